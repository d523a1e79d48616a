"""Float64 references of the attention ops and access to the native ops."""

from __future__ import annotations

import numpy as np

from ikpy._native import core, cpu, tier
from ikpy.graph.plan import OP_DTYPE, TENSOR_DTYPE

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, I32, I64, BF16, Q6_0, Q8_KV = (
    0,
    1,
    2,
    3,
    6,
    7,
    8,
    20,
    26,
    27,
    30,
    133,
    151,
)
TYPE_NAMES = {
    F32: "f32",
    F16: "f16",
    BF16: "bf16",
    Q8_0: "q8_0",
    Q6_0: "q6_0",
    Q5_1: "q5_1",
    Q5_0: "q5_0",
    Q4_1: "q4_1",
    Q4_0: "q4_0",
    IQ4_NL: "iq4_nl",
    Q8_KV: "q8_KV",
}
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float64)
ALL_TYPES = tuple(TYPE_NAMES)
CODED = tuple(kind for kind in ALL_TYPES if kind not in (F32, F16, BF16))
# Whether prompts of so many tokens over caches of BF16 and of codes are multiplied as bf16 numbers.
DOT_TOKENS = 24
MULTIPLIES_BF16 = (
    tier == "avx512" and not core.has_tiles() and core.cpu_maker() == "amd" and cpu.features()["avx512bf16"]
)
BLOCK_BYTES = {Q8_0: 34, Q6_0: 26, Q5_1: 24, Q5_0: 22, Q4_1: 20, Q4_0: 18, IQ4_NL: 18}
MIDDLE = {Q6_0: 32, Q5_0: 16, Q4_0: 8, Q5_1: 0, Q4_1: 0}
WITH_MINIMUM = (Q4_1, Q5_1)


def row_nbytes(type_id: int, n: int) -> int:
    """Bytes of a cache row of n elements."""
    per_block = {F32: 128, F16: 64, BF16: 64, Q8_KV: 32, **BLOCK_BYTES}[type_id]
    return per_block * n // 32 + (8 if type_id == Q8_KV else 0)


def decode_rows(rows: np.ndarray, type_id: int, n: int) -> np.ndarray:
    """uint8 [..., row_nbytes] -> float64 [..., n] (quant-formats.md#blocks-with-one-scale)."""
    if type_id == F32:
        return rows.view(np.float32).astype(np.float64)
    if type_id == F16:
        return rows.view(np.float16).astype(np.float64)
    if type_id == BF16:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if type_id == Q8_KV:
        d = np.ascontiguousarray(rows[..., :4]).view(np.float32).astype(np.float64)
        return d * rows[..., 8:].view(np.int8)
    blocks = rows.reshape(*rows.shape[:-1], n // 32, BLOCK_BYTES[type_id])
    head = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float64)
    d, minimum = head[..., :1], head[..., 1:] if type_id in WITH_MINIMUM else 0.0
    body = np.ascontiguousarray(blocks[..., 2:])
    levels: np.ndarray
    if type_id == Q8_0:
        levels = body.view(np.int8).astype(np.float64)
    else:
        nibbles = body[..., -16:]
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(np.int64)
        if type_id == Q6_0:
            j = np.arange(32) % 16
            shift = 4 * (j >> 3) + 2 * (np.arange(32) >> 4)
            codes = codes + 16 * ((body[..., j & 7] >> shift) & 3)
        if type_id in (Q5_0, Q5_1):
            words = np.ascontiguousarray(blocks[..., -20:-16])
            codes = codes + 16 * np.unpackbits(words, axis=-1, bitorder="little")
        levels = IQ4_VALUES[codes] if type_id == IQ4_NL else (codes - MIDDLE[type_id]).astype(np.float64)
    return (d * levels + minimum).reshape(*rows.shape[:-1], n)


