"""HunyuanOCR and HunyuanVL: a tower whose squares of patches a convolution joins, with learned rows around and in the
picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import SIGLIP, Projector, pixel_keys
from ikpy.convert.projectors.tensors import Wanted, linear, norm, patches, table

_ATTENTION = ("attn_q", "attn_k", "attn_v")


class HunyuanVL(Projector):
    """Names of transformers."""

    kind = "hunyuanvl"
    parts = ("vision_tower.",)
    tower: ClassVar[str] = "vision_tower"
    merger: ClassVar[str] = "vision_tower.patch_merger"
    convolutions: ClassVar[tuple[str, str]] = ("proj_conv", "proj_out")
    unused = ("vision_tower.patch_merger.image_sep",)  # between frames of a film
    layer = "vision_tower.layers"
    modules: ClassVar[Mapping[str, str]] = {**SIGLIP, "attn_out": "self_attn.o_proj"}
    activations = ("gelu",)
    eps = 1e-5

    @classmethod
    def chosen(cls, checkpoint: Checkpoint) -> type[HunyuanVL]:
        """By the names of the tensors."""
        is_published = any(name.removeprefix("model.").startswith("vit.") for name in checkpoint.tensors)
        return Published if is_published else cls

    def side(self, name: str) -> int:
        return super().side("max_image_size" if name == "image_size" else name)

    @property
    def merge(self) -> int:
        """Patches of the side of a square."""
        return self.vision.count("spatial_merge_size", default=2)

    def check(self) -> None:
        super().check()
        vision = self.vision
        vision.require(f"squares of {self.merge} patches", self.merge > 0)
        vision.require("pictures that are smaller than a patch", self.image_size >= self.patch_size)
        self.check_value(vision, "interpolate_mode", "bilinear")
        self.check_value(vision, "num_key_value_heads", self.n_head)
        self.check_value(vision, "temporal_patch_size", 1)
        self.check_value(vision, "cat_extra_token", 1, True)

    def keys(self) -> Keys:
        return super().keys() | {
            "vision.spatial_merge_size": self.merge,
            **pixel_keys(*self.processor.pixels()),
        }

    def tensors(self) -> Iterator[Wanted]:
        n, n_text, merger = self.n, self.n_text, self.merger
        yield from patches(f"{self.tower}.embeddings.patch_embedding", n, self.patch_size)
        # The first place is that of a class token, which there is none of.
        positions = f"{self.tower}.embeddings.position_embedding.weight"
        yield table("v.position_embd.weight", positions, self.n_patches + 1, n, view=without_first)
        yield from self.layers()
        yield from norm("mm.pre_norm", f"{merger}.before_rms", n, bias=False)
        first, second = (f"{merger}.{name}" for name in self.convolutions)
        yield from convolution("mm.0", first, 2 * n, n, self.merge)
        yield from convolution("mm.2", second, 4 * n, 2 * n, 1)
        yield table("v.image_newline", f"{merger}.image_newline", 4 * n)
        yield from linear("mm.model.fc", f"{merger}.mlp", n_text, 4 * n)
        for name in ("image_begin", "image_end"):
            yield table(f"mm.{name}", f"{merger}.{name}", n_text)
        yield from norm("mm.post_norm", f"{merger}.after_rms", n_text, bias=False)


class Published(HunyuanVL):
    """Names of the published checkpoints."""

    parts = ("vit.",)
    tower = "vit"
    merger = "vit.perceive"
    convolutions = ("proj.0", "proj.2")
    unused = ("vit.perceive.image_sep",)
    layer = "vit.layers"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "input_layernorm",
        **{name: f"self_attn.{name[-1]}_proj" for name in _ATTENTION},
        "attn_out": "self_attn.o_proj",
        "ln2": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }


def without_first(rows: np.ndarray) -> np.ndarray:
    """All rows but the first."""
    return rows[1:]


def convolution(target: str, source: str, n_out: int, n_in: int, side: int) -> Iterator[Wanted]:
    """Filters [n_out, n_in, side, side] and their bias."""
    yield Wanted(f"{target}.weight", f"{source}.weight", (n_out, n_in, side, side), floats=True)
    yield Wanted(f"{target}.bias", f"{source}.bias", (n_out,))
