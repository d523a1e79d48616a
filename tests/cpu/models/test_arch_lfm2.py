"""LFM2 and LFM2-MoE: random models against their definition."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError, IkpyError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.activations import ActivationCollector
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D, HEADS, KV, HEAD, F, TAPS = 5, 128, 4, 2, 32, 96, 3
N_EXPERT, USED, F_EXP, N_DENSE = 8, 3, 32, 2
ATTENDS = (2, 4)


def new_model(seed: int, *, experts: bool, attends: tuple[int, ...] = ATTENDS, tied: bool = True) -> RandomModel:
    """attends: the layers that are no convolutions."""
    keys = {
        **checks.shape(N_LAYER, D, HEADS, KV, HEAD, F),
        **RMS,
        "attention.head_count_kv": [KV if il in attends else 0 for il in range(N_LAYER)],
        "rope.freq_base": 1e6,
        "shortconv.l_cache": TAPS,
    }
    if experts:
        keys |= {
            "expert_count": N_EXPERT,
            "expert_used_count": USED,
            "expert_feed_forward_length": F_EXP,
            "expert_gating_func": 2,
            "leading_dense_block_count": N_DENSE,
        }
    m = RandomModel("lfm2moe" if experts else "lfm2", seed, **keys)
    checks.frame(m, D, tied=tied)
    m.weights["token_embd_norm"] = m.weights.pop("output_norm")
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        if il in attends:
            m.attention(p, D, HEADS, KV, HEAD)
            m.norm(f"{p}.attn_q_norm", HEAD)
            m.norm(f"{p}.attn_k_norm", HEAD)
        else:
            m.matrix(f"{p}.shortconv.in_proj", 3 * D, D)
            m.matrix(f"{p}.shortconv.conv", D, TAPS)
            m.matrix(f"{p}.shortconv.out_proj", D, D)
        if experts and il >= N_DENSE:
            checks.experts(m, p, D, F_EXP, N_EXPERT)
            m.vector(f"{p}.exp_probs_b.bias", N_EXPERT)
        else:
            m.ffn(p, D, F)
    return m


def convolution_layer(w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a convolution for a normed input h [T, D]."""
    before, behind, x = np.split(h @ w["shortconv.in_proj"].T, 3, axis=1)
    past, slots = np.zeros((1, D, TAPS - 1)), np.zeros(len(h), int)
    y, _ = recurrent.causal_conv(before * x, w["shortconv.conv"], past, slots, silu=False)
    return (behind * y) @ w["shortconv.out_proj"].T


def attention_layer(e: Evaluation, il: int, w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """Branch of a layer that attends for a normed input h [T, D]."""
    q, k, v = e.qkv(il, h)
    angles = ref.plain_angles(HEAD, 1e6, POS)
    q, k = (ref.rotate(ref.rms_norm(x, w[f"attn_{n}_norm"], e.eps), angles, neox=True) for n, x in (("q", q), ("k", k)))
    return e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))


def evaluated(m: RandomModel) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        x = x + (convolution_layer(w, h) if "shortconv.conv" in w else attention_layer(e, il, w, h))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        x = x + (checks.sigmoid_routed(w, h, USED) if "ffn_gate_inp" in w else e.ffn(il, h))
    return ref.rms_norm(x, e.w["token_embd_norm"], e.eps) @ e.w.get("output", e.w["token_embd"]).T


def lfm2() -> tuple[RandomModel, np.ndarray]:
    """Dense, the last layer attends."""
    m = new_model(81, experts=False)
    return m, evaluated(m)


def lfm2moe() -> tuple[RandomModel, np.ndarray]:
    """Experts, the last layer is a convolution."""
    m = new_model(82, experts=True, attends=(1, 3))
    return m, evaluated(m)


def lfm2_untied() -> tuple[RandomModel, np.ndarray]:
    """An output matrix of its own, the first layer attends."""
    m = new_model(83, experts=False, attends=(0, 2), tied=False)
    return m, evaluated(m)


MODELS = [lfm2, lfm2moe, lfm2_untied]
Make = Callable[[], tuple[RandomModel, np.ndarray]]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Make, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_quantized_cache(path, truth, 0.05)


def test_what_cannot_be(tmp_path: Path) -> None:
    for key, value, message in (
        ("shortconv.l_cache", 0, r"lfm2\.shortconv\.l_cache is 0"),
        ("shortconv.l_cache", 4, "tensor 'blk.0.shortconv.conv.weight' has wrong shape"),
        ("attention.causal", False, "lfm2 models in which tokens see later ones cannot be run"),
        ("attention.head_count_kv", [0, 0, 3, 0, 2], "layer 2 has 4 heads and 3 KV heads"),
    ):
        model = lfm2()[0]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("changes", [{"head_count": 0}, {"head_count": 0, "head_count_kv": 0}, {}], ids=str)
def test_files_without_heads(changes: dict[str, int], tmp_path: Path) -> None:
    """The shapes of tensors would be none of theirs."""
    model = lfm2()[0]
    for key in ("head_count", "head_count_kv"):
        model.keys.pop(f"attention.{key}")
    model.keys |= {f"attention.{key}": value for key, value in changes.items()}
    with pytest.raises(FileFormatError, match=r"model\.gguf: lfm2\.attention\.head_count is 0$"):
        Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("make", [lfm2, lfm2moe], ids=lambda f: f.__name__)
def test_importance_and_quantization(make: Make, tmp_path: Path) -> None:
    """Matrices of convolutions have statistics of their inputs; taps stay f32."""
    path = make()[0].write(tmp_path / "model.gguf")
    model = Model.load(path)
    collector = ActivationCollector({name: (*info.shape, 1, 1)[2] for name, info in model.gguf.tensors.items()})
    settings = ContextParams(n_ctx=64, n_threads=1)
    context = Context(model, dataclasses.replace(settings, collector=collector))
    whole = context.decode(Batch.single(TOKENS, logits="all"))
    assert {name for name in collector.entries if "shortconv" in name} == {
        f"blk.{il}.shortconv.{name}.weight"
        for il in range(N_LAYER)
        for name in ("in_proj", "out_proj")
        if model.arch.state_specs(il)
    }
    assert quantize([str(path), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        for name, info in file.tensors.items():
            kept = name.endswith(("norm.weight", ".bias", "shortconv.conv.weight", "ffn_gate_inp.weight"))
            assert info.type_id == (0 if kept else 8), name
    logits = Context(Model.load(tmp_path / "small.gguf"), settings).decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - whole).max(axis=1)) < 0.1 * np.abs(whole).max()
