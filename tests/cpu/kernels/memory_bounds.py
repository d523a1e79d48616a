"""Native ops, decoders and repacking on memory that ends, or starts, where no memory is.

A program of its own, because a read outside ends it: `python -m tests.cpu.kernels.memory_bounds`. Prints every case
before it runs. Weights are mapped files: nothing may be read beyond their last row. Products
take one thread: more meet inside of the matrix, and wait for each other's turns on a busy machine, ten thousand times.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import mmap
import sys
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from benchmarks import reference_attention as ref
from benchmarks.matmul_plans import Program
from benchmarks.random_weights import random_tensor
from ikpy._native import core
from ikpy.graph.elementwise import EXPONENTIAL, SIGNED_ROOT, UNARY_KINDS, XIELU
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE
from ikpy.quants import by_name

Place = Callable[[np.ndarray], np.ndarray]
EXPERTS = 3
ROPE = [10000.0, 1.0, 0.0, 1.0, 0.0, 0.0]
"""Parameters of rope_table: base, frequency scale, extrapolation, magnitude, corners."""
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


def product(name: str, k: int, n: int, tokens: int, place: Place, fmt: int, *, gated: bool = False) -> None:
    """mul_mat, or up and gate, over weights, activations in format fmt and results that are all placed."""
    weight = _weight(name, k, n)
    program = Program()
    buffer = _prepared(program, (tokens, k), place, fmt)
    weights = [program.weight(place(weight), name, (k, n)) for _ in range(2 if gated else 1)]
    out = program.array(place(np.zeros((tokens, n), np.float32)))
    program.op("mul_mat_up_gate" if gated else "mul_mat", out, [*weights, buffer], {0: fmt, 1: tokens})
    program.run(1)


def experts(name: str, k: int, n: int, tokens: int, place: Place, *, gated: bool) -> None:
    """Products with the first and the last of some experts, whose weights and biases are placed."""
    fmt = core.activation_format(by_name(name).id, tokens * 2 // EXPERTS, True)
    program = Program()
    buffer = _prepared(program, (tokens, k), place, fmt)
    ids = place(np.tile(np.array([EXPERTS - 1, 0], np.int32), (tokens, 1)))
    groups = program.array(place(np.zeros(EXPERTS + 1 + ids.size, np.int32)))
    program.op("moe_group", groups, [program.array(ids)], {0: EXPERTS})
    matrices = 2 if gated else 1
    shape = (k, n, EXPERTS)
    weights = [program.weight(place(np.tile(_weight(name, k, n), EXPERTS)), name, shape) for _ in range(matrices)]
    biases = [program.array(place(np.ones((EXPERTS, n), np.float32))) for _ in range(matrices)]
    out = program.array(place(np.zeros((tokens, 2, n), np.float32)))
    kind, option = ("mul_mat_id_up_gate", UNARY_KINDS["silu"]) if gated else ("mul_mat_id", 0)
    ip = {0: fmt, 1: tokens, 2: option, 3: 2, 4: EXPERTS}
    program.op(kind, out, [*weights, buffer, groups, *biases], ip)
    program.run(1)


def _prepared(program: Program, shape: tuple[int, int], place: Place, fmt: int) -> int:
    """Adds act_prepare for activations [T, K] in a format; both are placed."""
    act = place(np.zeros(core.activation_nbytes(fmt, shape[1], shape[0], 1), np.uint8))
    buffer = program.raw(act, 26, (act.size,), (1,))
    program.op("act_prepare", buffer, [program.array(place(np.ones(shape, np.float32)))], {0: fmt})
    return buffer


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
            for n, tokens in itertools.product((row.interleave, 16 + row.interleave), (1, 3, 9, 40)):
                print(name, columns, n, tokens, place.__name__, flush=True)
                for fmt in sorted({core.activation_format(row.id, rows) for rows in (1, tokens)}):
                    product(name, columns, n, tokens, place, fmt)
                    product(name, columns, n, tokens, place, fmt, gated=True)
        for tokens, gated in itertools.product((1, 3, 40), (False, True)):
            print("experts", name, tokens, gated, place.__name__, flush=True)
            experts(name, 3 * row.block_elements, 16 + row.interleave, tokens, place, gated=gated)


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
    rng = np.random.default_rng(0)
    for type_id in ref.ALL_TYPES:
        for d, heads, kv_heads in ((64, 4, 2), (96, 8, 1)):
            for tokens in (1, 3, 40):
                for n in (1, 17, 97):
                    print("attention", type_id, d, heads, kv_heads, tokens, n, place.__name__, flush=True)
                    values = rng.standard_normal((n, kv_heads, d)).astype(np.float32)
                    k = place(np.zeros((n, kv_heads, ref.row_nbytes(type_id, d)), np.uint8))
                    ref.kv_store(place(values), place(np.arange(n, dtype=np.int32)), k, type_id, n_threads=2)
                    q = rng.standard_normal((tokens, heads, d)).astype(np.float32)
                    mask = np.zeros((tokens, n), np.float16)
                    ranges = np.tile(np.array([0, n], np.int32), (tokens, 1))
                    options = {"scale": 0.1, "k_type": type_id, "v_type": type_id, "dv": d, "n_threads": 2}
                    positions = (place(np.arange(cells, dtype=np.int32)) for cells in (n, tokens))
                    biased, differences = (8.0, *positions, 0, heads), place(np.ones((heads, 9), np.float32))
                    for flash in (True, False):
                        cases = [(None, None), (biased, None)]
                        if type_id == ref.F16:  # of all types the same code looks biases up
                            cases.append(((0.0, *biased[1:]), differences))
                        for distances, table in cases:
                            options |= {"flash": flash, "distances": distances, "biases": table}
                            ref.attention(place(q), k, place(k), place(mask), place(ranges), **options)
        print("latent", type_id, place.__name__, flush=True)
        if type_id != ref.Q8_KV:
            k, _ = ref.make_cache(rng.standard_normal((70, 1, 576)).astype(np.float32), type_id)
            for tokens in (1, 5, 30):
                q = place(rng.standard_normal((tokens, 16, 576)).astype(np.float32))
                ranges = place(np.tile(np.array([0, 70], np.int32), (tokens, 1)))
                options = {"scale": 0.1, "k_type": type_id, "v_type": type_id, "dv": 512, "v_offset": 64}
                ref.attention(q, place(k), None, None, ranges, n_threads=2, **options)


def other_ops(place: Place) -> None:
    """Ops over float rows whose length is no multiple of a vector's."""
    for n in (1, 7, 40, 100):
        print("other ops", n, place.__name__, flush=True)
        x, y, vector, column = (np.ones(shape, np.float32) for shape in ((3, n), (3, n), (n,), (3, 1)))
        _op("rms_norm", place, x, [x, vector])
        _op("rms_norm", place, x, [x, None, y, y])
        _op("layer_norm", place, x, [x, vector, vector])
        for kind in ("add", "mul"):
            for other in (y, vector, column):
                _op(kind, place, x, [x, other])
        _op("scale", place, x, [x], fp=[2.0, 1.0])
        _op("softcap", place, x, [x], fp=[2.0])
        _op("unary", place, x, [x], [XIELU], [0.8, 0.6, 0.5, -0.1])
        _op("unary", place, x, [x], [SIGNED_ROOT], [1e-6])
        _op("unary", place, x, [x], [EXPONENTIAL])
        for number in UNARY_KINDS.values():
            _op("unary", place, x, [x], [number])
            _op("gated_unary", place, x, [x, y], [number], [0.5])
        _op("copy", place, x.astype(np.float16), [x])
        _op("block_maxima", place, np.zeros((3, -(-n // 64)), np.float32), [x], [64])
        _op("moe_combine", place, x, [np.ones((3, 2, n), np.float32), np.ones((3, 2), np.float32), _pairs(3, 2), y])
        _op("moe_route", place, np.zeros((3, 1), np.int32), [x, vector, column], [1, 1, 1], [1.0])
        table, tokens = np.tile(np.array([0, -1, n - 1], np.int32), (2, 1)), np.array([1, 0, 2], np.int32)
        ids, weights = np.zeros((3, 3), np.int32), np.zeros((3, 3), np.float32)
        _op("moe_route", place, ids, [x, None, weights, table, tokens], [3, 4, 1], [1.0])
        _op("act_stats", place, np.zeros(2 * (n + 2), np.float32), [x, None], [1, 1])
        _op("act_similarity", place, np.zeros(8, np.float32), [x, y], [3])
        recurrent_ops(n, place)
        hyper_connections(n, place)
        compressed_cells(n, place)
    for heads, size in ((1, 64), (3, 96), (2, 128)):
        x, table = np.ones((5, heads, size), np.float32), np.zeros((5, size), np.float32)
        _op("rope_table", place, table, [np.arange(5, dtype=np.int32), np.ones(size // 2, np.float32)], fp=ROPE)
        for sections in ([1, 9, 7, 5, 3], [2, 9, 7, 5, 0]):
            _op("rope_table", place, table, [np.zeros((5, 4), np.int32), None], [0, *sections], ROPE)
        for order in (0, 1):
            _op("rope", place, x, [x, table], [size, order, 0])
        _op("hadamard", place, x, [x], [size & -size])
    sparse_ops(place)
    _op("attention_temperature", place, np.zeros((5, 1, 1), np.float32), [np.arange(5, dtype=np.int32)], [8, 1], [0.1])


def recurrent_ops(n: int, place: Place) -> None:
    """Heads of n columns and of n rows, and n channels; states are placed too."""
    slots = np.array([1, 0, 1], np.int32)
    for taps in (1, 4, 16):
        x, weight, state = (np.ones(shape, np.float32) for shape in ((3, n), (n, taps), (2, n, taps - 1)))
        _op("causal_conv", place, x, [x, weight, state, slots, np.ones(n, np.float32)], [1, 1])
    weight, state = np.ones((n, 4), np.float32), np.ones((2, n, 15), np.float32)
    _op("causal_conv", place, x, [x, weight, state, slots], [1, 5])
    hashes = np.array([3, 5, 7, *[11] * 4, *[1] * 4], np.int64)
    rows, past = np.zeros((3, 4), np.int32), np.zeros((2, 2), np.float32)
    _op("ngram_rows", place, rows, [slots, hashes, past, slots], [1])
    for rows, columns in ((n, 40), (40, n)):
        shapes = ((3, 1, rows), (3, 1, rows), (3, 2, columns), (3, 2), (3, 2), (2, 2, rows, columns))
        q, k, v, g, beta, state = (np.zeros(shape, np.float32) for shape in shapes)
        for per_row, decay in enumerate((g, np.zeros((3, 2, rows), np.float32))):
            _op("gated_delta_rule", place, v, [q, k, v, decay, beta, state, slots], [0, per_row], [1e-6, 1.0])
        per_head, steps = np.zeros((2, 1), np.float32), np.zeros((3, 2), np.float32)
        _op("ssm_scan", place, v, [v, steps, per_head, q, k, per_head, state, slots])
        many = np.zeros(40, np.int32)
        v, q, steps = (np.zeros((40, *a.shape[1:]), np.float32) for a in (v, q, steps))
        _op("ssm_scan", place, v, [v, steps, per_head, q, q, per_head, state, many])
    for rows, columns in ((n, 40), (40, n)):
        shapes = ((3, 2, rows), (3, 1, columns), (2, rows), (2, 2, rows, columns))
        keys, v, first, state = (np.zeros(shape, np.float32) for shape in shapes)
        out = np.zeros((3, 2, columns), np.float32)
        for rule, further in enumerate(([None, None], [first, None], [keys, keys])):
            _op("wkv", place, out, [keys, keys, v, keys, *further, state, slots], [rule])
    for rows in (1, 16):
        x, b = np.zeros((3, 1, n), np.float32), np.zeros((3, 1, rows), np.float32)
        steps, rates, skips = (np.zeros(shape, np.float32) for shape in ((3, n), (rows, n), (n,)))
        state = np.zeros((2, 1, rows, n), np.float32)
        _op("ssm_scan", place, x, [x, steps, rates, b, b, skips, state, slots], [1])


def hyper_connections(d: int, place: Place) -> None:
    """Streams of d columns."""
    for n, tokens in ((1, 1), (4, 3), (5, 17)):
        full, scale = (2 + n) * n, np.ones(3, np.float32)
        weights, base = np.zeros((tokens, full), np.float32), np.zeros(full, np.float32)
        _op("hyper_weights", place, weights, [weights, base, scale], [n, 3], [1e-6])
        head = weights[:, :n].copy()
        _op("hyper_weights", place, head, [head, base[:n].copy(), scale[:1].copy()], [n, 3], [1e-6])
        streams, y = np.ones((tokens, n, d), np.float32), np.ones((tokens, d), np.float32)
        _op("hyper_collapse", place, y, [streams, head])
        _op("hyper_expand", place, streams, [streams, y, weights])
        _op("hyper_expand", place, streams, [streams, y, head])


def compressed_cells(size: int, place: Place) -> None:
    """Entries of so many elements from the first and the last of some cells; indices of tokens that there are not."""
    for n_cells, ratio, w in ((1, 1, size), (70, 7, size), (64, 5, 2 * size), (129, 64, 2 * size)):
        cells = np.ones((n_cells, 1, w), np.float32)
        cell_pos, cell_seq = np.arange(n_cells, dtype=np.int32)[::-1].copy(), np.ones(n_cells, np.int64)
        bias = np.zeros((ratio, w), np.float32)
        pos, seq = np.array([n_cells - 1, ratio - 1, 2**31 - 1], np.int32), np.array([0, 0, 77], np.int32)
        ends = np.array([0, 1, -1, 2, 3, -(2**31)], np.int32)
        out = np.zeros((len(ends), size), np.float32)
        _op("compress_cells", place, out, [cells, cells, bias, cell_pos, cell_seq, pos, seq, ends])


def sparse_ops(place: Place) -> None:
    """A choice of 10 of 70 cells, whose last block is no whole one, and attention to them."""
    n_cells, top_k, tokens = 70, 10, 3
    mask, ranges = np.zeros((tokens, n_cells), np.float16), np.tile(np.array([0, n_cells], np.int32), (tokens, 1))
    for n, heads, dtype in ((128, 20, np.float16), (64, 3, np.float16), (40, 5, np.float32)):
        print("sparse", n, heads, dtype.__name__, place.__name__, flush=True)
        rng = np.random.default_rng(n)
        q = rng.standard_normal((tokens, heads, n)).astype(np.float32)
        keys = rng.standard_normal((n_cells, 1, n)).astype(dtype)
        chosen = place(np.zeros((tokens, 1 + top_k), np.int32))
        program = Program()
        sources = [program.array(place(x)) for x in (q, q[:, :, 0].copy(), keys, mask, ranges)]
        lists = program.array(chosen)
        program.op("choose_cells", lists, sources)
        program.op("chosen_mask", program.array(place(mask)), [sources[3], lists])
        both = place(np.concatenate([mask[:, :7], mask], 1))
        program.op("chosen_mask", program.array(place(both)), [program.array(both), lists], {0: 7})
        listed = program.array(place(np.zeros((tokens, 1 + top_k + 5), np.int32)))
        program.op("chosen_list", listed, [program.array(both), lists], {0: 7})
        ends, cell_pos = np.arange(n_cells, dtype=np.int32)[::-1].copy(), np.arange(n_cells, dtype=np.int32)
        pos = np.full(tokens, n_cells - 1, np.int32)
        singles = program.array(place(np.zeros((tokens, 2 * (1 + top_k)), np.int32)))
        program.op(
            "stretch_cells",
            singles,
            [lists, program.array(place(ends)), *sources[3:], *(program.array(place(x)) for x in (cell_pos, pos))],
            {0: 2},
        )
        of_heads = program.array(place(np.zeros((heads, tokens, 1 + 2 * 9), np.int32)))
        positions = [program.array(place(x)) for x in (cell_pos, pos)]
        program.op("choose_blocks", of_heads, [sources[0], sources[2], *sources[3:], *positions], {0: 9, 1: 1})
        core.run(np.array(program.tensors, TENSOR_DTYPE), np.array(program.ops, OP_DTYPE), n_cells, 2)
        assert (chosen[:, 0] == top_k).all()
        sources = [q, keys, keys, mask, None, None, ranges, chosen]
        _op("attention", place, q, sources, [1, heads], [0.1])


def _pairs(rows: int, n: int) -> np.ndarray:
    return np.tile(np.arange(n, dtype=np.int32), (rows, 1))


def _op(
    kind: str,
    place: Place,
    dst: np.ndarray,
    src: list[np.ndarray | None],
    ip: Sequence[int] = (),
    fp: Sequence[float] = (),
) -> None:
    """Runs one op; its result and all it reads are placed."""
    program = Program()
    sources = [-1 if x is None else program.array(place(x)) for x in src]
    program.op(kind, program.array(place(dst)), sources, dict(enumerate(ip)))
    program.ops[-1]["fp"][: len(fp)] = fp
    program.run(2)


def main() -> None:
    """All cases for the types named, or for all; places: end, start."""
    from tests.cpu.kernels.test_matmul import FAST_TYPES

    faulthandler.enable()
    names = sys.argv[1:] or list(FAST_TYPES)
    for place in (before_the_end, behind_the_start):
        products(names, place)
        rows_and_codecs(names, place)
        attention(place)
        other_ops(place)
    print("done", flush=True)


if __name__ == "__main__":
    main()
