"""Kimi Linear: random models against their definition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.cli.session import rope_type
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.activations import ActivationCollector
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.definition_checks import LONG, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D, HEADS, F = 5, 64, 3, 96
NOPE, ROT, VALUE, RANK, Q_RANK = 32, 32, 32, 64, 24
SIZE, TAPS = 32, 4
C = SIZE * HEADS
N_EXPERT, USED, F_EXP, SCALE = 8, 3, 32, 2.4
ATTENDS = (3,)
BOUND = 2e-4  # what the first tokens read from a state is small where q.k cancels, and is normed then


def new_model(seed: int, *, split: bool, n_layer: int = N_LAYER, attends: tuple[int, ...] = ATTENDS) -> RandomModel:
    """split: attn_kv_b as two matrices per head for one KV head, as files of llama.cpp have it; else whole, as the
    first files had it, here with low-rank queries, and convolutions without a dimension of 1.
    """
    kv = 1 if split else HEADS
    keys = {
        **checks.shape(n_layer, D, HEADS, kv, RANK + ROT, F),
        **RMS,
        "attention.head_count_kv": [kv if il in attends else 0 for il in range(n_layer)],
        "attention.key_length_mla": NOPE + ROT,
        "attention.value_length": RANK,
        "attention.value_length_mla": VALUE,
        "attention.kv_lora_rank": RANK,
        "rope.dimension_count": ROT,
        "ssm.conv_kernel": TAPS,
        "kda.head_dim": SIZE,
        "expert_count": N_EXPERT,
        "expert_used_count": USED,
        "expert_feed_forward_length": F_EXP,
        "expert_shared_count": 1,
        "expert_weights_scale": SCALE,
        "expert_gating_func": 2,
        "leading_dense_block_count": 1,
        **({} if split else {"attention.q_lora_rank": Q_RANK}),
    }
    m = RandomModel("kimi-linear", seed, **keys)
    checks.frame(m, D, tied=False)
    for il in range(n_layer):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        add = add_attention if il in attends else add_recurrent
        add(m, p, split)
        if il == 0:
            m.ffn(p, D, F)
        else:
            checks.experts(m, p, D, F_EXP, N_EXPERT)
            m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
            m.ffn(p, D, F_EXP, "_shexp")
    return m


def add_recurrent(m: RandomModel, p: str, split: bool) -> None:
    for name in "qkv":
        m.matrix(f"{p}.attn_{name}", C, D)
        m.matrix(f"{p}.ssm_conv1d_{name}", *((C, 1, TAPS) if split else (C, TAPS)))
    for name in "fg":
        m.matrix(f"{p}.ssm_{name}_a", SIZE, D)
        m.matrix(f"{p}.ssm_{name}_b", C, SIZE)
    m.vector(f"{p}.ssm_dt.bias", C)
    m.weights[f"{p}.ssm_a"] = -m.random.uniform(0.1, 2, (HEADS, 1)).astype(np.float32)
    m.matrix(f"{p}.ssm_beta", HEADS, D)
    m.norm(f"{p}.ssm_norm", SIZE)
    m.matrix(f"{p}.attn_output", D, C)


def add_attention(m: RandomModel, p: str, split: bool) -> None:
    if split:
        m.matrix(f"{p}.attn_q", HEADS * (NOPE + ROT), D)
        m.matrix(f"{p}.attn_k_b", HEADS, RANK, NOPE)
        m.matrix(f"{p}.attn_v_b", HEADS, VALUE, RANK)
    else:
        m.matrix(f"{p}.attn_q_a", Q_RANK, D)
        m.norm(f"{p}.attn_q_a_norm", Q_RANK)
        m.matrix(f"{p}.attn_q_b", HEADS * (NOPE + ROT), Q_RANK)
        m.matrix(f"{p}.attn_kv_b", HEADS * (NOPE + VALUE), RANK)
    m.matrix(f"{p}.attn_kv_a_mqa", RANK + ROT, D)
    m.norm(f"{p}.attn_kv_a_norm", RANK)
    m.matrix(f"{p}.attn_output", D, HEADS * VALUE)


def delta_layer(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a KDA layer for a normed input h [T, D]."""
    slots = np.zeros(len(h), int)

    def convolved(name: str) -> np.ndarray:
        taps = w[f"ssm_conv1d_{name}"].reshape(C, TAPS)
        past = np.zeros((1, C, TAPS - 1))
        x, _ = recurrent.causal_conv(h @ w[f"attn_{name}"].T, taps, past, slots, silu=True)
        return x.reshape(-1, HEADS, SIZE)

    q, k, v = (convolved(name) for name in "qkv")
    step = np.log1p(np.exp(h @ w["ssm_f_a"].T @ w["ssm_f_b"].T + w["ssm_dt.bias"]))
    decay = step.reshape(-1, HEADS, SIZE) * w["ssm_a"].reshape(HEADS, 1)
    beta = ref.sigmoid(h @ w["ssm_beta"].T)
    state = np.zeros((1, HEADS, SIZE, SIZE))
    out, _ = recurrent.gated_delta_rule(
        q, k, v, decay, beta, state, slots, l2_eps=1e-6, scale=SIZE**-0.5, interleaved=False
    )
    gate = ref.sigmoid(h @ w["ssm_g_a"].T @ w["ssm_g_b"].T)
    return (ref.rms_norm(out, w["ssm_norm"], e.eps).reshape(len(h), C) * gate) @ w["attn_output"].T