def visible_cells(cell_pos, cell_seq, pos, seq, *, kind=0, n_swa=0, causal=True) -> np.ndarray:
    """bool [T, n_cells]; kind 0 none, 1 sliding window, 2 chunked, 3 half a window to both sides."""
    pos = np.asarray(pos)[:, None]
    carries = (np.asarray(cell_seq)[None].astype(np.uint64) >> np.asarray(seq)[:, None].astype(np.uint64)) & np.uint64(
        1
    )
    see = (np.asarray(cell_pos)[None] >= 0) & carries.astype(bool)
    if causal:
        see &= cell_pos <= pos
    if kind == 1:
        see &= pos - cell_pos < n_swa
    if kind == 2:
        see &= cell_pos >= pos // n_swa * n_swa
    if kind == 3:
        see &= np.abs(pos - cell_pos) <= n_swa // 2
    return see


def slopes(n_heads: int, max_bias: float) -> np.ndarray:
    """Slopes of linear biases (ALiBi): powers of 2^(-max_bias / n) for the largest power of two n of heads; the other
    heads have every second one of twice as many."""
    n = 1 << int(np.log2(n_heads))
    first = 2.0 ** (-max_bias * np.arange(1, n + 1) / n)
    between = 2.0 ** (-max_bias * np.arange(1, 2 * n + 1, 2) / (2 * n))
    return np.concatenate([first, between[: n_heads - n]])


def attend(q, k, v, visible, scale, *, softcap=0.0, sinks=None, bias=None) -> np.ndarray:
    """q [T, H, dk], k [n, H, dk], v [n, H, dv], visible bool [T, n], bias [T, H, n] -> float64 [T, H, dv]."""
    z = scale * np.einsum("thd,chd->thc", q.astype(np.float64), k)
    if softcap:
        z = softcap * np.tanh(z / softcap)
    if bias is not None:
        z = z + bias
    z = np.where(visible[:, None, :], z, -np.inf)
    top = np.where(visible.any(1)[:, None, None], z.max(-1, keepdims=True), 0.0)
    e = np.exp(z - top)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64)[None, :, None] - top)
    p = np.divide(e, total, out=np.zeros_like(e), where=visible.any(1)[:, None, None])
    return np.einsum("thc,chd->thd", p, v)


class NativeOp:
    """Builds tensor and op records for a single native op and runs it."""

    def __init__(self, name: str) -> None:
        self.op = np.zeros(1, OP_DTYPE)
        self.op["kind"] = core.op_kinds()[name]
        self.op["src"] = -1
        self.tensors: list[tuple] = []
        self.keep: list[np.ndarray] = []

    def tensor(self, array, type_id, ne, nb, offset=0) -> int:
        """Adds a view of array; ne and nb list dimensions 0..2."""
        self.keep.append(array)
        ne, nb = [*ne, *[1] * (4 - len(ne))], [*nb, *[0] * (4 - len(nb))]
        self.tensors.append((array.ctypes.data + offset, type_id, 0, ne, nb))
        return len(self.tensors) - 1

    def dense(self, array, type_id) -> int:
        """Adds a C-contiguous array, last axis first."""
        assert array.flags.c_contiguous
        return self.tensor(array, type_id, array.shape[::-1], array.strides[::-1])

    def run(self, n_kv=0, n_threads=1) -> None:
        core.run(np.array(self.tensors, TENSOR_DTYPE), self.op, n_kv, n_threads)


def kv_store(x: np.ndarray, cells, cache: np.ndarray, type_id: int, n_threads=1) -> None:
    """x f32 [T, Hk, n] into cache uint8 [n_ctx, Hk, row_nbytes]."""
    op = NativeOp("kv_store")
    op.op["dst"] = op.tensor(cache, type_id, [x.shape[2], *cache.shape[1::-1]], [0, *cache.strides[1::-1]])
    op.op["src"][0, 0] = op.dense(np.ascontiguousarray(x, np.float32), F32)
    op.op["src"][0, 1] = op.dense(np.ascontiguousarray(cells, np.int32), I32)
    op.run(n_threads=n_threads)


def make_cache(x: np.ndarray, type_id: int) -> tuple[np.ndarray, np.ndarray]:
    """x f32 [n, Hk, d] -> cache uint8 [n, Hk, bytes] and its decoded values."""
    cache = np.zeros((*x.shape[:2], row_nbytes(type_id, x.shape[2])), np.uint8)
    kv_store(x, np.arange(len(x)), cache, type_id)
    return cache, decode_rows(cache, type_id, x.shape[2])


