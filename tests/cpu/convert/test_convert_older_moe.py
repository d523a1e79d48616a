"""`ikpy convert` of Arctic, SmallThinker, OpenELM, PLM, GroveMoE, Grok-1: logits are those of their weights; errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import FileFormatError, UnsupportedError
from tests.cpu.convert import older_moe_checkpoints as older
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert.seeded_checkpoints import FF_EXPERT, HEAD, HEADS, KV, USED, D, Tiny
from tests.cpu.convert.test_convert_older import LLAMA, Named
from tests.cpu.convert.test_convert_seeded import converted, logits_of
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import test_arch_older_moe as arch
from tests.cpu.models.definition_checks import RMS
from tests.cpu.models.reference_models import Evaluation, RandomModel
from tests.cpu.models.test_arch_grok import grok_logits
from tests.cpu.models.test_arch_grovemoe import grovemoe_logits


def stacked(kind: Tiny, names: dict[str, str]) -> Named:
    """Weights in the names of definitions, those of experts joined."""
    weights: Named = {}
    parts: dict[str, dict[int, np.ndarray]] = {}
    outer = {"lm_head": "output", **dict.fromkeys(("norm", "norm.scale", "rms_norm"), "output_norm")}
    outer |= dict.fromkeys(("embed_tokens", "token_embeddings", "in_out_embed"), "token_embd")
    for name, values in tiny.weights(kind).items():
        path = name.removesuffix(".weight").removeprefix("model.").removeprefix("transformer.")
        path = path.replace("decoder_layer.", "layers.").replace(".moe.", ".experts.")
        if not path.startswith("layers."):
            weights[outer[path]] = values
            continue
        _, il, module = path.split(".", 2)
        before, _, after = module.partition("experts.")
        if module in LEFT_OUT:
            continue
        if after:
            e, _, part = after.partition(".")
            kind_of = "chunk_" if before.endswith("chunk_") else ""
            parts.setdefault(f"blk.{il}.{names[kind_of + part]}", {})[int(e)] = values
        else:
            weights[f"blk.{il}.{names[module]}"] = values
    return weights | {name: np.stack([found[e] for e in range(len(found))]) for name, found in parts.items()}


ARCTIC = {
    **LLAMA,
    "post_attention_layernorm": "ffn_norm_exps",
    "residual_layernorm": "ffn_norm",
    **{f"residual_mlp.{x}": f"ffn_{y}" for x, y in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
    "block_sparse_moe.gate": "ffn_gate_inp",
    **{x: f"ffn_{y}_exps" for x, y in (("w1", "gate"), ("w2", "down"), ("w3", "up"))},
}
THINKER = {
    **LLAMA,
    "block_sparse_moe.primary_router": "ffn_gate_inp",
    **{x: f"ffn_{x}_exps" for x in ("gate", "up", "down")},
}
ELM = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn.qkv_proj": "attn_qkv",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.out_proj": "attn_output",
    "ffn.proj_1": "ffn_gate_up",
    "ffn.proj_2": "ffn_down",
}
GROVE = {
    **LLAMA,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    **{f"{x}_proj": f"ffn_{x}_exps" for x in ("gate", "up", "down")},
    **{f"chunk_{x}_proj": f"ffn_{x}_chexps" for x in ("gate", "up", "down")},
}
GROK = {
    **{f"attn.{x}_proj": f"attn_{x}" for x in "qkv"},
    "attn.o_proj": "attn_output",
    **{f"multi_head_attention.{name}": f"attn_{name[0]}" for name in ("query", "key", "value")},
    "multi_head_attention.linear": "attn_output",
    **dict.fromkeys(("pre_attn_norm.scale", "rms_norm"), "attn_norm"),
    **dict.fromkeys(("post_attn_norm.scale", "rms_norm_1"), "attn_output_norm"),
    **dict.fromkeys(("pre_moe_norm.scale", "rms_norm_2"), "ffn_norm"),
    **dict.fromkeys(("post_moe_norm.scale", "rms_norm_3"), "layer_output_norm"),
    **dict.fromkeys(("moe_block.gate", "router"), "ffn_gate_inp"),
    **{name: f"ffn_{x}_exps" for x, name in (("gate", "linear"), ("up", "linear_v"), ("down", "linear_1"))},
}
LEFT_OUT = ("mlp.expert_bias",)
PLM = {
    **LLAMA,
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
}


def evaluation(kind: Tiny, names: dict[str, str], n_layer: int, **keys: Any) -> Evaluation:
    """The checkpoint's weights with the keys that its definition reads."""
    shape = checks.shape(n_layer, D, HEADS, KV, HEAD, FF_EXPERT)
    m = RandomModel(kind.name, 0, **{**shape, **RMS, **keys})
    m.weights = stacked(kind, names)
    for name in [name for name in m.weights if name.endswith("ffn_gate_up")]:
        gate, up = np.split(m.weights.pop(name), 2)
        m.weights |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
    return Evaluation(m)


