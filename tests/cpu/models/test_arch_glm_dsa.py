"""glm-dsa and deepseek32: dense attention, prediction layers, tools; the definition and other engines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.speculative import SpeculativeParams
from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.placement import PlacementParams
from ikpy.llm import LLM
from ikpy.models.size_class import size_class
from ikpy.quants import registry
from tests.cpu.models.peer_captures import check_against_peer
from tests.cpu.models.reference_models import N_VOCAB
from tests.cpu.models.sparse_latent_models import PUBLISHED, Sizes, SparseLatent, random_model
from tests.cuda.models import emulated

TOKENS = np.random.default_rng(5).integers(0, N_VOCAB, 40)
PEER_TOKENS = np.random.default_rng(5).integers(5, N_VOCAB, 24)
PREDICTING = Sizes(layers=4, predict=1)


def params(**changes: object) -> ContextParams:
    """A context whose cache rounds nothing."""
    return ContextParams(**{"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32", **changes})  # type: ignore[arg-type]


def check(found: np.ndarray, wanted: np.ndarray, bound: float = 5e-5) -> None:
    """Holds logits [T, n_vocab] to a fraction of the largest wanted one."""
    error = np.abs(found - wanted).max(axis=1) / np.abs(wanted).max()
    assert error.max() < bound, f"token {error.argmax()} is off by {error.max():.1e} of the largest logit"


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("arch", ["glm-dsa", "deepseek32", "deepseek2"])
def test_definition(arch: str, mla: int, flash: bool, tmp_path: Path) -> None:
    """One batch, single steps behind a part, and a second sequence in the same batch."""
    n = PREDICTING
    model = random_model(n, arch)
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    wanted = SparseLatent(model, n).logits(TOKENS)
    settings = params(mla=mla, flash_attn=flash, n_seq_max=2)
    check(Context(loaded, settings).decode(Batch.single(TOKENS, logits="all")), wanted)
    steps = Context(loaded, settings)
    parts = [steps.decode(Batch.single(TOKENS[:36], logits="all"))]
    parts += [steps.decode(Batch.single(TOKENS[i : i + 1], i)) for i in range(36, 40)]
    check(np.concatenate(parts), wanted)
    two = Batch(np.repeat(TOKENS[:20], 2), np.repeat(np.arange(20), 2), [0, 1] * 20, np.ones(40, np.bool_))
    check(Context(loaded, settings).decode(two), np.repeat(wanted[:20], 2, axis=0))


@pytest.mark.parametrize("mla", [1, 3])
def test_long_prompts_and_small_caches(mla: int, tmp_path: Path) -> None:
    """Latents expanded from the cache for a prompt; a quantized cache stays near (all experts are used: no choice
    between two depends on its rounding).
    """
    n = replace(PUBLISHED, experts=2, used=2)
    model = random_model(n, "glm-dsa")
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    tokens = np.random.default_rng(6).integers(0, N_VOCAB, 160)
    wanted = SparseLatent(model, n).logits(tokens)
    for type_k, bound in (("f32", 5e-5), ("f16", 5e-3), ("q8_0", 0.1)):
        check(Context(loaded, params(mla=mla, type_k=type_k)).decode(Batch.single(tokens, logits="all")), wanted, bound)


@pytest.mark.parametrize("arch", ["glm-dsa", "deepseek32"])
def test_other_engines(arch: str, tmp_path: Path) -> None:
    """ik_llama.cpp knows glm-dsa, llama.cpp both; their caches are F16."""
    loaded = Model.load(random_model(PUBLISHED, arch).write(tmp_path / "model.gguf"))
    context = Context(loaded, ContextParams(n_ctx=256, n_threads=1))
    check_against_peer(arch, PEER_TOKENS, context.decode(Batch.single(PEER_TOKENS, logits="all")), 1e-2)


def test_optional_keys_and_tensors(tmp_path: Path) -> None:
    """glm-dsa: sigmoid routing, no dense layers, no scale, the embedding as output; indexers may be missing."""
    n = Sizes(dense=0)
    model = random_model(n, "glm-dsa")
    full = SparseLatent(model, n)
    for key in ("expert_gating_func", "leading_dense_block_count"):
        del model.keys[key]
    model.weights = {name: w for name, w in model.weights.items() if "indexer" not in name and name != "output"}
    full.w["output"] = full.w["token_embd"]
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    check(Context(loaded, params()).decode(Batch.single(TOKENS, logits="all")), full.logits(TOKENS))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    for name, message in (
        ("blk.1.attn_k_b", "tensor 'blk.1.attn_k_b.weight' not found"),
        ("blk.1.ffn_up_shexp", "tensor 'blk.1.ffn_up_shexp.weight' not found"),
    ):
        model = random_model(Sizes(), "glm-dsa")
        del model.weights[name]
        with pytest.raises(FileFormatError, match=re.escape(message)):
            Model.load(model.write(tmp_path / "model.gguf"))
    for key, value, message in (
        ("nextn_predict_layers", 3, "3 prediction layers of 3 layers leave none to run"),
        ("attention.q_lora_rank", None, "glm-dsa.attention.q_lora_rank"),
        ("attention.kv_lora_rank", 0, "wrong shape"),
        ("expert_used_count", 0, "no expert layers are used"),
        ("rope.dimension_count", 80, "rope.dimension_count 80"),
    ):
        model = random_model(Sizes(), "glm-dsa")
        model.keys[key] = value
        model.keys = {name: v for name, v in model.keys.items() if v is not None}
        with pytest.raises(FileFormatError, match=re.escape(message)):
            Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("mla", [0, 1, 3])
def test_prediction_layers(mla: int, tmp_path: Path) -> None:
    """The last layer as a model of its own, with the states that contexts keep."""
    n = PREDICTING
    model = random_model(n, "glm-dsa")
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    definition = SparseLatent(model, n)
    context = Context(loaded, params(mla=mla, token_states=True))
    for logits in ("last", "all"):
        context.kv.clear()
        context.decode(Batch.single(TOKENS, logits=logits))
        assert context.token_states is not None
        check(context.token_states, definition.states(TOKENS))
    states = np.random.default_rng(1).normal(size=(len(TOKENS), n.d)).astype(np.float32)
    head = Context(loaded.prediction_head(), params(mla=mla))
    found = head.decode(Batch.single(TOKENS, logits="all"), states)
    check(found, definition.prediction(TOKENS, states.astype(np.float64)))


def test_drafts_do_not_change_the_text(tmp_path: Path) -> None:
    model = random_model(PREDICTING, "glm-dsa")
    model.words = ["word"]
    path = model.write(tmp_path / "model.gguf")
    drafting = SpeculativeParams(types=("mtp",), n_max=3, p_min=0.0)
    texts = [
        LLM(path, n_ctx=256, n_threads=1, speculative=how).generate([3, 5, 7], 40, temperature=0.0, ignore_eos=True)
        for how in (None, drafting)
    ]
    assert texts[0] == texts[1] and texts[0]
    path = random_model(Sizes(), "glm-dsa").write(tmp_path / "none.gguf")
    with pytest.raises(UsageError, match="no layers that predict further tokens"):
        Model.load(path).prediction_head()


def test_placements(tmp_path: Path) -> None:
    """Layers divided among two emulated devices, experts of all layers in host memory."""
    model = random_model(PREDICTING, "glm-dsa")
    path = model.write(tmp_path / "model.gguf")
    wanted = SparseLatent(model, PREDICTING).logits(TOKENS)
    rules = (("exps", "CPU"),)
    with emulated(2):
        loaded = Model.load(path, ModelParams(placement=PlacementParams(n_gpu_layers=2, rules=rules)))
        context = Context(loaded, params())
        check(context.decode(Batch.single(TOKENS, logits="all")), wanted)


# What llama-quantize of ik_llama.cpp makes of tensors that no other architecture has (Q4_K_M, rows of 256 and more).
QUANTIZED = {
    "indexer.attn_q_b.weight": "q4_K",
    "indexer.attn_k.weight": "q8_0",
    "indexer.proj.weight": "q4_K",
    "indexer.k_norm.weight": "f32",
    "indexer.k_norm.bias": "f32",
    "nextn.eh_proj.weight": "q4_K",
    "nextn.hnorm.weight": "f32",
}


def test_quantize(tmp_path: Path) -> None:
    n = Sizes(layers=5, predict=1, d=256, q_rank=256, rank=256, ff=256, nope=32, rot=32, value=32, index_heads=8)
    source, target = tmp_path / "model.gguf", tmp_path / "quantized.gguf"
    random_model(n, "glm-dsa").write(source)
    assert main(["quantize", str(source), str(target), "Q4_K_M", "1"]) == 0
    loaded = Model.load(target)
    for name, wanted in QUANTIZED.items():
        found = registry.by_id(loaded.gguf.tensors[f"blk.4.{name}"].type_id).name
        assert found == wanted, f"{name} is {found}, not {wanted}"
    assert np.isfinite(Context(loaded, params()).decode(Batch.single(TOKENS))).all()


def test_banner() -> None:
    assert size_class({"general.architecture": "glm-dsa", "glm-dsa.block_count": 79}) == "744B.A40B"
