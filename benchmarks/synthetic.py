"""Writes a GGUF model of a real shape with random weights in valid blocks, for speed measurements.

    python -m benchmarks.synthetic llama-1b q4_K model.gguf [--layers N] [--attn TYPE] [--experts TYPE] [--embed TYPE]
        [--header]

A small random matrix is quantized once per (type, row length) and tiled: any size is written at disk speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks import synthetic_deepseek4, synthetic_large, synthetic_mamba2
from benchmarks.shapes import SHAPES, Shape
from ikpy._native import core
from ikpy.gguf.types import GGUFValueType as VT
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry

TILE_ROWS = 32
ATTENTION_INTERVAL = 4
CONV_TAPS = 4
FALLBACK = "iq4_nl"  # for rows that are no multiple of 256


def fitting(type_name: str, ne0: int) -> str:
    """The type, or the fallback if rows of ne0 elements are no whole blocks."""
    return FALLBACK if ne0 % registry.by_name(type_name).block_elements else type_name


class Tiles:
    """Quantized random rows per (type, row length)."""

    def __init__(self) -> None:
        self._cache: dict[tuple[str, int], np.ndarray] = {}
        self._random = np.random.default_rng(7)

    def get(self, type_name: str, ne0: int) -> np.ndarray:
        """uint8 data of TILE_ROWS rows."""
        key = (type_name, ne0)
        if key not in self._cache:
            rows = (self._random.standard_normal((TILE_ROWS, ne0)) * 0.03).astype(np.float32)
            weights = np.ones(ne0, np.float32)
            self._cache[key] = np.asarray(core.quantize(rows, registry.by_name(type_name).id, weights, 2))
        return self._cache[key]


class ModelWriter:
    """Declares all tensors of a shape, then streams their data."""

    def __init__(self, path: str, shape: Shape, types: dict[str, str]) -> None:
        self.shape, self.types = shape, types
        self.writer = GGUFWriter(path)
        self.pending: list[tuple[str, tuple[int, ...], str]] = []
        self.tiles = Tiles()

    def metadata(self, name: str) -> None:
        """Hyper-parameters and a byte-level vocabulary filled up with dummy tokens."""
        w, s, a = self.writer, self.shape, self.shape.arch
        w.add("general.architecture", VT.STRING, a)
        w.add("general.name", VT.STRING, f"synthetic {name}")
        w.add("general.quantization_version", VT.UINT32, 2)
        integers = {
            "block_count": s.layers,
            "context_length": 131072,
            "embedding_length": s.embd,
            "feed_forward_length": s.ff,
            "attention.head_count": s.heads,
            "attention.head_count_kv": s.heads_kv,
            "vocab_size": s.vocab,
        }
        if s.kv_lora_rank and not s.q_lora_rank:
            integers |= {
                "attention.key_length": s.n_nope + s.n_rope,
                "attention.value_length": s.value_size,
                "attention.kv_lora_rank": s.kv_lora_rank,
                "rope.dimension_count": s.n_rope,
                "leading_dense_block_count": s.dense_layers,
                "expert_shared_count": s.shared,
                "expert_gating_func": 1,
            }
            w.add(f"{a}.expert_weights_scale", VT.FLOAT32, 1.0)
            w.add(f"{a}.expert_weights_norm", VT.BOOL, False)
        else:
            integers |= {"attention.key_length": s.head_size, "attention.value_length": s.head_size}
            integers["rope.dimension_count"] = s.n_rope or s.head_size
        if a in synthetic_mamba2.ARCHITECTURES:
            del integers["feed_forward_length"], integers["attention.head_count_kv"]
            synthetic_mamba2.metadata(w, s)
        elif s.state_size:
            integers |= {
                "full_attention_interval": ATTENTION_INTERVAL,
                "ssm.conv_kernel": CONV_TAPS,
                "ssm.inner_size": s.value_heads * s.state_size,
                "ssm.state_size": s.state_size,
                "ssm.time_step_rank": s.value_heads,
                "ssm.group_count": s.key_heads,
            }
            if s.shared:
                integers["expert_shared_feed_forward_length"] = s.ff_exp * s.shared
            w.add_array(f"{a}.rope.dimension_sections", VT.INT32, [s.n_rope // 2, 0, 0, 0])
        if s.experts:
            integers |= {"expert_count": s.experts, "expert_used_count": s.experts_used}
            integers["expert_feed_forward_length"] = s.ff_exp
        if s.experts_scale:
            synthetic_large.metadata(w, s, integers)
        if s.window:
            integers["attention.sliding_window"] = s.window
        if a == "deepseek4":
            synthetic_deepseek4.metadata(w, s)
        for key, value in integers.items():
            w.add(f"{a}.{key}", VT.UINT32, value)
        w.add(f"{a}.rope.freq_base", VT.FLOAT32, s.rope_base)
        w.add(f"{a}.attention.layer_norm_rms_epsilon", VT.FLOAT32, 1e-6)
        self._vocabulary()

    def _vocabulary(self) -> None:
        w, n = self.writer, self.shape.vocab
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [b for b in range(256) if b not in printable]
        mapped = {b: b for b in printable} | {b: 256 + i for i, b in enumerate(others)}
        tokens = [chr(mapped[b]) for b in range(256)] + [f"<t{i}>" for i in range(n - 256)]
        w.add("tokenizer.ggml.model", VT.STRING, "gpt2")
        w.add("tokenizer.ggml.pre", VT.STRING, "llama-bpe")
        w.add_array("tokenizer.ggml.tokens", VT.STRING, tokens)
        w.add_array("tokenizer.ggml.token_type", VT.INT32, [1] * n)
        w.add_array("tokenizer.ggml.merges", VT.STRING, ["a b"])
        w.add("tokenizer.ggml.bos_token_id", VT.UINT32, 0)
        w.add("tokenizer.ggml.eos_token_id", VT.UINT32, n - 1)

    def matrix(self, name: str, shape: tuple[int, ...], role: str) -> None:
        """A weight of the role's type."""
        self.pending.append((name, shape, self.types[role]))

    def norm(self, name: str, n: int) -> None:
        """A vector of ones."""
        self.pending.append((name, (n,), "f32"))

    def tensors(self) -> None:
        """All tensors of the shape."""
        s = self.shape
        self.matrix("token_embd.weight", (s.embd, s.vocab), "embed")
        self.norm("output_norm.weight", s.embd)
        if not s.tied:
            self.matrix("output.weight", (s.embd, s.vocab), "embed")
        if s.arch == "deepseek4":
            n = synthetic_deepseek4.STREAMS
            self.pending += synthetic_deepseek4.connection("output_hc", s, n, 1)
        for il in range(s.layers):
            prefix = f"blk.{il}."
            self.norm(prefix + "attn_norm.weight", s.embd)
            if s.arch == "nemotron_h":
                self._nemotron_h(prefix, synthetic_mamba2.kind(s, il))
                continue
            second = "post_attention" if self.has_delta_net or s.arch == "glm4moe" else "ffn"
            self.norm(f"{prefix}{second}_norm.weight", s.embd)
            if s.arch == "gemma2":
                self.norm(prefix + "post_attention_norm.weight", s.embd)
                self.norm(prefix + "post_ffw_norm.weight", s.embd)
            if s.arch == "deepseek4":
                self.pending += synthetic_deepseek4.layer_tensors(prefix, il, s, self.types["attn"])
            elif s.arch == "granitehybrid" and synthetic_mamba2.kind(s, il) == "M":
                self.pending += synthetic_mamba2.scan_tensors(prefix, s, self.types["attn"])
            elif self.has_delta_net and (il + 1) % ATTENTION_INTERVAL:
                self._delta_net(prefix)
            else:
                self._latent_attention(prefix) if s.kv_lora_rank else self._attention(prefix)
            is_moe = synthetic_large.is_moe(s, il)
            if s.experts_scale:
                self.pending += [(*row, "f32") for row in synthetic_large.vectors(prefix, s, is_moe)]
            self._experts(prefix) if is_moe else self._dense(prefix)

    @property
    def has_delta_net(self) -> bool:
        """Whether recurrent layers are those of the gated delta rule."""
        return self.shape.state_size > 0 and self.shape.arch not in synthetic_mamba2.ARCHITECTURES

    def _nemotron_h(self, p: str, kind: str) -> None:
        s = self.shape
        if kind == "M":
            self.pending += synthetic_mamba2.scan_tensors(p, s, self.types["attn"])
        elif kind == "*":
            self._attention(p)
        else:
            self.matrix(p + "ffn_up.weight", (s.embd, s.ff), "base")
            self.matrix(p + "ffn_down.weight", (s.ff, s.embd), "base")

    def _attention(self, p: str) -> None:
        s = self.shape
        gated = 2 if self.has_delta_net else 1
        self.matrix(p + "attn_q.weight", (s.embd, gated * s.heads * s.head_size), "attn")
        self.matrix(p + "attn_k.weight", (s.embd, s.heads_kv * s.head_size), "attn")
        self.matrix(p + "attn_v.weight", (s.embd, s.heads_kv * s.head_size), "attn")
        self.matrix(p + "attn_output.weight", (s.heads * s.head_size, s.embd), "attn")
        if s.arch.startswith("qwen3"):
            self.norm(p + "attn_q_norm.weight", s.head_size)
            self.norm(p + "attn_k_norm.weight", s.head_size)

    def _delta_net(self, p: str) -> None:
        s = self.shape
        n_values = s.value_heads * s.state_size
        n_channels = 2 * s.key_heads * s.state_size + n_values
        self.matrix(p + "attn_qkv.weight", (s.embd, n_channels), "attn")
        self.matrix(p + "attn_gate.weight", (s.embd, n_values), "attn")
        if s.arch == "qwen3next":
            self.matrix(p + "ssm_ba.weight", (s.embd, 2 * s.value_heads), "attn")
        else:
            self.matrix(p + "ssm_beta.weight", (s.embd, s.value_heads), "attn")
            self.matrix(p + "ssm_alpha.weight", (s.embd, s.value_heads), "attn")
        self.pending.append((p + "ssm_conv1d.weight", (CONV_TAPS, n_channels), "f32"))
        self.norm(p + "ssm_dt.bias", s.value_heads)
        self.norm(p + "ssm_a", s.value_heads)
        self.norm(p + "ssm_norm.weight", s.state_size)
        self.matrix(p + "ssm_out.weight", (n_values, s.embd), "attn")

    def _latent_attention(self, p: str) -> None:
        s = self.shape
        if s.q_lora_rank:
            for name, shape in synthetic_large.latent_attention(p, s):
                self.norm(name, shape[0]) if len(shape) == 1 else self.matrix(name, shape, "attn")
            return
        self.matrix(p + "attn_q.weight", (s.embd, s.heads * (s.n_nope + s.n_rope)), "attn")
        self.matrix(p + "attn_kv_a_mqa.weight", (s.embd, s.kv_lora_rank + s.n_rope), "attn")
        self.norm(p + "attn_kv_a_norm.weight", s.kv_lora_rank)
        self.matrix(p + "attn_kv_b.weight", (s.kv_lora_rank, s.heads * (s.n_nope + s.value_size)), "attn")
        self.matrix(p + "attn_output.weight", (s.heads * s.value_size, s.embd), "attn")

    def _dense(self, p: str) -> None:
        s = self.shape
        self.matrix(p + "ffn_gate.weight", (s.embd, s.ff), "base")
        self.matrix(p + "ffn_up.weight", (s.embd, s.ff), "base")
        self.matrix(p + "ffn_down.weight", (s.ff, s.embd), "base")

    def _experts(self, p: str) -> None:
        s = self.shape
        self.pending.append((p + "ffn_gate_inp.weight", (s.embd, s.experts), "f32"))
        for part in ("gate", "up"):
            self.matrix(f"{p}ffn_{part}_exps.weight", (s.embd, s.ff_exp, s.experts), "experts")
        self.matrix(p + "ffn_down_exps.weight", (s.ff_exp, s.embd, s.experts), "experts")
        if s.shared:
            width = s.ff_exp * s.shared
            self.matrix(p + "ffn_gate_shexp.weight", (s.embd, width), "attn")
            self.matrix(p + "ffn_up_shexp.weight", (s.embd, width), "attn")
            self.matrix(p + "ffn_down_shexp.weight", (width, s.embd), "attn")
            if self.has_delta_net:
                self.norm(p + "ffn_gate_inp_shexp.weight", s.embd)

    def declare(self) -> None:
        """Declares all tensors; rows that do not fit the blocks of their type get the fallback type."""
        self.pending = [(name, shape, fitting(type_name, shape[0])) for name, shape, type_name in self.pending]
        for name, shape, type_name in self.pending:
            self.writer.add_tensor(name, shape, registry.by_name(type_name).id)

    def write_header(self, path: str) -> None:
        """A sparse file of the model's size with its header and no data, for plans of memory."""
        self.declare()
        (shard,) = self.writer.plan()
        with open(path, "wb") as file:
            file.write(shard.header)
            file.truncate(shard.nbytes)

    def write(self) -> None:
        """Declares and streams everything; the file appears when it is complete."""
        self.declare()
        with self.writer as w:
            for name, shape, type_name in self.pending:
                for chunk in self._data(name, shape, type_name):
                    w.write(name, chunk)

    def _data(self, name: str, shape: tuple[int, ...], type_name: str) -> Iterator[np.ndarray]:
        if name.endswith("tid2eid.weight"):
            n = self.shape.experts
            table = (np.arange(shape[1], dtype=np.int32)[:, None] * 7 + np.arange(shape[0], dtype=np.int32) * 31) % n
            yield table.view(np.uint8).reshape(-1)
            return
        if len(shape) == 1 or name.endswith(("ssm_a", "ssm_d", "ssm_norm.weight")):
            value = -0.1 if name.endswith("ssm_a") else 1.0  # states decay
            yield np.full(shape, value, np.float32).view(np.uint8).reshape(-1)
            return
        if name.endswith(("ffn_gate_inp.weight", "ssm_conv1d.weight")):
            rows = np.random.default_rng(11).standard_normal((shape[1], shape[0])) * 0.05
            yield rows.astype(np.float32).view(np.uint8).reshape(-1)
            return
        tile = np.tile(self.tiles.get(type_name, shape[0]), 64)
        left = registry.by_name(type_name).tensor_nbytes((*shape, *([1] * (4 - len(shape)))))
        while left > 0:
            yield tile[: min(left, len(tile))]
            left -= len(tile)


