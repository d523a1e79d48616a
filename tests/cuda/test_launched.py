"""Behind the tests of kernels: nothing that can be launched was left out of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikpy.backends.cuda import emulator
from tests.cuda import programs


def test_every_kernel_was_launched_by_a_test_of_kernels(request: pytest.FixtureRequest) -> None:
    """Each of those tests compares with the CPU backend or a numpy decoder."""
    files = {path.name for path in Path(__file__).parent.glob("test_kernels_*.py")}
    config = request.config
    chosen = config.option.keyword or config.getoption("--results", None) or programs.DEVICE or programs.PTX
    if chosen or not files <= {item.path.name for item in request.session.items}:
        pytest.skip("shows something only behind all tests of kernels, on emulated devices")
    assert set(emulator.library(checked=True).kernels()) - programs.LAUNCHED == set()
