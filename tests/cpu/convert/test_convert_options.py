"""`ikpy convert`: options of configurations that change what a model computes are kept or refused, in all spellings."""

from __future__ import annotations

import pytest

from ikpy.convert import Conversion
from ikpy.convert.config import Config
from ikpy.convert.families import family
from ikpy.errors import FileFormatError
from tests.cpu.convert import checkpoints as made

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED = {
    "cohere2 period": ("cohere2", {"sliding_window_pattern": 2, "layer_types": None}, "sliding_window_pattern 2"),
    "smollm3 interval": (
        "smollm3",
        {"no_rope_layer_interval": 2, "no_rope_layers": None},
        "layers without RoPE that are not every fourth",
    ),
    "exaone4 letters": (
        "exaone4",
        {"sliding_window_pattern": "LGG", "layer_types": None},
        "sliding_window_pattern 'LGG'",
    ),
    "gemma3 window layers": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            }
        },
        "RoPE scaling 'linear' of the window layers",
    ),
    "gemma4 scaling": (
        "gemma4",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "RoPE scaling 'yarn'",
    ),
    "deepseek magnitude": (
        "deepseek-v3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.3}},
        "YaRN with attention_factor 1.3",
    ),
    "ministral magnitude": (
        "ministral3",
        {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.3}},
        "YaRN with attention_factor 1.3",
    ),
    "ministral mscale": ("ministral3", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, "YaRN with mscale None"),
    "ernie norm": ("ernie4_5-moe", {"moe_norm_min": 0.5}, "moe_norm_min 0.5"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_no_key_says(case, tmp_path):
    name, changes, message = REFUSED[case]
    folder = made.copy(name, tmp_path)
    made.amend(folder, **changes)
    with pytest.raises(FileFormatError) as error:
        Conversion(folder)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("afmoe", {"global_attn_every_n_layers": 3}, [1, 1, 0, 1, 1]),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, [1, 1, 1, 0]),
        ("exaone4", {"sliding_window_pattern": "LG"}, [1, 0, 1, 0]),
        ("exaone-moe", {"sliding_window_pattern": 2}, [1, 0, 1, 0, 1]),
        ("exaone4", {"layer_types": ["full_attention"] * 4}, [0, 0, 0, 0]),
    ],
)
def test_order_of_window_layers(name, changes, windows, tmp_path):
    """All full: beside a window, layers of EXAONE 4 do not know positions."""
    folder = made.copy(name, tmp_path)
    made.amend(folder, **{"layer_types": None, **changes})
    keys = Conversion(folder).metadata
    assert keys[f"{name}.attention.sliding_window_pattern"] == windows
    assert keys[f"{name}.attention.sliding_window"] == 8


def test_temperature_without_yarn_keeps_its_context(tmp_path):
    folder = made.copy("ministral3", tmp_path)
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    made.amend(folder, rope_parameters={**rope, "original_max_position_embeddings": 16})
    assert Conversion(folder).metadata["mistral3.rope.scaling.original_context_length"] == 16


def test_groups_that_are_all_used_are_no_limit(tmp_path):
    folder = made.copy("deepseek-v3", tmp_path)
    made.amend(folder, n_group=2, topk_group=1)
    assert any("not limited" in note for note in Conversion(folder).notes)
    made.amend(folder, topk_group=2)
    assert not any("not limited" in note for note in Conversion(folder).notes)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("deepseek-v3", "model.layers.2.mlp.gate.e_score_correction_bias"),
        ("llama-spm", "model.layers.1.self_attn.o_proj.bias"),
        ("glm4moe", "model.layers.1.self_attn.q_norm.weight"),
        ("gemma4", "model.layers.1.self_attn.v_proj.weight"),
        ("gemma4-moe", "model.layers.1.self_attn.v_proj.weight"),
        ("gemma4-moe", "model.layers.1.router.per_expert_scale"),
    ],
)
def test_optional_tensors_that_one_layer_lacks(name, lost, tmp_path):
    folder = made.copy(name, tmp_path)
    made.change_tensors(folder, lambda tensors: tensors.pop(lost))
    with pytest.raises(FileFormatError, match=r"layer [12] lacks \S+, which layer \d has; the checkpoint is"):
        Conversion(folder)


def test_shared_experts_of_no_width_are_left_out(tmp_path):
    folder = made.copy("deepseek-v3", tmp_path)
    made.amend(folder, n_shared_experts=0)

    def narrow(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if "shared_experts" in name]:
            del tensors[name]
            if name.endswith("weight"):
                tensors[name] = ("BF16", (64, 0) if "down_proj" in name else (0, 64), b"")

    made.change_tensors(folder, narrow)
    plan = Conversion(folder)
    assert not any("shexp" in tensor.output.name for tensor in plan.tensors)
    assert plan.metadata["deepseek2.expert_shared_count"] == 0


def test_gemma4_full_layers_with_heads_of_the_same_size(tmp_path):
    """Newer files list what differs by layer: nothing here."""
    folder = made.copy("gemma4", tmp_path)
    made.amend(folder, per_layer_config={}, drop=("global_head_dim",))
    path = folder / "config.json"
    assert family(Config(made.read_json(path), path)).n_rot == 16
