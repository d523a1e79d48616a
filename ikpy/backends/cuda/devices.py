"""The devices of this machine, or emulated ones.

IKPY_CUDA_EMULATE=N emulates N devices in host memory (for tests), each of IKPY_CUDA_EMULATE_MIB MiB (4096).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

from ikpy.backends.cuda.api import MIB, Device, DeviceError
from ikpy.backends.remote import hosts
from ikpy.errors import UsageError
from ikpy.graph.placement import DeviceParams, PlacementParams

EMULATE = "IKPY_CUDA_EMULATE"
EMULATED_MIB = "IKPY_CUDA_EMULATE_MIB"
ENCODER_DEVICE = "MTMD_BACKEND_DEVICE"
NO_DEVICE = ("none", "cpu")
# A wheel that was built here before is in the cache of pip; a release of numpy is none of this.
REINSTALL = "build PyCUDA again: pip install --force-reinstall --no-deps --no-cache-dir --no-binary pycuda pycuda"
TOO_OLD = "compute capability 7.5 or later is needed"
NO_PYCUDA = "PyCUDA is not installed (pip install pycuda)"


def available() -> Sequence[Device]:
    """All devices: GPUs, none if there is no PyCUDA, and behind them the hosts of --rpc.

    Raises DeviceError for a host that does not answer.
    """
    found = local_devices()
    return [*found, *hosts.opened(len(found))]


def local_devices() -> Sequence[Device]:
    """The GPUs of this machine."""
    return _open(os.environ.get(EMULATE, ""), os.environ.get(EMULATED_MIB, ""))[0]


def why_none() -> str:
    """Why there are no devices, in a few words."""
    return _open(os.environ.get(EMULATE, ""), os.environ.get(EMULATED_MIB, ""))[1]


def device_lines(devices: Sequence[Device]) -> list[str]:
    """What devices are, and which GPUs of the machine are left out for their age."""
    lines = [f"rpc: {d.name}: {d.description}, {d.memory().free / MIB:.0f} MiB free" for d in devices if d.is_remote]
    found = [device for device in devices if not device.is_remote]
    if not found:
        return lines
    lines.append(f"ggml_cuda_init: found {len(found)} CUDA devices:")
    for device in found:
        major, minor = device.compute_capability
        lines.append(f"  Device {device.index}: {device.description}, compute capability {major}.{minor}")
    reason = why_none()
    return [*lines, f"ggml_cuda_init: not used: {reason}"] if reason.startswith(TOO_OLD) else lines


@cache
def _open(emulated: str, mib: str) -> tuple[Sequence[Device], str]:
    if emulated:
        from ikpy.backends.cuda.emulated import EmulatedDevice

        count, size = _number(EMULATE, emulated), _number(EMULATED_MIB, mib or "4096")
        return [EmulatedDevice(i, size << 20) for i in range(count)], "0 devices are emulated"
    if find_spec("pycuda") is None:
        return [], NO_PYCUDA
    from ikpy.backends.cuda.modules import OLDEST, cubins

    try:
        from ikpy.backends.cuda.driver import open_devices
    except Exception as error:  # PyCUDA's extension raises what its build, the driver and numpy make it raise
        return [], f"PyCUDA does not load: {' '.join(str(error).split())}; {_remedy(str(error))}"
    try:
        found = open_devices(cubins)
    except DeviceError as error:
        return [], str(error)
    usable = [device for device in found if device.compute_capability >= OLDEST]
    too_old = ", ".join(str(device) for device in found if device not in usable)
    reason = f"{TOO_OLD}: {too_old}" if too_old else "there is no CUDA GPU"
    return usable, reason


def _remedy(error: str) -> str:
    if "undefined symbol: cu" in error:
        return f"the driver is older than the toolkit that PyCUDA was built with: update it, or {REINSTALL}"
    return f"is the NVIDIA driver installed? If so, {REINSTALL}"


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name}={text}: expected a number")
    return int(text)


def encoder_device(
    placement: PlacementParams,
    params: DeviceParams,
    *,
    offload: bool | None = None,
    name: str | None = None,
    log: Callable[[str], None] = lambda _: None,
) -> Device | None:
    """The device of an encoder beside a model, None: the CPU. Other machines encode nothing.

    The main one of the model's devices, if it has any (offload None) or there are any (True). name, or the variable
    MTMD_BACKEND_DEVICE: another one, "none" or "CPU" for none. Raises UsageError for a name that does not exist.
    """
    if offload is False:
        return None
    if name is not None:
        return None if name.lower() in NO_DEVICE else selected([name.upper()], "--mmproj-device")[0]
    if wanted := os.environ.get(ENCODER_DEVICE):
        if wanted.lower() in NO_DEVICE:
            return None
        try:
            return selected([wanted.upper()])[0]
        except UsageError:
            log(f"warning: {ENCODER_DEVICE}={wanted}: no such device; pictures are encoded on the usual one")
    found = selected(params.names) if offload else wanted_devices(placement, params)
    found = [device for device in found if not device.is_remote]
    if not found:
        return None
    return found[placement.main_gpu] if placement.main_gpu < len(found) else found[0]


def wanted_devices(placement: PlacementParams, params: DeviceParams) -> list[Device]:
    """Devices for a model: none with -ngl 0. Raises UsageError for names of devices that do not exist."""
    return [] if placement.n_gpu_layers == 0 else selected(params.names)


def selected(names: Sequence[str] | None, option: str = "--device") -> list[Device]:
    """Devices by name in the given order, all for None. Raises UsageError, which begins with the option, for a name
    that does not exist, or twice."""
    devices = available()
    if names is None:
        return list(devices)
    by_name = {device.name: device for device in devices}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        known = ", ".join(by_name) or f"none: {why_none()}"
        raise UsageError(f"{option} {unknown[0]}: no such device (available: {known})")
    repeated = [name for i, name in enumerate(names) if name in names[:i]]
    if repeated:
        raise UsageError(f"{option} {repeated[0]}: the device is named twice")
    return [by_name[name] for name in names]
