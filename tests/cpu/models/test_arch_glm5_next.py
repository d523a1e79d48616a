"""GLM-5.3 Flash: random models against their definition."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import IkpyError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.ir import F32
from ikpy.models.batch import EVERY
from tests.cpu.models import definition_checks as checks
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.glm5_next_model import Glm5Next, Sizes, random_model
from tests.cpu.models.reference_models import RandomModel

BOUND = 1e-4
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "type_indexer": "f32"}
context_of = partial(checks.context_of, **EXACT)
hold = partial(checks.hold, bound=BOUND)
VARIANTS = {
    "plain": Sizes(),
    "softplus": Sizes(bound=None),
    "odd": Sizes(
        layers=3,
        attends=(0, 2),
        full=(0, 2),
        heads=2,
        q_rank=48,
        pool=3,
        top_k=9,
        index_heads=3,
        index_size=40,
        streams=2,
    ),
    "no KDA": Sizes(layers=2, attends=(0, 1), full=(0,), pool=16, top_k=16),
    "KDA alone": Sizes(layers=2, attends=(), full=()),
}


def glm5_next() -> tuple[RandomModel, np.ndarray]:
    """A file as llama.cpp has it, whose indexers choose 3 pools of 4."""
    n = Sizes()
    m = random_model(n)
    return m, Glm5Next(m, n).logits(TOKENS)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_definition(name: str, flash: bool, tmp_path: Path) -> None:
    n = VARIANTS[name]
    m = random_model(n)
    truth, path = Glm5Next(m, n).logits(TOKENS), m.write(tmp_path / "model.gguf")
    for form, logits in checks.decoded(path, flash_attn=flash, **EXACT).items():
        hold(form, logits, truth)


def test_choice_matters(tmp_path: Path) -> None:
    """Until 4 pools have ended every token sees everything; -dsatk 0 attends to all, and keeps no index keys."""
    n = Sizes()
    m = random_model(n)
    path = m.write(tmp_path / "model.gguf")
    chosen, every = Glm5Next(m, n).logits(TOKENS), Glm5Next(m, n, all_cells=True).logits(TOKENS)
    first = n.top_k + n.pool - 1
    difference = np.abs(chosen - every).max(axis=1)
    assert difference[:first].max() == 0 and difference[first:].max() > 0.1
    context = context_of(path, sparse_top_k=0)
    hold("all", context.decode(Batch.single(TOKENS, logits="all")), every)
    assert {name for _, name in context_of(path).kv.tensors} - {name for _, name in context.kv.tensors} == {
        "iv",
        "ig",
        "ki",
    }
    few = Glm5Next(m, dataclasses.replace(n, top_k=n.pool)).logits(TOKENS)
    hold("-dsatk 3", context_of(path, sparse_top_k=3).decode(Batch.single(TOKENS, logits="all")), few)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "odd"])
def test_modes_of_latent_attention(name: str, mla: int, tmp_path: Path) -> None:
    """Also of prompts whose cells are expanded, and with the source window smaller than the context."""
    n = VARIANTS[name]
    m = random_model(n)
    path, truth = m.write(tmp_path / "model.gguf"), Glm5Next(m, n).logits(LONG)
    for n_ubatch in (512, 50, 7):
        context = context_of(path, n_ubatch=n_ubatch, mla=mla)
        hold(f"micro-batches of {n_ubatch}", context.decode(Batch.single(LONG, logits="all")), truth)
        assert context.kv.cells[EVERY, n.pool].used == len(LONG) // n.pool


@pytest.mark.parametrize("options", [{}, {"k_hadamard": True}], ids=["plain", "hadamard"])
@pytest.mark.parametrize("kind", ["q8_0", "q8_KV"])
def test_quantized_caches(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With all cells attended to: pools with nearly equal scores change places. Of the median token: so do experts."""
    m, n = random_model(Sizes()), Sizes()
    path, truth = m.write(tmp_path / "model.gguf"), Glm5Next(m, n, all_cells=True).logits(TOKENS)
    for mla in (0, 1):
        context = context_of(path, type_k=kind, type_v=kind, mla=mla, flash_attn=True, sparse_top_k=0, **options)
        logits = context.decode(Batch.single(TOKENS, logits="all"))
        error = float(np.median(np.abs(logits - truth).max(axis=1)) / np.abs(truth).max())
        assert 1e-5 < error < 0.05, f"mla {mla}: the median token is off by {error:.1e}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kda.head_dim", 0, "impossible KDA layers"),
        ("kda.gate_lower_bound", 0.5, "gate_lower_bound is 0.5, not below 0"),
        ("rope.dimension_count", 8, "these models have no RoPE"),
        ("attention.indexer.kpool", 1, "12 chosen cells in pools of 1 are not possible"),
        ("attention.indexer.kpool", 5, "12 chosen cells in pools of 5 are not possible"),
        ("attention.indexer.kpool", 6, "indexer_compressor_ape.weight' has wrong shape"),
        ("attention.indexer.kpool_select_tail", False, "kpool_select_tail is false; only models that attend"),
        ("attention.indexer.head_count", 0, "an indexer of 0 heads"),
        ("attention.indexer.top_k", 0, "chooses 0 cells"),
        ("attention.indexer.types", [0, 0, 0, 0, 1], "layer 1 shares the choice of an indexer, and none is before it"),
        ("attention.indexer.types", [1, 1], "must hold a number for each of 5 layers"),
        ("swiglu_clamp_exp", [1.0], "must hold a number for each of 5 layers"),
        ("hyper_connection.count", 9, "9 residual streams"),
        ("attention.q_lora_rank", 63, "wrong shape"),
        ("nextn_predict_layers", 5, "leave none to run"),
    ],
)
def test_what_cannot_be(key: str, value: Any, message: str, tmp_path: Path) -> None:
    checks.refuses(random_model(Sizes()), key, value, message, tmp_path)


