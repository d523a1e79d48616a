"""Rotation tables whose pairs are turned by one of four positions each."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy.graph.builder import RopeSections
from tests.cpu.kernels.op_graphs import run_graph, value_of

N, BASE, SCALE, MAGNITUDE = 52, 5000.0, 0.25, 1.2
IN_ORDER = {
    (10, 9, 7, 0): "t" * 10 + "h" * 9 + "w" * 7,
    (3, 2, 1, 1): ("ttthhwf" * 4)[:26],
    (0, 30, 0, 0): "h" * 26,
}
INTERLEAVED = {
    (10, 8, 8, 0): "thw" * 8 + "tt",
    (20, 3, 2, 1): "thwthwth" + "t" * 18,
    (26, 0, 0, 0): "t" * 26,
}
CASES = [(lengths, False, parts) for lengths, parts in IN_ORDER.items()]
CASES += [(lengths, True, parts) for lengths, parts in INTERLEAVED.items()]


@pytest.mark.parametrize(("lengths", "interleaved", "parts"), CASES)
@pytest.mark.parametrize("n_threads", [1, 3])
def test_every_pair_is_turned_by_its_position(
    lengths: tuple[int, int, int, int], interleaved: bool, parts: str, n_threads: int
) -> None:
    """Long heads go through the sections again."""
    rng = np.random.default_rng(3)
    places = rng.integers(0, 500, (7, 4)).astype(np.int32)
    factors = rng.uniform(0.5, 2, N // 2).astype(np.float32)
    sections, params = RopeSections(lengths, interleaved), [BASE, SCALE, 0.0, MAGNITUDE, 0.0, 0.0]
    table = run_graph(
        lambda g: [g.rope_table(value_of(places), N, value_of(factors), params, sections=sections)], n_threads
    )[0].reshape(7, N // 2, 2)
    chosen = places[:, ["thwf".index(part) for part in parts]]
    angles = SCALE * chosen * BASE ** (-2.0 * np.arange(N // 2) / N) / factors
    expected = MAGNITUDE * np.stack([np.cos(angles), np.sin(angles)], axis=2)
    error = np.abs(table - expected).max(axis=(1, 2))
    assert error.max() < 1e-4, f"token {error.argmax()} off by {error.max():.1e}"


def test_equal_positions_make_the_plain_table() -> None:
    """To the last bit: text before a picture is rotated as without one."""
    pos = np.arange(9, dtype=np.int32) * 77
    places, params = np.repeat(pos, 4).reshape(9, 4), [BASE, 1.0, 1.0, 1.0, 4.0, 15.0]
    plain = run_graph(lambda g: [g.rope_table(value_of(pos), N, None, params)], 1)[0]
    for interleaved in (False, True):
        sections = RopeSections((10, 9, 7, 0), interleaved)
        found = run_graph(lambda g, s=sections: [g.rope_table(value_of(places), N, None, params, sections=s)], 1)[0]  # type: ignore[misc]
        assert np.array_equal(found, plain)
