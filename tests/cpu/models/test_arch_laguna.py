"""poolside Laguna (laguna): random models against their definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.model import Model
from ikpy.engine.params import ModelParams
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N, D, KV, HEAD, F, F_SHARED, F_DENSE = 5, 96, 2, 32, 48, 64, 76
N_EXPERT, USED, SCALE, WINDOW = 10, 3, 2.5, 9
HEADS = {False: 4, True: 6}  # of full layers and of window layers
BASE, WINDOW_BASE, N_ROT = 5e5, 1e4, 16
FACTOR, ORIGINAL, FAST, SLOW = 8.0, 64, 64.0, 1.0


def layer(e: Evaluation, il: int, x: np.ndarray, has_window: bool, magnitude: float) -> np.ndarray:
    """One block on x [T, D]. magnitude: of rotated elements of full layers; 0: these are not stretched."""
    w = checks.layer_weights(e, il)
    h = ref.rms_norm(x, w["attn_norm"], e.eps)
    q, k, v = e.qkv(il, h)
    q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
    if has_window:
        angles, magnitude = ref.plain_angles(HEAD, WINDOW_BASE, POS), 1.0
    elif magnitude:
        angles = ref.yarn_angles(N_ROT, BASE, POS, FACTOR, ORIGINAL, FAST, SLOW)
    else:
        angles, magnitude = ref.plain_angles(N_ROT, BASE, POS), 1.0
    q, k = (ref.rotate(t, angles, neox=True, magnitude=magnitude) for t in (q, k))
    visible = (lambda i, j: i - j < WINDOW) if has_window else None
    a = ref.attend(q, k, v, 1 / math.sqrt(HEAD), visible=visible)
    gate = np.log1p(np.exp(h @ w["attn_gate"].T))
    a = (a.reshape(len(h), q.shape[1], -1) * gate.reshape(len(h), q.shape[1], -1)).reshape(len(h), -1)
    x = x + e.output(il, a)
    h = ref.rms_norm(x, w["ffn_norm"], e.eps)
    if "ffn_gate" in w:
        return x + e.ffn(il, h)
    return x + checks.sigmoid_routed(w, h, USED, SCALE) + e.ffn(il, h, suffix="_shexp")


def laguna(
    *, windows: bool = True, per_element: bool = False, magnitude: float = 1.0, **others: Any
) -> tuple[RandomModel, np.ndarray]:
    """As XS.2: three window layers with more heads behind every full one. windows=False, per_element=True: as M.1."""
    is_window = [windows and il % 4 != 0 for il in range(N)]
    keys: dict[str, Any] = {
        "attention.head_count": [HEADS[flag] for flag in is_window],
        "rope.freq_base": BASE,
        "rope.dimension_count": N_ROT,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F,
        "expert_shared_feed_forward_length": F_SHARED,
        "expert_weights_scale": SCALE,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
    }
    if windows:
        keys |= {"rope.freq_base_swa": WINDOW_BASE, "rope.dimension_count_swa": HEAD}
        keys |= {"attention.sliding_window": WINDOW}
    if magnitude:
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": FACTOR}
        keys |= {"rope.scaling.original_context_length": ORIGINAL, "rope.scaling.yarn_attn_factor": 1.0}
        keys |= {"rope.scaling.yarn_beta_fast": FAST, "rope.scaling.yarn_beta_slow": SLOW}
    m = RandomModel("laguna", 98, **{**checks.shape(N, D, 1, KV, HEAD, F_DENSE), **RMS, **keys, **others})
    checks.frame(m, D, tied=False)
    for il in range(N):
        p, heads = f"blk.{il}", HEADS[is_window[il]]
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, heads, KV, HEAD)
        m.matrix(f"{p}.attn_gate", heads * HEAD if per_element else heads, D)
        if il:
            checks.experts(m, p, D, F, N_EXPERT)
            m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
            m.ffn(p, D, F_SHARED, "_shexp")
        else:
            m.ffn(p, D, F_DENSE)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N):
        x = layer(e, il, x, is_window[il], magnitude)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


STRETCHED = 1 + 0.1 * math.log(FACTOR)


def test_definition(tmp_path: Path) -> None:
    model, truth = laguna(magnitude=STRETCHED)
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.05)


def test_without_windows_and_a_gate_per_element(tmp_path: Path) -> None:
    """As M.1: every layer attends to everything, and all have the same number of heads."""
    checks.check_definition(*laguna(windows=False, per_element=True, magnitude=0), tmp_path)


def test_magnitude_of_the_file(tmp_path: Path) -> None:
    """rope.scaling.attn_factor multiplies the usual magnitude; XS.2 leaves 1 of both."""
    checks.check_definition(*laguna(**{"rope.scaling.attn_factor": 1 / STRETCHED}), tmp_path)


def test_base_and_rotated_elements_of_windows_that_files_leave_out(tmp_path: Path) -> None:
    """Those of full layers."""
    model, _ = laguna(magnitude=0)
    for key in ("rope.freq_base_swa", "rope.dimension_count_swa"):
        del model.keys[key]
    hp = Model.load(model.write(tmp_path / "model.gguf")).hparams
    assert (hp.window_heads.rotated, hp.window_freq_base) == (N_ROT, None)


@pytest.mark.parametrize(
    ("pattern", "windows"),
    [
        (2, [False, True, False, True, False]),
        (1, [False] * N),
        (0, [True] * N),
        ([True, False, True, True, False], [True, False, True, True, False]),
    ],
)
def test_patterns(pattern: int | list[bool], windows: list[bool], tmp_path: Path) -> None:
    """A period, whose first layer is the full one, or a flag per layer; --override-kv replaces either."""
    model, _ = laguna(magnitude=0, **{"attention.head_count": [4] * N, "attention.sliding_window_pattern": pattern})
    for il in range(N):
        p = f"blk.{il}"
        model.attention(p, D, 4, KV, HEAD)
        model.matrix(f"{p}.attn_gate", 4, D)
    path = model.write(tmp_path / "model.gguf")
    assert windows_of(Model.load(path)) == windows
    overrides = {"laguna.attention.sliding_window_pattern": 3}
    assert windows_of(Model.load(path, ModelParams(kv_overrides=overrides))) == [False, True, True, False, True]


def windows_of(model: Model) -> list[bool]:
    """Whether each layer has a window."""
    return [model.arch.window(il)[0] != "none" for il in range(N)]


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"router_logit_softcapping": 2.0}, UnsupportedError, "router_logit_softcapping 2: capped logits"),
        ({"attention.sliding_window_pattern": [True]}, FileFormatError, "wrong array length; expected 5, got 1"),
        ({"attention.head_count": [4, 5, 6, 6, 4]}, FileFormatError, "layer 1 has 5 heads and 2 KV heads"),
        ({"rope.dimension_count": 64}, FileFormatError, "rope.dimension_count 64 is above the key head size 32"),
    ],
)
def test_impossible_files(keys: dict, error: type[IkpyError], message: str, tmp_path: Path) -> None:
    model, _ = laguna()
    model.keys |= keys
    with pytest.raises(error, match=message):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_a_gate_of_another_width(tmp_path: Path) -> None:
    model, _ = laguna()
    model.matrix("blk.2.attn_gate", HEADS[True] + 1, D)
    with pytest.raises(FileFormatError, match=r"blk\.2\.attn_gate\.weight"):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_size_class() -> None:
    keys = {"general.architecture": "laguna"}
    found = [size_class({**keys, "laguna.block_count": n}) for n in (40, 48, 70, 3)]
    assert found == ["33B.A3B", "118B.A8B", "225B.A23B", "?B"]
