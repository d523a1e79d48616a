"""Grok-1 and 2: random models against their definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.errors import FileFormatError
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, HEADS, KV, HEAD, F, EXPERTS, USED = 3, 4, 2, 32, 48, 6, 2
D = HEADS * HEAD
NORMS = ("attn_norm", "attn_output_norm", "ffn_norm", "layer_output_norm")
SCALES = {
    "attention.output_scale": 0.4,
    "attn_logit_softcapping": 2.0,
    "embedding_scale": 3.0,
    "logit_scale": 0.7,
}
UNSAID = {
    "attention.output_scale": 0.08838834764831845,
    "attn_logit_softcapping": 30.0,
    "embedding_scale": 78.38367176906169,
    "logit_scale": 0.5773502691896257,
}


def grok_model(*, dense: int = 0, **own: Any) -> RandomModel:
    """dense: width of the network beside the experts."""
    keys = {**RMS, "expert_count": EXPERTS, "expert_used_count": USED, **own}
    m = RandomModel("grok", 221, **checks.shape(N, D, HEADS, KV, HEAD, dense or F), **keys)
    checks.frame(m, D, tied=True)
    for il in range(N):
        p = f"blk.{il}"
        for name in NORMS:
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV, HEAD)
        checks.experts(m, p, D, F, EXPERTS)
        if dense:
            m.ffn(p, D, dense)
    return m


def grok_logits(e: Evaluation, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    scales = {**UNSAID, **{name: e.keys[name] for name in SCALES if name in e.keys}}
    cap = scales["attn_logit_softcapping"]
    cap_of_router = e.keys.get("router_logit_softcapping", 0.0)
    final = e.keys.get("final_logit_softcapping", 0.0)
    x = e.w["token_embd"][tokens] * scales["embedding_scale"]
    angles = ref.plain_angles(e.head, 10000.0, np.arange(len(tokens), dtype=np.float64))
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(y, angles, neox=True) for y in (q, k))
        attended = ref.attend(q, k, v, scales["attention.output_scale"], cap=cap)
        x = x + ref.rms_norm(e.output(il, attended), w["attn_output_norm"], e.eps)
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        router = h @ w["ffn_gate_inp"].T
        if cap_of_router:
            router = cap_of_router * np.tanh(router / cap_of_router)
        weights = checks.chosen(ref.softmax(router), e.keys["expert_used_count"])
        routed = np.zeros_like(h)
        for i in range(len(w["ffn_gate_inp"])):
            hidden = ref.gelu(h @ w["ffn_gate_exps"][i].T) * (h @ w["ffn_up_exps"][i].T)
            routed += weights[:, i : i + 1] * (hidden @ w["ffn_down_exps"][i].T)
        if "ffn_up" in w:
            routed = (routed + e.ffn(il, h, ref.gelu)) / np.sqrt(2)
        x = x + ref.rms_norm(routed, w["layer_output_norm"], e.eps)
    logits = scales["logit_scale"] * (ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T)
    return final * np.tanh(logits / final) if final else logits


def grok() -> tuple[RandomModel, np.ndarray]:
    m = grok_model(**SCALES)
    return m, grok_logits(Evaluation(m), TOKENS)


def grok2() -> tuple[RandomModel, np.ndarray]:
    """A dense network of another width beside the experts, capped logits."""
    own = {"expert_feed_forward_length": F, "final_logit_softcapping": 3.0, "router_logit_softcapping": 1.5}
    m = grok_model(dense=80, **SCALES, **own)
    return m, grok_logits(Evaluation(m), TOKENS)


@pytest.mark.parametrize("make", [grok, grok2], ids=lambda f: f.__name__)
def test_definition(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.08)


def test_files_without_scales(tmp_path: Path) -> None:
    model = grok_model()
    checks.check_definition(model, grok_logits(Evaluation(model), TOKENS), tmp_path)


def test_refused(tmp_path: Path) -> None:
    model = grok_model()
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(FileFormatError, match="expert_count is 0"):
        Model.load(path, ModelParams(kv_overrides={"grok.expert_count": 0, "grok.expert_used_count": 0}))
    model.ffn("blk.0", D, F + 1)
    with pytest.raises(FileFormatError, match=r"tensor 'blk\.0\.ffn_gate\.weight' has wrong shape"):
        Model.load(model.write(tmp_path / "grok-2.gguf"))


def test_size_class() -> None:
    assert size_class({"general.architecture": "grok", "grok.block_count": 64}) == "314B"
