"""Qwen4-Exp: random models against their definition."""

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
from ikpy.quants import registry
from tests.cpu.models import definition_checks as checks
from tests.cpu.models.definition_checks import LONG, TOKENS
from tests.cpu.models.qwen4exp_model import Qwen4Exp, Sizes, random_model
from tests.cpu.models.reference_models import RandomModel

BOUND = 1e-4
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "type_indexer": "f32"}
context_of = partial(checks.context_of, **EXACT)
hold = partial(checks.hold, bound=BOUND)
ODD = Sizes(
    layers=4,
    attends=(0, 2, 3),
    pools=(2, 3),
    heads=3,
    kv=1,
    rotated=12,
    key_heads=1,
    value_heads=3,
    taps=3,
    index_heads=3,
    index_size=40,
    top_k=6,
    pool=3,
    streams=3,
    rank=17,
    ngram_layer=1,
    ngram=4,
    per_length=1,
    row=24,
    kernel=4,
    rows=(7, 31, 101),
)
VARIANTS = {
    "plain": Sizes(),
    "odd": ODD,
    "pairs of tokens": Sizes(layers=2, attends=(1,), pools=(), streams=2, ngram=2, kernel=1, rows=(41, 43)),
    "no n-grams": Sizes(layers=3, attends=(0, 2), pools=(2,), pool=16, top_k=16, ngram_layer=None, streams=8),
    "states alone": Sizes(layers=2, attends=(), pools=(), ngram_layer=1),
}


def qwen4exp() -> tuple[RandomModel, np.ndarray]:
    """A file as llama.cpp has it, whose indexers choose 2 pools of 4."""
    n = Sizes()
    m = random_model(n)
    return m, Qwen4Exp(m, n).logits(TOKENS)


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_definition(name: str, flash: bool, tmp_path: Path) -> None:
    n = VARIANTS[name]
    m = random_model(n)
    truth, path = Qwen4Exp(m, n).logits(TOKENS), m.write(tmp_path / "model.gguf")
    for form, logits in checks.decoded(path, flash_attn=flash, **EXACT).items():
        hold(form, logits, truth)


def test_usual_order_of_layers(tmp_path: Path) -> None:
    """Files that do not list recurrent layers have an interval, 4 if they do not say it."""
    n = Sizes(attends=(3,), pools=(3,))
    m = random_model(n)
    del m.keys["attention.recurrent_layers"]
    truth = Qwen4Exp(m, n).logits(TOKENS)
    hold("", context_of(m.write(tmp_path / "model.gguf")).decode(Batch.single(TOKENS, logits="all")), truth)


def test_choice_matters(tmp_path: Path) -> None:
    """Until 3 pools have ended every token sees everything; -dsatk 0 attends to all, and keeps no index keys."""
    n = Sizes()
    m = random_model(n)
    path = m.write(tmp_path / "model.gguf")
    chosen, every = Qwen4Exp(m, n).logits(TOKENS), Qwen4Exp(m, n, all_cells=True).logits(TOKENS)
    first = n.top_k + n.pool - 1
    difference = np.abs(chosen - every).max(axis=1)
    assert difference[:first].max() == 0 and difference[first:].max() > 0.1
    context = context_of(path, sparse_top_k=0)
    hold("all", context.decode(Batch.single(TOKENS, logits="all")), every)
    assert {name for _, name in context_of(path).kv.tensors} - {name for _, name in context.kv.tensors} == {"iv", "ki"}
    few = Qwen4Exp(m, dataclasses.replace(n, top_k=n.pool)).logits(TOKENS)
    hold("-dsatk 3", context_of(path, sparse_top_k=3).decode(Batch.single(TOKENS, logits="all")), few)


def test_ngrams_matter() -> None:
    """Tokens before an end of text do not count behind it."""
    n = Sizes()
    m = random_model(n)
    assert n.eos in TOKENS[2:-3]
    rows = Qwen4Exp(m, n).ngram_rows(TOKENS)
    other = TOKENS.copy()
    at = TOKENS.tolist().index(n.eos)
    other[: at - 1] = other[: at - 1][::-1]
    np.testing.assert_array_equal(Qwen4Exp(m, n).ngram_rows(other)[at + 1 :], rows[at + 1 :])
    assert (Qwen4Exp(m, dataclasses.replace(n, eos=1)).ngram_rows(TOKENS)[at + 1] != rows[at + 1]).any()


@pytest.mark.parametrize("name", ["plain", "odd"])
def test_micro_batches(name: str, tmp_path: Path) -> None:
    """Of any size, also with the source window smaller than the context."""
    n = VARIANTS[name]
    m = random_model(n)
    path, truth = m.write(tmp_path / "model.gguf"), Qwen4Exp(m, n).logits(LONG)
    for n_ubatch in (512, 50, 7, 1):
        context = context_of(path, n_ubatch=n_ubatch)
        hold(f"micro-batches of {n_ubatch}", context.decode(Batch.single(LONG, logits="all")), truth)
        assert context.kv.cells[EVERY, n.pool].used == len(LONG) // n.pool


