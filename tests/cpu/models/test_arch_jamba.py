"""Jamba, Mamba and Falcon Mamba: random models against their definition."""

from __future__ import annotations

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
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS, TOKENS
from tests.cpu.models.reference_mamba import Sizes
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D, HEADS, KV, HEAD, F = 5, 64, 2, 1, 32, 96
N_EXPERT, USED = 6, 2
ATTENDS, EXPERT_LAYERS = (1, 4), (1, 3)
INNER = Sizes(D, 2 * D, norms="weights")
PLAIN, FALCON = Sizes(D, 160, rank=5, state=20, taps=3), Sizes(D, 128, norms="plain")
BOUND = 1e-4
Made = tuple[RandomModel, np.ndarray]


def new_jamba(seed: int, *, experts: bool = True) -> RandomModel:
    """A file as llama.cpp converts it: KV heads say which layers attend, routers which have experts."""
    keys = {
        **checks.shape(N_LAYER, D, HEADS, KV, HEAD, F),
        **RMS,
        **INNER.keys,
        "attention.head_count_kv": [KV if il in ATTENDS else 0 for il in range(N_LAYER)],
    }
    if experts:
        keys |= {"expert_count": N_EXPERT, "expert_used_count": USED}
    m = RandomModel("jamba", seed, **keys)
    checks.frame(m, D, tied=False)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        if il in ATTENDS:
            m.attention(p, D, HEADS, KV, HEAD)
        else:
            INNER.add(m, p)
        if experts and il in EXPERT_LAYERS:
            checks.experts(m, p, D, F, N_EXPERT)
        else:
            m.ffn(p, D, F)
    return m


def jamba_logits(m: RandomModel, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits [T, V] in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][tokens]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        if "ssm_in" in w:
            x = x + INNER.branch(w, h, e.eps)
        else:
            x = x + e.output(il, ref.attend(*e.qkv(il, h), 1 / math.sqrt(HEAD)))
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        if "ffn_gate_inp" in w:
            x = x + checks.routed(w, h, checks.chosen(ref.softmax(h @ w["ffn_gate_inp"].T), USED), USED)
        else:
            x = x + e.ffn(il, h)
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def new_mamba(seed: int, sizes: Sizes = PLAIN, *, tied: bool = True) -> RandomModel:
    """A file as llama.cpp converts it: no heads, no network."""
    keys = {"block_count": 3, "embedding_length": D, "feed_forward_length": 0, "attention.head_count": 0}
    m = RandomModel("mamba", seed, **keys, **RMS, **sizes.keys)
    checks.frame(m, D, tied=tied)
    for il in range(3):
        m.norm(f"blk.{il}.attn_norm", D)
        sizes.add(m, f"blk.{il}")
    return m


def mamba_logits(m: RandomModel, sizes: Sizes = PLAIN) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        x = x + sizes.branch(w, ref.rms_norm(x, w["attn_norm"], e.eps), e.eps)
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w.get("output", e.w["token_embd"]).T


def jamba() -> Made:
    m = new_jamba(151)
    return m, jamba_logits(m)


def jamba_dense() -> Made:
    """Without experts, as the small ones."""
    m = new_jamba(152, experts=False)
    return m, jamba_logits(m)


def mamba() -> Made:
    """Odd sizes."""
    m = new_mamba(153)
    return m, mamba_logits(m)


def falcon_mamba() -> Made:
    """Steps, B and C are normed without weights."""
    m = new_mamba(154, FALCON, tied=False)
    return m, mamba_logits(m, FALCON)


MODELS = [jamba, jamba_dense, mamba, falcon_mamba]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Callable[[], Made], tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    if model.arch == "jamba":
        checks.check_quantized_cache(path, truth, 0.05)


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_rows_that_give_no_logits(make: Callable[[], Made], tmp_path: Path) -> None:
    model, truth = make()
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")
    context = Context(Model.load(model.write(tmp_path / "model.gguf")), settings)
    assert np.abs(context.decode(Batch.single(TOKENS))[-1] - truth[-1]).max() < BOUND * np.abs(truth).max()


def test_layers_have_states_or_caches(tmp_path: Path) -> None:
    context = Context(Model.load(jamba()[0].write(tmp_path / "model.gguf")), ContextParams(n_ctx=64, n_threads=1))
    recurrent = context.kv.recurrent
    assert recurrent is not None and {layer for layer, _ in recurrent.tensors} == {0, 2, 3}
    assert {layer for layer, _ in context.kv.tensors} == set(ATTENDS)
    assert recurrent.tensors[0, "ssm"].shape[:3] == (2 * D, 16, 1)


def test_what_cannot_be(tmp_path: Path) -> None:
    for make, key, value, message in (
        (jamba, "ssm.state_size", 0, "impossible recurrent layers: inner_size 128, time_step_rank 8, state_size 0"),
        (jamba, "ssm.time_step_rank", 9, "tensor 'blk.0.ssm_x.weight' has wrong shape"),
        (jamba, "attention.head_count_kv", [0, 1, 1, 0, 1], "tensor 'blk.2.attn_q.weight' not found"),
        (jamba, "expert_count", 4, "tensor 'blk.1.ffn_gate_inp.weight' has wrong shape"),
        (mamba, "ssm.conv_kernel", 4, "tensor 'blk.0.ssm_conv1d.weight' has wrong shape"),
        (mamba, "embedding_length", 0, "impossible dimensions: embedding 0"),
    ):
        model = make()[0]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("make", [jamba, falcon_mamba], ids=lambda f: f.__name__)
def test_quantized(make: Callable[[], Made], tmp_path: Path) -> None:
    model, truth = make()
    assert quantize([str(model.write(tmp_path / "model.gguf")), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    small = (
        "norm.weight",
        ".bias",
        "ssm_a",
        "ssm_d",
        "ssm_conv1d.weight",
        "ffn_gate_inp.weight",
        "ssm_x.weight",
        "ssm_dt.weight",
    )
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        for name, info in file.tensors.items():
            assert info.type_id == 8 or name.endswith(small), name
    context = Context(Model.load(tmp_path / "small.gguf"), ContextParams(n_ctx=64, n_threads=1))
    logits = context.decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - truth).max(axis=1)) < 0.1 * np.abs(truth).max()


@pytest.mark.parametrize("make", [jamba, mamba], ids=lambda f: f.__name__)
def test_cache_types_without_a_cache_have_no_effect(make: Callable[[], Made], tmp_path: Path) -> None:
    log, model = list[str](), Model.load(make()[0].write(tmp_path / "model.gguf"))
    Context(model, ContextParams(n_ctx=64, n_threads=1, type_k="q8_0"), log=log.append)
    said = ["warning: -ctk and -ctv has no effect: no layer of the model has a cache"]
    assert [line for line in log if "has no effect" in line] == (said if model.hparams.arch == "mamba" else [])
