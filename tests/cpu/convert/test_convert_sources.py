"""`ikpy convert`: FP8, shards, other parts of a checkpoint, names that transformers does not have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.convert.output_tensor import pieces
from ikpy.convert.weights import scale_blocks
from ikpy.convert.words import e4m3_values
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.shared import SHARED


def test_e4m3_values():
    values = e4m3_values()
    assert values[0x7E] == 448 and values[0xFE] == -448 and values[1] == 2.0**-9 and values[0x38] == 1
    assert np.isnan(values[[0x7F, 0xFF]]).all() and np.isfinite(np.delete(values, [0x7F, 0xFF])).all()


@pytest.mark.parametrize("n", [1, 10, 100, 10_000])
def test_pieces_are_whole_rows_in_order(n):
    """Also of views; what lies in order is not taken matrix by matrix, of which convolutions have many."""
    array = np.arange(6 * 24 * 8).reshape(6, 24, 8)
    for values in (array, array[:, ::2], array.swapaxes(0, 1), array.reshape(6, 6, 4, 8).transpose(1, 0, 3, 2)):
        found = list(pieces(values, n))
        assert all(piece.flags.c_contiguous and piece.shape[1] == values.shape[-1] for piece in found)
        np.testing.assert_array_equal(np.concatenate(found).reshape(values.shape), values)
    assert len(list(pieces(array.reshape(-1, 2, 2), n))) == -(-array.size // max(2, n))


@pytest.mark.parametrize("shape", [(5, 7), (128, 256), (130, 300), (3, 6, 9)])
def test_block_scales(shape):
    random = np.random.default_rng(1)
    block = (4, 3) if max(shape) < 10 else (128, 128)
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    values, scale = random.normal(size=shape).astype(np.float32), random.random(grid, np.float32)
    spread = scale.repeat(block[0], -2).repeat(block[1], -1)[..., : shape[-2], : shape[-1]]
    assert np.array_equal(scale_blocks(values.copy(), scale, block, "w"), values * spread)


@pytest.mark.parametrize("scale_type", ["F32", "BF16", "F8_E8M0"])
@pytest.mark.parametrize("scale_shape", [(1,), (96, 1), (1, 1)], ids=["tensor", "row", "block"])
def test_fp8_with_one_scale_per_tensor_row_or_block(scale_shape, scale_type, tmp_path):
    folder = made.copy("llama", tmp_path)
    random = np.random.default_rng(2)
    codes, exponents = random.integers(0, 126, (96, 64), np.uint8), random.integers(120, 130, scale_shape, np.uint8)
    scale = np.exp2(exponents.astype("<f4") - 127)
    stored = {
        "F32": ("F32", scale_shape, scale.tobytes()),
        "BF16": made.bf16(scale),
        "F8_E8M0": ("F8_E8M0", scale_shape, exponents.tobytes()),
    }[scale_type]
    name = "model.layers.1.mlp.up_proj.weight"
    made.change_tensors(
        folder,
        lambda t: t.update(
            {
                name: ("F8_E4M3", (96, 64), codes.tobytes()),
                f"{name}_scale": stored,
                "model.layers.1.mlp.up_proj.input_scale": ("F32", (1,), b"\0\0\0\0"),
            }
        ),
    )
    file = convert(folder, tmp_path, outtype="f32")
    values = file.data(file.tensors["blk.1.ffn_up.weight"]).view(np.float32).reshape(96, 64)
    assert np.array_equal(values, e4m3_values()[codes] * scale.reshape(-1, 1))


def test_sharded_checkpoint_gives_the_same_file(tmp_path):
    folder = made.copy("mixtral", tmp_path)
    Conversion(folder, ConvertOptions(outfile=str(tmp_path / "one.gguf"))).write()
    made.split_into_shards(folder, 5)
    Conversion(folder, ConvertOptions(outfile=str(tmp_path / "many.gguf"))).write()
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "many.gguf").read_bytes()


def test_other_parts_and_prediction_layers_are_left_out(tmp_path):
    folder = made.copy("gemma3", tmp_path)
    plain = convert(folder, tmp_path)
    names = list(plain.tensors)

    def wrap(tensors: made.Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        for part in ("vision_tower.blocks.0", "embed_vision.embedding_projection", "embed_audio.embedding_projection"):
            tensors[f"{part}.weight"] = made.bf16(np.zeros((2, 2), np.float32))
        tensors["language_model.model.layers.7.eh_proj.weight"] = made.bf16(np.zeros((2, 2), np.float32))

    made.change_tensors(folder, wrap)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    conversion = Conversion(folder, ConvertOptions(outfile=str(tmp_path / "out.gguf")))
    assert [tensor.output.name for tensor in conversion.tensors] == names
    assert len(conversion.notes) == 2 and "prediction" in conversion.notes[0] and "other parts" in conversion.notes[1]


def test_gemma3_defaults_of_published_configurations(tmp_path):
    folder = made.copy("gemma3", tmp_path)
    made.amend(folder, drop=("max_position_embeddings", "rms_norm_eps", "rope_parameters", "layer_types"))
    keys = convert(folder, tmp_path).metadata
    assert keys["gemma3.context_length"] == 131072 and keys["gemma3.rope.freq_base"] == 1e6


def test_window_layers_that_a_configuration_does_not_list(tmp_path):
    folder = made.copy("exaone4", tmp_path)
    listed = convert(folder, tmp_path).metadata["exaone4.attention.sliding_window_pattern"]
    made.amend(folder, drop=("layer_types",))
    keys = convert(folder, tmp_path).metadata
    assert list(keys["exaone4.attention.sliding_window_pattern"]) == list(listed) == [1, 1, 1, 0]
    made.amend(folder, drop=("sliding_window",))
    assert "exaone4.attention.sliding_window" not in convert(folder, tmp_path).metadata


def test_windows_of_llama_are_noted(tmp_path):
    folder = made.copy("mistral", tmp_path)
    made.amend(folder, sliding_window=8, layer_types=["sliding_attention"] * 2)
    assert "window of 8 tokens is not part" in Conversion(folder).notes[0]


@pytest.mark.parametrize("truncate", [None, True, False])
def test_a_yarn_ramp_that_is_not_rounded_is_noted(truncate, tmp_path):
    folder = made.copy("qwen2", tmp_path)
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": truncate}
    made.amend(folder, rope_parameters={k: v for k, v in rope.items() if v is not None})
    assert ["ramp is rounded" in note for note in Conversion(folder).notes] == [True] * (truncate is False)


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({"index_topk_freq": 2}, [True, True, False]),
        ({"index_topk_freq": 3, "index_skip_topk_offset": 1}, [True, False, False]),
        ({"index_topk_pattern": "FSF"}, [True, False, True]),
        ({"index_topk_freq": 1}, None),
        ({}, None),
    ],
)
def test_layers_with_indexers_of_their_own(config, full, tmp_path):
    """By the schedule of published configurations; files say nothing where all have one."""
    folder = made.copy("glm-dsa", tmp_path)
    made.amend(folder, drop=("indexer_types",), **config)
    assert Conversion(folder).metadata.get("glm-dsa.attention.indexer.types") == full


BAILING_NAMES = {
    "token_embd": "model.word_embeddings",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_qkv": "attention.query_key_value",
    "attn_q_norm": "attention.query_layernorm",
    "attn_k_norm": "attention.key_layernorm",
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
BAILING_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "head_dim": "attention.key_length",
}


def _write_bailing(file: GGUFFile, folder: Path) -> None:
    """The golden file of bailingmoe2 as a checkpoint with the names Ling 2.0 is published with."""
    tensors: made.Tensors = {}
    for info in file.tensors.values():
        layer, base = info.name.split(".")[1], info.name.split(".")[-2]
        prefix = f"model.layers.{layer}." if info.name.startswith("blk.") else ""
        dtype = {0: "F32", 1: "F16"}[info.type_id]
        shape, data = tuple(reversed(info.shape)), file.data(info).tobytes()
        if base == "exp_probs_b":
            tensors[f"{prefix}mlp.gate.expert_bias"] = (dtype, shape, data)
            continue
        name = f"{prefix}{BAILING_NAMES[base]}.weight"
        n_parts = shape[0] if "{e}" in name else 1
        for e in range(n_parts):
            part = data[e * len(data) // n_parts : (e + 1) * len(data) // n_parts]
            tensors[name.replace("{e}", str(e))] = (dtype, shape[1:] if "{e}" in name else shape, part)
    made.write_tensors(folder / "model.safetensors", tensors)
    arch = {key.removeprefix("bailingmoe2."): value for key, value in file.metadata.items()}
    config = {name: np.asarray(arch[key]).item() for name, key in BAILING_KEYS.items() if key in arch}
    config["partial_rotary_factor"] = arch["rope.dimension_count"] / arch["attention.key_length"]
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", **config})
    )


@pytest.mark.skipif(not (SHARED / "golden" / "zoo" / "bailingmoe2.gguf").exists(), reason="no golden model")
def test_bailingmoe2_gives_the_golden_file(tmp_path):
    golden = GGUFFile.open(str(SHARED / "golden" / "zoo" / "bailingmoe2.gguf"))
    folder = made.copy("llama", tmp_path)
    _write_bailing(golden, folder)
    file = convert(folder, tmp_path)
    assert set(file.tensors) == set(golden.tensors)
    for name, info in golden.tensors.items():
        assert file.tensors[name].shape == info.shape and file.tensors[name].type_id == info.type_id, name
        assert np.array_equal(file.data(file.tensors[name]), golden.data(info)), name
    left_out = "bailingmoe2.nextn_predict_layers"  # 0
    keys = [key for key in golden.metadata if key.startswith("bailingmoe2.") and key != left_out]
    assert {k: file.metadata.get(k) for k in keys} == pytest.approx({k: golden.metadata[k] for k in keys})


@pytest.mark.parametrize("name", ["qwen35moe", "qwen3next"])
def test_experts_of_a_layer_together(name: str, tmp_path: Path) -> None:
    """As the hub has them beside a vision tower and a prediction layer, behind a configuration of several parts."""
    folder = made.copy(name, tmp_path)

    def join(tensors: made.Tensors) -> None:
        for il in range(5):
            path = f"model.layers.{il}.mlp.experts"
            parts = {
                kind: [tensors.pop(f"{path}.{e}.{kind}_proj.weight") for e in range(4)]
                for kind in ("gate", "up", "down")
            }
            both = [gate[2] + up[2] for gate, up in zip(parts["gate"], parts["up"], strict=True)]
            rows, columns = parts["gate"][0][1]
            tensors[f"{path}.gate_up_proj"] = "BF16", (4, 2 * rows, columns), b"".join(both)
            downs = b"".join(down[2] for down in parts["down"])
            tensors[f"{path}.down_proj"] = "BF16", (4, *parts["down"][0][1]), downs
        for key in [key for key in tensors if key.startswith("model.")]:
            tensors[key.replace("model.", "model.language_model.", 1)] = tensors.pop(key)
        tensors["model.visual.patch_embed.proj.weight"] = tensors["mtp.fc.weight"] = made.bf16(
            np.ones((4, 4), np.float32)
        )

    made.change_tensors(folder, join)
    made.amend(folder, drop=("intermediate_size",))
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": inner}))
    ours = convert(folder, tmp_path)
    (tmp_path / "plain").mkdir()
    plain = convert(made.CHECKPOINTS / name, tmp_path / "plain")
    assert set(ours.tensors) == set(plain.tensors)
    for key, info in plain.tensors.items():
        np.testing.assert_array_equal(ours.data(ours.tensors[key]), plain.data(info), key)
    arch = plain.metadata["general.architecture"]
    assert (plain.metadata[f"{arch}.feed_forward_length"], ours.metadata[f"{arch}.feed_forward_length"]) == (96, 0)
    tokens = Batch.single(list(range(5, 25)), logits="all")
    logits = [Context(Model.load(file.path)).decode(tokens) for file in (ours, plain)]
    np.testing.assert_array_equal(*logits)