@pytest.mark.parametrize("options", [{}, {"k_hadamard": True, "v_hadamard": True}], ids=["plain", "hadamard"])
@pytest.mark.parametrize("kind", ["q8_0", "q8_KV", "f16"])
def test_cache_types(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """With all cells attended to: pools with nearly equal scores change places. Of the median token: so do experts."""
    n = Sizes()
    m = random_model(n)
    path, truth = m.write(tmp_path / "model.gguf"), Qwen4Exp(m, n, all_cells=True).logits(TOKENS)
    for flash in (True, False) if kind == "f16" else (True,):
        context = context_of(path, type_k=kind, type_v=kind, flash_attn=flash, sparse_top_k=0, **options)
        logits = context.decode(Batch.single(TOKENS, logits="all"))
        error = float(np.median(np.abs(logits - truth).max(axis=1)) / np.abs(truth).max())
        assert 1e-6 < error < 0.05, f"flash {flash}: the median token is off by {error:.1e}"


def test_sequences(tmp_path: Path) -> None:
    """Going back by kept states, sequences that share cells, saved ones: the tokens before are those of the state."""
    n = Sizes()
    m = random_model(n)
    context = context_of(m.write(tmp_path / "model.gguf"), n_seq_max=3, n_kept_states=4)
    other = np.concatenate([TOKENS[:24], LONG[:16]])
    truth = Qwen4Exp(m, n).logits(other)
    context.decode(Batch.single(TOKENS[:22]))
    context.decode(Batch.single(TOKENS[22:26], 22))
    assert context.kv.rewind(0, 24) == 24
    hold("back", context.decode(Batch.single(other[24:30], 24, logits="all")), truth[24:30])
    context.kv.seq_cp(0, 1)
    hold("first", context.decode(Batch.single(other[30:], 30, logits="all")), truth[30:])
    hold("copy", context.decode(Batch.single(other[30:], 30, 1, logits="all")), truth[30:])
    both = Batch()
    both.add(LONG[:3], 0, 2, "all")
    hold("another", context.decode(both), Qwen4Exp(m, n).logits(LONG[:3]))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.compress_ratios", [0, 4, 0, 0, 8], r"pools of \[4, 8\] cells"),
        ("attention.compress_ratios", [0, 3, 0, 0, 3], "8 chosen cells in pools of 3 are not possible"),
        ("attention.compress_ratios", [0, 4], "must hold a number for each of 5 layers"),
        ("attention.indexer.head_count", 0, "an indexer of 0 heads"),
        ("attention.indexer.top_k", 0, "chooses 0 cells"),
        ("attention.indexer.key_length", 4, "of 4 elements, 8 of them rotated"),
        ("attention.recurrent_layers", [1, 0], "must hold a number for each of 5 layers"),
        ("attention.recurrent_layers", [False, False, True, True, False], "in layer 0, which has no states"),
        ("embedding_length_per_layer_input", 8, "wrong shape"),
        ("embedding_length_per_layer_input", 0, "impossible n-gram embeddings"),
        ("full_attention_interval", 0, "impossible recurrent layers"),
        ("hyper_connection.count", 9, "9 residual streams"),
        ("hyper_connection.count", 1, "1 residual streams"),
        ("hyper_connection.low_rank", 0, "gates of rank 0"),
        ("nextn_predict_layers", 5, "leave none to run"),
        ("ple.layers", [0, 2], "n-gram embeddings in 2 layers; one is supported"),
        ("ple.layers", 1, "wrong type"),
        ("ple.layers", ["one"], "must hold integers"),
        ("ple.layers", [5], "impossible n-gram embeddings: layer 5"),
        ("ple.ngram_size", 1, "impossible n-gram embeddings"),
        ("ple.ngram_size", 4, "must hold 4 integers"),
        ("ple.heads_per_ngram", 0, "impossible n-gram embeddings"),
        ("ple.conv_kernel", 7, "a convolution of 7 taps 3 tokens apart; at most 16 tokens"),
        ("ple.eos_token_id", 1 << 24, "16777216 is no token"),
        ("ple.head_vocab_sizes", np.array([53, 59, 61, 0], np.uint64), "impossible rows of n-grams"),
        ("ple.head_vocab_sizes", np.array([53, 59, 61, 80], np.uint64), "wrong shape; expected 16, 253"),
        ("ple.head_vocab_sizes", np.array([53, 59, 61, 1 << 31], np.uint64), "impossible rows of n-grams"),
        ("ple.head_offsets", np.array([-1, 53, 112, 173], np.int64), "none below 0"),
        ("ple.head_offsets", [1.0, 2.0, 3.0, 4.0], "must hold 4 integers"),
        ("ple.layer_multipliers", np.array([1, 2, 1 << 63], np.uint64), "impossible rows of n-grams"),
        ("ple.layer_multipliers", 7, "wrong type"),
    ],
)
def test_what_cannot_be(key: str, value: Any, message: str, tmp_path: Path) -> None:
    model = random_model(Sizes())
    model.keys[key] = value
    with pytest.raises(IkpyError, match=message) as error:
        Model.load(model.write(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)


def test_a_table_that_is_missing(tmp_path: Path) -> None:
    model = random_model(Sizes())
    del model.weights["per_layer_token_embd"]
    with pytest.raises(IkpyError, match=r"tensor 'per_layer_token_embd\.weight' not found"):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_prediction_layers_are_no_part_of_the_text_model(tmp_path: Path) -> None:
    """Counted among the layers, with lists as long as all layers."""
    model, truth = qwen4exp()
    n = Sizes()
    layer = {name: w for name, w in model.weights.items() if name.startswith("blk.4.")}
    model.weights |= {name.replace("blk.4.", "blk.5."): w for name, w in layer.items()}
    model.norm("blk.5.nextn.enorm", n.d)
    model.norm("blk.5.nextn.hnorm", n.streams * n.d)
    model.matrix("blk.5.nextn.eh_proj", n.d, 2 * n.d)
    model.norm("blk.5.nextn.hc_head_norm", n.streams * n.d)
    model.keys |= {"block_count": 6, "nextn_predict_layers": 1}
    model.keys["attention.compress_ratios"].append(0)
    model.keys["attention.recurrent_layers"].append(False)
    path = model.write(tmp_path / "model.gguf")
    hold("", context_of(path).decode(Batch.single(TOKENS, logits="all")), truth)


def test_what_does_not_go(tmp_path: Path) -> None:
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    context = context_of(path)
    with pytest.raises(UsageError, match="control vectors act on one residual stream"):
        context.steer(np.ones((5, Sizes().d), np.float32))
        context.decode(Batch.single([1, 2]))
    with pytest.raises(IkpyError, match="cannot be shifted"):
        context_of(path).kv.seq_add(0, 0, -1, 1)


def test_the_table_stays_in_the_file(tmp_path: Path) -> None:
    """Also where weights are rearranged; any type may hold it."""
    n = Sizes(row=32, d=128)
    m = random_model(n)
    rows = m.weights["per_layer_token_embd"]
    kind = registry.by_name("q8_0")
    from ikpy._native import core

    data = core.quantize(rows, kind.id, None, 1)
    m.encoded["per_layer_token_embd"] = kind.id, data
    m.weights["per_layer_token_embd"] = core.dequantize(data.reshape(-1), kind.id, n.row, len(rows), True)
    path, truth = m.write(tmp_path / "model.gguf"), Qwen4Exp(m, n).logits(TOKENS)
    for settings in ({}, {"repack": True}, {"use_mmap": False}, {"use_mlock": True}):
        model = Model.load(path, ModelParams(**settings))
        table = model.weights["per_layer_token_embd.weight"]
        assert table.type_id == kind.id and table.buffer.address is not None
        assert table.buffer.address == model.gguf.address(model.gguf.tensors["per_layer_token_embd.weight"])
        assert model.gguf.maps(table.buffer.address)
        assert table.buffer not in model._buffers_on_cpu(())
        context = Context(model, ContextParams(n_ctx=256, n_threads=1, **EXACT))
        hold(f"{settings}", context.decode(Batch.single(TOKENS, logits="all")), truth)


def test_importance_and_quantization(tmp_path: Path) -> None:
    """Every matrix has statistics of its inputs, and all but small tensors are quantized."""
    path = random_model(Sizes(rank=32, row=32)).write(tmp_path / "model.gguf")
    model = Model.load(path)
    stored = {name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()}
    collector = ActivationCollector(stored)
    settings = ContextParams(n_ctx=64, n_threads=1)
    context = Context(model, dataclasses.replace(settings, collector=collector))
    whole = context.decode(Batch.single(TOKENS, logits="all"))
    small = ("norm.weight", ".bias", "ssm_a", "conv1d.weight", "ffn_gate_inp_shexp.weight")
    small += tuple(f"ple_norm_{part}.weight" for part in ("key", "query", "conv"))
    layers = {name for name in stored if name.startswith("blk.")}
    products = layers - {name for name in layers if name.endswith(small)}
    together = {name for name in products if name.endswith("ffn_gate_exps.weight")}  # read what ffn_up_exps does
    assert products - together <= set(collector.entries)
    assert quantize([str(path), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        kept = {name for name, info in file.tensors.items() if info.type_id == F32}
    small += ("ffn_gate_inp.weight", "_inject.weight", "output_hc_down.weight", "output_hc_up.weight")
    assert kept == {name for name in stored if name.endswith(small)}
    logits = Context(Model.load(tmp_path / "small.gguf"), settings).decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - whole).max(axis=1)) < 0.25 * np.abs(whole).max()


def test_memory_is_what_was_planned(tmp_path: Path) -> None:
    path = random_model(Sizes()).write(tmp_path / "model.gguf")
    params = ContextParams(n_ctx=1024, n_seq_max=2)
    planned, real = (Context(Model.load(path, ModelParams(header_only=x)), params) for x in (True, False))
    assert planned.kv.nbytes() == real.kv.nbytes() == real.allocated_bytes["cache"]
    assert planned.compute_bytes == real.compute_bytes
