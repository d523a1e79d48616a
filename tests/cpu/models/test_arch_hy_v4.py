"""Tencent Hy4 (hy_v4): random models against their definition, choices of cells, saved states, placements, tools."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.placement import PlacementParams
from ikpy.models.size_class import size_class
from ikpy.quants import registry
from tests.cpu.models.reference_models import N_VOCAB, RandomModel
from tests.cpu.models.stream_latent_models import FULL, SMALL, IndependentStreams, StreamSizes, hy_v4
from tests.cpu.models.test_arch_glm_dsa import check, params
from tests.cuda.models import emulated

TOKENS = np.random.default_rng(5).integers(4, N_VOCAB, 60)
LONG = np.random.default_rng(6).integers(4, N_VOCAB, 300)
FEW = replace(SMALL, top_k=8)
PUBLISHED = replace(
    SMALL, d=96, heads=8, nope=192, rot=64, value=256, rank=512, q_rank=96, ff=64, index_size=128, experts=2, used=2
)
"""Head sizes of Hy4, for which there are kernels of their own. All experts are used: no choice depends on rounding."""


def exact(**changes: object) -> ContextParams:
    """A context whose caches round nothing."""
    return params(**{"type_indexer": "f32", **changes})


def loaded(model: RandomModel, folder: Path) -> Model:
    return Model.load(model.write(folder / "model.gguf"))


def in_parts(context: Context, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
    """Logits [T, n_vocab] of a text in batches of these sizes."""
    parts = pairwise(np.cumsum([0, *sizes]).tolist())
    return np.concatenate([context.decode(Batch.single(tokens[a:b], a, logits="all")) for a, b in parts])


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("top_k", [8, None])
def test_definition(top_k: int | None, mla: int, flash: bool, tmp_path: Path) -> None:
    """One batch, parts of several sizes with single steps, and a second sequence in the same batch."""
    model = hy_v4(FEW, indexers=top_k is not None)
    wanted = IndependentStreams(model, FEW, top_k=top_k).logits(TOKENS)
    file = loaded(model, tmp_path)
    settings = exact(mla=mla, flash_attn=flash, n_seq_max=2)
    check(Context(file, settings).decode(Batch.single(TOKENS, logits="all")), wanted)
    check(Context(file, settings).decode(Batch.single(TOKENS)), wanted[-1:])
    check(in_parts(Context(file, settings), TOKENS, [30, *[1] * 10, 9, 3, 8]), wanted)
    n = 40
    two = Batch(np.repeat(TOKENS[:n], 2), np.repeat(np.arange(n), 2), [0, 1] * n, np.ones(2 * n, np.bool_))
    check(Context(file, settings).decode(two), np.repeat(wanted[:n], 2, axis=0))


@pytest.mark.parametrize("mla", [0, 1, 3])
@pytest.mark.parametrize("options", [{}, {"attn_max_batch": 1, "n_threads": 3}], ids=str)
def test_long_prompts(mla: int, options: dict, tmp_path: Path) -> None:
    """Latents are expanded some heads at a time, each with its sink; further on chosen cells are read."""
    n = replace(SMALL, top_k=150)
    model = hy_v4(n)
    context = Context(loaded(model, tmp_path), exact(n_ctx=512, mla=mla, **options))
    check(in_parts(context, LONG, [140, 140, 20]), IndependentStreams(model, n, top_k=150).logits(LONG))


@pytest.mark.parametrize(("n_streams", "magnitude"), [(1, 2.0), (2, 0.5), (4, 2.0), (8, 1.1)])
def test_streams(n_streams: int, magnitude: float, tmp_path: Path) -> None:
    n = replace(SMALL, n_streams=n_streams, magnitude=magnitude, limit=0.0)
    model = hy_v4(n)
    found = Context(loaded(model, tmp_path), exact()).decode(Batch.single(TOKENS, logits="all"))
    check(found, IndependentStreams(model, n).logits(TOKENS))


def test_every_part_counts(tmp_path: Path) -> None:
    """Sinks, gates, bounds, epsilon and magnitude move the logits, so that the tests above hold them."""
    model = hy_v4()
    wanted = IndependentStreams(model, SMALL).logits(TOKENS)
    for change in (replace(SMALL, limit=0.0), replace(SMALL, magnitude=1.7), replace(SMALL, epsilon=0.0)):
        assert np.abs(IndependentStreams(model, change).logits(TOKENS) - wanted).max() > 1e-3 * np.abs(wanted).max()
    for name in ("attn_sinks", "attn_gate"):
        other = hy_v4()
        other.weights[f"blk.2.{name}"] += 0.3
        assert np.abs(IndependentStreams(other, SMALL).logits(TOKENS) - wanted).max() > 1e-3 * np.abs(wanted).max()


def test_layers_take_the_choice_of_another(tmp_path: Path) -> None:
    """Only layers with an indexer keep index keys."""
    context = Context(loaded(hy_v4(FEW), tmp_path), exact())
    assert {il for il, name in context.kv.tensors if name == "ki"} == set(FULL)


@pytest.mark.parametrize(("type_k", "bound"), [("f16", 5e-3), ("bf16", 3e-2), ("q8_0", 0.1)])
@pytest.mark.parametrize("mla", [0, 3])
def test_small_caches(mla: int, type_k: str, bound: float, tmp_path: Path) -> None:
    """With all experts in use: no choice between two depends on rounding."""
    n = replace(SMALL, experts=2, used=2, rank=64, rot=32, nope=32, value=32)
    model = hy_v4(n, indexers=False)
    settings = params(mla=mla, type_k=type_k, type_v=type_k)
    found = Context(loaded(model, tmp_path), settings).decode(Batch.single(TOKENS, logits="all"))
    check(found, IndependentStreams(model, n).logits(TOKENS), bound)


@pytest.mark.parametrize(("type_k", "bound"), [("f32", 5e-5), ("f16", 3e-3), ("bf16", 3e-2), ("q8_0", 0.1)])
@pytest.mark.parametrize("mla", [0, 1, 3])
def test_published_head_sizes(mla: int, type_k: str, bound: float, tmp_path: Path) -> None:
    model = hy_v4(PUBLISHED, indexers=False)
    context = Context(loaded(model, tmp_path), params(n_ctx=512, mla=mla, type_k=type_k, type_v=type_k))
    check(in_parts(context, LONG, [200, *[1] * 20, 8, 5, 67]), IndependentStreams(model, PUBLISHED).logits(LONG), bound)


@pytest.mark.parametrize("top_k", [8, None])
@pytest.mark.parametrize("mla", [0, 1, 3])
def test_published_head_sizes_on_devices(mla: int, top_k: int | None, tmp_path: Path) -> None:
    """A prompt as one batch and single tokens; the cache is F16."""
    n = replace(PUBLISHED, top_k=top_k or 2048, heads=4)
    model = hy_v4(n, indexers=top_k is not None)
    path = model.write(tmp_path / "model.gguf")
    settings = ContextParams(n_ctx=256, n_threads=1, mla=mla, type_indexer="f32")
    on_cpu = in_parts(Context(Model.load(path), settings), TOKENS[:24], [12, *[1] * 5, 7])
    placement = PlacementParams(split_mode="none")
    with emulated(1):
        context = Context(Model.load(path, ModelParams(placement=placement)), settings)
        check(in_parts(context, TOKENS[:24], [12, *[1] * 5, 7]), on_cpu, 3e-3)


def test_saved_sequences(tmp_path: Path) -> None:
    """Latents and index keys come back."""
    model = hy_v4(FEW)
    file = loaded(model, tmp_path)
    context = Context(file, exact())
    context.decode(Batch.single(TOKENS[:40]))
    save_sequence(tmp_path / "state", context, 0, TOKENS[:40].tolist())
    other = Context(file, exact(n_seq_max=3))
    found, _ = load_sequence(tmp_path / "state", other, 2, 256)
    assert found == TOKENS[:40].tolist()
    rest = other.decode(Batch.single(TOKENS[40:], 40, 2, logits="all"))
    check(rest, IndependentStreams(model, FEW, top_k=8).logits(TOKENS)[40:])


@pytest.mark.parametrize("mla", [0, 1, 3])
@pytest.mark.parametrize("split_mode", ["layer", "graph"])
def test_placements(split_mode: str, mla: int, tmp_path: Path) -> None:
    """Layers, or networks, on two emulated devices; experts of all layers in host memory."""
    model = hy_v4(FEW)
    path = model.write(tmp_path / "model.gguf")
    wanted = IndependentStreams(model, FEW, top_k=8).logits(TOKENS)
    for rules, n_layers in ((((r"exps", "CPU"),), 99), (((r"blk\.1\.attn_gate", "CPU"),), 3)):
        placement = PlacementParams(n_gpu_layers=n_layers, rules=rules, split_mode=split_mode)
        with emulated(2):
            context = Context(Model.load(path, ModelParams(placement=placement)), exact(mla=mla))
            check(in_parts(context, TOKENS, [30, *[1] * 10, 20]), wanted)


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_statistics_of_inputs(mla: int, tmp_path: Path) -> None:
    """Every token counts once for gates, weights of streams and indexers."""
    file = loaded(hy_v4(FEW), tmp_path)
    collector = ActivationCollector({name: (*info.shape, 1, 1)[2] for name, info in file.gguf.tensors.items()})
    context = Context(file, exact(n_ctx=512, n_ubatch=140, mla=mla, collector=collector))
    context.decode(Batch.single(LONG, logits="all"))
    for name in ("attn_gate", "attn_output", "hc_attn_fn", "hc_ffn_fn", "indexer.proj"):
        rows = collector.entries[f"blk.1.{name}.weight"].rows
        assert (rows == len(LONG)).all(), f"{name} has seen {rows} tokens"


def test_the_prediction_layer_is_left_out(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layers that predict further tokens"):
        loaded(hy_v4(), tmp_path).prediction_head()


def test_missing_parts_are_named(tmp_path: Path) -> None:
    for name, message in (
        ("blk.1.attn_sinks", "tensor 'blk.1.attn_sinks.weight' not found"),
        ("blk.2.attn_gate", "tensor 'blk.2.attn_gate.weight' not found"),
        ("blk.0.hc_ffn_base", "tensor 'blk.0.hc_ffn_base.weight' not found"),
        ("output_hc_fn", "tensor 'output_hc_fn.weight' not found"),
        ("blk.3.indexer.attn_k", "tensor 'blk.3.indexer.attn_k.weight' not found"),
    ):
        model = hy_v4()
        del model.weights[name]
        with pytest.raises(FileFormatError, match=re.escape(message)):
            loaded(model, tmp_path)
    for key, value, message in (
        ("hyper_connection.count", 9, "9 residual streams are not possible"),
        ("hyper_connection.count", 2, "wrong shape"),
        ("hyper_connection.magnitude", None, "hy_v4.hyper_connection.magnitude"),
        ("swiglu_clamp_exp", [0.5], "swiglu_clamp_exp must hold 4 floats, one per layer"),
        ("attention.indexer.types", [False, True, False, True], "layer 0 has no layer before it"),
        ("attention.indexer.key_length", 8, "an indexer of 8 heads of 8 elements, 16 of them rotated"),
    ):
        model = hy_v4()
        model.keys[key] = value
        model.keys = {name: v for name, v in model.keys.items() if v is not None}
        with pytest.raises(FileFormatError, match=re.escape(message)):
            loaded(model, tmp_path)


QUANTIZED = {
    "attn_gate.weight": "q4_K",
    "indexer.attn_q_b.weight": "q4_K",
    "hc_attn_fn.weight": "f32",
    "hc_ffn_base.weight": "f32",
    "attn_sinks.weight": "f32",
}


def test_quantize(tmp_path: Path) -> None:
    sizes = {"d": 256, "q_rank": 256, "rank": 256, "ff": 256, "nope": 32, "rot": 32, "value": 64, "heads": 4}
    n = StreamSizes(layers=4, **sizes)
    source, target = tmp_path / "model.gguf", tmp_path / "quantized.gguf"
    hy_v4(n).write(source)
    assert main(["quantize", str(source), str(target), "Q4_K_M", "1"]) == 0
    file = Model.load(target)
    found = {name: registry.by_id(file.gguf.tensors[f"blk.1.{name}"].type_id).name for name in QUANTIZED}
    assert found == QUANTIZED
    assert np.isfinite(Context(file, params()).decode(Batch.single(TOKENS))).all()


def test_size_class() -> None:
    assert size_class({"general.architecture": "hy_v4", "hy_v4.block_count": 78}) == "770B.A49B"