def kq_mask(cell_pos, cell_seq, pos, seq, n_kv, *, kind=0, n_swa=0, causal=True, until=None, n_threads=1):
    """Returns mask f16 [T, n_kv rounded up to 64] and ranges i32 [T, 2] of the native op."""
    op = NativeOp("kq_mask")
    mask = np.full((len(pos), (n_kv + 63) // 64 * 64), np.float16(np.nan))
    ranges = np.full((len(pos), 2), -7, np.int32)
    op.op["dst"] = op.dense(mask, F16)
    sources = [(np.asarray(cell_pos, np.int32), I32), (np.asarray(cell_seq, np.int64), I64),
               (np.asarray(pos, np.int32), I32), (np.asarray(seq, np.int32), I32), (ranges, I32)]  # fmt: skip
    for i, (array, type_id) in enumerate(sources):
        op.op["src"][0, i] = op.dense(np.ascontiguousarray(array), type_id)
    if until is not None:
        op.op["src"][0, 7] = op.dense(np.ascontiguousarray(until, np.int32), I32)
    op.op["ip"][0, :3] = kind, n_swa, int(causal)
    op.run(n_kv, n_threads)
    return mask, ranges


def attention(
    q,
    k,
    v,
    mask,
    ranges,
    *,
    scale,
    k_type,
    v_type,
    dv,
    softcap=0.0,
    sinks=None,
    k1=None,
    k1_type=F32,
    flash=True,
    n_threads=1,
    v_offset=None,
    distances=None,
    biases=None,
):
    """Native attention. q f32 [T, H, dk]; k, v, k1 caches uint8 [n, Hk, bytes]; v_offset: V is a view of k.

    distances: max_bias, positions i32 of cells and of tokens, first head and number of heads of the model. biases f32
    [H, 2 n + 1] of their differences, with a max_bias of 0.
    """
    n_tokens, n_heads, dk = q.shape
    n = len(k)
    op = NativeOp("attention")
    d1 = 0 if k1 is None else q.shape[2] - head_size(k, k_type)
    out = np.full((n_tokens, n_heads, dv), np.nan, np.float32)
    op.op["dst"] = op.dense(out, F32)
    src = op.op["src"][0]
    src[0] = op.dense(np.ascontiguousarray(q, np.float32), F32)
    src[1] = op.tensor(k, k_type, [dk - d1, k.shape[1], n], [0, *k.strides[1::-1]])
    if v_offset is None:
        src[2] = op.tensor(v, v_type, [dv, v.shape[1], n], [0, *v.strides[1::-1]])
    else:
        src[2] = op.tensor(k, k_type, [dv, k.shape[1], n], [0, *k.strides[1::-1]], row_nbytes(k_type, v_offset))
    if mask is not None:
        src[3] = op.dense(mask, F16)
    if sinks is not None:
        src[4] = op.dense(np.ascontiguousarray(sinks, np.float32), F32)
    if k1 is not None:
        src[5] = op.tensor(k1, k1_type, [d1, k1.shape[1], n], [0, *k1.strides[1::-1]])
    if ranges is not None:
        src[6] = op.dense(ranges, I32)
    op.op["fp"][0, :2] = scale, softcap
    op.op["ip"][0, :2] = int(flash), n_heads
    if distances is not None:
        op.op["fp"][0, 2], cell_pos, pos, *op.op["ip"][0, 2:4] = distances
        src[9], src[10] = (op.dense(np.ascontiguousarray(x, np.int32), I32) for x in (cell_pos, pos))
    if biases is not None:
        src[8] = op.dense(np.ascontiguousarray(biases, np.float32), F32)
    op.run(n, n_threads)
    return out


def head_size(cache: np.ndarray, type_id: int) -> int:
    """Elements of a row of the cache."""
    if type_id == Q8_KV:
        return cache.shape[-1] - 8
    return cache.shape[-1] * 32 // row_nbytes(type_id, 32)
