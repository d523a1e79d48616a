"""`pytest tests/cuda --device real` runs the tests of kernels and models on the GPUs of this machine."""

from __future__ import annotations

import pytest

from ikpy.backends.cuda import devices
from tests.cuda import programs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="emulated", choices=("emulated", "real"), help="where CUDA kernels run")


def is_real(config: pytest.Config) -> bool:
    """Whether the tests run on GPUs."""
    return config.getoption("--device", "emulated") == "real"


def pytest_configure(config: pytest.Config) -> None:
    if is_real(config):
        found = devices.available()
        if not found:
            raise pytest.UsageError(f"--device real: {devices.why_none()}")
        programs.DEVICE = found[0]


@pytest.fixture
def cuda_devices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of devices that models in this test run on: two emulated ones, or the real ones."""
    if is_real(request.config):
        return len(devices.available())
    monkeypatch.setenv(devices.EMULATE, "2")
    monkeypatch.setenv(devices.EMULATED_MIB, "1024")
    return len(devices.available())
