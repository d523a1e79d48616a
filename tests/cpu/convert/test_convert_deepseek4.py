"""`ikpy convert` of DeepSeek V4: logits that transformers recorded, its names and the official ones, FP8 and FP4."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.words import e4m3_values
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import IkpyError
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import dequantize, registry
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import deepseek4_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.test_convert import types

TOLERANCE = 5e-4
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Magnitudes of e2m1 by the three low bits."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "checkpoint")


def values(file: GGUFFile, name: str) -> np.ndarray:
    """Values of a tensor, slowest dimension first."""
    info = file.tensors[name]
    return np.asarray(dequantize(file.data(info), info.type_id, info.shape)).reshape(tuple(reversed(info.shape)))


def assert_same(ours: GGUFFile, expected: GGUFFile) -> None:
    """Equal tensors and keys."""
    assert list(ours.tensors) == list(expected.tensors)
    for name, info in expected.tensors.items():
        np.testing.assert_array_equal(ours.data(ours.tensors[name]), expected.data(info), name)
    assert {k: str(v) for k, v in ours.metadata.items()} == {k: str(v) for k, v in expected.metadata.items()}


def test_logits(folder, tmp_path):
    file = convert(folder, tmp_path, outtype="f32")
    golden = np.load(tiny.GOLDEN)
    context = Context(Model.load(file.path), ContextParams(n_ctx=256, n_threads=1, type_k="f32", type_indexer="f32"))
    logits = context.decode(Batch.single(golden["tokens"], 0, logits="all"))
    assert np.abs(logits[golden["rows"]] - golden["logits"]).max() <= TOLERANCE


def test_golden_tokens_are_those_of_the_seed():
    assert np.array_equal(np.load(tiny.GOLDEN)["tokens"], tiny.tokens())


# names

PUBLISHED = {
    r"^embed\.": "model.embed_tokens.",
    r"^head\.": "lm_head.",
    r"^norm\.": "model.norm.",
    r"^hc_head_": "model.hc_head.hc_",
    r"^layers\.": "model.layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.hc_(attn|ffn)_(\w+)$": r".\1_hc.\2",
    r"\.attn\.attn_sink": ".self_attn.sinks",
    r"\.attn\.indexer\.weights_proj": ".self_attn.compressor.indexer.scorer.weights_proj",
    r"\.attn\.indexer\.wq_b": ".self_attn.compressor.indexer.q_b_proj",
    r"\.attn\.indexer\.compressor\.": ".self_attn.compressor.indexer.",
    r"\.attn\.": ".self_attn.",
    r"(compressor\.(indexer\.)?)wkv": r"\1kv_proj",
    r"(compressor\.(indexer\.)?)wgate": r"\1gate_proj",
    r"(compressor\.(indexer\.)?)ape": r"\1position_bias",
    r"(compressor\.(indexer\.)?)norm": r"\1kv_norm",
    r"self_attn\.wq_a": "self_attn.q_a_proj",
    r"self_attn\.wq_b": "self_attn.q_b_proj",
    r"self_attn\.q_norm": "self_attn.q_a_norm",
    r"self_attn\.wkv": "self_attn.kv_proj",
    r"self_attn\.wo_a": "self_attn.o_a_proj",
    r"self_attn\.wo_b": "self_attn.o_b_proj",
    r"\.ffn\.gate\.bias": ".mlp.gate.e_score_correction_bias",
    r"\.ffn\.shared_experts\.w1": ".mlp.shared_experts.gate_proj",
    r"\.ffn\.shared_experts\.w2": ".mlp.shared_experts.down_proj",
    r"\.ffn\.shared_experts\.w3": ".mlp.shared_experts.up_proj",
    r"\.ffn\.": ".mlp.",
}


def as_published(tensors: made.Tensors) -> None:
    """The names of transformers' model, with the experts of a layer in one tensor."""
    for il in range(len(tiny.RATIOS)):
        prefix = f"layers.{il}.ffn.experts"
        parts = {w: [tensors.pop(f"{prefix}.{e}.{w}.weight") for e in range(tiny.N_EXPERT)] for w in ("w1", "w2", "w3")}
        both = b"".join(gate[2] + up[2] for gate, up in zip(parts["w1"], parts["w3"], strict=True))
        tensors[f"{prefix}.gate_up_proj"] = "BF16", (tiny.N_EXPERT, 2 * tiny.FF, tiny.D), both
        down = b"".join(part[2] for part in parts["w2"])
        tensors[f"{prefix}.down_proj"] = "BF16", (tiny.N_EXPERT, tiny.D, tiny.FF), down
    for name in [name for name in tensors if not name.startswith("mtp")]:
        renamed = name
        for pattern, replacement in PUBLISHED.items():
            renamed = re.sub(pattern, replacement, renamed)
        assert renamed != name
        tensors[renamed] = tensors.pop(name)


def as_saved(tensors: made.Tensors) -> None:
    """The mixture that transformers 5.24 saves."""
    for name in [name for name in tensors if not name.startswith(("mtp", "head"))]:
        renamed = name.replace("attn.kv_norm", "attn.norm").replace("embed.", "embed_tokens.")
        tensors[f"model.{renamed.replace('hc_head_', 'hc_head.hc_')}"] = tensors.pop(name)


