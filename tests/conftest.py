"""How tests are divided among processes (scripts/test): whole files, and the tests of CUDA kernels together."""

from __future__ import annotations

import signal
from pathlib import PurePath
from typing import Any

import pytest


def group_of(file: str) -> str:
    """The tests that one process runs; test_launched.py looks at what its own has launched."""
    name = PurePath(file).name
    return "kernels" if name.startswith("test_kernels_") or name == "test_launched.py" else file


def pytest_configure() -> None:
    """Tests interrupt themselves, also where a shell that started them in the background has Ctrl-C ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of --dist loadfile, with groups in place of files."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(super()._split_scope(nodeid))

    return Groups(config, log) if config.getvalue("dist") == "loadfile" else None
