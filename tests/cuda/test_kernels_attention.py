"""Emulated CUDA attention against the CPU backend: head sizes, cache types, masks, windows, sinks, splits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ikpy.backends.cuda import launch
from ikpy.graph.builder import Distances
from ikpy.graph.ir import Value
from ikpy.quants import registry
from tests.cuda.programs import Program

# Queries and probabilities are rounded to f16 for the tensor cores.
F16_BOUND = 2e-3


class Case:
    """A cache of n_cells of which n_kv are attended, and queries."""

    def __init__(self, seed: int, n_cells: int, n_tokens: int, heads: int, kv_heads: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.p = Program()
        self.n_cells, self.n_tokens, self.heads, self.kv_heads = n_cells, n_tokens, heads, kv_heads
        self.out: Value

    def normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape, np.float32)

    def cache(self, n: int, type_name: str, heads: int | None = None, factor: float = 1) -> Value:
        heads = heads or self.kv_heads
        row = registry.by_name(type_name).row_nbytes(n)
        cache = self.p.weight(np.zeros(self.n_cells * heads * row, np.uint8), type_name, (n, heads, self.n_cells))
        cells = self.p.array(np.arange(self.n_cells, dtype=np.int32))
        self.p.graph.kv_store(self.p.array(self.normal(self.n_cells, heads, n) * np.float32(factor)), cache, cells)
        cache.dynamic_dim = 2
        return cache

    def queries(self, n: int) -> Value:
        return self.p.array(2 * self.normal(self.n_tokens, self.heads, n))

    def mask(self, window: str = "none", n_swa: int = 0) -> tuple[Value, Value]:
        cell_pos = np.arange(self.n_cells, dtype=np.int32)
        cell_pos[::13] = -1
        last = self.n_cells - 10
        cells = [
            self.p.array(cell_pos),
            self.p.array(np.where(np.arange(self.n_cells) % 5 == 4, 2, 1).astype(np.int64)),
        ]
        pos = self.p.array(np.arange(last - self.n_tokens, last, dtype=np.int32))
        self.distances = cells[0], pos
        seq = self.p.array(np.zeros(self.n_tokens, np.int32))
        return self.p.graph.kq_mask(*cells, pos, seq, window=window, n_swa=n_swa, causal=True, own=False)

    def kernel(self) -> str:
        node = self.p.graph.nodes[-1]
        return launch.lower(node, lambda _: 0)[0].kernel

    def check(self, out: Value, bound: float = F16_BOUND) -> None:
        self.p.compare(out, bound=bound, n_kv=self.n_cells - 8)


def grouped(n: int, n_tokens: int, type_name: str = "f16", n_cells: int = 96, **options: object) -> Case:
    case = Case(n, n_cells, n_tokens, 6, 2)
    window = options.pop("window", "none")
    k, v = case.cache(n, type_name), case.cache(n, type_name)
    mask = case.mask(window, 24)  # type: ignore[arg-type]
    case.out = case.p.graph.attention(case.queries(n), [k], v, mask, scale=n**-0.5, flash=True, **options)
    return case


@pytest.mark.parametrize("n_tokens", [1, 25])
@pytest.mark.parametrize("n", [64, 72, 80, 88, 96, 112, 128, 256])
def test_head_sizes(n: int, n_tokens: int) -> None:
    case = grouped(n, n_tokens)
    assert case.kernel() == f"flash{16 if n_tokens == 1 else 64}_{n}_{n}"
    case.check(case.out)


@pytest.mark.parametrize("type_name", registry.CACHE_TYPES)
@pytest.mark.parametrize("n_tokens", [2, 12])
def test_cache_types(type_name: str, n_tokens: int) -> None:
    case = grouped(64, n_tokens, type_name)
    assert case.kernel().startswith("flash")
    case.check(case.out)


@pytest.mark.parametrize("type_name", ["bf16", "q8_0", "q8_KV", "q6_0", "q5_0", "q4_0", "iq4_nl"])
@pytest.mark.parametrize("n_tokens", [2, 12])
def test_cells_beyond_the_range_of_f16_stay_finite(type_name: str, n_tokens: int) -> None:
    case = Case(4, 96, n_tokens, 6, 2)
    k, v = case.cache(64, "f16"), case.cache(64, type_name, factor=1e5)
    out = case.p.graph.attention(case.queries(64), [k], v, case.mask(), scale=0.125, flash=True)
    (found,) = case.p.run([out], on_cuda=True, n_kv=88)
    assert 30000 < np.abs(found).max() <= 65504


@pytest.mark.parametrize("type_name", ["f16", "q8_0", "q6_0", "q5_1", "q5_0", "q4_1"])
def test_other_head_sizes_take_the_plain_kernel(type_name: str) -> None:
    case = grouped(32, 3, type_name)
    assert case.kernel() == "attention_any"
    case.check(case.out, 1e-5)


@pytest.mark.parametrize(("n", "n_tokens"), [(32, 9), (64, 9), (128, 2), (128, 25), (256, 25)])
@pytest.mark.parametrize("option", ["softcap", "sinks", "sliding", "chunked"])
def test_variants(n: int, n_tokens: int, option: str) -> None:
    rng = np.random.default_rng(0)
    if option == "sinks":
        case = Case(3, 96, n_tokens, 6, 2)
        k, v = case.cache(n, "f16"), case.cache(n, "f16")
        sinks = case.p.array(rng.standard_normal(6).astype(np.float32))
        out = case.p.graph.attention(case.queries(n), [k], v, case.mask(), scale=0.2, flash=True, sinks=sinks)
        case.check(out)
        return
    case = grouped(n, n_tokens, **({"softcap": 5.0} if option == "softcap" else {"window": option}))
    case.check(case.out)


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_cells_split_over_blocks(n_tokens: int) -> None:
    case = grouped(64, n_tokens, n_cells=1088)
    assert len(launch.lower(case.p.graph.nodes[-1], lambda _: 0)) == 2
    case.check(case.out)
    case.p.compare(case.out, bound=F16_BOUND, n_kv=70)


BIASED = [(32, 9), (72, 1), (88, 20), *((n, t) for n in (64, 80, 96, 112, 128) for t in (1, 3, 25))]


@pytest.mark.parametrize(("n", "n_tokens"), BIASED)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (6, 2)])
def test_linear_biases(n: int, n_tokens: int, heads: int, kv_heads: int) -> None:
    case = Case(n, 300 if n_tokens == 1 else 96, n_tokens, heads, kv_heads)
    k, v, mask = case.cache(n, "f16"), case.cache(n, "q8_0" if n % 32 == 0 else "bf16"), case.mask()
    out = case.p.graph.attention(
        case.queries(n), [k], v, mask, scale=n**-0.5, flash=True, distances=Distances(8.0, *case.distances)
    )
    assert case.kernel().endswith("attention_any" if n in (32, 72, 88) else "_biased")
    case.check(out)


@pytest.mark.parametrize("seen", [True, False])
def test_masks_of_texts_and_of_what_follows(seen: bool) -> None:
    p, n = Program(), 60
    cell_pos, pos = np.arange(n, dtype=np.int32), np.array([20, 33, 58], np.int32)
    cell_pos[::7] = -1
    lengths, seq = np.array([9, 30, 0], np.int32), np.ones(n, np.int64)
    arrays = [p.array(x) for x in (cell_pos, seq, pos, np.zeros(3, np.int32))]
    text = p.array(pos + lengths), seen
    mask, ranges = p.graph.kq_mask(*arrays, window="none", n_swa=0, causal=True, own=False, text=text)
    ours, truth = (p.run([mask, ranges], on_cuda=on_cuda, n_kv=n) for on_cuda in (True, False))
    for a, b in zip(ours, truth, strict=True):
        np.testing.assert_array_equal(a, b)
    edge = lengths[:, None]
    wanted = (cell_pos >= 0) & ((cell_pos < edge) if seen else (cell_pos >= edge) & (cell_pos <= pos[:, None]))
    assert (np.asarray(truth[0]).reshape(3, n) == 0).tolist() == wanted.tolist()


def test_linear_biases_of_a_part_of_the_heads() -> None:
    """Distances cost the last three of six heads what they cost them among all."""
    found = []
    for n in (64, 32):
        case = Case(n, 96, 4, 6, 6)
        k, v, mask = case.cache(n, "f16"), case.cache(n, "f16"), case.mask()
        q, distances = case.queries(n), Distances(5.0, *case.distances)
        whole = case.p.graph.attention(q, [k], v, mask, scale=0.1, flash=True, distances=distances)
        parts = [x.slice(1, 3, 3) for x in (q, k, v)]
        part = case.p.graph.attention(parts[0], [parts[1]], parts[2], mask, scale=0.1, flash=True, distances=distances)
        case.p.graph.nodes[-1].ip[2:] = [3, 6]
        whole_rows, part_rows = case.p.run([whole, part], on_cuda=True, n_kv=88)
        found.append(np.abs(whole_rows[..., 3:, :] - part_rows).max())
    assert max(found) < 1e-6


def latent(type_name: str, heads: int, n_tokens: int, n_cells: int = 64, window: str = "none", **options: Any) -> Case:
    """Keys of 64 + 512 columns, values are the last 512 of them."""
    case = Case(2, n_cells, n_tokens, heads, 1)
    k = case.cache(576, type_name)
    row = registry.by_name(type_name)
    v = Value(k.buffer, k.type_id, (512, *k.shape[1:]), k.strides, row.row_nbytes(64), 2)
    mask = case.mask(window, 24)
    case.out = case.p.graph.attention(case.queries(576), [k], v, mask, scale=0.07, flash=True, **options)
    return case


@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0", "q5_1"])
@pytest.mark.parametrize(("heads", "n_tokens"), [(16, 1), (24, 2)])
def test_latent_attention(type_name: str, heads: int, n_tokens: int) -> None:
    case = latent(type_name, heads, n_tokens)
    assert case.kernel() == f"flash{16 if heads == 16 else 32}_576_512"
    case.check(case.out)


def test_latent_cells_split_over_blocks() -> None:
    case = latent("q8_0", 16, 1, n_cells=1088)
    first, combine = launch.lower(case.p.graph.nodes[-1], lambda _: 0)
    assert (first.kernel, combine.kernel) == ("flash16_576_512", "flash_combine") and first.grid[2] > 1
    case.check(case.out)
    case.p.compare(case.out, bound=F16_BOUND, n_kv=70)


@pytest.mark.parametrize("heads", [16, 24])
@pytest.mark.parametrize("option", ["softcap", "sliding"])
def test_variants_of_latent_attention(option: str, heads: int) -> None:
    case = latent("f16", heads, 2, **({"softcap": 5.0} if option == "softcap" else {"window": option}))
    case.check(case.out)


def test_devices_with_little_shared_memory() -> None:
    """Turing has 64 KiB per block: rows are taken 16 at a time where 64 do not fit."""
    for n, expected in ((128, "flash64_128_128"), (256, "flash16_256_256")):
        (first, *_) = launch.lower(grouped(n, 25).p.graph.nodes[-1], lambda _: 0, launch.Target.of([(7, 5)]))
        assert first.kernel == expected
        assert first.shared_bytes <= 64 * 1024


@pytest.mark.parametrize("n", [64, 80, 96, 112, 128])
@pytest.mark.parametrize("n_tokens", [1, 25])
def test_two_blocks_share_a_multiprocessor_of_100_kib(n: int, n_tokens: int) -> None:
    (first, *_) = launch.lower(grouped(n, n_tokens).p.graph.nodes[-1], lambda _: 0)
    assert 2 * (first.shared_bytes + 1024 + 512) <= 100 * 1024


@pytest.mark.parametrize("type_name", ["f16", "q8_KV"])
def test_latents_and_rotated_parts_in_caches_of_their_own(type_name: str) -> None:
    case = Case(2, 64, 1, 16, 1)
    rotated, latents = case.cache(64, type_name), case.cache(512, type_name)
    out = case.p.graph.attention(case.queries(576), [rotated, latents], latents, case.mask(), scale=0.07, flash=True)
    assert case.kernel() == "flash16_576_512"
    case.check(out)


@pytest.mark.parametrize("n_tokens", [2, 20])
@pytest.mark.parametrize("type_name", ["f16", "bf16", "q8_0"])
def test_latent_prompts(type_name: str, n_tokens: int) -> None:
    """Expanded keys of 128 columns per head and 64 shared by all heads."""
    case = Case(2, 96, n_tokens, 3, 3)
    k, rotated, v = case.cache(128, type_name), case.cache(64, type_name, 1), case.cache(128, type_name)
    out = case.p.graph.attention(case.queries(192), [k, rotated], v, case.mask(), scale=0.07, flash=True)
    assert case.kernel() == f"flash{16 if n_tokens == 2 else 64}_192_128"
    case.check(out)


@pytest.mark.parametrize("n_tokens", [1, 25])
@pytest.mark.parametrize("type_name", ["f16", "q8_0", "bf16"])
def test_broken_query_stays_visible(type_name: str, n_tokens: int) -> None:
    """A NaN in a query makes its output NaN, not a mean of values; other heads are as ever."""
    case = Case(1, 96, n_tokens, 4, 2)
    k, v = case.cache(64, type_name), case.cache(64, type_name)
    q = case.normal(n_tokens, 4, 64)
    q[0, 1, 5] = np.nan
    out = case.p.graph.attention(case.p.array(q), [k], v, case.mask(), scale=0.125, flash=True)
    (actual,) = case.p.run([out], on_cuda=True, n_kv=88)
    broken = np.isnan(actual.reshape(n_tokens, 4, 64))
    assert broken[0, 1].all() and broken.sum() == 64
