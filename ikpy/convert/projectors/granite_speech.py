"""Granite Speech: a conformer, and a Q-Former that makes rows of windows of states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.conformers import Conformer
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table
from ikpy.errors import FileFormatError


class GraniteSpeech(Conformer):
    """Blocks of states, a middle layer that says characters, a Q-Former of windows."""

    kind = "granite_speech"
    parts = ("encoder.", "projector.")
    encoder_key = "encoder_config"
    layer = "encoder.layers"
    batch_norm = "conv.batch_norm"
    defaults: ClassVar[Mapping[str, Any]] = {
        "input_dim": 160,
        "num_layers": 10,
        "hidden_dim": 1024,
        "feedforward_mult": 4,
        "num_heads": 8,
        "output_dim": 42,
        "context_size": 200,
        "max_pos_emb": 512,
        "conv_kernel_size": 15,
        "conv_expansion_factor": 2,
    }
    modules: ClassVar[Mapping[str, str]] = {
        "ffn_norm": "ff1.pre_norm",
        "ffn_up": "ff1.up_proj",
        "ffn_down": "ff1.down_proj",
        "ln1": "attn.pre_norm",
        "attn_q": "attn.to_q",
        "attn_k": "attn.to_kv",
        "attn_v": "attn.to_kv",
        "attn_out": "attn.to_out",
        "attn_rel_pos_emb": "attn.rel_pos_emb",
        "norm_conv": "conv.norm",
        "conv_pw1": "conv.up_conv",
        "conv_dw": "conv.depth_conv.conv",
        "conv_pw2": "conv.down_conv",
        "ffn_norm_1": "ff2.pre_norm",
        "ffn_up_1": "ff2.up_proj",
        "ffn_down_1": "ff2.down_proj",
        "ln2": "post_norm",
    }

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        values = checkpoint.config.get("projector_config")
        if not isinstance(values, dict):
            raise FileFormatError(f"{checkpoint.folder / 'config.json'}: there is no 'projector_config'")
        path = checkpoint.folder / "config.json (projector_config)"
        self.windows = Config({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **values}, path)
        self.n_query = self.windows.count("hidden_size")
        self.window = self.config.count("window_size", default=15)
        self.rate = self.config.count("downsample_rate", default=5)
        self.reach = self.audio.count("max_pos_emb")

    @property
    def n_mel(self) -> int:
        return self.audio.count("input_dim")

    @property
    def n_ff(self) -> int:
        return self.audio.bounded("feedforward_mult", self.n * self.audio.count("feedforward_mult"))

    @property
    def n_inner(self) -> int:
        return self.audio.bounded("conv_expansion_factor", self.n * self.audio.count("conv_expansion_factor"))

    @property
    def kept(self) -> list[int]:
        """Layers whose states stand before the last ones (Granite Speech Plus)."""
        found = self.audio.get("cat_hidden_layers", default=[])
        middle = self.n_layer // 2
        fits = isinstance(found, list) and all(type(il) is int and 0 <= il < self.n_layer for il in found)
        self.audio.require(f"cat_hidden_layers {found}", fits and found == sorted(set(found)) and middle not in found)
        return list(found)

    def check(self) -> None:
        super().check()
        audio, windows, context = self.audio, self.windows, self.audio.count("context_size")
        self.check_value(audio, "dim_head", self.n // max(1, self.n_head))
        audio.require(f"input_dim {self.n_mel}", self.n_mel % 2 == 0)
        characters = audio.count("output_dim")
        audio.require(f"output_dim {characters}", 0 < characters <= 4096)
        audio.require(f"context_size {context} of max_pos_emb {self.reach}", 0 < context <= self.reach <= 8192)
        audio.require(f"cat_hidden_layers {self.kept}", True)
        self.check_value(windows, "hidden_act", "gelu")
        self.check_value(windows, "layer_norm_eps", 1e-12)
        self.check_value(windows, "cross_attention_frequency", 1)
        self.check_value(windows, "use_qformer_text_input", False)
        self.check_value(windows, "encoder_hidden_size", self.n * (1 + len(self.kept)))
        heads = windows.count("num_attention_heads")
        windows.require(f"{heads} heads in {self.n_query}", 0 < heads <= self.n_query and self.n_query % heads == 0)
        self.config.require(f"window_size {self.window}", 0 < self.window <= 256)
        self.config.require(f"downsample_rate {self.rate}", 0 < self.rate <= self.window)

    def keys(self) -> Keys:
        kept: Keys = {"audio.feature_layer": self.kept} if self.kept else {}
        return super().keys() | {
            "audio.chunk_size": self.audio.count("context_size"),
            "audio.conv_kernel_size": self.taps,
            "audio.max_pos_emb": self.reach,
            "audio.projector.window_size": self.window,
            "audio.projector.downsample_rate": self.rate,
            "audio.projector.head_count": self.windows.count("num_attention_heads"),
            **kept,
        }

    def has_bias(self, target: str) -> bool:
        return target != "attn_q"

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        n = self.n
        if target in ("attn_k", "attn_v"):
            start = n if target == "attn_v" else 0
            yield Wanted(f"{full}.weight", f"{source}.weight", (2 * n, n), lambda rows: rows[start : start + n])
        elif target == "attn_rel_pos_emb":
            yield table(full, f"{source}.weight", 2 * self.reach + 1, n // self.n_head)
        else:
            yield from super().module(full, target, source)

    def tensors(self) -> Iterator[Wanted]:
        characters = self.audio.count("output_dim")
        yield from linear("a.input_projection", "encoder.input_linear", self.n, self.n_mel)
        yield from self.layers()
        yield from linear("a.enc_ctc_out", "encoder.out", characters, self.n)
        yield from linear("a.enc_ctc_out_mid", "encoder.out_mid", self.n, characters)
        yield table("a.proj_query", "projector.query", 1, self.window // self.rate, self.n_query)
        yield from norm("a.proj_norm", "projector.qformer.layernorm", self.n_query)
        for il in range(self.windows.count("num_hidden_layers")):
            yield from self.window_layer(f"a.proj_blk.{il}", f"projector.qformer.encoder.layer.{il}")
        yield from linear("a.proj_linear", "projector.linear", self.n_text, self.n_query)

    def window_layer(self, target: str, source: str) -> Iterator[Wanted]:
        """A layer of the Q-Former."""
        n, n_ff = self.n_query, self.windows.count("intermediate_size", default=3072)
        n_state = self.n * (1 + len(self.kept))
        for mine, theirs, n_in in (("self_attn", "attention", n), ("cross_attn", "crossattention", n_state)):
            for part, name, width in (("q", "query", n), ("k", "key", n_in), ("v", "value", n_in)):
                yield from linear(f"{target}.{mine}_{part}", f"{source}.{theirs}.attention.{name}", n, width)
            yield from linear(f"{target}.{mine}_out", f"{source}.{theirs}.output.dense", n, n)
            yield from norm(f"{target}.{mine}_norm", f"{source}.{theirs}.output.LayerNorm", n)
        yield from linear(f"{target}.ffn_up", f"{source}.intermediate_query.dense", n_ff, n)
        yield from linear(f"{target}.ffn_down", f"{source}.output_query.dense", n, n_ff)
        yield from norm(f"{target}.ffn_norm", f"{source}.output_query.LayerNorm", n)
