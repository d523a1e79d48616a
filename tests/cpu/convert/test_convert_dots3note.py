"""`ikpy convert` of dots3 note: what files hold, configurations, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.convert.config import Config
from ikpy.convert.families.dots3note import Dots3Note
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import dots3note_checkpoints as dots
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.dots3note_checkpoints import DOTS3_NOTE
from tests.cpu.convert.test_convert_seeded import converted, logits_of

LOCAL = {"head_dim": 80, "kv_lora_rank": dots.LOCAL_RANK, "num_attention_heads": 2, "num_key_value_heads": 2}
LOCAL["qk_nope_head_dim"] = dots.LOCAL_NOPE


def test_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(DOTS3_NOTE, tmp_path)
    keys = {name.removeprefix("dots3note."): value for name, value in file.metadata.items()}
    lists = {"head_count": [4, 2, 4, 2], "sliding_window_pattern": [0, 1, 0, 1], "indexer.types": [1, 0, 1, 0]}
    assert {name: keys[f"attention.{name}"].tolist() for name in lists} == lists
    sizes = {"key_length": 80, "value_length": 64, "key_length_mla": 48, "value_length_mla": 32, "kv_lora_rank": 64}
    sizes |= {"key_length_swa": 112, "value_length_swa": 96, "key_length_mla_swa": 80, "value_length_mla_swa": 32}
    sizes |= {"kv_lora_rank_swa": 96, "sliding_window": dots.WINDOW, "head_count_kv": 1}
    assert {name: keys[f"attention.{name}"] for name in sizes} == sizes
    assert (keys["rope.freq_base"], keys["rope.freq_base_swa"], keys["rope.dimension_count_swa"]) == (10000, 500, 16)
    shapes = {"blk.0.attn_k_b.weight": (32, 64, 4), "blk.1.attn_k_b.weight": (64, 96, 2)}
    shapes |= {"blk.1.attn_v_b.weight": (96, 32, 2), "blk.0.attn_gate.weight": (64, 4)}
    assert {name: file.tensors[name].shape for name in shapes} == shapes
    norms = tiny.weights(DOTS3_NOTE)
    for il, rank in ((0, dots.RANK), (1, dots.LOCAL_RANK)):
        stored = file.data(file.tensors[f"blk.{il}.attn_kv_a_norm.weight"]).view(np.float32)
        factor = np.float32(np.sqrt(tiny.D / rank))
        np.testing.assert_array_equal(stored, norms[f"model.layers.{il}.self_attn.kv_a_layernorm.weight"] * factor)


def test_configuration_of_transformers(tmp_path: Path) -> None:
    """Values of single layers, nested RoPE; the whole model's names beside other parts."""
    official = converted(DOTS3_NOTE, tmp_path / "official")
    (tmp_path / "other").mkdir()
    folder = tiny.write(DOTS3_NOTE, tmp_path / "other" / "checkpoint", model_type="dots3_note")
    old = [name for name in DOTS3_NOTE.config if name.startswith("swa_")]
    rope = {"indexed_attention": 10000.0, "sliding_attention": 500.0}
    made.amend(
        folder,
        drop=(*old, "rope_theta", "sliding_window_size", "moe_shared_expert_intermediate_size"),
        per_layer_config={"1": LOCAL, "3": LOCAL},
        rope_parameters={kind: {"rope_type": "default", "rope_theta": base} for kind, base in rope.items()},
        sliding_window=dots.WINDOW,
        shared_experts_intermediate_size=tiny.FF_EXPERT,
    )
    extra = {
        f"{part}.proj.weight": made.bf16(np.ones((4, 4), np.float32)) for part in ("vision_encoder", "audio_adapter")
    }
    made.change_tensors(folder, lambda tensors: tensors.update(extra))
    again = convert(folder, tmp_path / "other", outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(official))


def test_kinds_of_layers_where_none_are_listed(tmp_path: Path) -> None:
    values = {name: value for name, value in DOTS3_NOTE.config.items() if name != "layer_types"}
    family = Dots3Note(Config({**values, "num_hidden_layers": 7}, tmp_path / "config.json"))
    short = [kind.removesuffix("_attention") for kind in family.kinds]
    assert short == ["indexed", "indexed", "sliding", "sliding", "sliding", "indexed", "sliding"]


FULL = ["full_attention", *dots.KINDS[1:]]
REFUSED: dict[str, dict[str, Any]] = {
    "layers of kind 'full_attention'": {"layer_types": FULL, "use_dsa": False},
    "layers of kind 'linear_attention'": {"layer_types": ["linear_attention"] * 4},
    "3 kinds of layers": {"layer_types": list(dots.KINDS[:3])},
    "windows with a q_lora_rank of their own": {"swa_q_lora_rank": 16},
    "heads of 90 with a window": {"swa_head_dim": 90, "swa_qk_rope_head_dim": 16},
    "layers of a kind that differ": {"per_layer_config": {"1": LOCAL, "3": {**LOCAL, "kv_lora_rank": 64}}},
    "shared experts of 48 beside 32": {"moe_shared_expert_intermediate_size": 48},
    "RoPE scaling 'yarn'": {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "rope_theta": 1e4}}},
    "kv_b_proj.* does not fit config.json": {"swa_kv_lora_rank": 64},
    "activation 'gelu'": {"hidden_act": "gelu"},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = tiny.write(DOTS3_NOTE, tmp_path / "checkpoint", **REFUSED[what])
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_full_attention_of_older_configurations_has_indexers(tmp_path: Path) -> None:
    folder = tiny.write(DOTS3_NOTE, tmp_path / "checkpoint", layer_types=FULL)
    assert Conversion(folder).metadata["dots3note.attention.indexer.types"] == [True, False, True, False]