def write_model(
    shape_name: str,
    type_name: str,
    path: str,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    window: int | None = None,
    attn: str | None = None,
    experts: str | None = None,
    embed: str | None = None,
    header_only: bool = False,
) -> None:
    """Writes the model, or its header alone to a sparse file; layers, vocab and window default to those of the shape.

    embed (token and output matrix) defaults to q8_0, or to type_name if that is 16-bit.
    """
    shape = SHAPES[shape_name]
    if layers:
        shape = replace(shape, layers=layers)
    if vocab:
        shape = replace(shape, vocab=vocab)
    if window:
        shape = replace(shape, window=window)
    default_embed = type_name if type_name in ("f16", "bf16", "f32") else "q8_0"
    types = {
        "base": type_name,
        "attn": attn or type_name,
        "experts": experts or type_name,
        "embed": embed or default_embed,
    }
    model = ModelWriter(path, shape, types)
    model.metadata(shape_name)
    model.tensors()
    if header_only:
        model.write_header(path)
    else:
        model.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("type")
    parser.add_argument("out")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--attn")
    parser.add_argument("--experts")
    parser.add_argument("--embed")
    parser.add_argument("--header", action="store_true", help="a sparse file without data, for --dry-run")
    a = parser.parse_args()
    types = {"attn": a.attn, "experts": a.experts, "embed": a.embed}
    write_model(a.shape, a.type, a.out, layers=a.layers, header_only=a.header, **types)


if __name__ == "__main__":
    main()
