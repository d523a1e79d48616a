"""The encoder of sound of Gemma 4, which is in the same file as that of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys, flat
from ikpy.convert.projectors.base import sound_keys
from ikpy.convert.projectors.tensors import Wanted, linear

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_LARGEST = float(np.finfo(np.float32).max)
_FRONT = "audio_tower.subsample_conv_projection"
# Names of GGUF files within a layer -> modules of the checkpoint.
_NORMS = {
    "ffn_norm": "feed_forward1.pre_layer_norm",
    "ffn_post_norm": "feed_forward1.post_layer_norm",
    "ffn_norm_1": "feed_forward2.pre_layer_norm",
    "ffn_post_norm_1": "feed_forward2.post_layer_norm",
    "attn_pre_norm": "norm_pre_attn",
    "attn_post_norm": "norm_post_attn",
    "conv_norm": "lconv1d.pre_layer_norm",
    "norm_conv": "lconv1d.conv_norm",
    "ln2": "norm_out",
}
_MATRICES = {
    "ffn_up": "feed_forward1.ffw_layer_1",
    "ffn_down": "feed_forward1.ffw_layer_2",
    "ffn_up_1": "feed_forward2.ffw_layer_1",
    "ffn_down_1": "feed_forward2.ffw_layer_2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.post",
    "conv_pw1": "lconv1d.linear_start",
    "conv_pw2": "lconv1d.linear_end",
}


def bounded(values: np.ndarray) -> np.ndarray:
    """No infinite bounds, which are those that bound nothing."""
    return np.clip(values, -_LARGEST, _LARGEST)


def softplus(values: np.ndarray) -> np.ndarray:
    """What queries are multiplied with."""
    return np.logaddexp(0, values)


class Gemma4Audio:
    """values: `audio_config`. n_text: elements of a token's embedding."""

    kind = "gemma4a"
    parts = ("audio_tower.", "embed_audio.")
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "subsampling_conv_channels": [128, 32],
        "conv_kernel_size": 5,
        "output_proj_dims": 1536,
        "rms_norm_eps": 1e-6,
    }
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "residual_weight": 0.5,
        "attention_chunk_size": 12,
        "attention_context_left": 13,
        "attention_context_right": 0,
        "attention_logit_cap": 50.0,
        "rms_norm_eps": 1e-6,
    }

    def __init__(self, checkpoint: Checkpoint, values: dict[str, Any], n_text: int) -> None:
        self.audio = Config({**self.defaults, **values}, checkpoint.folder / "config.json (audio_config)")
        self.n_text = n_text
        self.n = self.audio.count("hidden_size")
        self.n_ff = 4 * self.n
        self.n_head = self.audio.count("num_attention_heads")
        self.n_layer = self.audio.count("num_hidden_layers")
        self.taps = self.audio.count("conv_kernel_size")
        self.inner = self.audio.count("output_proj_dims")
        channels = self.audio.get("subsampling_conv_channels")
        fits = isinstance(channels, list) and len(channels) == 2 and all(type(n) is int and n > 0 for n in channels)
        self.audio.require(f"subsampling_conv_channels {channels}", fits and channels[0] % 4 == 0)
        self.channels = channels

    @property
    def n_mel(self) -> int:
        """Pitches: transformers' model has as many as channels."""
        return int(self.channels[0])

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        for name, usual in self.fixed.items():
            value = self.audio.get(name, default=usual)
            self.audio.require(f"{name} {value}", value == usual)
        self.audio.require(f"{self.n_head} heads in {self.n}", 0 < self.n_head <= self.n and self.n % self.n_head == 0)
        self.audio.require(f"subsampling_conv_channels {self.channels}", self.n_mel <= 256)

    def keys(self) -> Keys:
        """Metadata under "clip."."""
        return {
            "has_audio_encoder": True,
            "audio.projector_type": self.kind,
            **sound_keys(self, 1e-6),
        }

    def tensors(self) -> Iterator[Wanted]:
        """All tensors, in file order."""
        n_in = 1
        for i, n_out in enumerate(self.channels):
            source = f"{_FRONT}.layer{i}"
            yield Wanted(f"a.conv1d.{i}.weight", f"{source}.conv.weight", (n_out, n_in, 3, 3), floats=True)
            yield Wanted(f"a.conv1d.{i}.norm.weight", f"{source}.norm.weight", (n_out,))
            n_in = n_out
        n_joined = self.n_mel // 4 * n_in
        yield from linear("a.input_projection", f"{_FRONT}.input_proj_linear", self.n, n_joined, bias=False)
        for il in range(self.n_layer):
            yield from self.layer(f"a.blk.{il}", f"audio_tower.layers.{il}")
        yield from linear("a.pre_encode.out", "audio_tower.output_proj", self.inner, self.n)
        name = "embed_audio.embedding_projection"
        yield from linear("mm.a.input_projection", name, self.n_text, self.inner, bias=False)

    def layer(self, target: str, source: str) -> Iterator[Wanted]:
        """A layer of the encoder."""
        n = self.n
        for name, module in _NORMS.items():
            yield Wanted(f"{target}.{name}.weight", f"{source}.{module}.weight", (n,))
        sizes = {"ffn_up": (self.n_ff, n), "ffn_down": (n, self.n_ff), "conv_pw1": (2 * n, n)}
        for name, module in _MATRICES.items():
            shape = sizes.get(name.removesuffix("_1"), (n, n))
            yield Wanted(f"{target}.{name}.weight", f"{source}.{module}.linear.weight", shape)
            for bound in BOUNDS if self.audio.get("use_clipped_linears", default=True) else ():
                yield Wanted(f"{target}.{name}.{bound}", f"{source}.{module}.{bound}", (), flat, bounded)
        yield Wanted(f"{target}.attn_k_rel.weight", f"{source}.self_attn.relative_k_proj.weight", (n, n))
        head = (n // max(1, self.n_head),)
        yield Wanted(f"{target}.per_dim_scale.weight", f"{source}.self_attn.per_dim_scale", head, change=softplus)
        dw = f"{source}.lconv1d.depthwise_conv1d.weight"
        yield Wanted(f"{target}.conv_dw.weight", dw, (n, 1, self.taps), lambda rows: rows[:, 0], exact=True)
