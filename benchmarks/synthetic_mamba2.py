"""What synthetic files of hybrids with Mamba-2 have beyond other shapes: Nemotron-H and Granite 4.0 H."""

from __future__ import annotations

from benchmarks.shapes import Shape
from ikpy.gguf.types import GGUFValueType as VT
from ikpy.gguf.writer import GGUFWriter

ARCHITECTURES = ("nemotron_h", "granitehybrid")
CONV_TAPS = 4
# A letter per layer, over and over: M recurrent, * attends, - a network alone.
PATTERNS = {"nemotron_h": "M-M-M-M-M-M-*-", "granitehybrid": "MMMMM*MMMM"}


def kind(s: Shape, il: int) -> str:
    """Letter of a layer."""
    pattern = PATTERNS[s.arch]
    return pattern[il % len(pattern)]


def metadata(w: GGUFWriter, s: Shape) -> None:
    """Keys of these architectures."""
    kinds = [kind(s, il) for il in range(s.layers)]
    heads = [s.heads_kv if letter == "*" else 0 for letter in kinds]
    w.add_array(f"{s.arch}.attention.head_count_kv", VT.UINT32, heads)
    if s.arch == "nemotron_h":
        w.add_array(f"{s.arch}.feed_forward_length", VT.UINT32, [s.ff if letter == "-" else 0 for letter in kinds])
        w.add(f"{s.arch}.attention.layer_norm_epsilon", VT.FLOAT32, 1e-5)
    else:
        w.add(f"{s.arch}.feed_forward_length", VT.UINT32, s.ff_exp or s.ff)
        w.add(f"{s.arch}.rope.scaling.finetuned", VT.BOOL, False)
        for name in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale"):
            w.add(f"{s.arch}.{name}", VT.FLOAT32, 0.1 if name == "attention.scale" else 1.0)
    integers = {
        "ssm.conv_kernel": CONV_TAPS,
        "ssm.inner_size": s.value_heads * s.value_size,
        "ssm.state_size": s.state_size,
        "ssm.time_step_rank": s.value_heads,
        "ssm.group_count": s.key_heads,
        "expert_shared_feed_forward_length": s.ff_exp * s.shared,
    }
    for key, value in integers.items():
        w.add(f"{s.arch}.{key}", VT.UINT32, value)


def scan_tensors(p: str, s: Shape, type_name: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type of the tensors of a recurrent layer."""
    inner = s.value_heads * s.value_size
    channels = inner + 2 * s.key_heads * s.state_size
    return [
        (p + "ssm_in.weight", (s.embd, inner + channels + s.value_heads), type_name),
        (p + "ssm_conv1d.weight", (CONV_TAPS, channels), "f32"),
        (p + "ssm_conv1d.bias", (channels,), "f32"),
        (p + "ssm_dt.bias", (s.value_heads,), "f32"),
        (p + "ssm_a", (1, s.value_heads), "f32"),
        (p + "ssm_d", (1, s.value_heads), "f32"),
        (p + "ssm_norm.weight", (inner // s.key_heads, s.key_heads), "f32"),
        (p + "ssm_out.weight", (inner, s.embd), type_name),
    ]
