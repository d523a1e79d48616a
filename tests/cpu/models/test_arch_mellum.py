"""Mellum 2: random models against their definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.errors import FileFormatError
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

D, HEADS, KV, HEAD, F, N_EXPERT, USED = 96, 4, 2, 32, 36, 8, 3
WINDOW, KINDS = 9, [True, False, True, False]
FACTOR, STRETCHED, BASE = 4.0, 16, 500000.0


def new_model(seed: int, *, windows: bool = True, base: float = BASE) -> RandomModel:
    """base: of RoPE in window layers."""
    n = len(KINDS)
    keys: dict[str, Any] = {
        **checks.shape(n, D, HEADS, KV, HEAD, 100),
        **RMS,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F,
        "rope.freq_base": BASE,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": FACTOR,
        "rope.scaling.original_context_length": STRETCHED,
    }
    if windows:
        keys |= {
            "attention.sliding_window": WINDOW,
            "attention.sliding_window_pattern": KINDS,
            "rope.freq_base_swa": base,
        }
    m = RandomModel("mellum", seed, **keys)
    checks.frame(m, D, tied=False)
    for il in range(n):
        p = f"blk.{il}"
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, HEADS, KV, HEAD)
        checks.experts(m, p, D, F, N_EXPERT)
    return m


def made(seed: int, **kinds: Any) -> tuple[RandomModel, np.ndarray]:
    m = new_model(seed, **kinds)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il, kind in enumerate(KINDS):
        w, local = checks.layer_weights(e, il), kind and "attention.sliding_window" in m.keys
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
        if local:
            angles, magnitude = ref.plain_angles(HEAD, m.keys["rope.freq_base_swa"], POS), 1.0
        else:
            angles = ref.yarn_angles(HEAD, BASE, POS, FACTOR, STRETCHED, 32, 1)
            magnitude = 1 + 0.1 * math.log(FACTOR)
        q, k = (ref.rotate(t, angles, neox=True, magnitude=magnitude) for t in (q, k))
        visible = (lambda i, j: i - j < WINDOW) if local else None
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD), visible=visible))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        weights = checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), USED)
        x = x + checks.routed(w, h, weights / weights.sum(-1, keepdims=True), USED)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def mellum() -> tuple[RandomModel, np.ndarray]:
    """Window layers rotate without YaRN."""
    return made(141)


def mellum_two_bases() -> tuple[RandomModel, np.ndarray]:
    """And by a base of their own."""
    return made(142, base=10000.0)


def mellum_full() -> tuple[RandomModel, np.ndarray]:
    """No windows."""
    return made(143, windows=False)


@pytest.mark.parametrize("make", [mellum, mellum_two_bases, mellum_full], ids=lambda f: f.__name__)
def test_definition(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.06)


def test_patterns(tmp_path: Path) -> None:
    """A number: the last of so many layers has no window. Files with a window must have a pattern."""
    model = new_model(144)
    model.keys["attention.sliding_window_pattern"] = 2
    arch = Model.load(model.write(tmp_path / "number.gguf")).arch
    assert [arch.window(il)[0] != "none" for il in range(4)] == [True, False] * 2
    del model.keys["attention.sliding_window_pattern"]
    with pytest.raises(FileFormatError, match="sliding_window_pattern"):
        Model.load(model.write(tmp_path / "none.gguf"))


def test_size_class() -> None:
    assert size_class({"general.architecture": "mellum", "mellum.block_count": 28}) == "12B.A2.5B"
