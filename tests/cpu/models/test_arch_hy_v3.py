"""Tencent Hy3 (hy_v3): random models against their definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.speculative import SpeculativeParams
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.llm import LLM
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, D, HEADS, KV, HEAD, F, F_SHARED, F_DENSE = 3, 96, 6, 2, 32, 48, 64, 76
N_EXPERT, USED, SCALE, BASE = 10, 3, 2.826, 11158840.0


def layer(e: Evaluation, il: int, x: np.ndarray) -> np.ndarray:
    """One block on x [T, D]."""
    w = checks.layer_weights(e, il)
    h = ref.rms_norm(x, w["attn_norm"], e.eps)
    q, k, v = e.qkv(il, h)
    angles = ref.plain_angles(HEAD, BASE, POS)
    q = ref.rotate(ref.rms_norm(q, w["attn_q_norm"], e.eps), angles, neox=True)
    k = ref.rotate(ref.rms_norm(k, w["attn_k_norm"], e.eps), angles, neox=True)
    x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
    h = ref.rms_norm(x, w["ffn_norm"], e.eps)
    if "ffn_gate" in w:
        return x + e.ffn(il, h)
    biased = {"exp_probs_b.bias": w["exp_probs_b"], **w}
    return x + checks.sigmoid_routed(biased, h, USED, SCALE) + e.ffn(il, h, suffix="_shexp")


def hy_v3(n_predict: int = 0) -> tuple[RandomModel, np.ndarray]:
    """A dense layer, then experts beside a shared one. n_predict: 1 for a layer that predicts further tokens."""
    n = N + n_predict
    keys: dict[str, Any] = {
        "rope.freq_base": BASE,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F,
        "expert_shared_feed_forward_length": F_SHARED,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
    }
    m = RandomModel("hy_v3", 97, **{**checks.shape(n, D, HEADS, KV, HEAD, F_DENSE), **RMS, **keys})
    m.bare = ("exp_probs_b",)
    if n_predict:
        m.keys["nextn_predict_layers"] = n_predict
    checks.frame(m, D, tied=False)
    for il in range(n):
        p = f"blk.{il}"
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, HEADS, KV, HEAD)
        if il:
            checks.experts(m, p, D, F, N_EXPERT)
            m.vector(f"{p}.exp_probs_b", N_EXPERT)
            m.ffn(p, D, F_SHARED, "_shexp")
        else:
            m.ffn(p, D, F_DENSE)
    if n_predict:
        m.matrix(f"blk.{N}.nextn.eh_proj", D, 2 * D)
        for name in ("enorm", "hnorm", "shared_head_norm"):
            m.norm(f"blk.{N}.nextn.{name}", D)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N):
        x = layer(e, il, x)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def test_definition(tmp_path: Path) -> None:
    model, truth = hy_v3()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.05)


def test_names_and_keys_that_files_may_have_otherwise(tmp_path: Path) -> None:
    """A suffix behind the selection bias; routing and the shared width where they are the usual ones."""
    model, truth = hy_v3()
    model.bare = ()
    for il in range(1, N):
        model.weights[f"blk.{il}.exp_probs_b.bias"] = model.weights.pop(f"blk.{il}.exp_probs_b")
    del model.keys["expert_gating_func"]
    checks.check_definition(model, truth, tmp_path)


def test_prediction_layer(tmp_path: Path) -> None:
    """It has experts of its own and no part in the model's own logits."""
    model, truth = hy_v3(1)
    path = checks.check_definition(model, truth, tmp_path)
    states = np.random.default_rng(1).normal(size=(len(TOKENS), D)).astype(np.float32)
    e = Evaluation(model)
    w = checks.layer_weights(e, N)
    parts = (
        ref.rms_norm(e.w["token_embd"][TOKENS], w["nextn.enorm"], e.eps),
        ref.rms_norm(states.astype(np.float64), w["nextn.hnorm"], e.eps),
    )
    x = layer(e, N, np.concatenate(parts, axis=1) @ w["nextn.eh_proj"].T)
    wanted = ref.rms_norm(x, w["nextn.shared_head_norm"], e.eps) @ e.w["output"].T
    context = Context(Model.load(path).prediction_head(), ContextParams(n_ctx=256, type_k="f32", type_v="f32"))
    error = np.abs(context.decode(Batch.single(TOKENS, logits="all"), states) - wanted).max(axis=1)
    worst = error.max() / np.abs(wanted).max()
    assert worst < checks.FLOAT_BOUND, f"position {error.argmax()} off by {worst:.1e} relative"


def test_drafts_do_not_change_the_text(tmp_path: Path) -> None:
    path = hy_v3(1)[0].write(tmp_path / "model.gguf")
    drafting = SpeculativeParams(types=("mtp",), n_max=3, p_min=0.0)
    texts = [
        LLM(path, n_ctx=256, n_threads=1, speculative=how).generate([5, 7, 9], 40, temperature=0.0, ignore_eos=True)
        for how in (None, drafting)
    ]
    assert texts[0] == texts[1] and texts[0]


@pytest.mark.parametrize(("n_layer", "wanted"), [(80, "295B.A21B"), (81, "295B.A21B"), (48, "30B.A3B"), (5, "?B")])
def test_size_class(n_layer: int, wanted: str) -> None:
    assert size_class({"general.architecture": "hy_v3", "hy_v3.block_count": n_layer}) == wanted


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"expert_gating_func": 9}, "unknown expert_gating_func 9"),
        ({"attention.layer_norm_rms_epsilon": -1.0}, "the epsilon of norms is -1, below 0"),
        ({"nextn_predict_layers": N}, f"{N} prediction layers of {N} layers leave none to run"),
        ({"rope.dimension_count": HEAD // 2}, f"invalid n_rot: {HEAD // 2}, expected {HEAD}"),
    ],
)
def test_impossible_files(keys: dict, message: str, tmp_path: Path) -> None:
    model, _ = hy_v3()
    model.keys |= keys
    with pytest.raises(FileFormatError, match=message):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_every_tensor_is_taken(tmp_path: Path) -> None:
    """A bias of the wrong length is an error, not one that is overlooked."""
    model, _ = hy_v3()
    model.weights["blk.1.exp_probs_b"] = model.weights["blk.1.exp_probs_b"][1:]
    path = model.write(tmp_path / "model.gguf")
    assert "blk.1.exp_probs_b" in GGUFFile.open(path).tensors
    with pytest.raises(FileFormatError, match=r"blk\.1\.exp_probs_b"):
        Model.load(path)
