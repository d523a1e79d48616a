"""PLaMo 2 and 3: random models against their definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from ikpy.models.size_class import size_class
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.definition_checks import POS, RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel

D, HEADS, KV, HEAD, F, EPS = 64, 4, 2, 32, 96, 1e-5
WINDOW, BASE, WINDOW_BASE = 9, 500000.0, 10000.0
INNER, SCAN_HEADS, STATE, TAPS, RANK = 128, 4, 16, 4, 64
BARE = ("post_attention_norm", "post_ffw_norm", "ssm_dt_norm", "ssm_b_norm", "ssm_c_norm")
BOUND = 1e-4
Made = tuple[RandomModel, np.ndarray]


def common(m: RandomModel, p: str) -> None:
    """Norms and the network of a layer."""
    for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
        m.norm(f"{p}.{name}", D)
    m.matrix(f"{p}.ffn_up", 2 * F, D)
    m.matrix(f"{p}.ffn_down", D, F)


def fused(m: RandomModel, p: str, *, apart: bool) -> None:
    """Fused projections, and norms of all heads or of each."""
    m.matrix(f"{p}.attn_qkv", (HEADS + 2 * KV) * HEAD, D)
    m.matrix(f"{p}.attn_output", D, HEADS * HEAD)
    for name, heads in (("q", HEADS), ("k", KV)):
        m.norm(f"{p}.attn_{name}_norm", *((heads, HEAD) if apart else (HEAD,)))


def attended(w: ref.Weights, h: np.ndarray, base: float, window: int) -> np.ndarray:
    """Of the normed input h [T, D], behind the output matrix."""
    parts = np.split(h @ w["attn_qkv"].T, (HEADS * HEAD, (HEADS + KV) * HEAD), axis=1)
    q, k, v = (part.reshape(len(h), -1, HEAD) for part in parts)
    q, k = (ref.rms_norm(x, w[name], EPS) for x, name in ((q, "attn_q_norm"), (k, "attn_k_norm")))
    angles = ref.plain_angles(HEAD, base, POS[: len(h)])
    q, k = (ref.rotate(x, angles, neox=True) for x in (q, k))
    visible = (lambda i, j: i - j < window) if window else None
    return ref.attend(q, k, v, 1 / math.sqrt(HEAD), visible=visible) @ w["attn_output"].T


def network(w: ref.Weights, h: np.ndarray) -> np.ndarray:
    gate, up = np.split(h @ w["ffn_up"].T, 2, axis=1)
    return (ref.silu(gate) * up) @ w["ffn_down"].T


def new_plamo3(seed: int, n_layer: int = 4, **keys: Any) -> RandomModel:
    windows = {"attention.sliding_window": WINDOW, "rope.freq_base_swa": WINDOW_BASE}
    shape = checks.shape(n_layer, D, HEADS, KV, HEAD, F)
    m = RandomModel("plamo3", seed, **shape | RMS | windows | {"rope.freq_base": BASE} | keys)
    m.bare = BARE
    checks.frame(m, D, tied=True)
    for il in range(n_layer):
        common(m, f"blk.{il}")
        fused(m, f"blk.{il}", apart=False)
    return m


def plamo3_logits(m: RandomModel, full: tuple[int, ...]) -> np.ndarray:
    """full: layers that attend to everything."""
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        base, window = (BASE, 0) if il in full else (WINDOW_BASE, WINDOW)
        h = attended(w, ref.rms_norm(x, w["attn_norm"], EPS), base, window)
        x = x + ref.rms_norm(h, w["post_attention_norm"], EPS)
        h = network(w, ref.rms_norm(x, w["ffn_norm"], EPS))
        x = x + ref.rms_norm(h, w["post_ffw_norm"], EPS)
    return ref.rms_norm(x, e.w["output_norm"], EPS) @ e.w["token_embd"].T


def plamo3() -> Made:
    m = new_plamo3(241, **{"attention.sliding_window_pattern": 2})
    return m, plamo3_logits(m, (1, 3))


def plamo3_usual_period() -> Made:
    m = new_plamo3(242, 9)
    return m, plamo3_logits(m, (7,))


def plamo3_full() -> Made:
    m = new_plamo3(243, **{"attention.sliding_window": 0})
    return m, plamo3_logits(m, (0, 1, 2, 3))


def new_plamo2(seed: int, attends: tuple[int, ...] = (1, 3), n_layer: int = 5) -> RandomModel:
    """attends: layers without a state."""
    keys: dict[str, Any] = {
        **checks.shape(n_layer, D, HEADS, KV, HEAD, F),
        **RMS,
        "attention.head_count": [HEADS if il in attends else 0 for il in range(n_layer)],
        "attention.head_count_kv": [KV if il in attends else 0 for il in range(n_layer)],
        "ssm.inner_size": INNER,
        "ssm.time_step_rank": SCAN_HEADS,
        "ssm.state_size": STATE,
        "ssm.conv_kernel": TAPS,
        "ssm.group_count": 0,
    }
    m = RandomModel("plamo2", seed, **keys)
    m.bare = BARE
    checks.frame(m, D, tied=False)
    for il in range(n_layer):
        p = f"blk.{il}"
        common(m, p)
        if il in attends:
            fused(m, p, apart=True)
            continue
        m.matrix(f"{p}.ssm_in", 2 * INNER, D)
        m.matrix(f"{p}.ssm_conv1d", INNER, TAPS)
        m.matrix(f"{p}.ssm_x", 2 * STATE + RANK, INNER)
        m.matrix(f"{p}.ssm_dt", SCAN_HEADS, RANK)
        m.vector(f"{p}.ssm_dt.bias", SCAN_HEADS)
        m.weights[f"{p}.ssm_a"] = -m.random.uniform(0.1, 2, SCAN_HEADS).astype(np.float32)
        m.vector(f"{p}.ssm_d", SCAN_HEADS)
        m.matrix(f"{p}.ssm_out", D, INNER)
        for name, n in (("dt", RANK), ("b", STATE), ("c", STATE)):
            m.norm(f"{p}.ssm_{name}_norm", n)
    return m


def scanned(w: ref.Weights, h: np.ndarray) -> np.ndarray:
    """A layer with a state on the normed input h [T, D], token by token."""
    size = INNER // SCAN_HEADS
    both = (h @ w["ssm_in"].T).reshape(len(h), SCAN_HEADS, 2, size)
    z, x = both[:, :, 0], both[:, :, 1].reshape(len(h), INNER)
    slots, past = np.zeros(len(h), int), np.zeros((1, INNER, TAPS - 1))
    x, _ = recurrent.causal_conv(x, w["ssm_conv1d"], past, slots, silu=True)
    keys, queries, latents = np.split(x @ w["ssm_x"].T, (STATE, 2 * STATE), axis=1)
    keys, queries = ref.rms_norm(keys, w["ssm_b_norm"], EPS), ref.rms_norm(queries, w["ssm_c_norm"], EPS)
    steps = np.logaddexp(0, ref.rms_norm(latents, w["ssm_dt_norm"], EPS) @ w["ssm_dt"].T + w["ssm_dt.bias"])
    state, out = np.zeros((SCAN_HEADS, STATE, size)), np.empty((len(h), SCAN_HEADS, size))
    x = x.reshape(len(h), SCAN_HEADS, size)
    for t in range(len(h)):
        for i in range(SCAN_HEADS):
            decay = math.exp(steps[t, i] * w["ssm_a"][i])
            state[i] = decay * state[i] + np.outer(keys[t], steps[t, i] * x[t, i])
            out[t, i] = queries[t] @ state[i] + w["ssm_d"][i] * x[t, i]
    return (out * ref.silu(z)).reshape(len(h), INNER) @ w["ssm_out"].T


def plamo2_logits(m: RandomModel, tokens: np.ndarray) -> np.ndarray:
    e = Evaluation(m)
    x = e.w["token_embd"][tokens]
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], EPS)
        h = attended(w, h, 10000.0, 0) if "attn_qkv" in w else scanned(w, h)
        x = x + ref.rms_norm(h, w["post_attention_norm"], EPS)
        h = network(w, ref.rms_norm(x, w["ffn_norm"], EPS))
        x = x + ref.rms_norm(h, w["post_ffw_norm"], EPS)
    return ref.rms_norm(x, e.w["output_norm"], EPS) @ e.w["output"].T


def plamo2() -> Made:
    m = new_plamo2(244)
    return m, plamo2_logits(m, TOKENS)


def plamo2_last_recurrent() -> Made:
    """Ends with a layer that has a state."""
    m = new_plamo2(245, (1,), 3)
    return m, plamo2_logits(m, TOKENS)


@pytest.mark.parametrize("make", [plamo3, plamo3_usual_period, plamo3_full], ids=lambda f: f.__name__)
def test_plamo3(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_shift(path)


@pytest.mark.parametrize("make", [plamo2, plamo2_last_recurrent], ids=lambda f: f.__name__)
def test_plamo2(make: Any, tmp_path: Path) -> None:
    model, truth = make()
    checks.check_definition(model, truth, tmp_path, BOUND)
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")
    context = Context(Model.load(tmp_path / "model.gguf"), settings)
    assert np.abs(context.decode(Batch.single(TOKENS))[-1] - truth[-1]).max() < BOUND * np.abs(truth).max()


def test_names_with_a_suffix(tmp_path: Path) -> None:
    """Norms that llama.cpp writes without one."""
    for make in (plamo2, plamo3):
        model, truth = make()
        model.bare = ()
        context = checks.context_of(model.write(tmp_path / "model.gguf"), type_k="f32", type_v="f32")
        checks.hold(make.__name__, context.decode(Batch.single(TOKENS, logits="all")), truth, BOUND)


def test_what_cannot_be(tmp_path: Path) -> None:
    for key, value, message in (
        ("ssm.time_step_rank", 5, "impossible recurrent layers: inner_size 128, 5 heads"),
        ("ssm.state_size", 0, "impossible recurrent layers"),
        ("ssm.state_size", 32, "has wrong shape"),
    ):
        checks.refuses(plamo2()[0], key, value, message, tmp_path)
    model = plamo2()[0]
    del model.weights["blk.0.ssm_b_norm"]
    with pytest.raises(IkpyError, match=r"tensor 'blk\.0\.ssm_b_norm\.weight' not found"):
        Model.load(model.write(tmp_path / "model.gguf"))


def test_quantized(tmp_path: Path) -> None:
    """Norms, whatever their names, and what scans read stay as they are."""
    for make in (plamo2, plamo3):
        model, truth = make()
        assert quantize([str(model.write(tmp_path / "model.gguf")), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
        small = (
            "norm.weight",
            "_norm",
            ".bias",
            "ssm_a",
            "ssm_d",
            "ssm_conv1d.weight",
            "ssm_x.weight",
            "ssm_dt.weight",
        )
        with GGUFFile.open(tmp_path / "small.gguf") as file:
            for name, info in file.tensors.items():
                assert info.type_id == (0 if name.endswith(small) else 8), name
        logits = checks.context_of(tmp_path / "small.gguf").decode(Batch.single(TOKENS, logits="all"))
        assert np.median(np.abs(logits - truth).max(axis=1)) < 0.1 * np.abs(truth).max()


def test_size_classes() -> None:
    for arch, layers, width, expected in (
        ("plamo2", 16, 2048, "1B"),
        ("plamo2", 32, 2048, "2B"),
        ("plamo2", 32, 4096, "8B"),
        ("plamo3", 24, 2048, "2B"),
    ):
        shape = {f"{arch}.block_count": layers, f"{arch}.embedding_length": width}
        assert size_class({"general.architecture": arch, **shape}) == expected
