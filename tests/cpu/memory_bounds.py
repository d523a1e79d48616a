"""Native products, attention, decoders and repacking on memory that ends, or starts, where no memory is.

A program of its own, because a read outside ends it: `python -m tests.cpu.memory_bounds`. Prints every case before it
runs. Weights are mapped files: nothing may be read beyond their last row.
"""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import sys
from collections.abc import Callable
from functools import cache

import numpy as np

from ikpy._native import core
from ikpy.quants import by_name
from tests.cpu import reference_attention as ref
from tests.cpu.matmul_plans import F32, Program
from tests.cpu.quant_data import random_tensor

Place = Callable[[np.ndarray], np.ndarray]
_libc = ctypes.CDLL(None, use_errno=True)


def _guarded(data: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy of the array between two pages that cannot be touched, next to the second one or to the first one."""
    page = mmap.PAGESIZE
    inner = -(-data.nbytes // page) * page
    memory = mmap.mmap(-1, inner + 2 * page)
    whole = np.frombuffer(memory, np.uint8)
    for start in (0, inner + page):
        if _libc.mprotect(ctypes.c_void_p(whole.ctypes.data + start), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    first = page + (inner - data.nbytes if at_end else 0)
    copy = whole[first : first + data.nbytes]
    copy[:] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    return copy.view(data.dtype).reshape(data.shape)


def before_the_end(data: np.ndarray) -> np.ndarray:
    """A copy that ends where readable memory ends."""
    return _guarded(data, True)


def behind_the_start(data: np.ndarray) -> np.ndarray:
    """A copy that starts where readable memory starts."""
    return _guarded(data, False)


def product(name: str, k: int, n: int, tokens: int, place: Place, *, gated: bool = False, tiles: bool = False) -> None:
    """mul_mat, or up and gate, over weights, activations and results that are all placed."""
    row = by_name(name)
    weight = _weight(name, k, n)
    program = Program()
    fmt = core.activation_format(row.id, tokens if tiles else 1)
    act = place(np.zeros(core.activation_nbytes(fmt, k, tokens, 1), np.uint8))
    buffer = program.raw(act, 26, (act.size,), (1,))
    program.op("act_prepare", buffer, [program.array(place(np.ones((tokens, k), np.float32)))], {0: fmt})
    weights = [program.weight(place(weight), name, (k, n)) for _ in range(2 if gated else 1)]
    out = program.array(place(np.zeros((tokens, n), np.float32)))
    program.op("mul_mat_up_gate" if gated else "mul_mat", out, [*weights, buffer], {0: fmt, 1: tokens})
    program.run(2)


@cache
def _weight(name: str, k: int, n: int) -> np.ndarray:
    row = by_name(name)
    if row.is_quantized:
        return random_tensor(row, (k, n), 1)
    return np.ones(row.row_nbytes(k) * n, np.uint8)


def products(names: list[str], place: Place) -> None:
    """All types; rows that end in the middle of a chunk, a half and a block."""
    for name in names:
        row = by_name(name)
        for columns in sorted({3 * row.block_elements, 1280}):
            if columns % row.block_elements:
                continue
            for n in (row.interleave, 16 + row.interleave):
                for tokens in (1, 3, 40):
                    print(name, columns, n, tokens, place.__name__, flush=True)
                    product(name, columns, n, tokens, place)
                    product(name, columns, n, tokens, place, gated=True, tiles=True)


def rows_and_codecs(names: list[str], place: Place) -> None:
    """Look-up of the last and the first row, decoding, repacking and encoding."""
    for name in names:
        row = by_name(name)
        k, n = 3 * row.block_elements if row.block_elements >= 32 else 96, 2 * row.interleave
        print("rows", name, place.__name__, flush=True)
        weight = place(_weight(name, k, n))
        program = Program()
        ids = program.array(place(np.array([n - 1, 0], np.int32)))
        out = program.array(place(np.zeros((2, k), np.float32)))
        program.op("get_rows", out, [program.weight(weight, name, (k, n)), ids])
        program.run(1)
        core.dequantize(weight, row.id, k, n)
        if core.can_quantize(row.id):
            core.quantize(place(np.ones((n, k), np.float32)), row.id, place(np.ones(k, np.float32)))
        for other in names:
            if other != name and row.id != by_name(other).id:
                try:
                    core.repack(weight, row.id, by_name(other).id, k, n)
                except ValueError:
                    continue


def attention(place: Place) -> None:
    """Caches whose last cell is the last memory; every cache type, both kernels."""
    types = [F32, ref.F16, ref.BF16, ref.Q8_0, ref.Q6_0, ref.Q4_0, ref.IQ4_NL, ref.Q8_KV]
    rng = np.random.default_rng(0)
    for type_id in types:
        for d, heads, kv_heads in ((64, 4, 2), (96, 8, 1)):
            for tokens in (1, 3, 40):
                for n in (1, 17, 97):
                    print("attention", type_id, d, heads, kv_heads, tokens, n, place.__name__, flush=True)
                    values = rng.standard_normal((n, kv_heads, d)).astype(np.float32)
                    k, _ = ref.make_cache(values, type_id)
                    q = rng.standard_normal((tokens, heads, d)).astype(np.float32)
                    mask = np.zeros((tokens, n), np.float16)
                    ranges = np.tile(np.array([0, n], np.int32), (tokens, 1))
                    options = {"scale": 0.1, "k_type": type_id, "v_type": type_id, "dv": d, "n_threads": 2}
                    for flash in (True, False):
                        ref.attention(place(q), place(k), place(k), place(mask), place(ranges), flash=flash, **options)
        print("latent", type_id, place.__name__, flush=True)
        if type_id != ref.Q8_KV:
            k, _ = ref.make_cache(rng.standard_normal((70, 1, 576)).astype(np.float32), type_id)
            for tokens in (1, 5, 30):
                q = place(rng.standard_normal((tokens, 16, 576)).astype(np.float32))
                ranges = place(np.tile(np.array([0, 70], np.int32), (tokens, 1)))
                options = {"scale": 0.1, "k_type": type_id, "v_type": type_id, "dv": 512, "v_offset": 64}
                ref.attention(q, place(k), None, None, ranges, n_threads=2, **options)


def main() -> None:
    """All cases for the types named, or for all; places: end, start."""
    from tests.cpu.test_matmul import FAST_TYPES

    faulthandler.enable()
    names = sys.argv[1:] or list(FAST_TYPES)
    for place in (before_the_end, behind_the_start):
        products(names, place)
        rows_and_codecs(names, place)
        attention(place)
    print("done", flush=True)


if __name__ == "__main__":
    main()