def test_prediction_layers_are_no_part_of_the_text_model(tmp_path: Path) -> None:
    """Counted among the layers, with lists as long as the layers that run or as all."""
    model, truth = glm5_next()
    n = Sizes()
    layer = {name: w for name, w in model.weights.items() if name.startswith("blk.4.")}
    model.weights |= {name.replace("blk.4.", "blk.5."): w for name, w in layer.items()}
    for name in ("enorm", "hnorm", "shared_head_norm"):
        model.norm(f"blk.5.nextn.{name}", n.d)
    model.matrix("blk.5.nextn.eh_proj", n.d, 2 * n.d)
    model.keys |= {"block_count": 6, "nextn_predict_layers": 1}
    model.keys["attention.head_count_kv"].append(1)
    model.keys["attention.indexer.types"].append(1)
    path = model.write(tmp_path / "model.gguf")
    hold("", context_of(path).decode(Batch.single(TOKENS, logits="all")), truth)


@pytest.mark.parametrize("swa_full", [False, True])
def test_going_back_to_a_checkpoint(swa_full: bool, tmp_path: Path) -> None:
    """What the next index keys are made of must still be there, or the text is evaluated again."""
    n = Sizes()
    m = random_model(n)
    path, tokens = m.write(tmp_path / "model.gguf"), np.tile(LONG, 4)[:600]
    context = context_of(path, n_ctx=1024, n_ubatch=64, swa_full=swa_full)
    assert swa_full or context.kv.cells["sliding", n.pool].n_cells < 1024
    context.decode(Batch.single(tokens[:101]))
    context.kv.keep_checkpoint(0)
    context.decode(Batch.single(tokens[101:], 101))
    left = 101 if swa_full else 0
    assert context.kv.rewind(0, 101) == left
    other = np.concatenate([tokens[:101], tokens[:60]])
    logits = context.decode(Batch.single(other[left:], left, logits="all"))
    hold("", logits, Glm5Next(m, n).logits(other)[left:])


def test_what_does_not_go(tmp_path: Path) -> None:
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    context = context_of(path)
    with pytest.raises(UsageError, match="control vectors act on one residual stream"):
        context.steer(np.ones((5, Sizes().d), np.float32))
        context.decode(Batch.single([1, 2]))
    with pytest.raises(IkpyError, match="cannot be shifted"):
        context_of(path).kv.seq_add(0, 0, -1, 1)


def test_importance_and_quantization(tmp_path: Path) -> None:
    """Every matrix has statistics of its inputs, and all but small tensors are quantized."""
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    model = Model.load(path)
    stored = {name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()}
    collector = ActivationCollector(stored)
    settings = ContextParams(n_ctx=64, n_threads=1)
    context = Context(model, dataclasses.replace(settings, collector=collector))
    whole = context.decode(Batch.single(TOKENS, logits="all"))
    small = ("norm.weight", ".bias", "ssm_a", "_base.weight", "_scale.weight", "_ape.weight")
    small += tuple(f"ssm_conv1d_{x}.weight" for x in "qkv")
    layers = {name for name in stored if name.startswith("blk.")}
    assert set(collector.entries) == {name for name in layers if not name.endswith(small)}
    assert quantize([str(path), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        kept = {name for name, info in file.tensors.items() if info.type_id == F32}
    assert kept == {name for name in stored if name.endswith((*small, "ffn_gate_inp.weight")) or "hc_" in name}
    logits = Context(Model.load(tmp_path / "small.gguf"), settings).decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - whole).max(axis=1)) < 0.25 * np.abs(whole).max()


def test_memory_is_what_was_planned(tmp_path: Path) -> None:
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    params = ContextParams(n_ctx=1024, n_seq_max=2)
    planned, real = (Context(Model.load(path, ModelParams(header_only=x)), params) for x in (True, False))
    assert planned.kv.nbytes() == real.kv.nbytes() == real.allocated_bytes["cache"]
    assert planned.compute_bytes == real.compute_bytes
