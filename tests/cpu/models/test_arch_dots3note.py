"""dots3 note: random models against their definition."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import IkpyError, UsageError
from ikpy.graph.activations import ActivationCollector
from tests.cpu.models import definition_checks as checks
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.dots3note_model import Dots3Note, Kind, Sizes, random_model

BOUND = 2e-5
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "type_indexer": "f32"}
context_of = partial(checks.context_of, **EXACT)
hold = partial(checks.hold, bound=BOUND)
VARIANTS = {
    "plain": Sizes(),
    "odd": Sizes(layers=3, windows=(0,), local=Kind(5, 24, 8, 20, 56), window=130, dense=0, index_size=24, top_k=5),
    "no window": Sizes(layers=2, windows=()),
    "windows alone": Sizes(layers=2, windows=(0, 1)),
}


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_definition(name: str, flash: bool, tmp_path: Path) -> None:
    n = VARIANTS[name]
    m = random_model(n)
    truth, path = Dots3Note(m, n).logits(TOKENS), m.write(tmp_path / "model.gguf")
    for form, logits in checks.decoded(path, flash_attn=flash, **EXACT).items():
        hold(form, logits, truth)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["plain", "odd"])
def test_modes_of_latent_attention(name: str, mla: int, tmp_path: Path) -> None:
    """Also of prompts whose cells are expanded, and with windows whose cells are fewer than the context's."""
    n = VARIANTS[name]
    m = random_model(n)
    path, truth = m.write(tmp_path / "model.gguf"), Dots3Note(m, n).logits(LONG)
    for n_ubatch in (512, 50, 7):
        context = context_of(path, n_ctx=1024, n_ubatch=n_ubatch, mla=mla)
        hold(f"micro-batches of {n_ubatch}", context.decode(Batch.single(LONG, logits="all")), truth)
    assert context.kv.cells["sliding", n.window].n_cells < 1024


def test_choice_matters(tmp_path: Path) -> None:
    """-dsatk 0 attends to all cells that there are without a window, and keeps no index keys."""
    n = Sizes()
    m = random_model(n)
    path = m.write(tmp_path / "model.gguf")
    chosen, every = Dots3Note(m, n).logits(TOKENS), Dots3Note(m, n, all_cells=True).logits(TOKENS)
    difference = np.abs(chosen - every).max(axis=1)
    assert difference[: n.top_k].max() == 0 and difference[n.top_k :].max() > 0.1
    context = context_of(path, sparse_top_k=0)
    hold("all", context.decode(Batch.single(TOKENS, logits="all")), every)
    assert {il for il, name in context_of(path).kv.tensors if name == "ki"} == {0, 2}
    assert not any(name == "ki" for _, name in context.kv.tensors)


@pytest.mark.parametrize("options", [{}, {"k_hadamard": True}], ids=["plain", "hadamard"])
@pytest.mark.parametrize("kind", ["q8_0", "q8_KV"])
def test_quantized_caches(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With all cells attended to, of the median token: experts change places."""
    n = Sizes(full=Kind(4, 32, 32, 32, 64), local=Kind(2, 32, 32, 32, 96))
    m = random_model(n)
    path, truth = m.write(tmp_path / "model.gguf"), Dots3Note(m, n, all_cells=True).logits(TOKENS)
    for mla in (0, 1):
        context = context_of(path, type_k=kind, type_v=kind, mla=mla, flash_attn=True, sparse_top_k=0, **options)
        logits = context.decode(Batch.single(TOKENS, logits="all"))
        error = float(np.median(np.abs(logits - truth).max(axis=1)) / np.abs(truth).max())
        assert 1e-5 < error < 0.05, f"mla {mla}: the median token is off by {error:.1e}"


def test_sequences_that_go_back_share_and_are_saved(tmp_path: Path) -> None:
    n = Sizes()
    m = random_model(n)
    context = context_of(m.write(tmp_path / "model.gguf"), n_seq_max=3)
    checks.check_sequences(context, Dots3Note(m, n).logits, BOUND)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.sliding_window", 0, "a window of 0 tokens"),
        ("attention.kv_lora_rank_swa", 0, "latents of 0 elements are not possible"),
        ("attention.key_length_mla_swa", 24, "are not possible"),
        ("attention.kv_lora_rank_swa", 71, "has wrong shape"),
        ("attention.indexer.types", [True] * 4, "layers have either a window or an indexer"),
        ("attention.indexer.types", [True] * 3, "must hold a number for each of 4 layers"),
        ("attention.indexer.top_k", 0, "chooses 0 cells"),
        ("attention.head_count", 4, "blk.1.attn_output.weight' has wrong shape"),
        ("nextn_predict_layers", 4, "leave none to run"),
    ],
)
def test_what_cannot_be(key: str, value: Any, message: str, tmp_path: Path) -> None:
    checks.refuses(random_model(Sizes()), key, value, message, tmp_path)


def test_what_does_not_go(tmp_path: Path) -> None:
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    with pytest.raises(IkpyError, match="cannot be shifted"):
        context_of(path).kv.seq_add(0, 0, -1, 1)
    with pytest.raises(UsageError, match="layers of dots3note models that predict further tokens do not run"):
        Model.load(path).prediction_head()


def test_importance(tmp_path: Path) -> None:
    """Every matrix of attention and indexers has statistics of its inputs."""
    model = Model.load(random_model(Sizes()).write(tmp_path / "model.gguf"))
    stored = {name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()}
    collector = ActivationCollector(stored)
    context = Context(model, ContextParams(n_ctx=64, n_threads=1, collector=collector))
    context.decode(Batch.single(TOKENS, logits="all"))
    matrices = {name for name in stored if ("attn" in name or "indexer" in name) and "norm" not in name}
    assert {name for name in collector.entries if "attn" in name or "indexer" in name} == matrices


def test_memory_is_what_was_planned(tmp_path: Path) -> None:
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    params = ContextParams(n_ctx=1024, n_seq_max=2)
    planned, real = (Context(Model.load(path, ModelParams(header_only=x)), params) for x in (True, False))
    assert planned.kv.nbytes() == real.kv.nbytes() == real.allocated_bytes["cache"]
    assert planned.compute_bytes == real.compute_bytes
