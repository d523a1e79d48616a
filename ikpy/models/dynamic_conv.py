"""Short causal convolutions over the tokens of a block whose filters the tokens make themselves (DFlash 2)."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.graph.builder import Graph
from ikpy.graph.ir import Value
from ikpy.models.weights import WeightSource


@dataclass
class DynamicConv:
    """Convolutions of what a branch reads and of what it gives.

    base: f32 [D, taps, 2], of every channel; made: matrix [D, 2 * taps * G] to what groups of channels add to that, the
    groups one behind the other. The first tap is the token itself, every further one a token before.
    """

    base: Value
    made: Value

    @classmethod
    def take(cls, weights: WeightSource, name: str, d: int, n_taps: int, n_groups: int) -> DynamicConv:
        """The tensors of a branch."""
        return cls(
            weights.take(f"{name}_base", (d, n_taps, 2)),
            weights.take(f"{name}_proj.weight", (d, 2 * n_taps * n_groups)),
        )

    def run(self, g: Graph, x: Value, filters: Value, *, given: bool) -> Value:
        """x [D, T] convolved with filters [2 * taps * G, T]; given: what the branch gives."""
        (d, n_tokens), n_taps, side = x.shape[:2], self.base.shape[1], int(given)
        n_groups = filters.shape[0] // (2 * n_taps)
        out: Value | None = None
        for tap in range(min(n_taps, n_tokens)):
            n = n_tokens - tap
            own = filters.slice0((side * n_taps + tap) * n_groups, n_groups).slice(1, tap, n)
            groups = g.new(n_groups, n)
            g.copy(own, groups)
            before = x.slice(1, 0, n)
            rows = g.new(d, n)
            g.copy(before, rows)
            base = self.base.slice(2, side, 1).slice(1, tap, 1).reshape(d)
            grouped = g.mul(rows.reshape(d // n_groups, n_groups, n), groups.reshape(1, n_groups, n))
            term = g.add(grouped.reshape(d, n), g.mul(rows, base))
            out = term if out is None else _added_behind(g, out, term, tap)
        assert out is not None
        return out


def _added_behind(g: Graph, x: Value, term: Value, start: int) -> Value:
    """x [D, T] with a term [D, T - start] added to its rows from ``start`` on."""
    d, n_tokens = x.shape[:2]
    both = g.new(d, n_tokens)
    g.copy(x.slice(1, 0, start), both.slice(1, 0, start))
    g.copy(g.add(x.slice(1, start, n_tokens - start), term), both.slice(1, start, n_tokens - start))
    return both
