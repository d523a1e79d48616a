"""`ikpy convert` of Qwen4-Exp: shards of the table, constants of the hashes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import IkpyError
from ikpy.quants import dequantize
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import qwen4_exp_checkpoints as qwen
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.qwen4_exp_checkpoints import QWEN4_EXP, TEXT
from tests.cpu.convert.test_convert_seeded import converted, logits_of

HASHES = f"model.language_model.layers.{qwen.NGRAM_LAYER}.ple.ple_embedding"
TABLE = "per_layer_token_embd.weight"


def text(**values: Any) -> dict[str, Any]:
    return {"text_config": {**TEXT, **values}}


def test_keys(tmp_path: Path) -> None:
    """As llama.cpp has them: constants of hashes are of 64 bits, layers are counted from 0."""
    file = converted(QWEN4_EXP, tmp_path)
    metadata = {name.removeprefix("qwen4exp."): value for name, value in file.metadata.items()}
    expected = {
        "ple.layers": [qwen.NGRAM_LAYER],
        "ple.ngram_size": qwen.NGRAM,
        "ple.heads_per_ngram": qwen.PER_LENGTH,
        "ple.conv_kernel": qwen.KERNEL,
        "ple.eos_token_id": qwen.EOS,
        "embedding_length_per_layer_input": qwen.WIDTH // len(qwen.ROWS),
        "hyper_connection.count": qwen.STREAMS,
        "hyper_connection.low_rank": qwen.RANK,
        "attention.indexer.top_k": qwen.TOP_K,
        "attention.compress_ratios": [qwen.POOL if il in qwen.ATTENDS else 0 for il in range(qwen.N_LAYER)],
        "attention.recurrent_layers": [il not in qwen.ATTENDS for il in range(qwen.N_LAYER)],
        "rope.dimension_count": 16,
        "rope.dimension_sections": [4, 2, 2, 0],
    }
    for key, value in expected.items():
        np.testing.assert_array_equal(metadata[key], value, err_msg=key)
    for name, key in (("layer_multipliers",) * 2, ("ngram_heads_vocab_sizes", "head_vocab_sizes")):
        numbers = metadata[f"ple.{key}"]
        assert numbers.dtype == np.uint64 and numbers.tolist() == qwen.integers()[f"{HASHES}.{name}"]


@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_shards_follow_each_other(outtype: str, tmp_path: Path) -> None:
    """Whatever files they are in."""
    tmp_path.joinpath("x").mkdir()
    folder = tiny.write(QWEN4_EXP, tmp_path / "x" / "checkpoint")
    made.split_into_shards(folder, 3)
    file = made.convert(folder, tmp_path, outtype=outtype)
    weights = tiny.weights(QWEN4_EXP)
    table = np.concatenate([weights[f"{HASHES}.ngram_embedding.shard_{i}.weight"] for i in range(qwen.N_SHARDS)])
    info = file.tensors[TABLE]
    found = dequantize(file.data(info), info.type_id, info.shape)
    assert info.shape == table.shape[::-1]
    np.testing.assert_allclose(found, table, atol=0 if outtype == "f32" else 0.02)


def test_ends_of_texts(tmp_path: Path) -> None:
    """The first of several counts, as in transformers."""
    file = converted(QWEN4_EXP, tmp_path, **text(eos_token_id=[qwen.EOS, 3]))
    assert file.metadata["qwen4exp.ple.eos_token_id"] == qwen.EOS


def test_names_of_layers(tmp_path: Path) -> None:
    """Those of transformers, and none where the order is the usual one."""
    kinds = ["indexed_attention" if il in qwen.ATTENDS else "linear_attention" for il in range(qwen.N_LAYER)]
    golden = np.load(QWEN4_EXP.golden)
    logits = logits_of(converted(QWEN4_EXP, tmp_path, **text(layer_types=kinds)))[golden["rows"]]
    assert np.abs(logits[:, : golden["logits"].shape[1]] - golden["logits"]).max() < 5e-4


def test_models_without_ngrams(tmp_path: Path) -> None:
    folder = tiny.write(QWEN4_EXP, tmp_path / "checkpoint", **text(ple_layer_ids=None))

    def without(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if ".ple." in name]:
            del tensors[name]

    made.change_tensors(folder, without)
    file = made.convert(folder, tmp_path, outtype="f32")
    assert TABLE not in file.tensors and not any(".ple." in key for key in file.metadata)
    assert np.isfinite(logits_of(file)).all()


REFUSED: dict[str, dict[str, Any]] = {
    "output_gate_type 'silu'": {"output_gate_type": None},
    "output_gate_type 'swish'": {"output_gate_type": "swish"},
    "norm_topk_prob False": {"norm_topk_prob": False},
    "indexer_kv_heads 2": {"indexer_kv_heads": 2},
    "'indexer_n_heads' is missing": {"indexer_n_heads": None},
    "16 chosen cells in pools of 3": {"indexer_compress_ratio": 3},
    "n-gram embeddings in 2 layers": {"ple_layer_ids": [1, 3]},
    r"ple_layer_ids \[2\] of 5 layers, which must be a linear_attention one": {"ple_layer_ids": [2]},
    r"ple_layer_ids \[9\] of 5 layers": {"ple_layer_ids": [9]},
    "ple_embed_dim 130 for 4 heads": {"ple_embed_dim": 130},
    "'eos_token_id' is missing": {"eos_token_id": None},
    "another kind of layers": {"layer_types": ["linear_attention", "mamba", *["linear_attention"] * 3]},
    "4 kinds of layers": {"layer_types": ["linear_attention"] * 4},
    "activation 'gelu'": {"hidden_act": "gelu"},
    "needs 5 shards, found 4 .shard 4 is missing": {"split_ngram_parts": 5},
    "needs 3 shards, found 4 .there are more": {"split_ngram_parts": 3},
    "1 residual streams": {"hc_count": 1},
    "full_attention_interval 0": {"full_attention_interval": 0, "layer_types": None},
    "must hold 4 integers": {"ngram_size": 4, "heads_per_ngram": 1, "ple_embed_dim": 96},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = tiny.write(QWEN4_EXP, tmp_path / "checkpoint", **text(**REFUSED[what]))
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def _drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _replace(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    def change(tensors: made.Tensors) -> None:
        tensors[name] = kind, shape, data

    return change


DAMAGED = {
    "one layer must have ple.ple_embedding.layer_multipliers, found 0": _drop(f"{HASHES}.layer_multipliers"),
    "shard 2 is missing": _drop(f"{HASHES}.ngram_embedding.shard_2.weight"),
    "differ in shape": _replace(f"{HASHES}.ngram_embedding.shard_1.weight", "F32", (64, 16), bytes(64 * 16 * 4)),
    "must hold integers, none below 0": _replace(
        f"{HASHES}.ngram_heads_offsets", "I64", (4,), np.array([-1, 2, 3, 4]).tobytes()
    ),
    "'.*layer_multipliers' must hold integers": _replace(f"{HASHES}.layer_multipliers", "F32", (3,), bytes(12)),
    "has wrong shape; expected 32, 240, 1, 1, got 32, 232": _replace(
        f"{HASHES}.ngram_embedding.shard_3.weight", "F32", (40, 32), bytes(40 * 32 * 4)
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_checkpoints(what: str, tmp_path: Path) -> None:
    folder = tiny.write(QWEN4_EXP, tmp_path / "checkpoint")
    made.change_tensors(folder, DAMAGED[what])
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_a_matrix_with_a_dimension_of_1_in_front(tmp_path: Path) -> None:
    """Columns of heads of values move, not rows."""
    name = "model.language_model.layers.0.linear_attn.out_proj.weight"
    folder = tiny.write(QWEN4_EXP, tmp_path / "checkpoint")
    expected = logits_of(made.convert(folder, tmp_path, outtype="f32"))

    def add_dimension(tensors: made.Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, (1, *shape), data

    made.change_tensors(folder, add_dimension)
    np.testing.assert_array_equal(logits_of(made.convert(folder, tmp_path, outtype="f32")), expected)
