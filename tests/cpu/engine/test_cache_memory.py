"""Memory of caches: one block per context, in transparent huge pages as far as it fills them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import psutil
import pytest

from ikpy.engine.kv_cache import KVCache
from ikpy.gguf import huge_pages
from ikpy.models.batch import FULL, CacheSpec
from ikpy.quants import registry

MIB = 1 << 20
F16, Q8_0 = (registry.by_name(name).id for name in ("f16", "q8_0"))


def advised_bytes(begin: int, end: int) -> int:
    """Bytes of [begin, end) that ask for huge pages."""
    found = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            low, high = (int(text, 16) for text in first.split("-"))
            inside = max(0, min(high, end) - max(low, begin))
        elif first == "VmFlags:" and "hg" in rest:
            found += inside
    return found


@pytest.mark.skipif(not huge_pages.transparent_page_size(), reason="no transparent huge pages")
def test_large_memory_is_advised_as_far_as_it_fills_pages() -> None:
    page = huge_pages.transparent_page_size()
    size = 3 * page + 12345
    memory = huge_pages.zeroed_bytes(size)
    begin = memory.ctypes.data
    assert memory.shape == (size,) and begin % page == 0
    assert advised_bytes(begin, begin + size) == 3 * page
    assert not memory[:: 4096 * 16].any()
    memory[-1] = 7


def test_untouched_memory_takes_none() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    memory = huge_pages.zeroed_bytes(256 * MIB)
    assert process.memory_info().rss - before < 64 * MIB
    assert len(memory) == 256 * MIB


@pytest.mark.parametrize("size", [0, 1, 100, 65 * 1024])
def test_small_memory(size: int) -> None:
    memory = huge_pages.zeroed_bytes(size)
    assert memory.shape == (size,) and not memory.any()
    assert size == 0 or memory.ctypes.data % 64 == 0
    memory[:] = 1


def test_parts_of_a_block() -> None:
    block = huge_pages.Block([100, 1, 64])
    parts = [block.take(100), block.take(1), block.take(64)]
    assert [part.ctypes.data - parts[0].ctypes.data for part in parts] == [0, 128, 192]
    assert [part.size for part in parts] == [100, 1, 64]
    with pytest.raises(ValueError, match="256 bytes, 256 of them used, lacks room for 1"):
        block.take(1)


def test_memory_that_the_system_refuses_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        huge_pages.zeroed_bytes(1 << 56)


@pytest.mark.parametrize("n_ctx", [64, 40960])
def test_tensors_of_a_cache_share_a_block(n_ctx: int) -> None:
    window = ("sliding", 32)
    specs = [
        [CacheSpec("k", 64, 2, F16), CacheSpec("v", 32, 3, Q8_0)],
        [CacheSpec("k", 64, 2, F16, window), CacheSpec("v", 64, 2, F16, window)],
    ]
    cache = KVCache(n_ctx, specs, can_shift=True, windows={window: 96})
    assert cache.window_of == {(0, "k"): FULL, (0, "v"): FULL, (1, "k"): window, (1, "v"): window}
    assert cache.tensors[0, "k"].shape[:3] == (64, 2, n_ctx) and cache.tensors[1, "v"].shape[:3] == (64, 2, 96)
    owners = {id(value.buffer.owner) for value in cache.tensors.values()}
    assert len(owners) == 1
    (block,) = {id(v): v for v in (value.buffer.owner for value in cache.tensors.values())}.values()
    assert isinstance(block, np.ndarray)
    at = block.ctypes.data
    for value in cache.tensors.values():
        address = value.buffer.address
        assert address is not None and address % 64 == 0 and address >= at
        at = address + value.buffer.nbytes
    assert at <= block.ctypes.data + block.nbytes
    assert cache.allocated_bytes == cache.nbytes()
    planned = KVCache(n_ctx, specs, can_shift=True, windows={window: 96}, allocate=False)
    assert planned.allocated_bytes == 0 and planned.nbytes() == cache.nbytes()
