"""`ikpy convert` of MiMo-V2-Flash: keys, prediction layers, refused values; logits in test_convert_seeded.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import FileFormatError, IkpyError
from tests.cpu.convert import mimo2_checkpoints as mimo
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import Tensors, amend, change_tensors, convert

LAYER = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "final_layernorm": "layer_output_norm",
    "input_layernorm": "attn_norm",
    "pre_mlp_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.attention_sink_bias": "attn_sinks",
    **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def checkpoint(folder: Path, n_layers: int = 2) -> tuple[Path, dict[str, np.ndarray]]:
    """The tiny one with prediction layers; values of these by name."""
    made, random, values = tiny.write(mimo.MIMO2, folder), np.random.default_rng(8), dict[str, np.ndarray]()
    for number in range(n_layers):
        for name, shape in mimo.layer_shapes(number).items():
            rows = (
                random.normal(0, 1 / np.sqrt(shape[-1]), shape) if len(shape) > 1 else random.uniform(0.5, 1.5, shape)
            )
            values[name] = rows.astype(np.float32)

    def add(tensors: Tensors) -> None:
        tensors |= {name: ("F32", rows.shape, rows.tobytes()) for name, rows in values.items()}

    change_tensors(made, add)
    return made, values


def test_keys(tmp_path: Path) -> None:
    file = convert(tiny.write(mimo.MIMO2, tmp_path / "checkpoint"), tmp_path, outtype="f32")
    for key, value in {
        "attention.head_count_kv": [1, 2, 2, 2, 2, 1],
        "attention.sliding_window": mimo.WINDOW + 1,
        "attention.sliding_window_pattern": mimo.PATTERN,
        "attention.key_length": mimo.KEY,
        "attention.value_length": mimo.VALUE,
        "attention.value_scale": 0.707,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 32,
        "rope.freq_base": 5e6,
        "rope.freq_base_swa": 1e4,
        "expert_count": 8,
        "expert_used_count": 3,
    }.items():
        found = file.metadata[f"mimo2.{key}"]
        assert (list(found) if isinstance(value, list) else found) == pytest.approx(value), key
    assert not [name for name in file.tensors if "nextn" in name]


def test_prediction_layers(tmp_path: Path) -> None:
    """Tensors bit by bit, queries, keys and values in one as llama.cpp needs them; layers take turns; a file of them
    alone gives the same logits.
    """
    made, values = checkpoint(tmp_path / "checkpoint")
    whole = convert(made, tmp_path, outtype="f32")
    assert whole.metadata["mimo2.nextn_predict_layers"] == 2 and whole.metadata["mimo2.block_count"] == mimo.N + 2
    assert list(whole.metadata["mimo2.attention.head_count_kv"])[mimo.N :] == [mimo.KV_WINDOW] * 2
    assert list(whole.metadata["mimo2.attention.sliding_window_pattern"])[mimo.N :] == [1, 1]
    for name, rows in values.items():
        _, _, _, number, module = name.split(".", 4)
        if module.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            continue
        target = f"blk.{mimo.N + int(number)}.{LAYER[module.removesuffix('.weight')]}.weight"
        found = whole.data(whole.tensors[target]).view("<f4").reshape(rows.shape)
        np.testing.assert_array_equal(found, rows, target)
    for number in range(2):
        found = whole.data(whole.tensors[f"blk.{mimo.N + number}.attn_qkv.weight"]).view("<f4").reshape(-1, tiny.D)
        parts = [values[f"model.mtp.layers.{number}.self_attn.{x}_proj.weight"] for x in "qkv"]
        np.testing.assert_array_equal(found, np.concatenate(parts))
    (tmp_path / "own").mkdir()
    own = convert(made, tmp_path / "own", outtype="f32", prediction="only")
    settings = ContextParams(n_ctx=128, n_threads=1, type_k="f32", type_v="f32", embeddings=True)
    tokens, states = np.arange(20), np.random.default_rng(2).normal(size=(20, tiny.D)).astype(np.float32)
    heads = [Model.load(file.path).prediction_heads() for file in (whole, own)]
    assert [len(each) for each in heads] == [2, 2]
    for first, second in zip(*heads, strict=True):
        found = [Context(head, settings).decode(Batch.single(tokens, logits="all"), states) for head in (first, second)]
        np.testing.assert_array_equal(*found)


def test_a_layer_that_lacks_keys(tmp_path: Path) -> None:
    made, _ = checkpoint(tmp_path / "checkpoint")
    change_tensors(made, lambda tensors: tensors.pop("model.mtp.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(FileFormatError, match=r"blk.7.attn_qkv.weight needs 3 shards, found 2 \(shard 1 is missing\)"):
        convert(made, tmp_path)


def test_a_layer_that_lacks_a_tensor(tmp_path: Path) -> None:
    made, _ = checkpoint(tmp_path / "checkpoint")
    change_tensors(made, lambda tensors: tensors.pop("model.mtp.layers.1.final_layernorm.weight"))
    with pytest.raises(FileFormatError, match="prediction layer 1 lacks 'final_layernorm'"):
        convert(made, tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"swa_head_dim": 64}, "swa_head_dim 64"),
        ({"swa_num_attention_heads": 2}, "swa_num_attention_heads 2"),
        ({"attention_bias": True}, "attention_bias true"),
        ({"n_shared_experts": 1}, "n_shared_experts 1"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias True"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"n_group": 2}, "n_group 2"),
        ({"routed_scaling_factor": 2.5}, "routed_scaling_factor 2.5"),
        ({"norm_topk_prob": False}, "norm_topk_prob false"),
        ({"hybrid_layer_pattern": [0, 1]}, "layer_types of another number of layers"),
    ],
)
def test_values_that_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(mimo.MIMO2, tmp_path / "checkpoint")
    amend(folder, **values)
    with pytest.raises(IkpyError, match=message) as caught:
        Conversion(folder, ConvertOptions())
    assert "\n" not in str(caught.value)


def test_fused_matrices_are_refused(tmp_path: Path) -> None:
    """MiMo-V2.5 stores those of several devices one behind the other, which no value of its configuration tells."""
    folder = tiny.write(mimo.MIMO2, tmp_path / "checkpoint")

    def fuse(tensors: Tensors) -> None:
        for il in range(mimo.N):
            parts = [tensors.pop(f"model.layers.{il}.self_attn.{x}_proj.weight") for x in "qkv"]
            shape = sum(part[1][0] for part in parts), tiny.D
            name = f"model.layers.{il}.self_attn.qkv_proj.weight"
            tensors[name] = parts[0][0], shape, b"".join(part[2] for part in parts)

    change_tensors(folder, fuse)
    with pytest.raises(IkpyError, match=r"qkv_proj"):
        Conversion(folder, ConvertOptions())
