"""Emulated CUDA attention with biases by differences of positions (T5) against its definition in float64."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.backends.cuda import launch
from ikpy.graph.builder import Distances
from ikpy.graph.ir import Value
from tests.cuda.test_kernels_attention import F16_BOUND, Case

SCALE = 0.11


class Biased(Case):
    """Heads of n elements, biases for differences up to `farthest`, the same beyond."""

    def __init__(
        self, n: int, n_cells: int, n_tokens: int, heads: int, kv_heads: int, farthest: int, softcap: float = 0.0
    ) -> None:
        super().__init__(n, n_cells, n_tokens, heads, kv_heads)
        self.farthest, self.softcap = farthest, softcap
        self.cells = [self.normal(n_cells, kv_heads, n).astype(np.float16) for _ in "kv"]
        self.k, self.v = (self.p.weight(x, "f16", x.shape[::-1]) for x in self.cells)
        for cache in (self.k, self.v):
            cache.dynamic_dim = 2
        self.kept = self.mask()
        self.queries_f32 = 2 * self.normal(n_tokens, heads, n)
        self.q = self.p.array(self.queries_f32)
        self.table = 2 * self.normal(heads, 2 * farthest + 1)
        self.biases = Distances(0.0, *self.distances, self.p.array(self.table))

    def attention(self) -> Value:
        return self.p.graph.attention(
            self.q, [self.k], self.v, self.kept, scale=SCALE, flash=True, softcap=self.softcap, distances=self.biases
        )

    def truth(self, n_kv: int) -> np.ndarray:
        """f64 [T, H, n]."""
        k, v, q = (x.astype(np.float64) for x in (*self.cells, self.queries_f32))
        group = self.heads // self.kv_heads
        cell_pos = np.arange(self.n_cells)
        cell_pos[::13] = -1
        last = self.n_cells - 10
        out = np.zeros(q.shape)
        for t in range(self.n_tokens):
            own = last - self.n_tokens + t
            seen = [c for c in range(n_kv) if 0 <= cell_pos[c] <= own and c % 5 != 4]
            for h in range(self.heads):
                scores = SCALE * (k[seen, h // group] @ q[t, h])
                if self.softcap:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                for i, c in enumerate(seen):
                    difference = min(max(cell_pos[c] - own, -self.farthest), self.farthest)
                    scores[i] += self.table[h, self.farthest + difference]
                weights = np.exp(scores - scores.max())
                out[t, h] = weights @ v[seen, h // group] / weights.sum()
        return out

    def check_truth(self, out: Value, n_kv: int) -> None:
        wanted = self.truth(n_kv)
        (found,) = self.p.run([out], on_cuda=True, n_kv=n_kv)
        errors = np.abs(found.reshape(wanted.shape) - wanted).max(axis=(1, 2)) / np.abs(wanted).max()
        worst = int(errors.argmax())
        assert errors[worst] < F16_BOUND, f"token {worst}: {errors[worst]:.2g}"


@pytest.mark.parametrize("n_tokens", [1, 3, 25])
@pytest.mark.parametrize("n", [64, 128, 32])
@pytest.mark.parametrize(("heads", "kv_heads", "farthest"), [(3, 3, 3), (3, 3, 128), (6, 2, 17)])
def test_biases_by_differences_of_positions(n: int, n_tokens: int, heads: int, kv_heads: int, farthest: int) -> None:
    case = Biased(n, 96, n_tokens, heads, kv_heads, farthest)
    out = case.attention()
    rows = 16 if heads // kv_heads * n_tokens <= 16 else 64
    assert case.kernel() == ("attention_any" if n == 32 else f"flash{rows}_{n}_{n}_table")
    case.check_truth(out, 88)


@pytest.mark.parametrize("n_tokens", [2, 17])
def test_biases_beside_a_soft_cap(n_tokens: int) -> None:
    case = Biased(64, 96, n_tokens, 3, 3, 9, softcap=3.0)
    case.check_truth(case.attention(), 88)


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_biases_of_cells_split_over_blocks(n_tokens: int) -> None:
    case = Biased(64, 1088, n_tokens, 6, 6, 128)
    out = case.attention()
    assert len(launch.lower(case.p.graph.nodes[-1], lambda _: 0)) == 2
    case.check_truth(out, 1083)
    case.p.compare(out, bound=F16_BOUND, n_kv=70)


@pytest.mark.parametrize("type_name", ["bf16", "q8_0", "q8_KV", "q4_0", "f32"])
@pytest.mark.parametrize("n_tokens", [1, 20])
def test_biases_with_other_caches(type_name: str, n_tokens: int) -> None:
    case = Case(5, 96, n_tokens, 6, 6)
    k, v, mask = case.cache(64, type_name), case.cache(64, type_name), case.mask()
    table = case.p.array(case.normal(6, 2 * 40 + 1))
    biases = Distances(0.0, *case.distances, table)
    out = case.p.graph.attention(case.queries(64), [k], v, mask, scale=SCALE, flash=True, distances=biases)
    assert case.kernel().endswith("_table")
    case.check(out)


@pytest.mark.parametrize("n", [64, 32])
@pytest.mark.parametrize("n_tokens", [1, 25])
def test_biases_of_a_part_of_the_heads(n: int, n_tokens: int) -> None:
    """The last two of six heads get what they get among all."""
    case = Biased(n, 96, n_tokens, 6, 6, 128)
    whole = case.attention()
    case.q, case.k, case.v = (x.slice(1, 4, 2) for x in (case.q, case.k, case.v))
    part = case.attention()
    case.p.graph.nodes[-1].ip[2:] = [4, 6]
    whole_rows, part_rows = case.p.run([whole, part], on_cuda=True, n_kv=88)
    assert np.abs(whole_rows[..., 4:, :] - part_rows).max() < 1e-6
