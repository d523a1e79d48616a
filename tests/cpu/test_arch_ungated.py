"""AFM (arcee): networks without a gate. Random models against their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.errors import FileFormatError
from ikpy.models.size_class import size_class
from tests.cpu import definition_checks as checks
from tests.cpu import reference_models as ref
from tests.cpu.definition_checks import POS, RMS, TOKENS
from tests.cpu.reference_models import Evaluation, RandomModel

N, D, HEADS, KV, HEAD, F = 3, 72, 4, 2, 32, 100


def relu_squared(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) ** 2


def network(e: Evaluation, il: int, h: np.ndarray, act: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """down(act(up h)), with biases where the model has them."""
    up, down = (f"blk.{il}.ffn_{name}" for name in ("up", "down"))
    hidden = act(h @ e.w[up].T + e.w.get(f"{up}.bias", 0.0))
    return hidden @ e.w[down].T + e.w.get(f"{down}.bias", 0.0)


def arcee(*, biases: bool = False) -> tuple[RandomModel, np.ndarray]:
    """Rotated in adjacent pairs with factors of the frequencies."""
    m = RandomModel("arcee", 151, **checks.shape(N, D, HEADS, KV, HEAD, F), **RMS)
    checks.frame(m, D, tied=False)
    m.norm("rope_freqs", HEAD // 2)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)) if biases else ():
            m.vector(f"{p}.attn_{name}.bias", heads * HEAD)
        m.matrix(f"{p}.ffn_up", F, D)
        m.matrix(f"{p}.ffn_down", D, F)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, 10000.0, POS, e.w["rope_freqs"])
    for il in range(N):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=False) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + network(e, il, ref.rms_norm(x, w["ffn_norm"], e.eps), relu_squared)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def arcee_biased() -> tuple[RandomModel, np.ndarray]:
    """Biases of q, k and v."""
    return arcee(biases=True)


MODELS = [arcee, arcee_biased]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)
    checks.check_quantized_cache(path, truth, 0.06)


def test_a_gate_has_no_place(tmp_path: Path) -> None:
    model, truth = arcee()
    model.matrix("blk.0.ffn_gate", F, D)
    with pytest.raises(FileFormatError, match="ffn_gate"):
        checks.check_definition(model, truth, tmp_path)


def test_size_classes() -> None:
    for arch, layers, expected in (("arcee", 36, "4B"),):
        assert size_class({"general.architecture": arch, f"{arch}.block_count": layers}) == expected
