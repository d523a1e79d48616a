"""`ikpy convert` of models with linear biases that transformers has no class of, held to float64 evaluations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from tests.cpu.convert import alibi_checkpoints as alibi
from tests.cpu.convert import older_checkpoints as older
from tests.cpu.convert import plain_checkpoints as plain
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.seeded_checkpoints import FF, HEAD, HEADS, Tiny
from tests.cpu.convert.test_convert_older import GPT2, LLAMA, Named, named, usual_outer
from tests.cpu.convert.test_convert_seeded import converted, logits_of
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models.reference_models import RandomModel
from tests.cpu.quants.plain_blocks import Blocks, Form, gelu_erf

MPT_NAMES = {
    "norm_1": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.q_ln": "attn_q_norm",
    "attn.k_ln": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "norm_2": "ffn_norm",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}


def of_mpt(kind: Tiny) -> Named:
    outer = {**usual_outer("transformer.wte", "transformer.norm_f"), "transformer.wpe": "position_embd"}
    return named(kind, outer, "transformer.blocks", MPT_NAMES)


def of_jais(kind: Tiny) -> Named:
    """Matrices are stored the other way round; silu(c_fc2 x) c_fc x."""
    names = {**GPT2, "mlp.c_fc": "ffn_up", "mlp.c_fc2": "ffn_gate", "mlp.c_proj": "ffn_down"}
    outer = {**usual_outer("transformer.wte", "transformer.ln_f"), "transformer.relative_pe": "slopes"}
    weights = named(kind, outer, "transformer.h", names)
    del weights["slopes"]
    for name, values in weights.items():
        if name.startswith("blk.") and values.ndim == 2:
            weights[name] = values.T
    embedding = weights["token_embd"]
    return weights | {"token_embd": embedding * 3.0, "output": embedding * (2.5 * 0.5)}


def of_refact(kind: Tiny) -> Named:
    names = {
        **GPT2,
        "attn.q": "attn_q",
        "attn.kv": "kv",
        "mlp.gate_up_proj": "gate_up",
        "mlp.c_proj": "ffn_down",
    }
    weights = named(kind, usual_outer("transformer.wte", "transformer.ln_f"), "transformer.h", names)
    for il in range(plain.N_LAYER):
        p = f"blk.{il}"
        weights[f"{p}.attn_k"], weights[f"{p}.attn_v"] = np.split(weights.pop(f"{p}.kv"), 2)
        weights[f"{p}.ffn_gate"], weights[f"{p}.ffn_up"] = np.split(weights.pop(f"{p}.gate_up"), 2)
    return weights


def evaluated(weights: Named, form: Form) -> np.ndarray:
    """Logits [T, V] of the golden tokens, float64."""
    epsilon = "attention.layer_norm_rms_epsilon" if form.norms == "rms" else "attention.layer_norm_epsilon"
    m = RandomModel(
        form.arch, 0, **checks.shape(form.n_layer, form.d, form.heads, form.kv, form.head, FF), **{epsilon: 1e-5}
    )
    m.weights = weights
    return Blocks(form, m).logits(tiny.tokens())


OF_MPT = Form(
    "mpt", 0, norms="layer", kv=6, heads=6, head=16, act=gelu_erf, fused=True, tied=True, n_layer=plain.N_LAYER
)
OF_D = {"heads": HEADS, "head": HEAD, "n_layer": plain.N_LAYER, "max_bias": 8.0}
SILU: dict[str, Any] = {"act": ref.silu, "gated": True}
CASES = {
    "mpt": (alibi.MPT, of_mpt, replace(OF_MPT, max_bias=8.0, clamp=0.4)),
    "mpt-grouped": (alibi.MPT_GROUPED, of_mpt, replace(OF_MPT, kv=2, max_bias=6.0, head_norms="all")),
    "mpt-embedded": (alibi.MPT_EMBEDDED, of_mpt, replace(OF_MPT, clamp=0.4, positions=True)),
    "jais": (alibi.JAIS, of_jais, Form("jais", 0, kv=HEADS, **SILU, fused=True, scale=HEAD**-0.5, **OF_D)),
    "refact": (alibi.REFACT, of_refact, Form("refact", 0, norms="rms", kv=1, **SILU, **OF_D)),
}


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, tmp_path: Path) -> None:
    kind, weights_of, form = CASES[name]
    truth = evaluated(weights_of(kind), form)
    error = np.abs(logits_of(converted(kind, tmp_path)) - truth).max(axis=1)
    assert error.max() <= 1e-4 * np.abs(truth).max(), f"token {error.argmax()} is off by {error.max():.1e}"


def baichuan_13b() -> Tiny:
    """As many layers as tell the model."""
    two = older.baichuan_shapes()
    layers = {name: shape for name, shape in two.items() if name.startswith("model.layers.0.")}
    many = {name.replace("layers.0.", f"layers.{il}."): shape for il in range(40) for name, shape in layers.items()}
    return replace(older.BAICHUAN, config={**older.BAICHUAN.config, "num_hidden_layers": 40}, shapes=lambda: two | many)


def test_baichuan_13b(tmp_path: Path) -> None:
    kind = baichuan_13b()
    known = {f"model.layers.{il}.{x}": f"blk.{il}.{y}" for il in range(40) for x, y in LLAMA.items()}
    known |= {f"model.layers.{il}.self_attn.W_pack": f"blk.{il}.attn_qkv" for il in range(40)}
    known |= usual_outer("model.embed_tokens", "model.norm")
    weights = {known[name.removesuffix(".weight")]: values for name, values in tiny.weights(kind).items()}
    form = Form("baichuan", 0, norms="rms", kv=HEADS, **SILU, fused=True, **{**OF_D, "n_layer": 40})
    truth = evaluated(weights, form)
    error = np.abs(logits_of(converted(kind, tmp_path)) - truth).max(axis=1)
    assert error.max() <= 1e-4 * np.abs(truth).max(), f"token {error.argmax()} is off by {error.max():.1e}"


def keys_of(file: GGUFFile) -> dict[str, Any]:
    arch = file.metadata["general.architecture"]
    return {name.removeprefix(f"{arch}."): value for name, value in file.metadata.items()}


def test_keys(tmp_path: Path) -> None:
    keys = keys_of(converted(alibi.MPT_GROUPED, tmp_path / "mpt"))
    assert keys["attention.max_alibi_bias"] == 6.0 and keys["attention.head_count_kv"] == 2
    assert "attention.clamp_kqv" not in keys
    keys = keys_of(converted(alibi.MPT, tmp_path / "clipped"))
    assert np.isclose(keys["attention.clamp_kqv"], 0.4)
    assert "attention.max_alibi_bias" not in keys_of(converted(alibi.MPT_EMBEDDED, tmp_path / "embedded"))
    keys = keys_of(converted(alibi.BLOOM, tmp_path / "bloom"))
    assert keys["context_length"] == 2048 and keys["feed_forward_length"] == 4 * alibi.WIDE
    keys = keys_of(converted(alibi.REFACT, tmp_path / "refact"))
    assert keys["feed_forward_length"] == alibi.REFACT_FF and keys["attention.head_count_kv"] == 1


REFUSED: list[tuple[Tiny, dict[str, Any], str]] = [
    (alibi.BLOOM, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm true"),
    (alibi.MPT, {"logit_scale": "inv_sqrt_d_model"}, "logit_scale inv_sqrt_d_model"),
    (alibi.MPT, {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm'"),
    (alibi.MPT, {"attn_config": {"prefix_lm": True}}, "attn_config with prefix_lm true"),
    (alibi.MPT, {"attn_config": {"softmax_scale": 0.5}}, "softmax_scale 0.5"),
    (alibi.MPT, {"attn_config": {"sliding_window_size": 64}}, "sliding_window_size 64"),
    (alibi.MPT, {"attn_config": {"attn_type": "latent"}}, "attn_type latent"),
    (alibi.MPT, {"attn_config": {"kv_n_heads": 2.5}}, "'kv_n_heads' is 2.5, not an integer"),
    (alibi.MPT, {"attn_config": {"alibi_bias_max": 0}}, "alibi_bias_max 0"),
    (alibi.MPT, {"attn_config": {"clip_qkv": -1.0}}, "clip_qkv -1.0"),
    (alibi.MPT, {"attn_config": {"alibi": False}}, "position_embd.weight is missing"),
    (alibi.MPT, {"attn_config": [1]}, "attn_config that is no object"),
    (alibi.MPT, {"ffn_config": [1]}, "ffn_config that is no object"),
    (alibi.JAIS, {"position_embedding_type": "learned"}, "position_embedding_type 'learned'"),
    (alibi.JAIS, {"mup_scale_qk_dot_by_d": False}, "mup_scale_qk_dot_by_d false"),
    (alibi.JAIS, {"alibi_scaling": {"type": "linear"}}, "alibi_scaling"),
    (alibi.JAIS, {"activation_function": "gelu"}, "activation 'gelu'"),
    (alibi.REFACT, {"multi_query": False}, "multi_query false"),
]


@pytest.mark.parametrize(("kind", "values", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_refused(kind: Tiny, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=message):
        converted(kind, tmp_path, **values)


def test_norms_that_the_configuration_promises(tmp_path: Path) -> None:
    config = {**alibi.MPT.config["attn_config"], "qk_ln": True}
    with pytest.raises(FileFormatError, match=r"attn_[qk]_norm"):
        converted(alibi.MPT, tmp_path, attn_config=config)
