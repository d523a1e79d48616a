"""`ikpy convert` of the checkpoints of cohere_checkpoints.py: what files hold, configurations, errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, encoding, planned_file
from ikpy.errors import IkpyError
from ikpy.models.size_class import size_class
from ikpy.quants import dequantize
from tests.cpu.convert import checkpoints
from tests.cpu.convert import cohere_checkpoints as made
from tests.cpu.convert import dense_checkpoints as dense
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.test_convert_seeded import converted, logits_of
from tests.cpu.models import reference_models as ref
from tests.cpu.models.definition_checks import chosen


def keys_of(kind: tiny.Tiny, folder: Path, **config: Any) -> dict[str, Any]:
    """Metadata of the converted checkpoint without the prefix of the architecture."""
    metadata = converted(kind, folder, **config).metadata
    return {name.removeprefix(f"{metadata['general.architecture']}."): metadata[name] for name in metadata}


# Command A+


def test_command_a_plus_as_llama_cpp_has_it(tmp_path: Path) -> None:
    keys = keys_of(made.COHERE2_MOE, tmp_path)
    assert keys["general.architecture"] == "cohere2moe"
    assert [bool(flag) for flag in keys["attention.sliding_window_pattern"]] == [False, True, True, False, True]
    expected = {
        "feed_forward_length": tiny.FF,
        "expert_feed_forward_length": tiny.FF_EXPERT,
        "expert_shared_feed_forward_length": made.N_SHARED * tiny.FF_EXPERT,
        "expert_shared_count": made.N_SHARED,
        "leading_dense_block_count": 1,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "attention.sliding_window": made.WINDOW,
    }
    assert {name: keys[name] for name in expected} == expected
    assert "attention.layer_norm_rms_epsilon" not in keys


def test_command_a_plus_without_lists(tmp_path: Path) -> None:
    """Layers as first_k_dense_replace and two periods say them."""
    config = {"layer_types": None, "mlp_layer_types": None, "first_k_dense_replace": 1, "sliding_window_pattern": 3}
    same = converted(made.COHERE2_MOE, tmp_path / "lists")
    counted = converted(made.COHERE2_MOE, tmp_path / "counts", **config)
    np.testing.assert_array_equal(logits_of(counted), logits_of(same))


def test_biases_of_zeros(tmp_path: Path) -> None:
    """Some checkpoints of Cohere have biases that say nothing; others cannot be left out."""
    for value, message in ((0.0, ""), (0.5, "no bias for 'model.layers.0.input_layernorm.bias'")):
        folder = tiny.write(made.COHERE2_MOE, tmp_path / str(value))
        bias = checkpoints.bf16(np.full(tiny.D, value, np.float32))
        checkpoints.change_tensors(folder, lambda t, bias=bias: t.update({"model.layers.0.input_layernorm.bias": bias}))
        if not message:
            assert "blk.0.attn_norm.bias" not in checkpoints.convert(folder, tmp_path).tensors
            continue
        with pytest.raises(IkpyError, match=message):
            Conversion(folder)


# Solar Open


def test_solar_open_is_glm4moe(tmp_path: Path) -> None:
    """Whole heads are rotated, no layer is dense; a configuration of transformers 5 does not name a dense width."""
    keys = keys_of(made.SOLAR_OPEN, tmp_path)
    assert keys["general.architecture"] == "glm4moe"
    assert (keys["rope.dimension_count"], keys["leading_dense_block_count"]) == (tiny.HEAD, 0)
    folder = tiny.write(made.SOLAR_OPEN, tmp_path / "again")
    checkpoints.amend(folder, drop=("intermediate_size", "norm_topk_prob", "n_shared_experts", "rope_theta"))
    again = checkpoints.convert(folder, tmp_path, outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(converted(made.SOLAR_OPEN, tmp_path / "first")))
    assert size_class({"general.architecture": "glm4moe", "glm4moe.block_count": 48}) == "102B.A12B"


def test_solar_open_with_biases(tmp_path: Path) -> None:
    """attention_bias: of q, k and v."""
    folder = tiny.write(made.SOLAR_OPEN, tmp_path / "checkpoint", attention_bias=True)

    def add(tensors: checkpoints.Tensors) -> None:
        for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
            values = np.full(tensors[name][1][0], 0.5, np.float32)
            tensors[name.replace("weight", "bias")] = checkpoints.bf16(values)

    checkpoints.change_tensors(folder, add)
    file = checkpoints.convert(folder, tmp_path, outtype="f32")
    assert np.isfinite(logits_of(file)).all() and "blk.2.attn_v.bias" in file.tensors
    assert not np.array_equal(logits_of(file), logits_of(converted(made.SOLAR_OPEN, tmp_path / "without")))


# Mellum 2


def test_mellum_as_llama_cpp_has_it(tmp_path: Path) -> None:
    keys = keys_of(made.MELLUM, tmp_path)
    assert (keys["rope.freq_base"], keys["rope.freq_base_swa"]) == (500000.0, 10000.0)
    assert [bool(flag) for flag in keys["attention.sliding_window_pattern"]] == [True, False, True]
    assert (keys["rope.scaling.type"], keys["rope.scaling.factor"]) == ("yarn", 4.0)


def test_mellum_without_windows(tmp_path: Path) -> None:
    keys = keys_of(made.MELLUM, tmp_path, layer_types=None, rope_parameters=None, use_sliding_window=False)
    assert keys["rope.freq_base"] == 500000.0
    assert not {"attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa"} & set(keys)


# Ling 1


def bailing_logits(norm_head: bool) -> np.ndarray:
    """Logits [T, V] of the checkpoint as its repository computes them, in float64."""
    w = {name: values.astype(np.float64) for name, values in tiny.weights(made.BAILING_MOE).items()}
    tokens, eps = tiny.tokens(), 1e-6
    x = w["model.word_embeddings.weight"][tokens]
    angles = ref.plain_angles(tiny.HEAD, 600000.0, np.arange(len(tokens), dtype=np.float64))
    for il in range(made.BAILING_LAYERS):
        layer = {name.removeprefix(f"model.layers.{il}."): values for name, values in w.items()}
        h = ref.rms_norm(x, layer["input_layernorm.weight"], eps)
        joined = (h @ layer["attention.query_key_value.weight"].T).reshape(len(h), -1, tiny.HEAD)
        q, k, v = np.split(joined, (tiny.HEADS, tiny.HEADS + tiny.KV), axis=1)
        q, k = (ref.rotate(t, angles, neox=True) for t in (q, k))
        x = x + ref.attend(q, k, v, tiny.HEAD**-0.5) @ layer["attention.dense.weight"].T
        h = ref.rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        kept = chosen(ref.softmax(h @ layer["mlp.gate.weight"].T), tiny.USED)
        x = x + gated(layer, "mlp.shared_experts", h)
        for e, weights in enumerate((kept / kept.sum(1, keepdims=True)).T):
            x = x + weights[:, None] * gated(layer, f"mlp.experts.{e}", h)
    head = w["lm_head.weight"]
    if norm_head:
        head = head / np.linalg.norm(head, axis=0)
    return ref.rms_norm(x, w["model.norm.weight"], eps) @ head.T


def gated(layer: ref.Weights, prefix: str, h: np.ndarray) -> np.ndarray:
    """SwiGLU."""
    gate, up, down = (layer[f"{prefix}.{name}.weight"] for name in made.NAMES)
    return (ref.silu(h @ gate.T) * (h @ up.T)) @ down.T


@pytest.mark.parametrize("norm_head", [True, False])
def test_ling(norm_head: bool, tmp_path: Path) -> None:
    file = converted(made.BAILING_MOE, tmp_path, norm_head=norm_head)
    truth, logits = bailing_logits(norm_head), logits_of(file)
    error = np.abs(logits - truth).max(axis=1) / np.abs(truth).max()
    assert error.max() < 5e-5, f"token {error.argmax()} is off by {error.max():.1e}"


def test_ling_as_llama_cpp_has_it(tmp_path: Path) -> None:
    keys = keys_of(made.BAILING_MOE, tmp_path)
    expected = {
        "general.architecture": "bailingmoe",
        "expert_shared_count": made.N_SHARED,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.0,
        "leading_dense_block_count": 0,
        "rope.dimension_count": tiny.HEAD,
    }
    assert {name: keys[name] for name in expected} == expected


def test_columns_of_other_types_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are those of whole columns, whatever is read at once."""
    matrix = np.random.default_rng(3).normal(size=(50, 24)).astype(np.float32)
    matrix[:, 5] = 0
    whole = encoding.column_lengths(matrix, "f32")
    for module in (encoding, planned_file):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 7 * 24)
    np.testing.assert_allclose(encoding.column_lengths(matrix, "f32"), whole, rtol=1e-6)
    np.testing.assert_allclose(np.delete(whole, 5), np.delete(np.linalg.norm(matrix, axis=0), 5), rtol=1e-6)
    assert not encoding.unit_columns(whole)(matrix)[:, 5].any()
    file = converted(made.BAILING_MOE, tmp_path, "q8_0")
    output = file.tensors["output.weight"]
    values = dequantize(file.data(output), output.type_id, output.shape)
    np.testing.assert_allclose(np.linalg.norm(values, axis=0), 1, rtol=0.01)


