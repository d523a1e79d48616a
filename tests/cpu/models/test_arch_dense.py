"""AFM, EXAONE 3, Minitron and Apertus: random models against their definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.model import Model
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

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


def exaone(*, biases: bool = False) -> tuple[RandomModel, np.ndarray]:
    """The blocks of llama, rotated by halves."""
    m = RandomModel("exaone", 152, **checks.shape(N, D, HEADS, KV, HEAD, F), **RMS)
    checks.frame(m, D, tied=True)
    m.norm("rope_freqs", HEAD // 2)
    for il in range(N):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        m.ffn(p, D, F)
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)) if biases else ():
            m.vector(f"{p}.attn_{name}.bias", heads * HEAD)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, 10000.0, POS, e.w["rope_freqs"])
    for il in range(N):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["token_embd"].T


def exaone_biased() -> tuple[RandomModel, np.ndarray]:
    """Biases of q, k and v."""
    return exaone(biases=True)


def nemotron(*, biases: bool = False) -> tuple[RandomModel, np.ndarray]:
    """LayerNorm with biases, part of each head rotated."""
    d, rotated = HEADS * HEAD, 12
    keys = {**checks.shape(N, d, HEADS, KV, HEAD, F), "attention.layer_norm_epsilon": 1e-5}
    m = RandomModel("nemotron", 153, **{**keys, "rope.dimension_count": rotated})
    checks.frame(m, d, tied=False)
    m.vector("output_norm.bias", d)
    for il in range(N):
        p = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"{p}.{name}", d)
            m.vector(f"{p}.{name}.bias", d)
        m.attention(p, d, HEADS, KV, HEAD)
        m.matrix(f"{p}.ffn_up", F, d)
        m.matrix(f"{p}.ffn_down", d, F)
        sizes = {"attn_q": HEADS * HEAD, "attn_k": KV * HEAD, "attn_v": KV * HEAD, "attn_output": d}
        for name, size in {**sizes, "ffn_up": F, "ffn_down": d}.items() if biases else ():
            m.vector(f"{p}.{name}.bias", size)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(rotated, 10000.0, POS)

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        return ref.layer_norm(x, e.w[name], e.eps) + e.w[f"{name}.bias"]

    for il in range(N):
        q, k, v = e.qkv(il, normed(x, f"blk.{il}.attn_norm"))
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + network(e, il, normed(x, f"blk.{il}.ffn_norm"), relu_squared)
    return m, normed(x, "output_norm") @ e.w["output"].T


def nemotron_biased() -> tuple[RandomModel, np.ndarray]:
    """Biases everywhere."""
    return nemotron(biases=True)


XIELU = {"alpha_p": [0.3, -1.5, 2.0], "alpha_n": [-0.4, 1.2, 0.1], "beta": [0.5, 0.4, 0.6], "eps": [-1e-6, -0.2, -1e-6]}
"""As files have them, a number per layer."""


def xielu(x: np.ndarray, il: int) -> np.ndarray:
    """The activation of a layer (arXiv:2411.13010)."""
    positive, negative, beta, eps = (XIELU[name][il] for name in ("alpha_p", "alpha_n", "beta", "eps"))
    above = np.logaddexp(0, positive) * x**2
    below = (beta + np.logaddexp(0, negative)) * (np.expm1(np.minimum(x, eps)) - x)
    return beta * x + np.where(x > 0, above, below)


def apertus() -> tuple[RandomModel, np.ndarray]:
    """Normed heads, frequency factors, an activation per layer."""
    m = RandomModel("apertus", 154, **checks.shape(N, D, HEADS, KV, HEAD, F), **RMS)
    m.outer_keys = {f"xielu.{name}": values for name, values in XIELU.items()}
    checks.frame(m, D, tied=False)
    m.norm("rope_freqs", HEAD // 2)
    for il in range(N):
        p = f"blk.{il}"
        for name, size in (("attn_norm", D), ("ffn_norm", D), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            m.norm(f"{p}.{name}", size)
        m.attention(p, D, HEADS, KV, HEAD)
        m.matrix(f"{p}.ffn_up", F, D)
        m.matrix(f"{p}.ffn_down", D, F)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    angles = ref.plain_angles(HEAD, 10000.0, POS, e.w["rope_freqs"])
    for il in range(N):
        w = checks.layer_weights(e, il)
        q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
        q, k = ref.rms_norm(q, w["attn_q_norm"], e.eps), ref.rms_norm(k, w["attn_k_norm"], e.eps)
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + network(e, il, ref.rms_norm(x, w["ffn_norm"], e.eps), lambda h, il=il: xielu(h, il))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


MODELS = [apertus, arcee, arcee_biased, exaone, exaone_biased, nemotron, nemotron_biased]


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


def test_activations_of_fewer_layers(tmp_path: Path) -> None:
    for key, value, message in (
        ("xielu.beta", [0.5, 0.5], "key xielu.beta must hold 3 floats"),
        ("xielu.eps", [0.0, math.inf, 0.0], "key xielu.eps holds numbers that are not finite"),
        ("xielu.alpha_p", None, "xielu.alpha_p"),
    ):
        model, truth = apertus()
        model.outer_keys[key] = value
        if value is None:
            del model.outer_keys[key]
        with pytest.raises(FileFormatError, match=message):
            checks.check_definition(model, truth, tmp_path)


def test_pruned_layers_take_their_activations_along(tmp_path: Path) -> None:
    model, _ = apertus()
    path = model.write(tmp_path / "model.gguf")
    assert main(["quantize", "--prune-layers", "1", str(path), str(tmp_path / "pruned.gguf"), "F32"]) == 0
    pruned = GGUFFile.open(tmp_path / "pruned.gguf")
    for name, values in XIELU.items():
        np.testing.assert_allclose(pruned.metadata[f"xielu.{name}"], [values[0], values[2]], rtol=1e-6)
    assert Model.load(tmp_path / "pruned.gguf").hparams.n_layer == 2


def test_norms_without_biases(tmp_path: Path) -> None:
    for name in ("output_norm", "blk.1.ffn_norm"):
        model, truth = nemotron()
        del model.weights[f"{name}.bias"]
        with pytest.raises(FileFormatError, match=f"tensor '{name}.bias' not found"):
            checks.check_definition(model, truth, tmp_path)


def test_size_classes() -> None:
    for arch, layers, expected in (("arcee", 36, "4B"), ("exaone", 30, "2.4B"), ("apertus", 80, "70B")):
        assert size_class({"general.architecture": arch, f"{arch}.block_count": layers}) == expected
    assert size_class({"general.architecture": "nemotron", "nemotron.embedding_length": 3072}) == "4B"
