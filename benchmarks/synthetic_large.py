"""What GLM-4.5 to 4.6, Kimi K2 and Llama 4 have beyond the plain layers of `benchmarks.synthetic`.

Names and keys are those of files that llama.cpp's converter writes.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.shapes import Shape
from ikpy.gguf.types import GGUFValueType as VT
from ikpy.gguf.writer import GGUFWriter

Declared = tuple[str, tuple[int, ...]]
SIGMOID = 2


def metadata(w: GGUFWriter, s: Shape, integers: dict[str, int]) -> None:
    """Adds keys of routing and of latents, and changes those of integers that differ."""
    a = s.arch
    if a == "llama4":
        integers |= {"interleave_moe_layer_step": s.moe_step}
        return
    if a == "qwen3moe":
        return
    integers |= {"expert_gating_func": SIGMOID, "expert_shared_count": s.shared}
    integers |= {"leading_dense_block_count": s.dense_layers}
    w.add(f"{a}.expert_weights_scale", VT.FLOAT32, s.experts_scale)
    w.add(f"{a}.expert_weights_norm", VT.BOOL, True)
    if s.kv_lora_rank:
        integers |= {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": s.q_lora_rank,
            "attention.kv_lora_rank": s.kv_lora_rank,
            "attention.key_length": s.kv_lora_rank + s.n_rope,
            "attention.value_length": s.kv_lora_rank,
            "attention.key_length_mla": s.n_nope + s.n_rope,
            "attention.value_length_mla": s.value_size,
            "rope.dimension_count": s.n_rope,
        }


def latent_attention(p: str, s: Shape) -> Iterator[Declared]:
    """Matrices and vectors of attention over latents, with the halves of `attn_kv_b` that files have today."""
    yield p + "attn_q_a.weight", (s.embd, s.q_lora_rank)
    yield p + "attn_q_a_norm.weight", (s.q_lora_rank,)
    yield p + "attn_q_b.weight", (s.q_lora_rank, s.heads * (s.n_nope + s.n_rope))
    yield p + "attn_kv_a_mqa.weight", (s.embd, s.kv_lora_rank + s.n_rope)
    yield p + "attn_kv_a_norm.weight", (s.kv_lora_rank,)
    yield p + "attn_k_b.weight", (s.n_nope, s.kv_lora_rank, s.heads)
    yield p + "attn_v_b.weight", (s.kv_lora_rank, s.value_size, s.heads)
    yield p + "attn_output.weight", (s.heads * s.value_size, s.embd)


def vectors(p: str, s: Shape, is_moe: bool) -> Iterator[Declared]:
    """Norms and biases of a layer."""
    if s.arch == "glm4moe":
        yield p + "attn_q.bias", (s.heads * s.head_size,)
        yield p + "attn_k.bias", (s.heads_kv * s.head_size,)
        yield p + "attn_v.bias", (s.heads_kv * s.head_size,)
        yield p + "attn_q_norm.weight", (s.head_size,)
        yield p + "attn_k_norm.weight", (s.head_size,)
    if is_moe and s.arch in ("glm4moe", "deepseek2"):
        yield p + "exp_probs_b.bias", (s.experts,)


def is_moe(s: Shape, il: int) -> bool:
    """Whether a layer has experts."""
    return s.experts > 0 and il >= s.dense_layers and (il + 1) % s.moe_step == 0
