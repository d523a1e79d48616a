"""`pytest tests/cuda --device real` runs the tests of kernels and models on the GPUs of this machine.

With `--device checked` whole models, too, run with the checks of the emulation, threads taking turns in an order that
`--order` says. With `--device ptx --arch 75`, 80 or 90 the tests of kernels execute the PTX for that architecture
(tests/cuda/ptx), and with 80 those of models do.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.gpu.device import works
from ikpy.backends.cuda import devices, emulated, emulator
from ikpy.backends.cuda.api import LaunchLike
from ikpy.backends.cuda.arguments import pack
from ikpy.backends.cuda.emulated import EmulatedDevice, Launcher
from ikpy.backends.cuda.launch import kernel_file
from tests.cuda import fake_pycuda, programs
from tests.cuda.ptx.launcher import Library
from tests.cuda.reporting import Reporter

# Accesses that --traffic prints: how many times the sectors or passes that they need at least.
WASTE = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ("emulated", "checked", "ptx", "real")
    parser.addoption("--device", default="emulated", choices=choices, help="where CUDA kernels run")
    parser.addoption("--order", type=int, default=2026, help="order of threads with --device checked")
    parser.addoption("--traffic", action="store_true", help="with --device ptx: print accesses that take many sectors")
    parser.addoption("--arch", type=int, default=80, choices=(75, 80, 90), help="architecture with --device ptx")
    parser.addoption("--results", type=Path, help="file that gets a line per test; what it has is not run again")


def is_real(config: pytest.Config) -> bool:
    """Whether the tests run on GPUs."""
    return config.getoption("--device", "emulated") == "real"


def is_ptx(config: pytest.Config) -> bool:
    """Whether the tests of kernels execute PTX."""
    return config.getoption("--device", "emulated") == "ptx"


def pytest_configure(config: pytest.Config) -> None:
    if is_real(config):
        found = devices.available()
        if not found:
            raise pytest.UsageError(f"--device real: {devices.why_none()}")
        programs.DEVICE = found[0]
    if config.getoption("--device", "emulated") == "checked":
        emulated.kernel_launcher = lambda: checked_launcher(config.getoption("--order"))
    if is_ptx(config):
        programs.PTX = Library(config.getoption("--arch"), measured=config.getoption("--traffic"))
    path = config.getoption("--results", None)
    if path is not None:
        reporter = Reporter(path, device_works)
        programs.ON_LAUNCH = reporter.launching
        config.pluginmanager.register(reporter, "ikpy-results")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if programs.PTX is None or not config.getoption("--traffic"):
        return
    rows = [(kernel, t) for kernel, program in programs.PTX.used.items() for t in program.traffic() if t.waste >= WASTE]
    terminalreporter.section(f"accesses that take {WASTE} times what they need or more")
    for kernel, t in sorted(rows, key=lambda row: (row[0], -row[1].waste)):
        what = f"{t.sectors} sectors of {t.lines} lines for {t.bytes} bytes"
        if t.passes > t.least_passes:
            what = f"{t.passes} passes instead of {t.least_passes}"
        terminalreporter.line(
            f"{t.waste:5.1f}  {kernel:<24} {t.place:<28} {t.instruction}: {t.requests} requests, {what}"
        )


def device_works() -> bool:
    """Whether the GPU of the tests, if they run on one, takes work."""
    return programs.DEVICE is None or works(programs.DEVICE)


@pytest.fixture
def emulation(request: pytest.FixtureRequest) -> None:
    """For tests of the emulation itself, which show nothing on a GPU."""
    if is_real(request.config) or is_ptx(request.config):
        pytest.skip("looks at the emulation")


def checked_launcher(order: int) -> Launcher:
    """Launches with the checks of the emulation."""
    machine = emulator.library(checked=True)

    def launch(launch: LaunchLike) -> None:
        machine.set_order(order)
        machine.launch(launch.kernel, launch.grid, launch.block, launch.shared_bytes, launch.args)

    return launch


def on_machine(device: EmulatedDevice) -> Launcher:
    """Launches of an emulated device, whose compute capability is 8.0, on the machine that executes PTX."""
    machine = programs.PTX
    assert machine is not None

    def launch(launch: LaunchLike) -> None:
        args = (launch.kernel, launch.grid, launch.block, launch.shared_bytes, launch.args)
        machine.launch(*args, memory=device.ranges())

    return launch


@pytest.fixture
def cuda_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of devices that models in this test run on: two emulated ones, or the real ones."""
    if is_real(request.config):
        return len(devices.available())
    monkeypatch.setenv(devices.EMULATE, "2")
    monkeypatch.setenv(devices.EMULATED_MIB, "1024")
    if programs.PTX is not None:
        if programs.PTX.arch != 80:
            pytest.skip("emulated devices have compute capability 8.0")
        monkeypatch.setattr(EmulatedDevice, "launcher", property(on_machine))
    return len(devices.available())


def packed(args: list[bytes]) -> fake_pycuda.Packed:
    buffer = fake_pycuda.Packed(pack(args))
    buffer.args = args
    return buffer


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package driver with two devices in `devices`, whose kernels are the emulated ones, and its `library`."""
    machine = emulator.library()
    fake_pycuda.Function.launcher = staticmethod(machine.launch)  # type: ignore[assignment]

    def cubins(capability: tuple[int, int], kernels: Collection[str]) -> dict[str, Path]:
        assert capability == (8, 6)
        found = {}
        for name in kernels:
            found[name] = tmp_path / f"{kernel_file(name)}.cubin"
            found[name].write_text(" ".join(machine.kernels()))
        return found

    with fake_pycuda.installed():
        package = importlib.import_module("ikpy.backends.cuda.driver")
        library = fake_pycuda.Library()
        monkeypatch.setattr(package.library, "loaded", lambda: library)
        monkeypatch.setattr(package.streams, "pack", packed)
        yield SimpleNamespace(cuda=package.cuda, library=library, devices=package.open_devices(cubins))