def arctic(tokens: np.ndarray) -> np.ndarray:
    return arch.arctic_logits(evaluation(older.ARCTIC, ARCTIC, older.N_LAYER), tokens, neox=True)


def smallthinker(tokens: np.ndarray) -> np.ndarray:
    keys = {"attention.sliding_window": older.WINDOW, "expert_gating_func": 2}
    return arch.smallthinker_logits(evaluation(older.SMALLTHINKER, THINKER, older.N_THINKER, **keys), tokens)


def openelm(tokens: np.ndarray) -> np.ndarray:
    keys = {"attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": older.ELM_HEAD}
    return arch.openelm_logits(evaluation(older.OPENELM, ELM, len(older.ELM_FF), **keys), tokens)


def plm(tokens: np.ndarray) -> np.ndarray:
    return arch.plm_logits(evaluation(older.PLM, PLM, older.N_LAYER), tokens)


def grovemoe(tokens: np.ndarray) -> np.ndarray:
    keys = {"experts_per_group": 2, "expert_group_scale": 0.05, "expert_used_count": USED}
    return grovemoe_logits(evaluation(older.GROVEMOE, GROVE, older.N_LAYER, **keys), tokens)


def grok(tokens: np.ndarray, kind: Tiny = older.GROK) -> np.ndarray:
    keys = {"attention.output_scale": 0.1, "attn_logit_softcapping": 2.0, "embedding_scale": 3.0, "logit_scale": 0.7}
    return grok_logits(evaluation(kind, GROK, older.N_LAYER, expert_used_count=USED, **keys), tokens)


def grok_xai(tokens: np.ndarray) -> np.ndarray:
    return grok(tokens, older.GROK_XAI)


CASES: list[tuple[Tiny, Callable[[np.ndarray], np.ndarray]]] = [
    (older.ARCTIC, arctic),
    (older.SMALLTHINKER, smallthinker),
    (older.OPENELM, openelm),
    (older.PLM, plm),
    (older.GROVEMOE, grovemoe),
    (older.GROK, grok),
    (older.GROK_XAI, grok_xai),
]


@pytest.mark.parametrize(("kind", "evaluate"), CASES, ids=lambda x: getattr(x, "name", ""))
def test_logits(kind: Tiny, evaluate: Callable[[np.ndarray], np.ndarray], tmp_path: Path) -> None:
    truth = evaluate(tiny.tokens())
    error = np.abs(logits_of(converted(kind, tmp_path)) - truth).max(axis=1)
    assert error.max() <= 1e-4 * np.abs(truth).max(), f"token {error.argmax()} is off by {error.max():.1e}"


def test_smallthinker_without_windows(tmp_path: Path) -> None:
    layouts = {"rope_layout": [1] * older.N_THINKER, "sliding_window_layout": [0] * older.N_THINKER}
    file = converted(older.SMALLTHINKER, tmp_path, **layouts, moe_primary_router_apply_softmax=True)
    keys = {"expert_gating_func": 1}
    truth = arch.smallthinker_logits(evaluation(older.SMALLTHINKER, THINKER, older.N_THINKER, **keys), tiny.tokens())
    assert np.abs(logits_of(file) - truth).max() <= 1e-4 * np.abs(truth).max()


