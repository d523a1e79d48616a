"""Hunyuan dense, and the text part of HunyuanVL: random models against their definition and llama.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.errors import FileFormatError
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, D, HEADS, KV, HEAD, F = 2, 64, 3, 1, 32, 76


def hunyuan_dense(alpha: float = 0.0, arch: str = "hunyuan-dense") -> tuple[RandomModel, np.ndarray]:
    """Heads are rotated, then normed."""
    m = RandomModel(arch, 51, **checks.shape(N, D, HEADS, KV, HEAD, F), **RMS)
    if alpha:
        m.keys["rope.scaling.alpha"] = alpha
    checks.frame(m, D, tied=True)
    for il in range(N):
        p = f"blk.{il}"
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, HEADS, KV, HEAD)
        m.ffn(p, D, F)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    base = 10000.0 * (alpha ** (HEAD / (HEAD - 2)) if alpha else 1.0)
    angles = ref.plain_angles(HEAD, base, POS)
    for il in range(N):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q = ref.rms_norm(ref.rotate(q, angles, neox=True), w["attn_q_norm"], e.eps)
        k = ref.rms_norm(ref.rotate(k, angles, neox=True), w["attn_k_norm"], e.eps)
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T


def hunyuan_dense_alpha() -> tuple[RandomModel, np.ndarray]:
    """Files whose base is raised by a key."""
    return hunyuan_dense(1000.0)


@pytest.mark.parametrize("sections", [None, [4, 4, 4, 4]])
def test_text_of_hunyuan_vl(sections: list[int] | None, tmp_path: Path) -> None:
    """As hunyuan-dense; all positions of a token are the same."""
    model, truth = hunyuan_dense(1000.0, "hunyuan_vl")
    if sections:
        model.keys["rope.dimension_sections"] = sections
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_peer(path, "hunyuan_dense_alpha", 0.02)


@pytest.mark.parametrize("make", [hunyuan_dense, hunyuan_dense_alpha], ids=lambda f: f.__name__)
def test_definition_and_peer(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_peer(path, make.__name__, 0.02)


def test_alpha_of_tiny_heads(tmp_path: Path) -> None:
    model = RandomModel("hunyuan-dense", 52, **checks.shape(1, 8, 1, 1, 2, 8), **RMS, **{"rope.scaling.alpha": 2.0})
    checks.frame(model, 8, tied=True)
    with pytest.raises(FileFormatError, match=r"rope.scaling.alpha needs heads above 2 elements"):
        Model.load(model.write(tmp_path / "model.gguf"))
