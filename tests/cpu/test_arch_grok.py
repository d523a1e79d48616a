"""Grok-1: a random model against its definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.models.size_class import size_class
from tests.cpu import definition_checks as checks
from tests.cpu import reference_models as ref
from tests.cpu.definition_checks import RMS, TOKENS
from tests.cpu.reference_models import Evaluation, RandomModel

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


def grok_model(**own: Any) -> RandomModel:
    keys = {**RMS, "expert_count": EXPERTS, "expert_used_count": USED, **own}
    m = RandomModel("grok", 221, **checks.shape(N, D, HEADS, KV, HEAD, F), **keys)
    checks.frame(m, D, tied=True)
    for il in range(N):
        p = f"blk.{il}"
        for name in NORMS:
            m.norm(f"{p}.{name}", D)
        m.attention(p, D, HEADS, KV, HEAD)
        checks.experts(m, p, D, F, EXPERTS)
    return m


def grok_logits(e: Evaluation, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    scales = {**UNSAID, **{name: e.keys[name] for name in SCALES if name in e.keys}}
    cap = scales["attn_logit_softcapping"]
    x = e.w["token_embd"][tokens] * scales["embedding_scale"]
    angles = ref.plain_angles(e.head, 10000.0, np.arange(len(tokens), dtype=np.float64))
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(y, angles, neox=True) for y in (q, k))
        attended = ref.attend(q, k, v, scales["attention.output_scale"], cap=cap)
        x = x + ref.rms_norm(e.output(il, attended), w["attn_output_norm"], e.eps)
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        weights = checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), e.keys["expert_used_count"])
        routed = np.zeros_like(h)
        for i in range(len(w["ffn_gate_inp"])):
            hidden = ref.gelu(h @ w["ffn_gate_exps"][i].T) * (h @ w["ffn_up_exps"][i].T)
            routed += weights[:, i : i + 1] * (hidden @ w["ffn_down_exps"][i].T)
        x = x + ref.rms_norm(routed, w["layer_output_norm"], e.eps)
    return scales["logit_scale"] * (ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T)


def grok() -> tuple[RandomModel, np.ndarray]:
    m = grok_model(**SCALES)
    return m, grok_logits(Evaluation(m), TOKENS)


def test_definition(tmp_path: Path) -> None:
    model, truth = grok()
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
    model.ffn("blk.0", D, F)
    with pytest.raises(UnsupportedError, match=r"Grok-2 \(a dense network beside the experts\) is not supported"):
        Model.load(model.write(tmp_path / "grok-2.gguf"))


def test_size_class() -> None:
    assert size_class({"general.architecture": "grok", "grok.block_count": 64}) == "314B"
