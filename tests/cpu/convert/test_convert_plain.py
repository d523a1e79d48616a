"""`ikpy convert` of plain blocks: values that files cannot say, tensors that lack or are too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import FileFormatError, UnsupportedError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import plain_checkpoints as plain
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import HEAD, HEADS, KV, Tiny


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (plain.PHI, {"qk_layernorm": True}, "qk_layernorm true"),
        (plain.PHI, {"hidden_act": "relu"}, "activation 'relu'"),
        (plain.STARCODER2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (plain.STABLELM, {"qk_layernorm": True}, r"layer 0 lacks attn_k_norm\.weight"),
        (plain.STABLELM, {"use_parallel_residual": True}, r"layer 0 has ffn_norm\.(weight|bias), which config"),
        (plain.STABLELM_12B, {"qk_layernorm": False}, r"layer 0 has attn_._norm\.weight, which config"),
        (plain.STABLELM_12B, {"use_parallel_residual": False}, r"layer 0 lacks ffn_norm\.weight"),
        (plain.PYTHIA, {"hidden_act": "relu"}, "activation 'relu'"),
        (plain.PYTHIA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic'"),
        (plain.FALCON, {"alibi": True}, "alibi true"),
        (plain.FALCON, {"parallel_attn": False}, "parallel_attn false"),
        (plain.FALCON, {"bias": True}, "bias true"),
        (plain.FALCON, {"multi_query": False}, r"blk\.0\.attn_qkv\.weight|does not fit"),
        (plain.FALCON_40B, {"num_kv_heads": 3}, "does not fit"),
    ],
)
def test_refused(kind: Tiny, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(kind, tmp_path / "checkpoint", **values)
    with pytest.raises((FileFormatError, UnsupportedError), match=message):
        Conversion(folder)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (plain.PHI, "lm_head.bias", "needs output.bias"),
        (plain.PYTHIA, "gpt_neox.layers.1.attention.query_key_value.bias", "needs blk.1.attn_qkv.bias"),
        (plain.STABLELM, "model.layers.1.input_layernorm.bias", "needs blk.1.attn_norm.bias"),
        (plain.STABLELM_12B, "model.layers.1.self_attn.q_layernorm.norms.2.weight", "needs 4 parts, found 3"),
        (plain.FALCON_40B, "transformer.h.1.ln_attn.weight", "needs|lacks"),
    ],
)
def test_a_tensor_that_lacks(kind: Tiny, name: str, message: str, tmp_path: Path) -> None:
    folder = tiny.write(kind, tmp_path / "checkpoint")
    stored = {key: tiny.entry(key, values) for key, values in tiny.weights(kind).items()}
    del stored[name]
    made.write_tensors(folder / "model.safetensors", stored)
    with pytest.raises((FileFormatError, UnsupportedError), match=message):
        Conversion(folder)


def test_masks_that_old_checkpoints_hold(tmp_path: Path) -> None:
    folder = tiny.write(plain.PYTHIA, tmp_path / "checkpoint")
    stored = {key: tiny.entry(key, values) for key, values in tiny.weights(plain.PYTHIA).items()}
    for il in range(plain.N_LAYER):
        p = f"gpt_neox.layers.{il}.attention"
        stored[f"{p}.bias"] = ("U8", (1, 1, 4, 4), bytes(16))
        stored[f"{p}.masked_bias"] = ("F32", (), np.float32(-1e9).tobytes())
        stored[f"{p}.rotary_emb.inv_freq"] = ("F32", (2,), bytes(8))
    made.write_tensors(folder / "model.safetensors", stored)
    assert any("6 tensors of other parts" in note for note in Conversion(folder).notes)


def test_heads_in_turns_lie_one_behind_the_other(tmp_path: Path) -> None:
    """Of every KV head its heads of q, that of k and that of v."""
    name = "transformer.h.0.self_attention.query_key_value.weight"
    rows = tiny.weights(plain.FALCON_40B)[name].reshape(KV, HEADS // KV + 2, HEAD, -1)
    file = convert(tiny.write(plain.FALCON_40B, tmp_path / "checkpoint"), tmp_path, outtype="f32")
    found = (
        np.array(file.data(file.tensors["blk.0.attn_qkv.weight"])).view(np.float32).reshape(-1, HEAD, rows.shape[-1])
    )
    np.testing.assert_array_equal(found[1], rows[0, 1])
    np.testing.assert_array_equal(found[2], rows[1, 0])
    np.testing.assert_array_equal(found[HEADS + 1], rows[1, 2])
    np.testing.assert_array_equal(found[HEADS + KV], rows[0, 3])


def test_a_window_is_told(tmp_path: Path) -> None:
    notes = Conversion(tiny.write(plain.STARCODER2, tmp_path / "checkpoint")).notes
    assert any("window of 128 tokens is not part" in note for note in notes)


def test_an_approximation_of_gelu_is_told(tmp_path: Path) -> None:
    """GPT-NeoX 20B has it; files cannot say which one is meant."""
    notes = Conversion(tiny.write(plain.PYTHIA, tmp_path / "fast", hidden_act="gelu_fast")).notes
    assert any("of which 'gelu_fast' is an approximation" in note for note in notes)
    exact = Conversion(tiny.write(plain.PYTHIA, tmp_path / "exact")).notes
    assert not any("GELU" in note for note in exact)
