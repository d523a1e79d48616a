"""The hosts of this process (--rpc), which every model can use as it does the GPUs of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ikpy.errors import UsageError

_wanted: list[tuple[str, int]] = []
_open: dict[tuple[str, int], Any] = {}


def use(endpoints: Sequence[str]) -> None:
    """From now on the hosts at these addresses, HOST[:PORT], are devices behind those of this machine.

    They are connected to when devices are asked for; others that were in use are left. Raises UsageError for what is no
    address, or the same twice.
    """
    if not (endpoints or _wanted):
        return
    from ikpy.backends.remote.protocol import parse_endpoint

    found: list[tuple[str, int]] = []
    for text in endpoints:
        try:
            endpoint = parse_endpoint(text)
        except ValueError as error:
            raise UsageError(f"--rpc: {error}") from None
        if endpoint in found:
            raise UsageError(f"--rpc: {text} is named twice")
        found.append(endpoint)
    _wanted[:] = found
    for endpoint in [endpoint for endpoint in _open if endpoint not in found]:
        _open.pop(endpoint).connection.close()


def opened(first: int) -> list[Any]:
    """The hosts as devices, numbered from `first` on. Raises DeviceError for one that does not answer."""
    if not _wanted:
        return []
    from ikpy.backends.remote.device import RemoteDevice

    for i, (host, port) in enumerate(_wanted, first):
        known = _open.get((host, port))
        if known is None or known.connection.is_dead:
            _open[host, port] = RemoteDevice(i, host, port)
    return [_open[endpoint] for endpoint in _wanted]
