"""GroveMoE: a random model against its definition."""

from __future__ import annotations

import math
from pathlib import Path

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

N, HEADS, KV, HEAD, F, WIDTH, EXPERTS, USED, SIZE, SCALE = 3, 4, 2, 32, 48, 24, 12, 4, 2, 0.3
D = HEADS * HEAD


def grovemoe() -> tuple[RandomModel, np.ndarray]:
    """A chosen expert brings the small one of its group along; two of a group bring it twice."""
    keys = {**RMS, "expert_count": EXPERTS, "expert_used_count": USED, "expert_feed_forward_length": F}
    keys |= {"experts_per_group": SIZE, "expert_group_scale": SCALE, "expert_chunk_feed_forward_length": WIDTH}
    m = RandomModel("grovemoe", 211, **checks.shape(N, D, HEADS, KV, HEAD, F), **keys)
    checks.frame(m, D, tied=False)
    for il in range(N):
        p = f"blk.{il}"
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, HEADS, KV, HEAD)
        checks.experts(m, p, D, F, EXPERTS)
        for name, rows, columns in (("gate", WIDTH, D), ("up", WIDTH, D), ("down", D, WIDTH)):
            m.matrix(f"{p}.ffn_{name}_chexps", EXPERTS // SIZE, rows, columns)
    return m, grovemoe_logits(Evaluation(m), TOKENS)


def grovemoe_logits(e: Evaluation, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V]."""
    used, size = e.keys["expert_used_count"], e.keys["experts_per_group"]
    x = e.w["token_embd"][tokens]
    angles = ref.plain_angles(e.head, 10000.0, np.arange(len(tokens), dtype=np.float64))
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
        q, k = (ref.rotate(y, angles, neox=True) for y in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(e.head)))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        weights = checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), used)
        weights = weights / weights.sum(-1, keepdims=True)
        x = x + checks.routed(w, h, weights, used)
        for t, row in enumerate(h):
            for i in np.flatnonzero(weights[t]):
                gate, up, down = (w[f"ffn_{name}_chexps"][i // size] for name in ("gate", "up", "down"))
                x[t] += e.keys["expert_group_scale"] * weights[t, i] * (down @ (ref.silu(gate @ row) * (up @ row)))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def test_definition(tmp_path: Path) -> None:
    model, truth = grovemoe()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.08)


def test_fewer_experts(tmp_path: Path) -> None:
    """-ser drops an expert together with the small one of its group."""
    model, _ = grovemoe()
    path = model.write(tmp_path / "model.gguf")
    model.keys["expert_used_count"] = 2
    truth = grovemoe_logits(Evaluation(model), TOKENS)
    logits = checks.decoded(path, smart_expert_reduction=(2, 1.0), type_k="f32", type_v="f32")["one batch"]
    checks.hold("-ser 2,1", logits, truth, 5e-5)


def test_groups_that_there_are_not(tmp_path: Path) -> None:
    path = grovemoe()[0].write(tmp_path / "model.gguf")
    for size in (0, 5):
        with pytest.raises(FileFormatError, match=f"12 experts in groups of {size}"):
            Model.load(path, ModelParams(kv_overrides={"grovemoe.experts_per_group": size}))
    with pytest.raises(FileFormatError, match="wrong shape"):
        Model.load(path, ModelParams(kv_overrides={"grovemoe.experts_per_group": 3}))


def test_size_class() -> None:
    assert size_class({"general.architecture": "grovemoe", "grovemoe.block_count": 48}) == "30B.A3B"
