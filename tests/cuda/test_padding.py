"""Micro-batches of sizes near to each other share a plan on devices, by repeating their last token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.padding import MOST_EXACT, padded_outputs, padded_tokens
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.plans import Plans
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.placement import PlacementParams
from tests.cpu.models.test_arch_qwen3next import qwen35moe
from tests.cuda.models import emulated, zoo

TINY = ikpy.default_model_path()
TOKENS = np.random.default_rng(5).integers(0, 150, 256)
EXPERTS = PlacementParams(n_gpu_layers=99, rules=(("exps", "CPU"),))
DIVIDED = PlacementParams(n_gpu_layers=99, split_mode="graph")


TOLERANCE = 3e-3  # as that of the placements: the number of tokens decides on formats of activations


def test_sizes() -> None:
    """At most an eighth more, never more than a micro-batch has, eight sizes between powers of two."""
    for n_ubatch in (512, 500):
        sizes = {n: padded_tokens(n, n_ubatch) for n in range(1, n_ubatch + 1)}
        assert all(n <= padded <= min(n_ubatch, n * 9 / 8) for n, padded in sizes.items())
        assert all(sizes[n] == n for n in range(1, MOST_EXACT + 1))
        assert len({padded for n, padded in sizes.items() if 256 < n <= 512}) == 8
        assert list(sizes.values()) == sorted(sizes.values())
    assert [padded_outputs(n, 40, 44) for n in (0, 1, 2, 3, 5, 17, 33, 40)] == [0, 1, 2, 4, 8, 32, 43, 44]
    assert [padded_outputs(n, 4, 4) for n in range(5)] == [0, 1, 2, 3, 4]


def context_of(path: Path, placement: PlacementParams, **params: Any) -> Context:
    settings = {"n_ctx": 256, "n_ubatch": 128, "n_batch": 128, "n_threads": 1} | params
    return Context(Model.load(path, ModelParams(placement=placement)), ContextParams(**settings))


def batch_of(start: int, n: int, wanted: set[int] | str) -> Batch:
    """n tokens with outputs at these indices."""
    if isinstance(wanted, str):
        return Batch.single(TOKENS[start : start + n], start, logits=wanted)
    batch = Batch()
    for i in range(n):
        batch.add(TOKENS[start + i : start + i + 1], start + i, logits="last" if i in wanted else "none")
    return batch


@pytest.mark.parametrize("wanted", ["last", "all", {3, 9, 16}, set(range(1, 41))], ids=["last", "all", "few", "most"])
@pytest.mark.parametrize(
    ("path", "placement", "n_devices", "params"),
    [
        (TINY, PlacementParams(n_gpu_layers=99), 1, {}),
        (TINY, EXPERTS, 1, {"type_k": "q8_0"}),
        (TINY, DIVIDED, 2, {}),
        (zoo("qwen3moe"), EXPERTS, 2, {}),
        (zoo("qwen3"), PlacementParams(n_gpu_layers=99, kv_offload=False), 1, {"type_k": "q8_0", "type_v": "q4_0"}),
        (zoo("deepseek2-lite"), PlacementParams(n_gpu_layers=99), 1, {"mla": 1}),
    ],
)
def test_repeated_tokens_change_nothing(
    path: Path, placement: PlacementParams, n_devices: int, params: dict[str, Any], wanted: set[int] | str
) -> None:
    """Logits and caches are those without them, for a prompt, more of it behind that, and a single token."""
    found = []
    with emulated(n_devices):
        for pads in (True, False):
            context = context_of(path, placement, **params)
            assert context._pads
            context._pads = pads
            logits = [context.decode(batch_of(start, n, wanted)) for start, n in ((0, 41), (41, 37), (78, 1))]
            context.sync_caches_to_host()
            caches = [np.frombuffer(v.buffer.owner, np.uint8).copy() for v in context.kv.tensors.values()]
            found.append((logits, caches))
    (padded_logits, padded_caches), (logits, caches) = found
    largest = max(np.abs(part).max() for part in logits if part.size)
    for i, (got, expected) in enumerate(zip(padded_logits, logits, strict=True)):
        assert got.shape == expected.shape
        if expected.size:
            worst = np.abs(got - expected).max()
            assert worst <= TOLERANCE * largest, f"batch {i}: {worst} of {largest}"
    for i, (got, expected) in enumerate(zip(padded_caches, caches, strict=True)):
        # Products of more tokens round a few values to a neighbour; cells that no token took stay empty.
        assert np.mean(got != expected) < 0.01, f"cache {i}: {np.flatnonzero(got != expected)[:8]}"
        assert (got.nonzero()[0].max(), got.size) == (expected.nonzero()[0].max(), expected.size)


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sizes of the plans that are made from now on."""
    made: list[tuple[int, int]] = []
    original = Plans._made
    monkeypatch.setattr(Plans, "_made", lambda self, shape: made.append(shape[:2]) or original(self, shape))
    return made


def test_prompts_share_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 97 to 104 tokens, and those of several sequences with 5 to 8 outputs."""
    with emulated(1):
        context = context_of(zoo("qwen3"), PlacementParams(n_gpu_layers=99))
        made = count_plans(monkeypatch)
        for n in (97, 100, 104, 103):
            context.kv.clear()
            context.decode(batch_of(0, n, "last"))
        for n_wanted in (5, 7, 8):
            context.kv.clear()
            context.decode(batch_of(0, 50, set(range(n_wanted))))
    assert made == [(104, 1), (52, 8)]


@pytest.mark.parametrize("params", [{"causal": False}, {"collector": ActivationCollector({})}, {}])
def test_what_is_not_padded(params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that see each other, statistics of tokens, and models whose layers have states."""
    path = zoo("qwen3") if params else qwen35moe()[0].write(tmp_path / "recurrent.gguf")
    with emulated(1):
        context = context_of(path, PlacementParams(n_gpu_layers=99), **params)
        made = count_plans(monkeypatch)
        context.decode(batch_of(0, 100, "last"))
    assert made == [(100, 1)]
