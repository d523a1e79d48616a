"""Nemotron-H, dense and with experts: random models against their definition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.cli.session import rope_type
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.activations import ActivationCollector
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS, TOKENS
from tests.cpu.models.reference_mamba2 import Sizes
from tests.cpu.models.reference_models import Evaluation, RandomModel

D, HEADS, KV, HEAD, F = 64, 4, 2, 32, 96
N_EXPERT, USED, F_EXP, F_SHARED, SCALE, LATENT = 8, 3, 32, 64, 2.5, 32
MAMBA2 = Sizes(D)
BOUND = 1e-4  # what is read from a state is normed, also where it is small


def new_model(seed: int, pattern: str, *, latent: int = 0, n_predict: int = 0) -> RandomModel:
    """pattern: a letter per layer as in configurations: M recurrent, * attends, - dense, E experts. n_predict: further
    layers that are not run.
    """
    n_layer, experts = len(pattern) + n_predict, "E" in pattern
    kinds = pattern + "*" * n_predict
    keys: dict[str, Any] = {
        **checks.shape(n_layer, D, HEADS, KV, HEAD, F),
        **RMS,
        **MAMBA2.keys,
        "attention.head_count_kv": [KV if kind == "*" else 0 for kind in kinds],
        "feed_forward_length": [{"-": F, "E": F_EXP}.get(kind, 0) for kind in kinds],
        "rope.dimension_count": D // HEADS,  # as llama.cpp writes it, of no meaning
    }
    if experts:
        keys |= {
            "expert_count": N_EXPERT,
            "expert_used_count": USED,
            "expert_feed_forward_length": F_EXP,
            "expert_shared_feed_forward_length": F_SHARED,
            "expert_shared_count": 1,
            "expert_weights_norm": True,
            "expert_weights_scale": SCALE,
            "expert_group_count": 1,
            **({"moe_latent_size": latent} if latent else {}),
        }
    if n_predict:
        keys["nextn_predict_layers"] = n_predict
    m = RandomModel("nemotron_h_moe" if experts else "nemotron_h", seed, **keys)
    checks.frame(m, D, tied=False)
    for il, kind in enumerate(kinds):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        if kind == "M":
            MAMBA2.add(m, p)
        elif kind == "*":
            m.attention(p, D, HEADS, KV, HEAD)
        elif kind == "-":
            m.matrix(f"{p}.ffn_up", F, D)
            m.matrix(f"{p}.ffn_down", D, F)
        else:
            add_experts(m, p, latent)
    return m


def add_experts(m: RandomModel, p: str, latent: int) -> None:
    n = latent or D
    m.matrix(f"{p}.ffn_gate_inp", N_EXPERT, D)
    m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
    m.matrix(f"{p}.ffn_up_exps", N_EXPERT, F_EXP, n)
    m.matrix(f"{p}.ffn_down_exps", N_EXPERT, n, F_EXP)
    m.matrix(f"{p}.ffn_up_shexp", F_SHARED, D)
    m.matrix(f"{p}.ffn_down_shexp", D, F_SHARED)
    if latent:
        m.matrix(f"{p}.ffn_latent_down", latent, D)
        m.matrix(f"{p}.ffn_latent_up", D, latent)


def squared_relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) ** 2


def experts_branch(w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Routed and shared experts for a normed input h [T, D]."""
    weights = checks.chosen(ref.sigmoid(h @ w["ffn_gate_inp"].T), USED, w["exp_probs_b.bias"])
    weights = SCALE * weights / weights.sum(-1, keepdims=True)
    x = h @ w["ffn_latent_down"].T if "ffn_latent_down" in w else h
    hidden = squared_relu(np.einsum("efn,tn->tef", w["ffn_up_exps"], x))
    out = np.einsum("te,enf,tef->tn", weights, w["ffn_down_exps"], hidden)
    out = out @ w["ffn_latent_up"].T if "ffn_latent_up" in w else out
    return out + squared_relu(h @ w["ffn_up_shexp"].T) @ w["ffn_down_shexp"].T


