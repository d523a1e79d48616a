"""DeciLM and Llama-Nemotron: random models with every kind of layer against their definition."""

from __future__ import annotations

import math
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
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

D, HEADS, HEAD, BASE = 96, 6, 32, 5e5
# Heads, KV heads and width of the network of every layer: none, a matrix, attention with and without a network.
KINDS = ((6, 2, 96), (6, 0, 160), (0, 0, 64), (0, 0, 0), (6, 6, 32), (6, 1, 64), (6, 0, 32), (0, 0, 96), (6, 3, 64))
WITHOUT_NETWORK = ((0, 0, 64), *KINDS[:5], (6, 1, 0), (6, 0, 0), (6, 3, 0))
"""Layers that mix and have no network, the last one among them; the first does not attend."""


def new_model(seed: int, kinds: tuple[tuple[int, int, int], ...] = KINDS, *, biases: bool = False) -> RandomModel:
    """A file with layers of these kinds, with frequency factors."""
    keys = {
        **checks.shape(len(kinds), D, HEADS, HEADS, HEAD, 0),
        **RMS,
        "attention.head_count": [heads for heads, _, _ in kinds],
        "attention.head_count_kv": [kv for _, kv, _ in kinds],
        "feed_forward_length": [f for _, _, f in kinds],
        "rope.freq_base": BASE,
    }
    m = RandomModel("deci", seed, **keys)
    checks.frame(m, D, tied=False)
    m.weights["rope_freqs"] = m.random.uniform(1, 8, HEAD // 2).astype(np.float32)
    for il, (heads, kv, f) in enumerate(kinds):
        p = f"blk.{il}"
        if heads:
            m.norm(f"{p}.attn_norm", D)
        if kv:
            m.attention(p, D, heads, kv, HEAD)
        elif heads:
            m.matrix(f"{p}.attn_output", D, D)
        if f:
            m.norm(f"{p}.ffn_norm", D)
            m.ffn(p, D, f)
        if biases and kv:
            for name, n in (("q", heads * HEAD), ("k", kv * HEAD), ("v", kv * HEAD), ("output", D)):
                m.vector(f"{p}.attn_{name}.bias", n)
    return m


def evaluated(
    m: RandomModel, tokens: np.ndarray = TOKENS, *, neox: bool = False, base: float = BASE, head: int = HEAD
) -> np.ndarray:
    """Logits [T, V] in float64."""
    e = Evaluation(m)
    x, pos = e.w["token_embd"][tokens], np.arange(len(tokens), dtype=np.float64)
    angles = ref.plain_angles(head, base, pos, e.w["rope_freqs"])
    for il in range(e.n_layer):
        w = checks.layer_weights(e, il)
        if "attn_q" in w:
            q, k, v = e.qkv(il, ref.rms_norm(x, w["attn_norm"], e.eps))
            q, k = (ref.rotate(heads, angles, neox=neox) for heads in (q, k))
            x = x + e.output(il, ref.attend(q, k, v, 1 / math.sqrt(head)))
        elif "attn_output" in w:
            x = x + ref.rms_norm(x, w["attn_norm"], e.eps) @ w["attn_output"].T
        if "ffn_up" in w:
            x = x + e.ffn(il, ref.rms_norm(x, w["ffn_norm"], e.eps))
    return ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def deci() -> tuple[RandomModel, np.ndarray]:
    """Every kind of layer of the published models."""
    m = new_model(111)
    return m, evaluated(m)


def deci_without_networks() -> tuple[RandomModel, np.ndarray]:
    """Layers that mix and have no network; biases."""
    m = new_model(112, WITHOUT_NETWORK, biases=True)
    return m, evaluated(m)


def deci_empty_last() -> tuple[RandomModel, np.ndarray]:
    """The last layer is empty."""
    m = new_model(113, (*KINDS[1:5], (0, 0, 0)))
    return m, evaluated(m)


MODELS = [deci, deci_without_networks, deci_empty_last]


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_definition(make: object, tmp_path: Path) -> None:
    model, truth = make()  # type: ignore[operator]
    path = checks.check_definition(model, truth, tmp_path)
    checks.check_quantized_cache(path, truth, 0.05)
    checks.check_shift(path)


@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_rows_that_give_no_logits(make: object, tmp_path: Path) -> None:
    model, truth = make()  # type: ignore[operator]
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32")
    context = Context(Model.load(model.write(tmp_path / "model.gguf")), settings)
    assert np.abs(context.decode(Batch.single(TOKENS))[-1] - truth[-1]).max() < 5e-5 * np.abs(truth).max()


def test_layers_that_do_not_attend_have_no_cache(tmp_path: Path) -> None:
    path = deci()[0].write(tmp_path / "model.gguf")
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1, type_k="f16", type_v="f16"))
    assert {layer for layer, _ in context.kv.tensors} == {il for il, (_, kv, _) in enumerate(KINDS) if kv}
    assert context.kv.nbytes() == 256 * 2 * 2 * HEAD * sum(kv for _, kv, _ in KINDS)


def test_one_number_for_all_layers(tmp_path: Path) -> None:
    """DeciLM 7B: KV heads differ, heads and widths do not."""
    kinds = ((6, 2, 96), (6, 1, 96), (6, 3, 96))
    model = new_model(114, kinds)
    model.keys |= {"attention.head_count": 6, "feed_forward_length": 96}
    checks.check_definition(model, evaluated(model), tmp_path)


def test_what_cannot_be(tmp_path: Path) -> None:
    heads, kv = ([kind[i] for kind in KINDS] for i in range(2))
    for key, value, message in (
        ("attention.head_count_kv", [*kv[:-1], 4], "layer 8 has 6 heads and 4 KV heads"),
        ("attention.head_count", [*heads[:-1], 0], "layer 8 has 0 heads and 3 KV heads"),
        ("attention.head_count", [*heads[:2], 1, *heads[3:]], "tensor 'blk.2.attn_norm.weight' not found"),
        ("feed_forward_length", [0] * len(KINDS), "wrong number of tensors"),
        ("rope.dimension_count", 8, "invalid n_rot: 8, expected 32"),
    ):
        model = deci()[0]
        model.keys[key] = value
        with pytest.raises(IkpyError, match=message):
            Model.load(model.write(tmp_path / "model.gguf"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M", "IQ4_KS"])
def test_quantized(kind: str, tmp_path: Path) -> None:
    model, truth = deci()
    model.write(tmp_path / "model.gguf")
    assert quantize([str(tmp_path / "model.gguf"), str(tmp_path / "small.gguf"), kind]) == 0
    with GGUFFile.open(tmp_path / "small.gguf") as file:
        kept = [name for name, info in file.tensors.items() if info.type_id == 0]
        assert all(name.endswith(("norm.weight", ".bias", "rope_freqs.weight")) for name in kept), kept
    context = Context(Model.load(tmp_path / "small.gguf"), ContextParams(n_ctx=64, n_threads=1))
    logits = context.decode(Batch.single(TOKENS, logits="all"))
    assert np.median(np.abs(logits - truth).max(axis=1)) < 0.4 * np.abs(truth).max()
    assert logits.shape == (len(POS), N_VOCAB)
