"""MiniCPM-V 4.6: SigLIP with positions in shares of a picture; squares of patches become one twice."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.siglip import SiglipProjector
from ikpy.convert.projectors.tensors import Wanted, linear, norm, patches, table

_POSITIONS = 70
"""Positions of a side, whatever the size of a picture."""
_EPS = 1e-6
"""Of the norm of the projector, whatever that of the encoder is."""
_PAIR = [2, 2]
_TILES = 9


class MiniCpmV46(SiglipProjector):
    """With `downsample_mode` 4x squares become one behind the last layer alone."""

    kind = "minicpmv4_6"
    parts = ("vision_tower.", "merger.")

    @property
    def merges_inside(self) -> bool:
        """Whether squares become one within the encoder."""
        return self.config.get("downsample_mode", default="16x") != "4x"

    @property
    def insert(self) -> int:
        """The layer behind which they do."""
        return self.config.count("insert_layer_id", default=6)

    def check(self) -> None:
        super().check()
        config, vision, processor = self.config, self.vision, self.processor
        self.check_value(config, "downsample_mode", "4x", "16x")
        self.check_value(config, "drop_vision_last_layer", False)
        self.check_value(config, "merger_times", 1)
        self.check_value(config, "merge_kernel_size", _PAIR)
        self.check_value(vision, "window_kernel_size", _PAIR)
        self.check_value(vision, "layer_norm_eps", _EPS)
        side = self.image_size // self.patch_size if self.patch_size else 0
        vision.require(f"{side} x {side} positions", side == _POSITIONS)
        config.require(f"insert_layer_id {self.insert}", not self.merges_inside or self.insert < self.n_layer)
        self.check_value(processor, "max_slice_nums", _TILES)
        self.check_value(processor, "slice_mode", True)
        self.check_value(processor, "patch_size", self.patch_size)

    def left_out(self) -> tuple[str, ...]:
        return self.unused if self.merges_inside else (*self.unused, f"{self.tower}.vit_merger.")

    def keys(self) -> Keys:
        side = self.processor.edge("scale_resolution") or 448
        found = super().keys() | {"vision.image_size": side, "vision.projector.scale_factor": 2}
        if self.merges_inside:
            found |= {"vision.projector.scale_factor": 4, "vision.wa_layer_indexes": np.array([self.insert], np.int32)}
        return found

    def embedding(self) -> Iterator[Wanted]:
        yield from patches(f"{self.tower}.embeddings.patch_embedding", self.n, self.patch_size)
        name = f"{self.tower}.embeddings.position_embedding.weight"
        yield table("v.position_embd.weight", name, _POSITIONS**2, self.n)

    def tensors(self) -> Iterator[Wanted]:
        n, wide = self.n, 4 * self.n
        yield from self.encoder()
        if self.merges_inside:
            target, source = "v.vit_merger", f"{self.tower}.vit_merger"
            yield from norm(f"{target}.ln1", f"{source}.layer_norm1", n)
            for part in ("q", "k", "v", "out"):
                yield from linear(f"{target}.attn_{part}", f"{source}.self_attn.{part}_proj", n, n)
            yield from norm(f"{target}.ds_ln", f"{source}.pre_norm", wide)
            sizes = wide, 4 * self.n_ff, n
            names = (f"{source}.linear_1", f"{source}.linear_2")
            yield from self.two_layers((f"{target}.ds_ffn_up", f"{target}.ds_ffn_down"), names, sizes)
        yield from norm("mm.input_norm", "merger.mlp.0.pre_norm", wide)
        names = ("merger.mlp.0.linear_1", "merger.mlp.0.linear_2")
        yield from self.two_layers(("mm.up", "mm.down"), names, (wide, wide, self.n_text))