# Granite with windows and sinks


def test_granite_swa_as_llama_cpp_has_it(tmp_path: Path) -> None:
    for kind, width in ((made.GRANITE_SWA, tiny.FF), (made.GRANITE_MOE_SWA, tiny.FF_EXPERT)):
        keys = keys_of(kind, tmp_path / kind.name)
        assert (keys["general.architecture"], keys["feed_forward_length"]) == ("granite_swa", width)
        assert [bool(flag) for flag in keys["attention.sliding_window_pattern"]] == [False, True, True, False]
        assert [bool(flag) for flag in keys["attention.rope_pattern"]] == [False, True, False, True]
        assert (keys["rope.freq_base"], keys["logit_scale"]) == (20000.0, 2.0)


def test_granite_swa_without_lists(tmp_path: Path) -> None:
    """The first of four layers has no window, all know positions."""
    keys = keys_of(made.GRANITE_SWA, tmp_path, layer_types=None, layer_rope_theta=None)
    assert [bool(flag) for flag in keys["attention.sliding_window_pattern"]] == [False, True, True, True]
    assert all(keys["attention.rope_pattern"]) and keys["rope.freq_base"] == 10000.0


# EXAONE 3, Minitron, Apertus


ACTIVATION = "model.layers.1.mlp.act_fn"


