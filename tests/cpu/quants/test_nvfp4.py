"""Models with NVFP4 matrices and factors beside them, as llama.cpp's files have them, against their definition."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from ikpy._native import core
from ikpy.cli import main
from ikpy.engine.adapter import LoraAdapter
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import dequantize, registry
from ikpy.quants.legacy import ue4m3_halves
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import POS, RMS, TOKENS, experts, frame, layer_weights, routed, shape
from tests.cpu.models.reference_models import Evaluation, RandomModel
from tests.cpu.models.shaped_models import Dims, deepseek2, tokens
from tests.cpu.models.test_adapters import make_pairs, merged, write_adapter
from tests.cpu.models.test_arch_gemma3n import gemma3n

NVFP4 = registry.by_name("nvfp4")
SHAPE = shape(2, 128, 4, 2, 32, 192)
N_EXPERT, N_USED, EXPERT_WIDTH = 4, 2, 64
ROUTING = {
    "expert_count": N_EXPERT,
    "expert_used_count": N_USED,
    "expert_feed_forward_length": EXPERT_WIDTH,
}
# Activations are rounded to 8 bits.
BOUND = 0.05


def encode(model: RandomModel, *, factors: bool = True) -> None:
    """Stores all matrices of layers but routers in NVFP4, times a factor each; the weights become what that means."""
    for name in [n for n, w in model.weights.items() if n.startswith("blk.") and w.ndim > 1 and "gate_inp" not in n]:
        w = model.weights[name]
        n_matrices = len(w) if w.ndim == 3 else 1
        # The largest value is the largest that the type holds, as checkpoints have it.
        factor = (np.abs(w).reshape(n_matrices, -1).max(-1) / (448 * 6)).astype(np.float32)
        factor = factor if factors else np.ones_like(factor)
        spread = factor.reshape(-1, *[1] * (w.ndim - 1)) if w.ndim == 3 else factor[0]
        rows = (w / spread).reshape(-1, w.shape[-1]).astype(np.float32)
        data = core.quantize(rows, NVFP4.id, None, 1)
        model.encoded[name] = NVFP4.id, data
        model.weights[name] = dequantize(data.reshape(-1), NVFP4.id, rows.shape[::-1]).reshape(w.shape) * spread
        if factors:
            model.weights[f"{name}.scale"] = factor
            model.weights[f"{name}.input_scale"] = np.full_like(factor, 0.01)
    model.bare = (".input_scale",)


def attention(e: Evaluation, x: np.ndarray, il: int, *, neox: bool) -> np.ndarray:
    """Attention of a layer on x."""
    angles = ref.plain_angles(e.head, 10000.0, POS)
    h = ref.rms_norm(x, e.w[f"blk.{il}.attn_norm"], e.eps)
    q, k, v = e.qkv(il, h)
    if f"blk.{il}.attn_q_norm" in e.w:
        q, k = (ref.rms_norm(t, e.w[f"blk.{il}.attn_{n}_norm"], e.eps) for t, n in ((q, "q"), (k, "k")))
    q, k = (ref.rotate(t, angles, neox=neox) for t in (q, k))
    return e.output(il, ref.attend(q, k, v, 1 / math.sqrt(e.head)))


def dense(*, factors: bool = True) -> tuple[RandomModel, np.ndarray]:
    """Every matrix of a layer with a factor."""
    d, heads, kv, head, f = 128, 4, 2, 32, 192
    m = RandomModel("llama", 71, **SHAPE, **RMS)
    frame(m, d, tied=False)
    for il in range(2):
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"blk.{il}.{name}", d)
        m.attention(f"blk.{il}", d, heads, kv, head)
        m.ffn(f"blk.{il}", d, f)
    encode(m, factors=factors)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(2):
        x = x + attention(e, x, il, neox=False)
        x = x + e.ffn(il, ref.rms_norm(x, e.w[f"blk.{il}.ffn_norm"], e.eps))
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def mixture() -> tuple[RandomModel, np.ndarray]:
    """A factor for every expert."""
    d, heads, kv, head = 128, 4, 2, 32
    m = RandomModel("qwen3moe", 72, **SHAPE, **RMS, **ROUTING)
    frame(m, d, tied=False)
    for il in range(2):
        p = f"blk.{il}"
        for name in ("attn_norm", "ffn_norm"):
            m.norm(f"{p}.{name}", d)
        for name in ("attn_q_norm", "attn_k_norm"):
            m.norm(f"{p}.{name}", head)
        m.attention(p, d, heads, kv, head)
        experts(m, p, d, EXPERT_WIDTH, N_EXPERT)
        for expert in range(N_EXPERT):
            m.weights[f"{p}.ffn_gate_exps"][expert] *= 1 + expert
    encode(m)
    e = Evaluation(m)
    x = e.w["token_embd"][TOKENS]
    for il in range(2):
        x = x + attention(e, x, il, neox=True)
        w = layer_weights(e, il)
        h = ref.rms_norm(x, w["ffn_norm"], e.eps)
        scores = ref.softmax(h @ w["ffn_gate_inp"].T)
        kept = np.where(scores >= np.sort(scores, axis=-1)[:, -N_USED, None], scores, 0)
        x = x + routed(w, h, kept / kept.sum(-1, keepdims=True), N_USED)
    return m, ref.rms_norm(x, e.w["output_norm"], e.eps) @ e.w["output"].T


def logits(path: Path, n_ubatch: int = 64) -> np.ndarray:
    context = Context(
        Model.load(path), ContextParams(n_ctx=256, n_threads=1, n_ubatch=n_ubatch, type_k="f32", type_v="f32")
    )
    return context.decode(Batch.single(TOKENS, logits="all"))


@pytest.mark.parametrize("make", [dense, mixture])
def test_factors_multiply_products(make, tmp_path):
    """The file with factors against the definition, and bit by bit against float matrices that have them within."""
    model, expected = make()
    actual = logits(model.write(tmp_path / "m.gguf"))
    error = np.abs(actual - expected).max(-1) / np.abs(expected).max()
    assert error.max() < BOUND, f"token {error.argmax()}: {error.max():.3g}"
    alone = logits(tmp_path / "m.gguf", n_ubatch=1)
    assert np.abs(alone - expected).max() < BOUND * np.abs(expected).max()
    model.encoded = {}
    model.weights = {n: w for n, w in model.weights.items() if "scale" not in n}
    floats = logits(model.write(tmp_path / "f.gguf"))
    assert np.abs(floats - expected).max() < 5e-5 * np.abs(expected).max()


def test_factor_of_one_changes_nothing(tmp_path):
    model, _ = dense(factors=False)
    plain = logits(model.write(tmp_path / "plain.gguf"))
    for name in list(model.encoded):
        model.weights[f"{name}.scale"] = np.ones(1, np.float32)
    assert np.array_equal(logits(model.write(tmp_path / "one.gguf")), plain)


def test_factor_that_is_not_finite_is_refused(tmp_path):
    model, _ = dense()
    model.weights["blk.1.ffn_up.scale"] = np.array([np.nan], np.float32)
    with pytest.raises(FileFormatError, match=r"'blk.1.ffn_up.scale' is nan; factors of matrices are finite"):
        Model.load(model.write(tmp_path / "m.gguf"))


def test_factor_of_another_shape_is_refused(tmp_path):
    model, _ = dense()
    model.weights["blk.1.ffn_up.scale"] = np.ones(3, np.float32)
    with pytest.raises(FileFormatError, match=r"not used: blk.1.ffn_up.scale"):
        Model.load(model.write(tmp_path / "m.gguf"))


def test_scales_are_fp8_without_sign():
    halves = ue4m3_halves()
    assert halves[[0, 1, 8, 56, 126]].tolist() == [0, 2.0**-10, 2.0**-7, 0.5, 224]
    assert halves[127] == 0 and halves[255] == 240
    assert np.array_equal(halves[128:255], halves[:127])


def test_values_that_the_type_holds_are_encoded_exactly():
    """Of random blocks whose largest level is 6, encoding what they decode to gives the same numbers."""
    rng = np.random.default_rng(4)
    blocks = rng.integers(0, 256, (64, 36)).astype(np.uint8)
    blocks[:, :4] = rng.integers(8, 127, (64, 4))
    blocks[:, 4::8] = 0x7F
    values = dequantize(blocks.reshape(-1), NVFP4.id, (64, 64)).reshape(64, 64)
    again = dequantize(core.quantize(values, NVFP4.id, None, 1).reshape(-1), NVFP4.id, (64, 64)).reshape(64, 64)
    assert np.array_equal(again, values)


@pytest.mark.parametrize("make", [dense, mixture])
def test_quantizing_keeps_factors(make, tmp_path):
    """The numbers of a matrix go to another type, its factor stays."""
    model, expected = make()
    path, out = model.write(tmp_path / "m.gguf"), tmp_path / "out.gguf"
    assert main(["quantize", "--allow-requantize", str(path), str(out), "Q8_0"]) == 0
    with GGUFFile.open(path) as before, GGUFFile.open(out) as after:
        for name, info in before.tensors.items():
            numbers, again = (
                dequantize(f.data(t), t.type_id, t.shape) for f, t in ((before, info), (after, after.tensors[name]))
            )
            assert np.abs(again - numbers).max() <= 0.005 * np.abs(numbers).max(), name
            assert registry.by_id(after.tensors[name].type_id).name != "nvfp4"
    if make is dense:  # few tokens of the mixture get other experts
        assert np.abs(logits(out) - expected).max() < BOUND * np.abs(expected).max()


def in_floats(model: RandomModel) -> RandomModel:
    """The same with F32 matrices, whose factors stay tensors of their own."""
    result = RandomModel(model.arch, 0)
    result.keys, result.weights, result.numbered_words = model.keys, dict(model.weights), True
    for name in model.encoded:
        w, factor = model.weights[name], model.weights[f"{name}.scale"]
        result.weights[name] = (w / factor.reshape(-1, *[1] * (w.ndim - 1) if w.ndim == 3 else ())).astype(np.float32)
        result.weights.pop(f"{name}.input_scale")
    return result


@pytest.mark.parametrize("make", [dense, mixture])
def test_factors_of_floats(make, tmp_path):
    """Factors count for any type, so that products are exact here."""
    model, expected = make()
    for n_ubatch in (64, 7, 1):
        error = np.abs(logits(in_floats(model).write(tmp_path / "m.gguf"), n_ubatch) - expected).max(-1)
        assert error.max() < 5e-5 * np.abs(expected).max(), f"token {error.argmax()}: {error.max():.3g}"


@pytest.mark.parametrize("make", [dense, mixture])
def test_adapters_are_added_behind_factors(make, tmp_path):
    model = in_floats(make()[0])
    pairs = {name: pair for name, pair in make_pairs(model, 4).items() if f"{name}.scale" in model.weights}
    loaded = Model.load(model.write(tmp_path / "m.gguf"))
    adapter = LoraAdapter.load(write_adapter(tmp_path / "a.gguf", model.arch, pairs, 8.0), loaded)
    settings = ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_v="f32", adapters=(adapter,))
    context = Context(loaded, settings)
    context.adapter_scales[:] = 1.0
    actual = context.decode(Batch.single(TOKENS, logits="all"))
    # Without factors: what they multiply has them within.
    plain = RandomModel(model.arch, 0)
    plain.keys, plain.numbered_words = model.keys, True
    plain.weights = {n: w for n, w in model.weights.items() if not n.endswith(".scale")}
    for name in pairs:
        w, factor = plain.weights[name], model.weights[f"{name}.scale"]
        plain.weights[name] = w * factor.reshape(-1, *[1] * (w.ndim - 1) if w.ndim == 3 else ())
    expected = logits(merged(plain, pairs, 2.0).write(tmp_path / "merged.gguf"))
    assert np.abs(actual - expected).max() < 5e-5 * np.abs(expected).max()


def per_head(model: RandomModel) -> RandomModel:
    """attn_k_b and attn_v_b in place of attn_kv_b, with a factor for every head."""
    result = RandomModel(model.arch, 0)
    result.keys, result.weights = model.keys, dict(model.weights)
    heads, rank = model.keys["attention.head_count"], model.keys["attention.kv_lora_rank"]
    for il in range(model.keys["block_count"]):
        both = result.weights.pop(f"blk.{il}.attn_kv_b").reshape(heads, -1, rank)
        n_keys = result.weights[f"blk.{il}.attn_q"].shape[0] // heads - model.keys["rope.dimension_count"]
        factors = (2.0 ** (np.arange(heads) % 5 - 2)).astype(np.float32)
        for name, part in (("k", both[:, :n_keys].swapaxes(1, 2)), ("v", both[:, n_keys:])):
            result.weights[f"blk.{il}.attn_{name}_b"] = np.ascontiguousarray(part / factors[:, None, None])
            result.weights[f"blk.{il}.attn_{name}_b.scale"] = factors
    return result


def in_one(model: RandomModel) -> RandomModel:
    """attn_kv_b with a factor."""
    for name in [n for n in model.weights if n.endswith("attn_kv_b")]:
        model.weights[name] = model.weights[name] / np.float32(4)
        model.weights[f"{name}.scale"] = np.full(1, 4, np.float32)
    return model


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("change", [in_one, per_head])
def test_factors_of_latent_attention(change, mla, tmp_path):
    """Whatever of attn_kv_b, attn_k_b and attn_v_b the loader makes of the others has their factors once."""
    sizes = Dims(heads=4, kv=4, rank=64, rot=16, dense=2)
    model, expected = deepseek2(sizes)
    path = change(model).write(tmp_path / "m.gguf")
    settings = ContextParams(n_ctx=256, n_threads=1, mla=mla, type_k="f32", type_v="f32")
    context = Context(Model.load(path, ModelParams(mla=mla)), settings)
    actual = context.decode(Batch.single(tokens(sizes.vocab), logits="all"))
    error = np.abs(actual - expected).max(-1) / np.abs(expected).max()
    assert error.max() < 2e-4, f"token {error.argmax()}: {error.max():.3g}"


def test_factors_of_what_no_product_has_are_refused(tmp_path):
    model, _ = dense()
    model.weights["blk.1.ffn_norm.scale"] = np.full(1, 2, np.float32)
    with pytest.raises(FileFormatError, match=r"not used: blk.1.ffn_norm.scale"):
        Model.load(model.write(tmp_path / "m.gguf"))


def test_factors_of_matrices_that_are_not_used(tmp_path):
    """The last layers share keys and values; their own matrices are skipped with all that lies beside them."""
    model = gemma3n()
    name = f"blk.{model.keys['block_count'] - 1}.attn_k"
    model.weights |= {f"{name}.scale": np.full(1, 2, np.float32), f"{name}.input_scale": np.ones(1, np.float32)}
    model.bare = (".input_scale",)
    Model.load(model.write(tmp_path / "m.gguf"))