def attention_layer(e: Evaluation, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a layer of latent attention without positions for a normed input h [T, D]."""
    if "attn_q" in w:
        q = h @ w["attn_q"].T
    else:
        q = ref.rms_norm(h @ w["attn_q_a"].T, w["attn_q_a_norm"], e.eps) @ w["attn_q_b"].T
    latent, shared = np.split(h @ w["attn_kv_a_mqa"].T, [RANK], axis=1)
    latent = ref.rms_norm(latent, w["attn_kv_a_norm"], e.eps)
    if "attn_kv_b" in w:
        both = (latent @ w["attn_kv_b"].T).reshape(len(h), HEADS, NOPE + VALUE)
        own, v = both[..., :NOPE], both[..., NOPE:]
    else:
        own = np.einsum("tr,hrn->thn", latent, w["attn_k_b"])
        v = np.einsum("tr,hnr->thn", latent, w["attn_v_b"])
    k = np.concatenate([own, np.repeat(shared[:, None], HEADS, 1)], axis=2)
    return ref.attend(q.reshape(len(h), HEADS, -1), k, v, 1 / math.sqrt(NOPE + ROT)) @ w["attn_output"].T


def evaluated(m: RandomModel, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits [T, V] in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][tokens]
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        branch = attention_layer if "attn_kv_a_mqa" in w else delta_layer
        x = x + branch(e, w, ref.rms_norm(x, w["attn_norm"], e.eps))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        x = x + (e.ffn(il, h, suffix="_shexp") + checks.sigmoid_routed(w, h, USED, SCALE) if il else e.ffn(il, h))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def kimi_linear() -> tuple[RandomModel, np.ndarray]:
    """A file of today."""
    m = new_model(71, split=True)
    return m, evaluated(m)


def kimi_linear_whole() -> tuple[RandomModel, np.ndarray]:
    """attn_kv_b in one, low-rank queries."""
    m = new_model(72, split=False)
    return m, evaluated(m)


MODELS = [kimi_linear, kimi_linear_whole]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Callable[[], tuple[RandomModel, np.ndarray]], tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    checks.check_quantized_cache(path, truth, 0.05)


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_modes_of_latent_attention(
    make: Callable[[], tuple[RandomModel, np.ndarray]], mla: int, tmp_path: Path
) -> None:
    model, _ = make()
    checks.check_latent_mode(model, evaluated(model, LONG), mla, tmp_path, BOUND)


def test_what_cannot_be(tmp_path: Path) -> None:
    for key, value, message in (
        ("kda.head_dim", 0, "impossible KDA layers: head_dim 0, conv_kernel 4"),
        ("ssm.conv_kernel", 0, "impossible KDA layers: head_dim 32, conv_kernel 0"),
        ("kda.head_dim", 16, "tensor 'blk.0.attn_q.weight' has wrong shape"),
    ):
        model = kimi_linear()[0]
        model.keys[key] = value
        with pytest.raises(FileFormatError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("changes", [{"head_count": 0}, {"head_count": 0, "head_count_kv": 0}, {}], ids=str)
def test_files_without_heads(changes: dict[str, int], tmp_path: Path) -> None:
    """The shapes of tensors would be none of theirs."""
    model = kimi_linear()[0]
    for key in ("head_count", "head_count_kv"):
        model.keys.pop(f"attention.{key}")
    model.keys |= {f"attention.{key}": value for key, value in changes.items()}
    with pytest.raises(FileFormatError, match=r"model\.gguf: kimi-linear\.attention\.head_count is 0$"):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_rope_options_have_no_effect(tmp_path: Path) -> None:
    path = kimi_linear()[0].write(tmp_path / "model.gguf")
    logits, log = [], list[str]()
    for options in ({}, {"rope_freq_base": 77.0, "rope_freq_scale": 0.5, "rope_scaling": "yarn"}):
        context = Context(Model.load(path), ContextParams(n_ctx=64, n_threads=1, **options), log=log.append)  # type: ignore[arg-type]
        logits.append(context.decode(Batch.single(TOKENS, logits="all")))
    np.testing.assert_array_equal(*logits)
    said = [line for line in log if "has no effect" in line]
    assert said == ["warning: --rope-... and --yarn-... has no effect: no layer of the model is rotated"]
    with GGUFFile.open(path) as file:
        assert rope_type(file) == -1


def test_importance_and_quantization(tmp_path: Path) -> None:
    """Every matrix has statistics of its inputs, and all but small tensors are quantized."""
    path = kimi_linear()[0].write(tmp_path / "model.gguf")
    model = Model.load(path)
    stored = {name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()}
    collector = ActivationCollector(stored)
    settings = ContextParams(n_ctx=64, n_threads=1)
    context = Context(model, dataclasses.replace(settings, collector=collector))
    whole = context.decode(Batch.single(TOKENS, logits="all"))
    small = ("norm.weight", ".bias", "ssm_a", *(f"ssm_conv1d_{x}.weight" for x in "qkv"))
    matrices = {name for name in stored if name.split(".")[-2].startswith(("attn", "ssm")) and not name.endswith(small)}
    assert {name for name in collector.entries if "attn" in name or "ssm" in name} == matrices
    assert quantize([str(path), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        for name, info in file.tensors.items():
            assert info.type_id == (0 if name.endswith((*small, "ffn_gate_inp.weight")) else 8), name
    logits = Context(Model.load(tmp_path / "small.gguf"), settings).decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - whole).max(axis=1)) < 0.25 * np.abs(whole).max()
