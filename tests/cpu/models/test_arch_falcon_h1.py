"""Falcon-H1: random models against their definition."""

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
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_mamba2 import Sizes
from tests.cpu.models.reference_models import Evaluation, RandomModel

N_LAYER, D, HEADS, KV, HEAD, F, BASE = 3, 64, 4, 2, 32, 96, 1e11
MAMBA2 = Sizes(D)
BOUND = 1e-4


def new_model(seed: int, *, normed: bool = False) -> RandomModel:
    """normed: scans have norms."""
    keys = {**checks.shape(N_LAYER, D, HEADS, KV, HEAD, F), **RMS, **MAMBA2.keys, "rope.freq_base": BASE}
    m = RandomModel("falcon-h1", seed, **keys)
    checks.frame(m, D, tied=False)
    for il in range(N_LAYER):
        p = f"blk.{il}"
        m.norm(f"{p}.attn_norm", D)
        m.norm(f"{p}.ffn_norm", D)
        m.attention(p, D, HEADS, KV, HEAD)
        MAMBA2.add(m, p, normed=normed)
        m.ffn(p, D, F)
    return m


def evaluated(m: RandomModel) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        q, k, v = e.qkv(il, h)
        q, k = (ref.rotate(heads, ref.plain_angles(HEAD, BASE, POS), neox=True) for heads in (q, k))
        attended = e.output(il, ref.attend(q, k, v, 1 / math.sqrt(HEAD)))
        x = x + attended + MAMBA2.branch(w, h, e.eps)
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def falcon_h1() -> tuple[RandomModel, np.ndarray]:
    """As published: scans without norms."""
    m = new_model(101)
    return m, evaluated(m)


def falcon_h1_normed() -> tuple[RandomModel, np.ndarray]:
    """With norms."""
    m = new_model(102, normed=True)
    return m, evaluated(m)


Make = Callable[[], tuple[RandomModel, np.ndarray]]


@pytest.mark.parametrize("make", [falcon_h1, falcon_h1_normed], ids=lambda f: f.__name__)
def test_definition(make: Make, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path, BOUND)
    checks.check_quantized_cache(path, truth, 0.05)


def test_rows_that_give_no_logits(tmp_path: Path) -> None:
    model, truth = falcon_h1()
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")
    context = Context(Model.load(model.write(tmp_path / "model.gguf")), settings)
    assert np.abs(context.decode(Batch.single(TOKENS))[-1] - truth[-1]).max() < BOUND * np.abs(truth).max()


def test_layers_have_states_and_caches(tmp_path: Path) -> None:
    context = Context(Model.load(falcon_h1()[0].write(tmp_path / "model.gguf")), ContextParams(n_ctx=64, n_threads=1))
    recurrent, layers = context.kv.recurrent, set(range(N_LAYER))
    assert recurrent is not None and {layer for layer, _ in recurrent.tensors} == layers
    assert {layer for layer, _ in context.kv.tensors} == layers


def test_what_cannot_be(tmp_path: Path) -> None:
    for key, value, message in (
        ("ssm.group_count", 0, "impossible recurrent layers: inner_size 128, 8 heads in 0 groups"),
        ("attention.head_count_kv", 0, "layer 0 has 4 heads and 0 KV heads"),
        ("ssm.state_size", 16, "tensor 'blk.0.ssm_in.weight' has wrong shape"),
    ):
        model = falcon_h1()[0]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))


def test_quantized(tmp_path: Path) -> None:
    model, truth = falcon_h1()
    assert quantize([str(model.write(tmp_path / "model.gguf")), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    small = ("norm.weight", ".bias", "ssm_a", "ssm_d", "ssm_conv1d.weight")
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        for name, info in file.tensors.items():
            assert info.type_id == (0 if name.endswith(small) else 8), name
    context = Context(Model.load(tmp_path / "small.gguf"), ContextParams(n_ctx=64, n_threads=1))
    logits = context.decode(Batch.single(TOKENS, logits="all"))
    assert np.abs(logits - truth).max() < 0.1 * np.abs(truth).max()
