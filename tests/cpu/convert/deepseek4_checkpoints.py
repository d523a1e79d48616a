"""A tiny DeepSeek V4 checkpoint made from a seed, in the names and types of the official repository.

scripts/make_deepseek4_golden.py records the logits that transformers gives for it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made

GOLDEN = made.DATA / "deepseek-v4.npz"
"""tokens (i32 [T]), rows (i32 [R]) and logits (f32 [R, V]) after these rows."""
N_TOKENS = 140
D, V, HEADS, SIZE, Q_RANK, GROUPS, OUT_RANK, N_EXPERT, USED, FF = 64, 384, 4, 32, 32, 2, 32, 8, 3, 32
INDEX_HEADS, INDEX_SIZE, STREAMS = 16, 64, 4
RATIOS = (0, 4, 128, 4)
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": V,
    "hidden_size": D,
    "moe_intermediate_size": FF,
    "num_hidden_layers": len(RATIOS),
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": SIZE,
    "qk_rope_head_dim": 16,
    "q_lora_rank": Q_RANK,
    "o_groups": GROUPS,
    "o_lora_rank": OUT_RANK,
    "n_routed_experts": N_EXPERT,
    "n_shared_experts": 1,
    "num_experts_per_tok": USED,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,
    "sliding_window": 128,
    "compress_ratios": [*RATIOS, 0],
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_SIZE,
    "index_topk": 4,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "compress_rope_theta": 40000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def bf16_values(values: np.ndarray) -> np.ndarray:
    """Values f32 cut to bf16."""
    return (np.ascontiguousarray(values, "<f4").view("<u4") & 0xFFFF0000).view("<f4")


def layer_shapes(il: int) -> dict[str, tuple[int, ...]]:
    """Shapes by the name within a layer."""
    mixes = (2 + STREAMS) * STREAMS
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (D,),
        "ffn_norm.weight": (D,),
        "attn.attn_sink": (HEADS,),
        "attn.wq_a.weight": (Q_RANK, D),
        "attn.q_norm.weight": (Q_RANK,),
        "attn.wq_b.weight": (HEADS * SIZE, Q_RANK),
        "attn.wkv.weight": (SIZE, D),
        "attn.kv_norm.weight": (SIZE,),
        "attn.wo_a.weight": (GROUPS * OUT_RANK, HEADS * SIZE // GROUPS),
        "attn.wo_b.weight": (D, GROUPS * OUT_RANK),
        "ffn.gate.weight": (N_EXPERT, D),
    }
    for branch in ("attn", "ffn"):
        shapes |= {f"hc_{branch}_fn": (mixes, STREAMS * D), f"hc_{branch}_base": (mixes,), f"hc_{branch}_scale": (3,)}
    for expert in ("shared_experts", *(f"experts.{e}" for e in range(N_EXPERT))):
        shapes |= {f"ffn.{expert}.w1.weight": (FF, D), f"ffn.{expert}.w3.weight": (FF, D)}
        shapes[f"ffn.{expert}.w2.weight"] = (D, FF)
    ratio = RATIOS[il]
    sizes = {"attn.compressor": SIZE} if ratio else {}
    if ratio == 4:
        sizes["attn.indexer.compressor"] = INDEX_SIZE
        shapes["attn.indexer.wq_b.weight"] = (INDEX_HEADS * INDEX_SIZE, Q_RANK)
        shapes["attn.indexer.weights_proj.weight"] = (INDEX_HEADS, D)
    for name, size in sizes.items():
        width = 2 * size if ratio == 4 else size
        shapes |= {f"{name}.wkv.weight": (width, D), f"{name}.wgate.weight": (width, D)}
        shapes |= {f"{name}.ape": (ratio, width), f"{name}.norm.weight": (size,)}
    if il < CONFIG["num_hash_layers"]:
        shapes["ffn.gate.tid2eid"] = (V, USED)
    else:
        shapes["ffn.gate.bias"] = (N_EXPERT,)
    return shapes


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors by their official names."""
    width = STREAMS * D
    outer = {"embed.weight": (V, D), "head.weight": (V, D), "norm.weight": (D,)}
    outer |= {"hc_head_fn": (STREAMS, width), "hc_head_base": (STREAMS,), "hc_head_scale": (1,)}
    layers = {f"layers.{il}.{name}": shape for il in range(len(RATIOS)) for name, shape in layer_shapes(il).items()}
    return {**outer, **layers}


def weights() -> dict[str, np.ndarray]:
    """Tensors f32 by their official names, rounded to bf16 where the repository has it, tables i64."""
    random = np.random.RandomState(5)  # its numbers never change
    made_weights = {}
    for name, shape in sorted(shapes().items()):
        kind = name.rsplit(".", 1)[-1]
        if kind == "tid2eid":
            made_weights[name] = np.stack([random.permutation(N_EXPERT)[:USED] for _ in range(V)]).astype(np.int64)
            continue
        values = random.standard_normal(shape)
        if "norm" in name:
            values = 1 + 0.2 * values
        elif name.startswith("embed"):
            values = 0.7 * values
        elif kind.endswith("_scale"):
            values = 0.7 + 0.3 * np.abs(values)
        elif kind.endswith("_base") or kind == "bias":
            values = 0.3 * values
        elif kind.endswith("_fn"):
            values /= math.sqrt(shape[-1])
        elif kind == "weight":
            values *= 1.5 / math.sqrt(shape[-1])
        made_weights[name] = values.astype(np.float32) if is_f32(name) else bf16_values(values)
    return made_weights


def is_f32(name: str) -> bool:
    """Whether the repository stores a tensor in f32."""
    kind = name.rsplit(".", 1)[-1]
    return "hc_" in name or kind in ("attn_sink", "ape", "bias")


def tokens() -> np.ndarray:
    """The tokens i32 [T] of the golden logits."""
    return np.random.RandomState(6).randint(0, V, N_TOKENS).astype(np.int32)


def entry(name: str, values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor as it is stored."""
    if values.dtype == np.int64:
        return "I64", values.shape, values.tobytes()
    return ("F32", values.shape, values.tobytes()) if is_f32(name) else made.bf16(values)


def write(folder: Path, **config: Any) -> Path:
    """The checkpoint with the tokenizer of DeepSeek V3; config: further values of config.json."""
    made.copy("deepseek-v3", folder.parent).rename(folder)
    (folder / "golden.npz").unlink()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    stored = {name: entry(name, values) for name, values in weights().items()}
    stored["mtp.0.enorm.weight"] = made.bf16(np.ones(D, np.float32))
    made.write_tensors(folder / "model.safetensors", stored)
    return folder
