"""Gemma 4: patches rotate by row and column, norms before and behind the branches, means of squares of patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys, flat
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.gemma4_audio import BOUNDS, Gemma4Audio, bounded
from ikpy.convert.projectors.tensors import Wanted, flat_patches, linear, table


class Gemma4(Projector):
    """Inputs and outputs of matrices have bounds where the configuration says so."""

    kind = "gemma4v"
    parts = ("vision_tower.", "embed_vision.", *Gemma4Audio.parts)
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "input_layernorm",
        **{f"attn_{name}": f"self_attn.{name}_proj.linear" for name in "qkv"},
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_out": "self_attn.o_proj.linear",
        "attn_post_norm": "post_attention_layernorm",
        "ln2": "pre_feedforward_layernorm",
        **{f"ffn_{name}": f"mlp.{name}_proj.linear" for name in ("gate", "up", "down")},
        "ffn_post_norm": "post_feedforward_layernorm",
    }
    norm_bias = False
    usual_image_size = 224  # pictures keep their proportions
    defaults: ClassVar[Mapping[str, int | float]] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 16,
        "patch_size": 16,
    }

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        values = checkpoint.config.get("audio_config")
        self.sound = Gemma4Audio(checkpoint, values, self.n_text) if isinstance(values, dict) else None

    @property
    def factor(self) -> int:
        """Patches of the side of a square that becomes one token."""
        return self.vision.count("pooling_kernel_size", default=3)

    def check(self) -> None:
        super().check()
        self.vision.require(f"pooling_kernel_size {self.factor}", self.factor > 0)
        self.vision.require("attention_bias true", not self.vision.get("attention_bias", default=False))
        self.check_value(self.vision, "num_key_value_heads", self.n_head)
        self.check_rope(100)
        if self.sound:
            self.sound.check()

    def keys(self) -> Keys:
        keys = super().keys() | {"vision.projector.scale_factor": self.factor}
        if self.sound is None:
            return keys
        return keys | {"vision.projector_type": keys.pop("projector_type")} | self.sound.keys()

    def left_out(self) -> tuple[str, ...]:
        return self.unused if self.sound else (*self.unused, *Gemma4Audio.parts)

    def has_bias(self, target: str) -> bool:
        return False

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        yield from super().module(full, target, source)
        if source.endswith(".linear") and self.vision.get("use_clipped_linears", default=False):
            for name in BOUNDS:
                yield Wanted(f"{full}.{name}", f"{source.removesuffix('linear')}{name}", (), flat, bounded)

    def tensors(self) -> Iterator[Wanted]:
        yield from flat_patches("vision_tower.patch_embedder.input_proj", self.n, self.patch_size, bias=False)
        n_positions = self.vision.count("position_embedding_size", default=10240)
        name = "vision_tower.patch_embedder.position_embedding_table"
        yield table("v.position_embd.weight", name, 2, n_positions, self.n)
        yield from self.layers()
        if self.vision.get("standardize", default=False):
            yield Wanted("v.std_bias", "vision_tower.std_bias", (self.n,))
            yield Wanted("v.std_scale", "vision_tower.std_scale", (self.n,))
        yield from linear("mm.input_projection", "embed_vision.embedding_projection", self.n_text, self.n, bias=False)
        if self.sound:
            yield from self.sound.tensors()