def test_magnitude_of_phimoe(tmp_path: Path) -> None:
    keys = converted(older.PHIMOE, tmp_path).metadata
    assert keys["phimoe.rope.scaling.attn_factor"] == np.float32(1.2)
    assert keys["phimoe.rope.scaling.original_context_length"] == 256
    assert keys["phimoe.attention.layer_norm_rms_epsilon"] == np.float32(1e-5)


def test_widths_in_units() -> None:
    from ikpy.convert.families.older_moe import _in_units

    assert [_in_units(x, 256) for x in (640.0, 700.0, 100.0, 383.0, 400.0)] == [768, 768, 256, 512, 512]


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (older.PHIMOE, {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        (older.PHIMOE, {"num_experts_per_tok": 3}, "num_experts_per_tok 3"),
        (older.PHIMOE, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "RoPE scaling 'yarn'"),
        (
            older.PHIMOE,
            {"rope_scaling": {**older.PHIMOE.config["rope_scaling"], "long_mscale": 1.3}},
            "another magnitude of long contexts",
        ),
        (older.GROVEMOE, {"norm_topk_prob": False}, "norm_topk_prob False"),
        (older.GROVEMOE, {"mlp_only_layers": [1]}, "dense layers among the expert layers"),
        (older.GROVEMOE, {"num_experts": 6}, "needs (6|3) experts, found (8|4)"),
        (older.GROK, {"residual_moe": True}, "residual_moe true"),
        (older.GROK, {"hidden_act": "silu"}, "activation 'silu'"),
        (older.GROK, {"num_experts": 6}, "needs 6 experts, found 8"),
        (older.DBRX, {"ffn_config": {"moe_normalize_expert_weights": None}}, "moe_normalize_expert_weights None"),
        (older.DBRX, {"ffn_config": {"ffn_act_fn": {"name": "gelu"}}}, "activation 'gelu'"),
        (older.DBRX, {"attn_config": 3}, "attn_config 3"),
        (older.ARCTIC, {"moe_layer_frequency": 2}, "moe_layer_frequency 2"),
        (older.ARCTIC, {"use_residual": False}, "use_residual false"),
        (older.ARCTIC, {"num_experts_per_tok": 1}, "num_experts_per_tok 1"),
        (older.SMALLTHINKER, {"rope_layout": [1] * older.N_THINKER}, "rope_layout"),
        (older.SMALLTHINKER, {"sliding_window_layout": [1] * older.N_THINKER}, "sliding_window_layout"),
        (older.SMALLTHINKER, {"sliding_window_layout": [0, 1]}, "sliding_window_layout"),
        (older.SMALLTHINKER, {"moe_enable_secondary_experts": True}, "secondary experts"),
        (older.SMALLTHINKER, {"moe_layer_layout": [0] * older.N_THINKER}, "dense layers"),
        (older.SMALLTHINKER, {"norm_topk_prob": False}, "norm_topk_prob false"),
        (older.OPENELM, {"normalize_qk_projections": False}, "normalize_qk_projections false"),
        (older.OPENELM, {"num_query_heads": [3, 4]}, "num_query_heads of 2 layers"),
        (older.OPENELM, {"num_kv_heads": [1, 2, 4]}, "layer 2 has 6 heads and 4 KV heads"),
        (older.OPENELM, {"ffn_dim_divisor": 0}, "ffn_dim_divisor 0"),
        (older.PLM, {"q_lora_rank": 32}, "q_lora_rank 32"),
        (older.PLM, {"hidden_act": "silu"}, "activation 'silu'"),
        (older.PLM, {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "RoPE scaling 'yarn'"),
    ],
)
def test_refused(kind: Tiny, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = tiny.write(kind, tmp_path / "checkpoint", **values)
    with pytest.raises((FileFormatError, UnsupportedError), match=message):
        Conversion(folder)
