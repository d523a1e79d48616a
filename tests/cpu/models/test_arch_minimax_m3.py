"""MiniMax M3: random models against their definition."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import IkpyError
from ikpy.graph.activations import ActivationCollector
from tests.cpu.models import definition_checks as checks
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.minimax_m3_model import MiniMaxM3, Sizes, random_model

BOUND = 2e-5
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "type_indexer": "f32"}
context_of = partial(checks.context_of, **EXACT)
hold = partial(checks.hold, bound=BOUND)
VARIANTS = {
    "plain": Sizes(),
    "odd": Sizes(heads=6, kv=3, head=40, index_size=24, top_k=4, block=3, local=2, dense=0),
    "one KV head": Sizes(layers=2, sparse=(0,), kv=1, block=16, top_k=1, local=0),
    "dense": Sizes(sparse=()),
}


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_definition(name: str, flash: bool, tmp_path: Path) -> None:
    n = VARIANTS[name]
    m = random_model(n)
    truth, path = MiniMaxM3(m, n).logits(TOKENS), m.write(tmp_path / "model.gguf")
    for form, logits in checks.decoded(path, flash_attn=flash, **EXACT).items():
        hold(form, logits, truth)


@pytest.mark.parametrize("n_ubatch", [512, 50, 7])
@pytest.mark.parametrize("name", ["plain", "odd"])
def test_prompts(name: str, n_ubatch: int, tmp_path: Path) -> None:
    n = VARIANTS[name]
    m = random_model(n)
    path = m.write(tmp_path / "model.gguf")
    logits = context_of(path, n_ubatch=n_ubatch).decode(Batch.single(LONG, logits="all"))
    hold("", logits, MiniMaxM3(m, n).logits(LONG))


def test_choice_matters(tmp_path: Path) -> None:
    """Until 4 blocks have begun every token sees everything; -dsatk 0 attends to all, and keeps no index keys."""
    n = Sizes()
    m = random_model(n)
    path = m.write(tmp_path / "model.gguf")
    chosen, every = MiniMaxM3(m, n).logits(TOKENS), MiniMaxM3(m, n, all_cells=True).logits(TOKENS)
    difference, first = np.abs(chosen - every).max(axis=1), n.top_k * n.block
    assert difference[:first].max() == 0 and difference[first:].max() > 0.1
    context = context_of(path, sparse_top_k=0)
    hold("all", context.decode(Batch.single(TOKENS, logits="all")), every)
    assert {name for _, name in context_of(path).kv.tensors} == {"k", "v", "ki"}
    assert {name for _, name in context.kv.tensors} == {"k", "v"}
    few = MiniMaxM3(m, dataclasses.replace(n, top_k=2)).logits(TOKENS)
    hold("-dsatk 11", context_of(path, sparse_top_k=11).decode(Batch.single(TOKENS, logits="all")), few)


@pytest.mark.parametrize("options", [{}, {"k_hadamard": True, "v_hadamard": True}], ids=["plain", "hadamard"])
@pytest.mark.parametrize("flash", [True, False])
def test_quantized_caches(flash: bool, options: dict[str, Any], tmp_path: Path) -> None:
    """The same choices, as index keys are exact. Of the median token: experts change places."""
    n = Sizes()
    m = random_model(n)
    path, truth = m.write(tmp_path / "model.gguf"), MiniMaxM3(m, n).logits(TOKENS)
    kinds = {"type_k": "q8_0", "type_v": "q8_0" if flash else "f16"}
    logits = context_of(path, flash_attn=flash, **kinds, **options).decode(Batch.single(TOKENS, logits="all"))
    error = float(np.median(np.abs(logits - truth).max(axis=1)) / np.abs(truth).max())
    assert 1e-5 < error < 0.05, f"the median token is off by {error:.1e}"


def test_sequences_that_go_back_share_and_are_saved(tmp_path: Path) -> None:
    n = Sizes()
    m = random_model(n)
    path = m.write(tmp_path / "model.gguf")
    context = context_of(path, n_seq_max=3)
    checks.check_sequences(context, MiniMaxM3(m, n).logits, BOUND)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.indexer.head_count", 4, "4 index heads; there must be one for each KV head"),
        ("attention.indexer.top_k", 0, "chooses 0 blocks of 4 positions"),
        ("attention.indexer.block_size", 0, "chooses 3 blocks of 0 positions"),
        ("attention.indexer.local_blocks", 4, "4 of them the last ones, is not possible"),
        ("attention.indexer.key_length", 8, "index keys of 8 elements, fewer than the 16 rotated ones"),
        ("attention.indexer.key_length", 64, "indexer.q_proj.weight' has wrong shape"),
        ("expert_gating_func", 9, "unknown expert_gating_func 9"),
    ],
)
def test_what_cannot_be(key: str, value: Any, message: str, tmp_path: Path) -> None:
    checks.refuses(random_model(Sizes()), key, value, message, tmp_path)


def test_an_indexer_that_is_not_whole(tmp_path: Path) -> None:
    model = random_model(Sizes())
    del model.weights["blk.1.indexer.k_norm"]
    with pytest.raises(IkpyError, match=r"blk.1.indexer.k_norm.weight' not found"):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_positions_cannot_be_shifted(tmp_path: Path) -> None:
    with pytest.raises(IkpyError, match="cannot be shifted"):
        context_of(random_model(Sizes()).write(tmp_path / "model.gguf")).kv.seq_add(0, 0, -1, 1)


def test_importance(tmp_path: Path) -> None:
    """Every matrix of attention and indexers has statistics of its inputs."""
    model = Model.load(random_model(Sizes()).write(tmp_path / "model.gguf"))
    stored = {name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()}
    collector = ActivationCollector(stored)
    context = Context(model, ContextParams(n_ctx=64, n_threads=1, collector=collector))
    context.decode(Batch.single(TOKENS, logits="all"))
    matrices = {name for name in stored if ("attn" in name or "indexer" in name) and not name.endswith("norm.weight")}
    assert {name for name in collector.entries if "attn" in name or "indexer" in name} == matrices


def test_memory_is_what_was_planned(tmp_path: Path) -> None:
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    params = ContextParams(n_ctx=1024, n_seq_max=2)
    planned, real = (Context(Model.load(path, ModelParams(header_only=x)), params) for x in (True, False))
    assert planned.kv.nbytes() == real.kv.nbytes() == real.allocated_bytes["cache"]
    assert planned.compute_bytes == real.compute_bytes