@pytest.mark.parametrize("rename", [as_published, as_saved])
def test_names_of_transformers(rename, folder, tmp_path):
    official = convert(folder, tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    renamed = tiny.write(other / "checkpoint")
    made.change_tensors(renamed, rename)
    assert_same(convert(renamed, other), official)


def test_configuration_of_transformers(folder, tmp_path):
    """Kinds of layers and RoPE as transformers 5 writes them."""
    official = convert(folder, tmp_path)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1)
    made.amend(
        folder,
        drop=("compress_ratios", "num_hash_layers", "rope_scaling", "qk_rope_head_dim"),
        layer_types=[kinds[ratio] for ratio in tiny.RATIOS],
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        compress_rope_theta=160000.0,
        partial_rotary_factor=0.5,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            "compress": {**yarn, "rope_theta": 40000.0, "attention_factor": 1.0, "partial_rotary_factor": 0.5},
        },
    )
    again = tmp_path / "again"
    again.mkdir()
    assert_same(convert(folder, again), official)


# keys and types


def test_keys(folder, tmp_path):
    keys = convert(folder, tmp_path).metadata
    expected: dict[str, Any] = {
        "block_count": 4,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.q_lora_rank": 32,
        "attention.output_lora_rank": 32,
        "attention.output_group_count": 2,
        "attention.sliding_window": 128,
        "attention.compress_ratios": [0, 4, 128, 4],
        "attention.compress_rope_freq_base": 40000.0,
        "attention.indexer.head_count": 16,
        "attention.indexer.key_length": 64,
        "attention.indexer.top_k": 4,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_gating_func": 4,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
        "hash_layer_count": 1,
        "swiglu_clamp_exp": [1.0] * 4,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
    }
    found = {name: keys[f"deepseek4.{name}"] for name in expected}
    assert {k: list(v) if isinstance(v, np.ndarray) else v for k, v in found.items()} == expected
    assert "deepseek4.nextn_predict_layers" not in keys


@pytest.mark.parametrize("outtype", ["bf16", "f16", "q8_0"])
def test_types(outtype, folder, tmp_path):
    file = convert(folder, tmp_path, outtype=outtype)
    found = types(file)
    plain = {name for name, kind in found.items() if kind == "f32" and len(file.tensors[name].shape) > 1}
    parts = (
        "hc_attn_fn.weight",
        "hc_ffn_fn.weight",
        "_compressor_ape.weight",
        "ffn_gate_inp.weight",
        "output_hc_fn.weight",
    )
    assert plain == {name for name in found if name.endswith(parts)}
    assert found["blk.0.ffn_gate_tid2eid.weight"] == "i32"
    assert found["blk.1.attn_compressor_kv.weight"] == found["blk.1.indexer.proj.weight"] == outtype
    table = file.data(file.tensors["blk.0.ffn_gate_tid2eid.weight"]).view(np.int32)
    assert np.array_equal(table.reshape(tiny.V, tiny.USED), tiny.weights()["layers.0.ffn.gate.tid2eid"])


def test_prediction_layers_are_left_out(folder):
    conversion = Conversion(folder)
    assert any("1 tensors of prediction layers (MTP) are left out" in note for note in conversion.notes)
    assert not any("enorm" in tensor.output.name for tensor in conversion.tensors)


# FP8 and FP4