def test_apertus_as_llama_cpp_has_it(tmp_path: Path) -> None:
    """Numbers of the activations in keys without the architecture."""
    metadata, stored = converted(dense.APERTUS, tmp_path).metadata, tiny.weights(dense.APERTUS)
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        expected = [stored[f"model.layers.{il}.mlp.act_fn.{name}"].item() for il in range(dense.APERTUS_LAYERS)]
        np.testing.assert_array_equal(metadata[f"xielu.{name}"], np.float32(expected))


def test_apertus_without_numbers(tmp_path: Path) -> None:
    """beta and eps may be missing everywhere, but not in one layer; a number is one."""
    changes: dict[str, tuple[Any, str]] = {
        "everywhere": (lambda t: [t.pop(n) for n in list(t) if n.endswith(("beta", "eps"))], ""),
        "in a layer": (lambda t: t.pop(f"{ACTIVATION}.beta"), "layer 1 lacks mlp.act_fn.beta"),
        "needed": (lambda t: t.pop(f"{ACTIVATION}.alpha_p"), "layer 1 lacks mlp.act_fn.alpha_p"),
        "two": (lambda t: t.update({f"{ACTIVATION}.beta": ("F32", (2,), bytes(8))}), "is not one finite number"),
    }
    for case, (change, message) in changes.items():
        folder = tiny.write(dense.APERTUS, tmp_path / case)
        checkpoints.change_tensors(folder, change)
        if not message:
            metadata = Conversion(folder).metadata
            assert (metadata["xielu.beta"], metadata["xielu.eps"]) == ([0.5] * 2, [-1e-6] * 2)
            continue
        with pytest.raises(IkpyError, match=message):
            Conversion(folder)


