"""What files of DeepSeek V4's shape hold beside the usual: sizes of DeepSeek-V4-Flash."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ikpy.gguf.types import GGUFValueType as VT

if TYPE_CHECKING:
    from benchmarks.shapes import Shape
    from ikpy.gguf.writer import GGUFWriter

STREAMS, Q_RANK, OUT_RANK, OUT_GROUPS = 4, 1024, 1024, 8
INDEX_HEADS, INDEX_SIZE, TOP_K = 64, 128, 512
HASH_LAYERS, WINDOW = 3, 128
MIXES = (2 + STREAMS) * STREAMS
Declared = tuple[str, tuple[int, ...], str]


def ratio(layer: int) -> int:
    """Positions per compressed cell: two layers have none, then 4 and 128 take turns."""
    return 0 if layer < 2 else (4, 128)[layer % 2]


def metadata(w: GGUFWriter, s: Shape) -> None:
    """Keys of the architecture."""
    integers = {
        "attention.q_lora_rank": Q_RANK,
        "attention.output_lora_rank": OUT_RANK,
        "attention.output_group_count": OUT_GROUPS,
        "attention.sliding_window": WINDOW,
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_SIZE,
        "attention.indexer.top_k": TOP_K,
        "rope.scaling.original_context_length": 65536,
        "expert_shared_count": s.shared,
        "expert_gating_func": 4,
        "hash_layer_count": HASH_LAYERS,
        "hyper_connection.count": STREAMS,
        "hyper_connection.sinkhorn_iterations": 20,
    }
    floats = {
        "attention.compress_rope_freq_base": 160000.0,
        "rope.scaling.factor": 16.0,
        "expert_weights_scale": 1.5,
        "hyper_connection.epsilon": 1e-6,
    }
    for key, number in integers.items():
        w.add(f"{s.arch}.{key}", VT.UINT32, number)
    for key, value in floats.items():
        w.add(f"{s.arch}.{key}", VT.FLOAT32, value)
    w.add(f"{s.arch}.rope.scaling.type", VT.STRING, "yarn")
    w.add(f"{s.arch}.expert_weights_norm", VT.BOOL, True)
    w.add_array(f"{s.arch}.attention.compress_ratios", VT.UINT32, [ratio(il) for il in range(s.layers)])
    w.add_array(f"{s.arch}.swiglu_clamp_exp", VT.FLOAT32, [10.0] * s.layers)


def connection(name: str, s: Shape, mixes: int, scales: int) -> Iterator[Declared]:
    """Of a branch, or of the head."""
    yield f"{name}_fn.weight", (STREAMS * s.embd, mixes), "f32"
    yield f"{name}_base.weight", (mixes,), "f32"
    yield f"{name}_scale.weight", (scales,), "f32"


def compressor(name: str, s: Shape, size: int, layer: int) -> Iterator[Declared]:
    """What makes compressed cells; matrices are in 16 bits as in published files."""
    width = 2 * size if ratio(layer) == 4 else size
    yield f"{name}_compressor_kv.weight", (s.embd, width), "bf16"
    yield f"{name}_compressor_gate.weight", (s.embd, width), "bf16"
    yield f"{name}_compressor_ape.weight", (width, ratio(layer)), "f32"
    yield f"{name}_compressor_norm.weight", (size,), "f32"


def layer_tensors(p: str, layer: int, s: Shape, attn: str) -> Iterator[Declared]:
    """All of a layer but the norm of its branches and its experts. attn: type of the projections."""
    yield from connection(p + "hc_attn", s, MIXES, 3)
    yield from connection(p + "hc_ffn", s, MIXES, 3)
    width = s.heads * s.head_size
    yield p + "attn_q_a.weight", (s.embd, Q_RANK), attn
    yield p + "attn_q_a_norm.weight", (Q_RANK,), "f32"
    yield p + "attn_q_b.weight", (Q_RANK, width), attn
    yield p + "attn_kv.weight", (s.embd, s.head_size), attn
    yield p + "attn_kv_a_norm.weight", (s.head_size,), "f32"
    yield p + "attn_sinks.weight", (s.heads,), "f32"
    yield p + "attn_output_a.weight", (width // OUT_GROUPS, OUT_RANK * OUT_GROUPS), attn
    yield p + "attn_output_b.weight", (OUT_RANK * OUT_GROUPS, s.embd), attn
    if ratio(layer):
        yield from compressor(p + "attn", s, s.head_size, layer)
    if ratio(layer) == 4:
        yield p + "indexer.attn_q_b.weight", (Q_RANK, INDEX_HEADS * INDEX_SIZE), attn
        yield p + "indexer.proj.weight", (s.embd, INDEX_HEADS), "bf16"
        yield from compressor(p + "indexer", s, INDEX_SIZE, layer)
    if layer < HASH_LAYERS:
        yield p + "ffn_gate_tid2eid.weight", (s.experts_used, s.vocab), "i32"
    else:
        yield p + "exp_probs_b.bias", (s.experts,), "f32"
