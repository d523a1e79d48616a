"""How tests are divided among processes (scripts/test): whole files, and the tests of CUDA kernels together.

The longest come first: one that began last would keep a single core busy when all others have ended.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator
from pathlib import PurePath
from typing import Any

import pytest

gc.disable()  # the collection makes a million objects and no garbage: a third of its time was looking for some

LONG = (
    "tests/cpu/kernels/test_tiers.py",
    "kernels",
    "tests/cuda/test_ptx.py",
    "tests/cuda/test_adapters.py",
    "tests/cuda/test_models.py",
    "tests/cuda/test_ptx_traffic.py",
    "tests/cuda/test_placement_matrix.py",
    "tests/cpu/models/test_zoo.py",
    "tests/cuda/test_divided.py",
    "tests/server/test_captures.py",
    "tests/server/test_behaviour.py",
    "tests/cpu/engine/test_memory_plan.py",
    "tests/cpu/quantize/test_reference_files.py",
    "tests/cpu/kernels/test_memory_bounds.py",
    "tests/cpu/engine/test_speculative.py",
    "tests/cuda/test_tools_matrix.py",
    "tests/cuda/test_gpu_session.py",
    "tests/cpu/project/test_sanitizers.py",
    "tests/cpu/convert/test_hub.py",
    "tests/cpu/kernels/test_attention_halves.py",
    "tests/cpu/kernels/test_attention_dots.py",
    "tests/cpu/project/test_build_cache.py",
    "tests/cpu/vocab/test_grammar_limits.py",
    "tests/cuda/test_offload.py",
)
"""Groups that take longer than their numbers of tests suggest; the others follow by these numbers."""


def group_of(file: str) -> str:
    """The tests that one process runs; test_launched.py looks at what its own has launched."""
    name = PurePath(file).name
    return "kernels" if name.startswith("test_kernels_") or name == "test_launched.py" else file


def pytest_configure() -> None:
    """Tests interrupt themselves, also where a shell that started them in the background has Ctrl-C ignored."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What was collected stays until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """What a file leaves (modules, caches) stays, too: later collections need not look at it again."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests group by group, those of LONG first."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item.nodeid.partition("::")[0]), []).append(item)
    places = {name: place for place, name in enumerate(LONG)}
    names = sorted(groups, key=lambda name: (places.get(name, len(LONG)), -len(groups[name])))
    return [item for name in names for item in groups[name]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items[:] = in_order(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The scheduler of --dist loadfile, with groups in place of files."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(super()._split_scope(nodeid))

    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # the order is that of the processes' tests
    return Groups(config, log)