def quantize(tensors: made.Tensors) -> dict[str, np.ndarray]:
    """Random FP8 and FP4 in the places where the repository has them; their values by official name."""
    random = np.random.default_rng(3)
    expected = {}
    for name, (_, shape, _) in list(tensors.items()):
        base = name.removesuffix(".weight")
        if re.search(r"\.experts\.\d+\.w[123]$", base):
            codes = random.integers(0, 256, (shape[0], shape[1] // 2), np.uint8)
            exponents = random.integers(118, 124, (shape[0], shape[1] // 32), np.uint8)
            nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(shape)
            signed = np.where(nibbles & 8, -FP4[nibbles & 7], FP4[nibbles & 7])
            expected[name] = signed * np.exp2(exponents.astype(np.float32) - 127).repeat(32, 1)
            tensors[name] = "I8", codes.shape, codes.tobytes()
        elif re.search(r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)$|shared_experts\.w[123]$", base):
            codes = random.integers(0, 256, shape, np.uint8)
            codes[codes & 127 == 127] = 0  # NaN
            exponents = random.integers(110, 116, (-(-shape[0] // 128), -(-shape[1] // 128)), np.uint8)
            scales = np.exp2(exponents.astype(np.float32) - 127).repeat(128, 0).repeat(128, 1)
            expected[name] = e4m3_values()[codes] * scales[: shape[0], : shape[1]]
            tensors[name] = "F8_E4M3", shape, codes.tobytes()
        else:
            continue
        tensors[f"{base}.scale"] = "F8_E8M0", exponents.shape, exponents.tobytes()
    return expected


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}


def quantized(folder: Path) -> dict[str, np.ndarray]:
    """Change the checkpoint; values by official name."""
    expected: dict[str, np.ndarray] = {}
    made.change_tensors(folder, lambda tensors: expected.update(quantize(tensors)))
    made.amend(folder, quantization_config=FP8, expert_dtype="fp4")
    return expected


@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_experts_of_fp4_become_mxfp4(outtype, folder, tmp_path):
    expected = quantized(folder)
    file = convert(folder, tmp_path, outtype=outtype)
    assert file.metadata["general.file_type"] == registry.ftype_by_name("MXFP4").id
    found = types(file)
    assert {name for name, kind in found.items() if kind == "mxfp4"} == {n for n in found if "_exps.weight" in n}
    for il in range(len(tiny.RATIOS)):
        for w, part in EXPERTS.items():
            stack = [expected[f"layers.{il}.ffn.experts.{e}.{w}.weight"] for e in range(tiny.N_EXPERT)]
            assert np.array_equal(values(file, f"blk.{il}.ffn_{part}_exps.weight"), np.stack(stack))


def test_fp8_is_decoded(folder, tmp_path):
    expected = quantized(folder)
    file = convert(folder, tmp_path, outtype="f32")
    names = {
        "attn.wq_a": "attn_q_a",
        "attn.wo_a": "attn_output_a",
        "attn.indexer.wq_b": "indexer.attn_q_b",
        "ffn.shared_experts.w2": "ffn_down_shexp",
    }
    for source, target in names.items():
        assert np.array_equal(values(file, f"blk.1.{target}.weight"), expected[f"layers.1.{source}.weight"]), target


def test_fp4_beside_other_experts_is_decoded(folder, tmp_path):
    """One expert of a stack was stored in bf16: MXFP4 cannot hold it."""
    plain = np.linspace(-1, 1, tiny.FF * tiny.D, dtype=np.float32).reshape(tiny.FF, tiny.D)
    expected = quantized(folder)

    def change(tensors: made.Tensors) -> None:
        tensors["layers.1.ffn.experts.2.w1.weight"] = made.bf16(plain)
        del tensors["layers.1.ffn.experts.2.w1.scale"]

    made.change_tensors(folder, change)
    file = convert(folder, tmp_path, outtype="f32")
    found = values(file, "blk.1.ffn_gate_exps.weight")
    assert np.array_equal(found[2], tiny.bf16_values(plain))
    assert np.array_equal(found[3], expected["layers.1.ffn.experts.3.w1.weight"])


# errors

Change = Callable[[made.Tensors], Any]


def wrong_table(tensors: made.Tensors) -> None:
    kind, shape, data = tensors["layers.0.ffn.gate.tid2eid"]
    tensors["layers.0.ffn.gate.tid2eid"] = kind, shape, np.int64(tiny.N_EXPERT).tobytes() + data[8:]


def table_of_floats(tensors: made.Tensors) -> None:
    tensors["layers.0.ffn.gate.tid2eid"] = made.bf16(np.zeros((tiny.V, tiny.USED), np.float32))


def integers_for_floats(tensors: made.Tensors) -> None:
    tensors["layers.1.attn.wkv.weight"] = "I64", (tiny.SIZE, tiny.D), bytes(8 * tiny.SIZE * tiny.D)


def no_bias(tensors: made.Tensors) -> None:
    del tensors["layers.2.ffn.gate.bias"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_table, "names expert 8 of 8"),
        (table_of_floats, "numbers of type bf16, not integers"),
        (integers_for_floats, "has type I64"),
        (no_bias, "layer 2 lacks exp_probs_b.bias, which layer 1 has"),
    ],
)
def test_wrong_tensors(change, message, folder, tmp_path):
    made.change_tensors(folder, change)
    with pytest.raises(IkpyError, match=message):
        convert(folder, tmp_path)


def test_fp4_without_scales(folder, tmp_path):
    quantized(folder)
    made.change_tensors(folder, lambda tensors: tensors.pop("layers.1.ffn.experts.2.w1.scale"))
    with pytest.raises(IkpyError, match=r"layers\.1\.ffn\.experts\.2\.w1\.weight' has type I8"):
        convert(folder, tmp_path)


def test_fp4_with_scales_of_another_shape(folder, tmp_path):
    quantized(folder)

    def change(tensors: made.Tensors) -> None:
        tensors["layers.1.ffn.experts.2.w1.scale"] = "F8_E8M0", (tiny.FF, 1), bytes(tiny.FF)

    made.change_tensors(folder, change)
    with pytest.raises(IkpyError, match=r"shapes of 'layers\.1\.ffn\.experts\.2\.w1\.weight' and"):
        convert(folder, tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"compress_ratios": [0, 8, 128, 4]}, "compression ratios other than 0, 4 and 128"),
        ({"compress_ratios": [0, 4]}, "2 compression ratios for 4 layers"),
        ({"compress_ratios": None}, "'compress_ratios' is missing"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "tables of experts behind the first layers"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE scaling 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.2}}, "attention_factor 1.2"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ],
)
def test_refused_configurations(values, message, folder, tmp_path):
    made.amend(folder, **values)
    with pytest.raises(IkpyError, match=message):
        convert(folder, tmp_path)
