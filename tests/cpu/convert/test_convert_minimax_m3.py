"""`ikpy convert` of MiniMax M3: what files hold, configurations, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import minimax_m3_checkpoints as m3
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.minimax_m3_checkpoints import MINIMAX_M3, TEXT
from tests.cpu.convert.test_convert_seeded import converted, logits_of

NESTED: dict[str, Any] = TEXT["sparse_attention_config"]  # type: ignore[assignment]


def test_as_llama_cpp_has_it(tmp_path: Path) -> None:
    file = converted(MINIMAX_M3, tmp_path)
    keys = {name.removeprefix("minimax-m3."): value for name, value in file.metadata.items()}
    sizes = {"head_count": m3.KV, "key_length": m3.INDEX_SIZE, "top_k": m3.TOP_K, "block_size": 4, "local_blocks": 1}
    assert {name: keys[f"attention.indexer.{name}"] for name in sizes} == sizes
    widths = {"feed_forward_length": tiny.FF, "expert_feed_forward_length": tiny.FF_EXPERT, "expert_shared_count": 1}
    assert {name: keys[name] for name in widths} == widths
    assert (keys["rope.dimension_count"], keys["leading_dense_block_count"]) == (16, 1)
    assert (keys["expert_gating_func"], keys["expert_weights_scale"], keys["expert_weights_norm"]) == (2, 2, True)
    names = {name.removeprefix("blk.1.") for name in file.tensors if name.startswith("blk.1.indexer")}
    assert names == {f"indexer.{x}.weight" for x in ("q_proj", "k_proj", "q_norm", "k_norm")}
    assert not any(name.startswith("blk.0.indexer") for name in file.tensors)


def test_configuration_of_transformers(tmp_path: Path) -> None:
    """As transformers saves it: lists of kinds, sizes of indexers, and a fraction instead of rotated elements."""
    official = converted(MINIMAX_M3, tmp_path / "official")
    flat = {"index_n_heads": m3.KV, "index_head_dim": m3.INDEX_SIZE, "index_block_size": m3.BLOCK}
    flat |= {"index_topk_blocks": m3.TOP_K, "index_local_blocks": 1}
    kinds = ["minimax_m3_sparse" if il in m3.SPARSE else "full_attention" for il in range(m3.N_LAYER)]
    text = {**TEXT, **flat, "hidden_act": "silu", "rotary_dim": 64, "layer_types": kinds}
    text |= {"sparse_attention_config": None, "moe_layer_freq": None, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    (tmp_path / "other").mkdir()
    folder = tiny.write(MINIMAX_M3, tmp_path / "other" / "checkpoint", text_config=text)
    extra = {"patch_merge_mlp.linear_1.weight": made.bf16(np.ones((4, 4), np.float32))}
    made.change_tensors(folder, lambda tensors: tensors.update(extra))
    again = convert(folder, tmp_path / "other", outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(official))


@pytest.mark.parametrize(
    ("rope", "outer", "n_rot"),
    [
        ({}, {}, 32),
        ({"partial_rotary_factor": 0.25}, {}, 8),
        ({}, {"partial_rotary_factor": 0.25}, 8),
        ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25}, 16),
    ],
)
def test_rotated_elements_are_those_of_transformers(rope, outer, n_rot, tmp_path: Path) -> None:
    """`rotary_dim` is 16, which its configuration has and its model does not read."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, **rope}
    folder = tiny.write(MINIMAX_M3, tmp_path / "checkpoint", text_config={**TEXT, "rope_parameters": rope, **outer})
    conversion = Conversion(folder)
    assert conversion.metadata["minimax-m3.rope.dimension_count"] == n_rot
    notes = [note for note in conversion.notes if "rotary_dim" in note]
    said = f"rotary_dim 16 is not used: partial_rotary_factor says that {n_rot} elements are rotated"
    assert notes == ([said] if n_rot != 16 else [])


@pytest.mark.parametrize(("inside", "outside"), [(True, False), (False, True), (True, None)])
def test_either_part_ties_embeddings(inside, outside, tmp_path: Path) -> None:
    """As in transformers, which uses an output matrix that there is nevertheless."""
    text = {**TEXT, "tie_word_embeddings": inside}
    folder = tiny.write(MINIMAX_M3, tmp_path / "checkpoint", text_config=text, tie_word_embeddings=outside)
    if outside is not None:
        assert "output.weight" in convert(folder, tmp_path).tensors
    made.change_tensors(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "lm_head" in name])
    assert "output.weight" not in convert(folder, tmp_path).tensors


REFUSED: dict[str, dict[str, Any]] = {
    "swiglu_alpha 1.5": {"swiglu_alpha": 1.5},
    "swiglu_limit 8": {"swiglu_limit": 8},
    "activation 'gelu'": {"hidden_act": "gelu"},
    "use_gemma_norm false": {"use_gemma_norm": False},
    "scoring_func 'softmax'": {"scoring_func": "softmax"},
    "shared experts of 40 beside 32": {"shared_intermediate_size": 40},
    "2 kinds of layers": {"layer_types": ["full_attention"] * 2},
    "another kind of layers": {"layer_types": ["linear_attention"] * m3.N_LAYER},
    "dense layers among the expert layers": {"moe_layer_freq": [1, 0, 0]},
    "4 index heads; there must be one": {"sparse_attention_config": {**NESTED, "sparse_num_index_heads": 4}},
    "layer 1 has indexer.*which config.json says it has not": {"layer_types": ["full_attention"] * m3.N_LAYER},
    "layer 0 lacks indexer.q_proj.weight": {"layer_types": ["minimax_m3_sparse"] * m3.N_LAYER},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_file_can_say(what: str, tmp_path: Path) -> None:
    folder = tiny.write(MINIMAX_M3, tmp_path / "checkpoint", text_config={**TEXT, **REFUSED[what]})
    with pytest.raises(IkpyError, match=what) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)


def test_an_indexer_that_is_missing(tmp_path: Path) -> None:
    folder = tiny.write(MINIMAX_M3, tmp_path / "checkpoint")

    def drop(tensors: made.Tensors) -> None:
        for name in [name for name in tensors if "layers.2.self_attn.index" in name]:
            del tensors[name]

    made.change_tensors(folder, drop)
    with pytest.raises(IkpyError, match=r"layer 2 lacks indexer.q_proj.weight"):
        Conversion(folder)
