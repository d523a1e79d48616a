"""`ikpy convert` of Llama-Nemotron and DeciLM: logits of the definition with the checkpoint's own weights, errors.

transformers does not have these models.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import IkpyError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.shelf_checkpoints import DECI, DECI_HEAD, DECI_HEADS, DECI_LAYERS, DECI_ROPE, UNIT, deci_block
from tests.cpu.convert.test_convert_seeded import TOLERANCE, converted, logits_of
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.models.test_arch_deci import evaluated

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "linear_attn": "attn_output",
    "o_proj": "attn_output",
    **{f"{x}_proj": f"attn_{x}" for x in "qkv"},
    **{f"{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
}


def frequency_divisors(base: float) -> np.ndarray:
    """Of Llama 3.1: waves that are long against the original context are stretched."""
    rotations = DECI_ROPE["original_max_position_embeddings"] / (  # type: ignore[operator]
        2 * math.pi * base ** (np.arange(0, DECI_HEAD, 2) / DECI_HEAD)
    )
    slow, fast, factor = (float(DECI_ROPE[f"{x}factor"]) for x in ("low_freq_", "high_freq_", ""))  # type: ignore[arg-type]
    kept = np.clip((rotations - slow) / (fast - slow), 0, 1)
    return 1 / (kept + (1 - kept) / factor)


def definition(base: float) -> np.ndarray:
    """Logits [T, V] with the weights of the checkpoint, whose heads rotate in halves."""
    model = RandomModel("deci", 0, block_count=len(DECI_LAYERS))
    model.keys |= {"attention.layer_norm_rms_epsilon": 1e-5, "attention.key_length": DECI_HEAD}
    for name, values in tiny.weights(DECI).items():
        path = name.removesuffix(".weight")
        layer = f"blk.{path.split('.')[2]}." if "layers" in path else ""
        model.weights[layer + NAMES[path.split(".")[-1] if layer else path]] = values
    model.weights["rope_freqs"] = frequency_divisors(base)
    return evaluated(model, tiny.tokens(), neox=True, base=base, head=DECI_HEAD)


def test_logits(tmp_path: Path) -> None:
    expected = definition(10000.0)
    error = np.abs(logits_of(converted(DECI, tmp_path)) - expected)
    assert error.max() <= TOLERANCE, f"token {error.max(axis=1).argmax()} is off by {error.max():.1e}"


def test_keys_are_those_of_llama_cpp(tmp_path: Path) -> None:
    file = converted(DECI, tmp_path)
    keys = {name.removeprefix("deci."): value for name, value in file.metadata.items()}
    assert keys["attention.head_count"].tolist() == [0 if kv < 0 else DECI_HEADS for kv, _ in DECI_LAYERS]
    assert keys["attention.head_count_kv"].tolist() == [max(kv, 0) for kv, _ in DECI_LAYERS]
    assert keys["feed_forward_length"].tolist() == [f for _, f in DECI_LAYERS]
    assert keys["attention.key_length"] == keys["rope.dimension_count"] == DECI_HEAD
    assert file.tensors["rope_freqs.weight"].shape == (DECI_HEAD // 2,)
    assert not [name for name in file.tensors if name.startswith("blk.3.")]


def test_decilm(tmp_path: Path) -> None:
    """KV heads in a list, widths alike; RoPE that grows with the text."""
    folder = tiny.write(DECI, tmp_path / "checkpoint")
    heads = [kv for kv, f in DECI_LAYERS if kv > 0 and f]

    def keep(tensors: made.Tensors) -> None:
        old = [il for il, (kv, f) in enumerate(DECI_LAYERS) if kv > 0 and f]
        for name in [name for name in tensors if "layers" in name]:
            part, il = tensors.pop(name), int(name.split(".")[2])
            if il in old:
                tensors[name.replace(f"layers.{il}.", f"layers.{old.index(il)}.")] = part

    made.change_tensors(folder, keep)
    values: dict[str, Any] = {"num_key_value_heads_per_layer": heads, "intermediate_size": UNIT, "model_type": "deci"}
    scaling = {"type": "dynamic", "factor": 2.0}
    made.amend(folder, drop=("block_configs",), num_hidden_layers=2, rope_scaling=scaling, **values)
    assert "beyond 2048 tokens the model scales RoPE by the length of the text" in Conversion(folder).notes[0]
    file = made.convert(folder, tmp_path)
    assert file.metadata["deci.attention.head_count_kv"].tolist() == heads
    assert file.metadata["deci.attention.head_count"] == DECI_HEADS
    assert np.isfinite(logits_of(file)).all()


def changed(il: int, part: str, **values: Any) -> dict[str, Any]:
    """block_configs with other values in a part of a layer."""
    blocks = [deci_block(*layer) for layer in DECI_LAYERS]
    blocks[il][part] |= values
    return {"block_configs": blocks}


BAD: list[tuple[dict[str, Any], str]] = [
    (changed(0, "attention", window_length=128), "attention with window_length 128 in a layer"),
    (changed(0, "attention", n_heads_in_group=3), "groups of 3 of 4 heads"),
    (changed(0, "attention", n_heads_in_group="2"), "groups of '2' of 4 heads"),
    (changed(0, "attention", n_heads_in_group=None), "attention {} in layer 0"),
    (changed(0, "attention", no_op=True), "attention {'n_heads_in_group': 2, 'no_op': True} in layer 0"),
    (changed(1, "ffn", ffn_mult=None, replace_with_linear=True), "ffn with replace_with_linear True in a layer"),
    (changed(1, "ffn", ffn_mult=None), "ffn {} in layer 1"),
    (changed(1, "ffn", ffn_mult=1e30), "ffn_mult 1e[+]30"),
    (changed(1, "ffn", ffn_mult=4.0), "tensor 'blk.1.ffn_gate.weight' has wrong shape"),
    (changed(0, "attention", n_heads_in_group=1), "tensor 'blk.0.attn_k.weight' has wrong shape"),
    ({"block_configs": [deci_block(2, 256)]}, "block_configs for other than 6 layers"),
    ({"block_configs": [7] * 6}, "block_configs without 'attention' in a layer"),
    ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' is not supported for deci"),
    ({"hidden_act": "gelu"}, "activation 'gelu'"),
    ({"block_configs": None, "num_key_value_heads_per_layer": [2]}, "num_key_value_heads_per_layer"),
]


@pytest.mark.parametrize(("values", "message"), BAD, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_what_cannot_be_expressed(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(DECI, tmp_path / "checkpoint", **values)
    if "num_key_value_heads_per_layer" in values:
        made.amend(folder, intermediate_size=UNIT)
    with pytest.raises(IkpyError, match=message.replace("{", "[{]")):
        Conversion(folder)


def test_missing_tensors(tmp_path: Path) -> None:
    folder = tiny.write(DECI, tmp_path / "checkpoint")
    made.change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.self_attn.linear_attn.weight"))
    with pytest.raises(IkpyError, match=r"layer 1 lacks blk\.1\.attn_output\.weight"):
        Conversion(folder)
