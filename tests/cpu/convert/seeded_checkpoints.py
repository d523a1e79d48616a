"""Tiny checkpoints made from a seed, in the names that models are published with.

scripts/make_seeded_golden.py records the logits that transformers gives for them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.deepseek4_checkpoints import bf16_values

V, D, HEADS, FF = 384, 64, 4, 96
N_EXPERT, USED, FF_EXPERT = 8, 3, 32
N_TOKENS = 70
Shapes = dict[str, tuple[int, ...]]

OUTER: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}


def head(name: str, model_type: str) -> dict[str, Any]:
    """How config.json of every checkpoint begins."""
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "vocab_size": V,
        "hidden_size": D,
    }


@dataclass(frozen=True)
class Tiny:
    """A kind of checkpoint: its config.json and the shapes of its tensors.

    arranged: a tensor by name and values as transformers takes it, where that is not as published. integers: further
    tensors i64 by name.
    """

    name: str
    config: dict[str, Any]
    shapes: Callable[[], Shapes]
    arranged: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values

    is_encoder: bool = False
    integers: Callable[[], dict[str, list[int]]] = dict

    @property
    def golden(self) -> Path:
        """Rows (i32 [R]) and logits (f32 [R, C]) after these rows, of the first C tokens of the vocabulary; of encoders
        the states of these rows.
        """
        return made.DATA / f"{self.name}.npz"


# Kimi Linear

N_LAYER, ATTENDS, SIZE, RANK, NOPE, ROT, VALUE, TAPS = 5, 4, 32, 64, 32, 32, 32, 4
"""ATTENDS: number of the layer that attends, counted from 1."""


def kimi_linear_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(N_LAYER):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices: Shapes = {"o_proj": (D, HEADS * VALUE)}
        if il + 1 == ATTENDS:
            matrices |= {"q_proj": (HEADS * (NOPE + ROT), D), "kv_a_proj_with_mqa": (RANK + ROT, D)}
            matrices |= {"kv_b_proj": (HEADS * (NOPE + VALUE), RANK), "kv_a_layernorm": (RANK,)}
        else:
            n = HEADS * SIZE
            matrices |= {f"{x}_proj": (n, D) for x in "qkv"} | {f"{x}_conv1d": (n, 1, TAPS) for x in "qkv"}
            matrices |= {f"{x}_a_proj": (SIZE, D) for x in "fg"} | {f"{x}_b_proj": (n, SIZE) for x in "fg"}
            matrices |= {"b_proj": (HEADS, D), "o_norm": (SIZE,)}
            shapes |= {f"{p}.self_attn.A_log": (1, 1, HEADS, 1), f"{p}.self_attn.dt_bias": (n,)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, ("gate_proj", "up_proj", "down_proj"))
            continue
        p = f"{p}.block_sparse_moe"
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.gate.e_score_correction_bias": (N_EXPERT,)}
        shapes |= gated(f"{p}.shared_experts", FF_EXPERT, ("gate_proj", "up_proj", "down_proj"))
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, ("w1", "w3", "w2"))
    return shapes


def gated(prefix: str, n: int, names: tuple[str, str, str]) -> Shapes:
    """Gate, up and down of a network."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names)
    return {gate: (n, D), up: (n, D), down: (D, n)}


KIMI_LINEAR = Tiny(
    "kimi-linear",
    {
        **head("KimiLinear", "kimi_linear"),
        "head_dim": 16,
        "hidden_act": "silu",
        "intermediate_size": FF,
        "kv_lora_rank": RANK,
        "linear_attn_config": {
            "full_attn_layers": [ATTENDS],
            "head_dim": SIZE,
            "kda_layers": [il for il in range(1, N_LAYER + 1) if il != ATTENDS],
            "num_heads": HEADS,
            "short_conv_kernel_size": TAPS,
        },
        "mla_use_nope": True,
        "model_max_length": 256,
        "moe_intermediate_size": FF_EXPERT,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": HEADS,
        "num_expert_group": 1,
        "num_experts": N_EXPERT,
        "num_experts_per_token": USED,
        "num_hidden_layers": N_LAYER,
        "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROT,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "use_grouped_topk": True,
        "v_head_dim": VALUE,
        "torch_dtype": "bfloat16",
    },
    kimi_linear_shapes,
)

# LFM2

KV, HEAD, LFM2_TAPS = 2, 16, 3
FF_GIVEN, FF_UNIT = 130, 32
"""Two thirds of the width that the configuration gives, in whole units, are FF."""
N_LFM2, N_DENSE, LFM2_ATTENDS = 4, 1, (1, 3)


def lfm2_shapes(*, experts: bool) -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {"model.embed_tokens.weight": (V, D), "model.embedding_norm.weight": (D,)}
    for il in range(N_LFM2):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("operator_norm", "ffn_norm")}
        if il in LFM2_ATTENDS:
            heads = {"q_proj": (HEADS * HEAD, D), "k_proj": (KV * HEAD, D), "v_proj": (KV * HEAD, D)}
            heads |= {"out_proj": (D, HEADS * HEAD), "q_layernorm": (HEAD,), "k_layernorm": (HEAD,)}
            shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in heads.items()}
        else:
            parts = {"in_proj": (3 * D, D), "conv": (D, 1, LFM2_TAPS), "out_proj": (D, D)}
            shapes |= {f"{p}.conv.{name}.weight": shape for name, shape in parts.items()}
        p = f"{p}.feed_forward"
        if not experts or il < N_DENSE:
            shapes |= gated(p, FF, ("w1", "w3", "w2"))
            continue
        shapes |= {f"{p}.gate.weight": (N_EXPERT, D), f"{p}.expert_bias": (N_EXPERT,)}
        for e in range(N_EXPERT):
            shapes |= gated(f"{p}.experts.{e}", FF_EXPERT, ("w1", "w3", "w2"))
    return shapes


