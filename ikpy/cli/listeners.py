"""The sockets that `ikpy server` listens on: addresses with a port, or paths of Unix sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Sequence

from ikpy.errors import ResourceError

UNIX_ENDING = ".sock"
"""An address that ends so is the path of a Unix socket."""
BACKLOG = 2048
"""Connections that may wait until the model is loaded."""


def listen(hosts: Sequence[str], port: int, *, shared: bool = False) -> list[socket.socket]:
    """A listening socket for each address; port 0 stands for the same free one of all. Clients that connect before the
    server answers wait. shared: other servers that want it so may listen on the port as well, and the system divides
    connections among them. Raises ResourceError when an address cannot be used."""
    found: list[socket.socket] = []
    try:
        for host in hosts:
            listener = bind_path(host) if host.endswith(UNIX_ENDING) else bind_address(host, port, shared=shared)
            found.append(listener)
            port = port or port_of(found)
    except BaseException:
        close(found, hosts[: len(found)])
        raise
    return found


def bind_address(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that listens at a host's address. Raises ResourceError."""
    if shared and not hasattr(socket, "SO_REUSEPORT"):
        raise ResourceError("--reuse-port: this system gives a port to one server")
    listener = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # at once: two sockets that only are bound may share a port
    except OSError as error:
        if listener is not None:
            listener.close()
        reason = error.strerror or str(error)
        raise ResourceError(f"couldn't bind to server socket: hostname={host} port={port} ({reason})") from None
    return listener


def bind_path(path: str) -> socket.socket:
    """A Unix socket at a path; one that nobody listens on any more is replaced. Raises ResourceError."""
    if not hasattr(socket, "AF_UNIX"):
        raise ResourceError(f"--host {path}: this system has no Unix sockets")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_abandoned(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ResourceError(f"couldn't bind to server socket: {path} ({reason})") from None
    return listener


def is_abandoned(path: str) -> bool:
    """Whether there is a Unix socket at the path that refuses connections."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):  # an ordinary file refuses connections too
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def port_of(listeners: Sequence[socket.socket]) -> int:
    """The port of the first socket that has one, else 0."""
    return next((int(item.getsockname()[1]) for item in listeners if not isinstance(item.getsockname(), str)), 0)


def close(listeners: Sequence[socket.socket], hosts: Sequence[str]) -> None:
    """Closes the sockets of some addresses and removes the files of Unix sockets."""
    for listener in listeners:
        listener.close()
    for host in hosts:
        if host.endswith(UNIX_ENDING):
            with contextlib.suppress(OSError):
                os.unlink(host)
