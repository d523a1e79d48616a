"""`ikpy convert` of checkpoints with recurrent layers: what files hold, names and configurations, errors."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.config import Config
from ikpy.convert.families.lfm2 import Lfm2
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.seeded_checkpoints import KIMI_LINEAR, LFM2, LFM2_MOE
from tests.cpu.convert.test_convert_seeded import converted, logits_of

# Kimi Linear


def test_kimi_linear_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(KIMI_LINEAR, tmp_path)
    keys = {name.removeprefix("kimi-linear."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count_kv"].tolist() == [0, 0, 0, 1, 0]
    sizes = {"key_length": 96, "value_length": 64, "key_length_mla": 64, "value_length_mla": 32, "kv_lora_rank": 64}
    assert {name: keys[f"attention.{name}"] for name in sizes} == sizes
    assert (keys["kda.head_dim"], keys["ssm.conv_kernel"], keys["expert_gating_func"]) == (32, 4, 2)
    assert keys["expert_weights_norm"] and keys["leading_dense_block_count"] == 1
    shapes = {
        "blk.0.ssm_conv1d_k.weight": (4, 1, 128),
        "blk.0.ssm_a": (1, 4),
        "blk.3.attn_k_b.weight": (32, 64, 4),
        "blk.3.attn_v_b.weight": (64, 32, 4),
    }
    assert {name: file.tensors[name].shape for name in shapes} == shapes
    assert "blk.3.attn_kv_b.weight" not in file.tensors


def test_configuration_of_transformers(tmp_path: Path) -> None:
    """Kinds of layers and sizes as transformers 5 writes them; its names of the dense network."""
    official = converted(KIMI_LINEAR, tmp_path / "official")
    kinds = ["full_attention" if il + 1 == tiny.ATTENDS else "linear_attention" for il in range(tiny.N_LAYER)]
    (tmp_path / "other").mkdir()
    folder = tiny.write(KIMI_LINEAR, tmp_path / "other" / "checkpoint", layer_types=kinds, linear_head_dim=tiny.SIZE)
    others = {"linear_num_heads": tiny.HEADS, "linear_conv_kernel_dim": tiny.TAPS}
    mlp = ["dense", *["sparse"] * (tiny.N_LAYER - 1)]
    made.amend(folder, drop=("linear_attn_config", "first_k_dense_replace"), mlp_layer_types=mlp, **others)

    def rename(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if ".mlp." in name]:
            tensors[name.replace(".mlp.", ".block_sparse_moe.")] = tensors.pop(name)

    made.change_tensors(folder, rename)
    again = convert(folder, tmp_path / "other", outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(official))


LINEAR = KIMI_LINEAR.config["linear_attn_config"]
REFUSED = {
    "mla_use_nope false": {"mla_use_nope": False},
    "moe_layer_freq above 1": {"moe_layer_freq": 2},
    "2 heads of KDA layers beside 4 others": {"linear_attn_config": {**LINEAR, "num_heads": 2}},
    "gate_lower_bound -5.0": {"linear_attn_config": {**LINEAR, "gate_lower_bound": -5.0}},
    "activation 'situ'": {"hidden_act": "situ"},
    "4 kinds of layers": {"layer_types": ["linear_attention"] * 4},
    "'full_attn_layers' is missing": {"linear_attn_config": {"num_heads": 4, "head_dim": 32}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = tiny.write(KIMI_LINEAR, tmp_path / "checkpoint", **REFUSED[what])
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_a_tensor_that_is_missing(tmp_path: Path) -> None:
    folder = tiny.write(KIMI_LINEAR, tmp_path / "checkpoint")
    made.change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.f_b_proj.weight"))
    with pytest.raises(IkpyError, match=r"layer 1 lacks blk.1.ssm_f_b.weight \(from 'self_attn.f_b_proj'\)"):
        Conversion(folder)


def test_tokenizer_of_kimi(tmp_path: Path) -> None:
    """tiktoken.model alone: the pre-tokenizer is that of Kimi K2."""
    folder = tiny.write(KIMI_LINEAR, tmp_path / "checkpoint")
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_text(
        "\n".join(f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256))
    )
    assert convert(folder, tmp_path).metadata["tokenizer.ggml.pre"] == "kimi-k2"


# LFM2


def test_lfm2_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(LFM2, tmp_path)
    keys = {name.removeprefix("lfm2."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count_kv"].tolist() == [0, 2, 0, 2]
    assert (keys["shortconv.l_cache"], keys["feed_forward_length"], keys["rope.freq_base"]) == (3, tiny.FF, 1e6)
    assert file.tensors["blk.0.shortconv.conv.weight"].shape == (3, tiny.D)
    assert file.tensors["token_embd_norm.weight"].shape == (tiny.D,)
    assert "output.weight" not in file.tensors and "output_norm.weight" not in file.tensors


def test_widths_of_lfm2(tmp_path: Path) -> None:
    """As they are, or adjusted: of LFM2 1.2B 8192, two thirds of 12288."""
    folder = tiny.write(LFM2, tmp_path / "checkpoint")
    config = Config(made.read_json(folder / "config.json"), folder / "config.json")

    def width(**values: Any) -> int:
        return Lfm2(Config({**config.values, **values}, config.path)).n_ff

    assert width(block_ff_dim=12288, block_multiple_of=256) == 8192
    assert width(block_ff_dim=tiny.FF, block_auto_adjust_ff_dim=False) == tiny.FF
    assert width(block_ff_dim=6656, block_multiple_of=256) == 4608
    assert width(block_ff_dim=100, block_ffn_dim_multiplier=1.5, block_multiple_of=10) == 100


def test_keys_of_lfm2_moe(tmp_path: Path) -> None:
    file = converted(LFM2_MOE, tmp_path)
    keys = {name.removeprefix("lfm2moe."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count_kv"].tolist() == [0, 2, 0, 2]
    names = ("leading_dense_block_count", "expert_gating_func", "expert_count", "expert_used_count")
    assert [keys[name] for name in names] == [tiny.N_DENSE, 2, tiny.N_EXPERT, tiny.USED]
    assert keys["expert_weights_norm"] and "expert_shared_count" not in keys


@pytest.mark.parametrize(
    ("what", "config"),
    [
        ("layers of kind 'linear_attention'", {"layer_types": ["linear_attention", *["conv"] * 3]}),
        ("3 kinds of layers", {"layer_types": ["conv"] * 3}),
        ("block_multiple_of 0", {"block_multiple_of": 0}),
        ("layer 1 lacks blk.1.shortconv.in_proj.weight", {"full_attn_idxs": [3]}),
        ("layer 0 lacks blk.0.attn_q.weight", {"full_attn_idxs": None}),
    ],
)
def test_what_no_file_of_lfm2_can_say(what: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.write(LFM2, tmp_path / "checkpoint", **config)
    with pytest.raises(IkpyError, match=what):
        Conversion(folder)


def test_biases_of_convolutions_are_refused(tmp_path: Path) -> None:
    folder = tiny.write(LFM2, tmp_path / "checkpoint", conv_bias=True)
    bias = np.zeros(3 * tiny.D, np.float32)
    change = {"model.layers.0.conv.in_proj.bias": made.bf16(bias)}
    made.change_tensors(folder, lambda tensors: tensors.update(change))
    with pytest.raises(IkpyError, match=r"architecture lfm2 has no bias for 'model.layers.0.conv.in_proj.bias'"):
        Conversion(folder)