_LFM2: dict[str, Any] = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": N_LFM2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "max_position_embeddings": 256,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "conv_L_cache": LFM2_TAPS,
    "conv_bias": False,
    "torch_dtype": "bfloat16",
}
LFM2 = Tiny(
    "lfm2",
    {
        **_LFM2,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_auto_adjust_ff_dim": True,
        "block_dim": D,
        "block_ff_dim": FF_GIVEN,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": FF_UNIT,
        "block_norm_eps": 1e-5,
        "full_attn_idxs": list(LFM2_ATTENDS),
        "num_heads": HEADS,
        "use_pos_enc": True,
    },
    lambda: lfm2_shapes(experts=False),
)
LFM2_MOE = Tiny(
    "lfm2-moe",
    {
        **_LFM2,
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "intermediate_size": FF,
        "moe_intermediate_size": FF_EXPERT,
        "layer_types": ["full_attention" if il in LFM2_ATTENDS else "conv" for il in range(N_LFM2)],
        "norm_topk_prob": True,
        "num_dense_layers": N_DENSE,
        "num_experts": N_EXPERT,
        "num_experts_per_tok": USED,
        "routed_scaling_factor": 1.0,
        "tie_embedding": True,
        "use_expert_bias": True,
    },
    lambda: lfm2_shapes(experts=True),
)

# Mistral Small 4

N_MISTRAL4, Q_RANK, STRETCHED = 3, 32, 16
"""STRETCHED: tokens of the original context, after as many of which queries grow."""


def mistral4_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes = dict(OUTER)
    for il in range(N_MISTRAL4):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in ("input_layernorm", "post_attention_layernorm")}
        matrices = {"q_a_proj": (Q_RANK, D), "q_b_proj": (HEADS * (NOPE + ROT), Q_RANK), "o_proj": (D, HEADS * VALUE)}
        matrices |= {"kv_a_proj_with_mqa": (RANK + ROT, D), "kv_b_proj": (HEADS * (NOPE + VALUE), RANK)}
        shapes |= {f"{p}.self_attn.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"{p}.self_attn.q_a_layernorm.weight": (Q_RANK,), f"{p}.self_attn.kv_a_layernorm.weight": (RANK,)}
        names = ("gate_proj", "up_proj", "down_proj")
        if il == 0:
            shapes |= gated(f"{p}.mlp", FF, names)
            continue
        shapes |= {f"{p}.mlp.gate.weight": (N_EXPERT, D), **gated(f"{p}.mlp.shared_experts", FF_EXPERT, names)}
        shapes[f"{p}.mlp.experts.gate_up_proj"] = (N_EXPERT, 2 * FF_EXPERT, D)
        shapes[f"{p}.mlp.experts.down_proj"] = (N_EXPERT, D, FF_EXPERT)
    return shapes


MISTRAL4 = Tiny(
    "mistral4",
    {
        **head("Mistral4", "mistral4"),
        "hidden_act": "silu",
        "intermediate_size": FF,
        "moe_intermediate_size": FF_EXPERT,
        "num_hidden_layers": N_MISTRAL4,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "n_routed_experts": N_EXPERT,
        "n_shared_experts": 1,
        "num_experts_per_tok": USED,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROT,
        "v_head_dim": VALUE,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "rope_parameters": {
            "type": "yarn",
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": STRETCHED,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    },
    mistral4_shapes,
)

CHECKPOINTS = (KIMI_LINEAR, LFM2, LFM2_MOE, MISTRAL4)
IS_F32 = ("A_log", "bias")
NUMBERS = {"beta": 0.4375, "eps": -0.125}
"""What tensors without dimensions hold."""


def weights(tiny: Tiny) -> dict[str, np.ndarray]:
    """Tensors f32 by name, rounded to bf16 where repositories have it."""
    random = np.random.RandomState(7)  # its numbers never change
    made_weights = {}
    for name, shape in sorted(tiny.shapes().items()):
        values = random.standard_normal(shape) if shape else np.array(NUMBERS[name.rpartition(".")[2]])
        if "norm" in name or ".ln_" in name:
            values = 1 + 0.2 * values
        elif name.endswith("A_log"):
            values = np.log(1 + 3 * random.random_sample(shape))
        elif name.endswith("bias"):
            values = 0.3 * values
        elif shape and "embed" not in name:
            values *= 1.5 / math.sqrt(shape[-1])
        kept = values.astype(np.float32) if name.endswith(IS_F32) else bf16_values(values)
        made_weights[name] = kept.reshape(shape)
    return made_weights


def tokens() -> np.ndarray:
    """The tokens i32 [T] of the golden logits."""
    return np.random.RandomState(6).randint(0, V, N_TOKENS).astype(np.int32)


def entry(name: str, values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor as it is stored."""
    return ("F32", values.shape, values.tobytes()) if name.endswith(IS_F32) else made.bf16(values)


def write(tiny: Tiny, folder: Path, *, for_transformers: bool = False, **config: Any) -> Path:
    """The checkpoint with the tokenizer of DeepSeek V3; config: further values of config.json."""
    made.copy("deepseek-v3", folder.parent).rename(folder)
    (folder / "golden.npz").unlink()
    (folder / "config.json").write_text(json.dumps({**tiny.config, **config}))
    arranged = tiny.arranged if for_transformers else lambda name, values: values
    stored = {name: entry(name, arranged(name, values)) for name, values in weights(tiny).items()}
    for name, numbers in tiny.integers().items():
        stored[name] = ("I64", (len(numbers),), np.array(numbers, np.int64).tobytes())
    made.write_tensors(folder / "model.safetensors", stored)
    return folder
