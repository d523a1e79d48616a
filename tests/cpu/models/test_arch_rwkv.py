"""RWKV-6, RWKV-7 and what puts their time mixes into layers of Qwen2: random models against their definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.models.size_class import size_class
from ikpy.quants import registry
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import RMS, TOKENS
from tests.cpu.models.reference_models import Evaluation, RandomModel
from tests.cpu.models.reference_rwkv import Sizes, channel_mix

N_LAYER, D, F = 4, 64, 96
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
GOOSE, ODD_GOOSE = Sizes(D, 32, (8, 12, 4, 16)), Sizes(60, 20, (5, 7, 3, 9))
ARWKV, UNGATED = Sizes(D, 32, (8, 12, 4, 16)), Sizes(D, 32, (8, 12, 4), gate=False)
FINCH, QRWKV = Sizes(D, 32, (8, 12)), Sizes(D, 16, (8, 12), kv=2)
BOUND = 1e-4
Made = tuple[RandomModel, np.ndarray]


def rwkv_model(arch: str, seed: int, sizes: Sizes, keys: dict[str, Any]) -> RandomModel:
    """All but the time mixes of a file as llama.cpp converts it: no heads; a word for every token."""
    common = {"block_count": N_LAYER, "embedding_length": sizes.d, "feed_forward_length": F}
    m = RandomModel(arch, seed, **common, **{"attention.head_count": 0, "wkv.head_size": sizes.size, **keys})
    checks.frame(m, sizes.d, tied=False)
    return m


def low_ranks(sizes: Sizes) -> dict[str, int]:
    """Keys of RWKV-7."""
    names = ("decay", "iclr", "value_residual_mix", "gate")
    return {f"attention.{name}_lora_rank": rank for name, rank in zip(names, sizes.ranks, strict=False)}


def extra_dims(sizes: Sizes) -> dict[str, int]:
    """Keys of RWKV-6."""
    return {"time_mix_extra_dim": sizes.ranks[0], "time_decay_extra_dim": sizes.ranks[1]}


def add_norm(m: RandomModel, name: str, d: int) -> None:
    """LayerNorm."""
    m.norm(name, d)
    m.vector(f"{name}.bias", d)


def add_channel_mix(m: RandomModel, p: str, d: int, *, gated: bool) -> None:
    """The network of a layer, with both norms."""
    add_norm(m, f"{p}.attn_norm", d)
    add_norm(m, f"{p}.attn_norm_2", d)
    for name in ("k", "r") if gated else ("k",):
        m.weights[f"{p}.channel_mix_lerp_{name}"] = m.random.uniform(0, 1, d).astype(np.float32)
    m.matrix(f"{p}.channel_mix_key", F, d)
    m.matrix(f"{p}.channel_mix_value", d, F)
    if gated:
        m.matrix(f"{p}.channel_mix_receptance", d, d)


def layered_norm(w: ref.Weights, name: str, x: np.ndarray, eps: float) -> np.ndarray:
    return ref.layer_norm(x, w[name], eps) + w[f"{name}.bias"]


def new_rwkv7(seed: int, sizes: Sizes = GOOSE) -> RandomModel:
    m = rwkv_model("rwkv7", seed, sizes, {**LAYER_NORM, **low_ranks(sizes)})
    for name in ("token_embd_norm", "output_norm"):
        add_norm(m, name, sizes.d)
    for il in range(N_LAYER):
        add_channel_mix(m, f"blk.{il}", sizes.d, gated=False)
        sizes.add7(m, f"blk.{il}", il)
    return m


def rwkv7_logits(m: RandomModel, sizes: Sizes = GOOSE) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e, first = Evaluation(m), None
    x = layered_norm(e.w, "token_embd_norm", e.w["token_embd"][TOKENS], e.eps)
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        branch, values = sizes.branch7(w, layered_norm(w, "attn_norm", x, e.eps), first)
        first = values if first is None else first
        x = x + branch
        x = x + channel_mix(w, layered_norm(w, "attn_norm_2", x, e.eps))
    return layered_norm(e.w, "output_norm", x, e.eps) @ e.w["output"].T


def new_rwkv6(seed: int, *, fused: bool = True, rescale: int = 2) -> RandomModel:
    m = rwkv_model("rwkv6", seed, FINCH, {**LAYER_NORM, **extra_dims(FINCH), "rescale_every_n_layers": rescale})
    for name in ("token_embd_norm", "output_norm"):
        add_norm(m, name, D)
    for il in range(N_LAYER):
        add_channel_mix(m, f"blk.{il}", D, gated=True)
        FINCH.add6(m, f"blk.{il}", qwen=False, fused=fused)
    return m


def rwkv6_logits(m: RandomModel) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e, every = Evaluation(m), m.keys["rescale_every_n_layers"]
    x = layered_norm(e.w, "token_embd_norm", e.w["token_embd"][TOKENS], e.eps)
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        x = x + FINCH.branch6(w, layered_norm(w, "attn_norm", x, e.eps), qwen=False)
        x = x + channel_mix(w, layered_norm(w, "attn_norm_2", x, e.eps))
        x = x / 2 if every and (il + 1) % every == 0 else x
    return layered_norm(e.w, "output_norm", x, e.eps) @ e.w["output"].T


def new_qwen2(arch: str, seed: int, sizes: Sizes, keys: dict[str, Any]) -> RandomModel:
    """Norms and networks of Qwen2."""
    m = rwkv_model(arch, seed, sizes, {**RMS, "token_shift_count": 1, **keys})
    for il in range(N_LAYER):
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"blk.{il}.{name}", D)
        m.ffn(f"blk.{il}", D, F)
    return m


def new_arwkv7(seed: int, sizes: Sizes = ARWKV, *, normed: bool = True) -> RandomModel:
    m = new_qwen2("arwkv7", seed, sizes, low_ranks(sizes))
    for il in range(N_LAYER):
        sizes.add7(m, f"blk.{il}", il, normed=normed)
    return m


def new_rwkv6qwen2(seed: int, sizes: Sizes = QRWKV) -> RandomModel:
    m = new_qwen2("rwkv6qwen2", seed, sizes, {**extra_dims(sizes), "attention.head_count_kv": sizes.kv})
    for il in range(N_LAYER):
        sizes.add6(m, f"blk.{il}", qwen=True)
    return m


def qwen2_logits(m: RandomModel, sizes: Sizes) -> np.ndarray:
    """Logits [T, V] of TOKENS in float64."""
    e, first = Evaluation(m), None
    x = e.w["token_embd"][TOKENS]
    for il in range(N_LAYER):
        w = checks.layer_weights(e, il)
        h = ref.rms_norm(x, w["attn_norm"], e.eps)
        if m.arch == "arwkv7":
            branch, values = sizes.branch7(w, h, first)
            first = values if first is None else first
        else:
            branch = sizes.branch6(w, h, qwen=True)
        x = x + branch
        x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def rwkv7() -> Made:
    m = new_rwkv7(171)
    return m, rwkv7_logits(m)


def rwkv7_odd() -> Made:
    """Heads and ranks of no round number."""
    m = new_rwkv7(172, ODD_GOOSE)
    return m, rwkv7_logits(m, ODD_GOOSE)


def arwkv7() -> Made:
    m = new_arwkv7(173)
    return m, qwen2_logits(m, ARWKV)


def arwkv7_plain() -> Made:
    """Without gates and norms of heads."""
    m = new_arwkv7(174, UNGATED, normed=False)
    return m, qwen2_logits(m, UNGATED)


def rwkv6() -> Made:
    m = new_rwkv6(175)
    return m, rwkv6_logits(m)


def rwkv6_apart() -> Made:
    """Shares of the token before in tensors of their own, as in the first files; never halved."""
    m = new_rwkv6(176, fused=False, rescale=0)
    return m, rwkv6_logits(m)


def rwkv6qwen2() -> Made:
    """Two heads share keys and values."""
    m = new_rwkv6qwen2(177)
    return m, qwen2_logits(m, QRWKV)


MODELS = [rwkv7, rwkv7_odd, arwkv7, arwkv7_plain, rwkv6, rwkv6_apart, rwkv6qwen2]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: Callable[[], Made], tmp_path: Path) -> None:
    model, truth = make()
    checks.check_definition(model, truth, tmp_path, BOUND)


@pytest.mark.parametrize(
    ("make", "key", "value", "message"),
    [
        (rwkv7, "wkv.head_size", 0, "impossible heads: wkv.head_size 0, embedding 64"),
        (rwkv7, "wkv.head_size", 48, "impossible heads: wkv.head_size 48, embedding 64"),
        (rwkv7, "token_shift_count", 1, "token_shift_count is 1, not 2"),
        (rwkv7, "attention.decay_lora_rank", 9, "time_mix_w1.weight' has wrong shape"),
        (rwkv6, "time_mix_extra_dim", 0, "time_mix_w1.weight' has wrong shape"),
        (arwkv7, "token_shift_count", 2, "token_shift_count is 2, not 1"),
        (rwkv6qwen2, "attention.head_count_kv", 3, "4 heads and 3 KV heads"),
    ],
)
def test_what_cannot_be(make: Callable[[], Made], key: str, value: int, message: str, tmp_path: Path) -> None:
    checks.refuses(make()[0], key, value, message, tmp_path)


@pytest.mark.parametrize("name", ["time_mix_ln", "time_mix_ln.bias", "time_mix_g2", "time_mix_lerp_fused"])
def test_half_a_norm_or_gate(name: str, tmp_path: Path) -> None:
    """What files may lack, they lack as a whole."""
    model = arwkv7()[0]
    del model.weights[f"blk.1.{name}"]
    with pytest.raises(FileFormatError, match=f"tensor 'blk.1.{name}.*' not found"):
        Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("make", [rwkv7, arwkv7, rwkv6, rwkv6qwen2], ids=lambda f: f.__name__)
def test_quantized(make: Callable[[], Made], tmp_path: Path) -> None:
    """Matrices of low rank and vectors keep their type, as llama-quantize leaves them."""
    model, truth = make()
    path = tmp_path / "small.gguf"
    assert quantize([str(model.write(tmp_path / "model.gguf")), str(path), "Q8_0"]) == 0
    context = Context(Model.load(path), ContextParams(n_ctx=64, n_threads=1))
    logits = context.decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - truth).max(axis=1)) < 0.1 * np.abs(truth).max()
    with GGUFFile.open(path) as file:
        types = {name: registry.by_id(info.type_id).name for name, info in file.tensors.items()}
    matrices = ("receptance", "key", "value", "output", "gate", "ffn_gate", "ffn_up", "ffn_down", "token_embd")
    coded = {name for name, kind in types.items() if kind != "f32"}
    assert coded == {n for n in types if n.removesuffix(".weight").endswith(matrices) and not n.endswith(".bias")}


def test_size_classes() -> None:
    for arch, layers, width, expected in (
        ("rwkv7", 12, 768, "190M"),
        ("rwkv7", 24, 1024, "450M"),
        ("rwkv7", 24, 2048, "1.5B"),
        ("rwkv7", 32, 2560, "2.9B"),
        ("arwkv7", 28, 3584, "7B"),
        ("rwkv6", 24, 2048, "1.6B"),
        ("rwkv6", 32, 2560, "3B"),
        ("rwkv6", 32, 4096, "7B"),
        ("rwkv6", 61, 4096, "14B"),
        ("rwkv6qwen2", 64, 5120, "32B"),
        ("rwkv6qwen2", 28, 3584, "?B"),
    ):
        keys = {f"{arch}.block_count": layers, f"{arch}.embedding_length": width}
        assert size_class({"general.architecture": arch, **keys}) == expected