def branch(e: Evaluation, il: int, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Of a layer for a normed input h [T, D]."""
    if "ssm_in" in w:
        return MAMBA2.branch(w, h, e.eps)
    if "attn_q" in w:
        return e.output(il, ref.attend(*e.qkv(il, h), 1 / math.sqrt(HEAD)))
    if "ffn_gate_inp" in w:
        return experts_branch(w, h)
    return squared_relu(h @ w["ffn_up"].T) @ w["ffn_down"].T


def evaluated(m: RandomModel, n_layer: int) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(n_layer):
        w = checks.layer_weights(e, il)
        x = x + branch(e, il, w, ref.rms_norm(x, w["attn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def made(seed: int, pattern: str, **kinds: int) -> tuple[RandomModel, np.ndarray]:
    m = new_model(seed, pattern, **kinds)
    return m, evaluated(m, len(pattern))


def nemotron_h() -> tuple[RandomModel, np.ndarray]:
    """As Nemotron Nano 2; the last layer is a network."""
    return made(91, "M-M*-M-")


def nemotron_h_moe() -> tuple[RandomModel, np.ndarray]:
    """As Nemotron 3 Nano; the last layer is recurrent."""
    return made(92, "MEM*EM")


def nemotron_h_latent() -> tuple[RandomModel, np.ndarray]:
    """As Nemotron 3 Super, with a prediction layer; the last layer attends."""
    return made(93, "MEM*EM*", latent=LATENT, n_predict=1)


MODELS = [nemotron_h, nemotron_h_moe, nemotron_h_latent]
Make = Callable[[], tuple[RandomModel, np.ndarray]]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Make, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    checks.check_quantized_cache(path, truth, 0.05)


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_rows_that_give_no_logits(make: Make, tmp_path: Path) -> None:
    """The last layer goes on with the rows whose logits are wanted; a network of tokens alone computes no others."""
    model, truth = make()
    context = Context(
        Model.load(model.write(tmp_path / "model.gguf")),
        ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32"),
    )
    logits = context.decode(Batch.single(TOKENS))
    assert np.abs(logits[-1] - truth[-1]).max() < BOUND * np.abs(truth).max()


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_states_of_all_tokens(make: Make, tmp_path: Path) -> None:
    """Where the last layer goes on with some rows, the others are computed apart if their states are wanted."""
    model, truth = make()
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32", token_states=True)
    context = Context(Model.load(model.write(tmp_path / "model.gguf")), settings)
    context.decode(Batch.single(TOKENS))
    assert context.token_states is not None
    logits = context.token_states @ model.weights["output"].T
    assert np.abs(logits - truth).max() < BOUND * np.abs(truth).max()


def test_a_convolution_without_bias(tmp_path: Path) -> None:
    model = new_model(94, "M*-")
    del model.weights["blk.0.ssm_conv1d.bias"]
    checks.check_definition(model, evaluated(model, 3), tmp_path, BOUND)


def test_what_cannot_be(tmp_path: Path) -> None:
    for make, key, value, message in (
        (
            nemotron_h,
            "ssm.state_size",
            0,
            "impossible recurrent layers: inner_size 128, 8 heads in 2 groups, state_size 0",
        ),
        (nemotron_h, "ssm.group_count", 3, "impossible recurrent layers: inner_size 128, 8 heads in 3 groups"),
        (nemotron_h, "ssm.time_step_rank", 6, "impossible recurrent layers: inner_size 128, 6 heads"),
        (nemotron_h, "ssm.conv_kernel", 3, "tensor 'blk.0.ssm_conv1d.weight' has wrong shape"),
        (nemotron_h, "attention.head_count_kv", [0, 0, 0, 3, 0, 0, 0], "layer 3 has 4 heads and 3 KV heads"),
        (nemotron_h_moe, "expert_count", 0, "0 experts used|3 of 0 experts used"),
        (nemotron_h_latent, "moe_latent_size", 64, "tensor 'blk.1.ffn_up_exps.weight' has wrong shape"),
        (nemotron_h_latent, "nextn_predict_layers", 9, "9 prediction layers of 8 layers leave none to run"),
    ):
        model = make()[0]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message) as error:
            Model.load(model.write(tmp_path / "model.gguf"))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("n_predict", [0, 1])
def test_prediction_layers_of_dense_models_are_not_run(n_predict: int, tmp_path: Path) -> None:
    made = new_model(99, "M-*", n_predict=n_predict)
    made.matrix("blk.3.nextn.eh_proj", D, 2 * D)
    if not n_predict:
        del made.weights["blk.3.nextn.eh_proj"]
    model = Model.load(made.write(tmp_path / "model.gguf"))
    with pytest.raises(IkpyError, match="the model has no layers that predict further tokens"):
        model.prediction_head()


def test_layers_have_states_caches_or_nothing(tmp_path: Path) -> None:
    path = nemotron_h_moe()[0].write(tmp_path / "model.gguf")
    context = Context(Model.load(path), ContextParams(n_ctx=64, n_threads=1))
    recurrent = context.kv.recurrent
    assert recurrent is not None and {layer for layer, _ in recurrent.tensors} == {0, 2, 5}
    assert {layer for layer, _ in context.kv.tensors} == {3}
    with GGUFFile.open(path) as file:
        assert rope_type(file) == -1


@pytest.mark.parametrize("make", [nemotron_h, nemotron_h_latent], ids=lambda f: f.__name__)
def test_importance_and_quantization(make: Make, tmp_path: Path) -> None:
    """Every matrix has statistics of its inputs, and all but small tensors are quantized."""
    model_of, _ = make()
    path = model_of.write(tmp_path / "model.gguf")
    model = Model.load(path)
    stored = {name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()}
    collector = ActivationCollector(stored)
    settings = ContextParams(n_ctx=64, n_threads=1)
    context = Context(model, dataclasses.replace(settings, collector=collector))
    whole = context.decode(Batch.single(TOKENS, logits="all"))
    small = ("norm.weight", ".bias", "ssm_a", "ssm_d", "ssm_conv1d.weight")
    run = {f"blk.{il}" for il in range(model.hparams.n_layer)}
    matrices = {name for name in stored if ".".join(name.split(".")[:2]) in run and not name.endswith(small)}
    assert {name for name in collector.entries if name.startswith("blk.")} == matrices
    assert quantize([str(path), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        for name, info in file.tensors.items():
            assert info.type_id == (0 if name.endswith((*small, "ffn_gate_inp.weight")) else 8), name
    logits = Context(Model.load(tmp_path / "small.gguf"), settings).decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - whole).max(axis=1)) < 0.25 * np.abs(whole).max()