def test_exaone_in_the_names_of_llama(tmp_path: Path) -> None:
    """As transformers 5 names modules and values."""
    official = converted(dense.EXAONE, tmp_path / "official")
    config = {"num_hidden_layers": dense.EXAONE_LAYERS, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    folder = tiny.write(dense.EXAONE, tmp_path / "checkpoint", **config)
    checkpoints.amend(folder, drop=("num_layers", "layer_norm_epsilon", "activation_function"))
    names = {
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "transformer.h": "model.layers",
        "attn.attention.out_proj": "self_attn.o_proj",
        "attn.attention": "self_attn",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "c_fc_0": "gate_proj",
        "c_fc_1": "up_proj",
        "c_proj": "down_proj",
    }

    def rename(tensors: checkpoints.Tensors) -> None:
        for name in list(tensors):
            new = name
            for old, other in names.items():
                new = new.replace(old, other)
            tensors[new] = tensors.pop(name)

    checkpoints.change_tensors(folder, rename)
    again = checkpoints.convert(folder, tmp_path, outtype="f32")
    np.testing.assert_array_equal(logits_of(again), logits_of(official))


def test_minitron_as_llama_cpp_has_it(tmp_path: Path) -> None:
    """Weights of norms are whole, biases as stored."""
    file = converted(dense.NEMOTRON, tmp_path)
    stored = tiny.weights(dense.NEMOTRON)
    for target, module in (
        ("output_norm", "model.norm"),
        ("blk.1.ffn_norm", "model.layers.1.post_attention_layernorm"),
    ):
        weight, bias = (file.tensors[f"{target}.{part}"] for part in ("weight", "bias"))
        np.testing.assert_allclose(file.data(weight).view(np.float32), stored[f"{module}.weight"] + 1, rtol=1e-6)
        np.testing.assert_array_equal(file.data(bias).view(np.float32), stored[f"{module}.bias"])
    assert file.metadata["nemotron.rope.dimension_count"] == tiny.HEAD // 2


def test_minitron_without_a_bias_of_a_norm(tmp_path: Path) -> None:
    folder = tiny.write(dense.NEMOTRON, tmp_path / "checkpoint")
    checkpoints.change_tensors(folder, lambda tensors: tensors.pop("model.norm.bias"))
    with pytest.raises(IkpyError, match=r"architecture nemotron needs output_norm\.bias"):
        Conversion(folder)


SCALED = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
REFUSED: dict[str, tuple[tiny.Tiny, dict[str, Any], str]] = {
    "sum of experts": (made.COHERE2_MOE, {"shared_expert_combination_strategy": "sum"}, "combination_strategy 'sum'"),
    "routing": (made.COHERE2_MOE, {"expert_selection_fn": "tanh"}, "expert_selection_fn 'tanh'"),
    "dense layer without positions": (
        made.COHERE2_MOE,
        {"prefix_dense_sliding_window_pattern": 2},
        "a dense layer without window and without positions",
    ),
    "dense layer in the middle": (
        made.COHERE2_MOE,
        {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]},
        "dense layers among the expert layers",
    ),
    "dense layer of Solar Open": (made.SOLAR_OPEN, {"first_k_dense_replace": 1}, "first_k_dense_replace 1"),
    "dense layer of Mellum": (
        made.MELLUM,
        {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        "dense layers among the expert layers",
    ),
    "weights of Mellum": (made.MELLUM, {"norm_topk_prob": False}, "norm_topk_prob False"),
    "windows of Mellum": (
        made.MELLUM,
        {"rope_parameters": {"full_attention": SCALED, "sliding_attention": SCALED}},
        "RoPE scaling 'linear' of the window layers",
    ),
    "part of a head of Mellum": (
        made.MELLUM,
        {
            "rope_parameters": {
                **made.MELLUM.config["rope_parameters"],
                "full_attention": {"partial_rotary_factor": 0.5},
            }
        },
        "partial_rotary_factor 0.5",
    ),
    "windows that are not used": (made.MELLUM, {"use_sliding_window": False}, "use_sliding_window false"),
    "kinds of Mellum": (made.MELLUM, {"layer_types": ["full_attention"]}, "1 kinds of attention"),
    "dense layer of Ling": (made.BAILING_MOE, {"first_k_dense_replace": 1}, "first_k_dense_replace 1"),
    "routing of Ling": (made.BAILING_MOE, {"score_function": "sigmoid"}, "experts chosen by sigmoid"),
    "another Ling": (made.BAILING_MOE, {"architectures": ["BailingMoeLinearForCausalLM"]}, "BailingMoeLinear"),
    "windows of Ling": (made.BAILING_MOE, {"use_sliding_window": True}, "use_sliding_window true"),
    "scores of Ling": (made.BAILING_MOE, {"norm_softmax": True}, "norm_softmax true"),
    "activation of AFM": (dense.ARCEE, {"hidden_act": "silu"}, "activation 'silu'"),
    "bases of Granite": (
        made.GRANITE_SWA,
        {"layer_rope_theta": [0, 10000, 20000, 0]},
        r"layer_rope_theta with bases \[10000, 20000\]",
    ),
    "too few bases": (made.GRANITE_SWA, {"layer_rope_theta": [0, 10000]}, "2 bases of RoPE"),
    "too few windows": (made.GRANITE_SWA, {"layer_types": ["full_attention"]}, "sliding_window_pattern has wrong"),
    "heads of Minitron": (dense.NEMOTRON, {"kv_channels": 24}, "kv_channels 24 beside heads"),
    "norms of Apertus": (dense.APERTUS, {"qk_norm": False}, "qk_norm false"),
    "other norms of Apertus": (dense.APERTUS, {"post_norm": True}, "post_norm true"),
    "activation of EXAONE": (dense.EXAONE, {"activation_function": "gelu"}, "activation 'gelu'"),
    "too few kinds": (made.COHERE2_MOE, {"mlp_layer_types": ["dense"]}, "1 kinds of networks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_file_can_say(case: str, tmp_path: Path) -> None:
    kind, config, message = REFUSED[case]
    with pytest.raises(IkpyError, match=message) as caught:
        Conversion(tiny.write(kind, tmp_path / "checkpoint", **config))
    assert "\n" not in str(caught.value)
