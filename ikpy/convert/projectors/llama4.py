"""Llama 4: patches rotate by row and column, squares of them side by side, two matrices and a third one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import SIGLIP, Projector
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table


class Llama4(Projector):
    """Pictures are cut into tiles; a token stands for the whole of one."""

    kind = "llama4"
    parts = ("vision_model.", "multi_modal_projector.")
    layer = "vision_model.model.layers"
    modules: ClassVar[Mapping[str, str]] = {
        **SIGLIP,
        "ln1": "input_layernorm",
        "attn_out": "self_attn.o_proj",
        "ln2": "post_attention_layernorm",
    }
    activations = ("gelu",)
    eps = 1e-5

    @property
    def factor(self) -> int:
        """Patches of the side of a square that becomes one token."""
        ratio = self.vision.number("pixel_shuffle_ratio", default=0.5)
        factor = round(1 / ratio) if ratio > 0 else 0
        side = self.image_size // self.patch_size
        self.vision.require(f"pixel_shuffle_ratio {ratio:g}", factor > 0 and factor * ratio == 1 and not side % factor)
        return factor

    def check(self) -> None:
        super().check()
        has_bias = bool(self.vision.get("multi_modal_projector_bias", default=False))
        self.vision.require("multi_modal_projector_bias true", not has_bias)
        self.check_value(self.vision, "vision_feature_select_strategy", "default")
        self.check_rope(10000)

    def keys(self) -> Keys:
        return super().keys() | {"vision.projector.scale_factor": self.factor}

    def tensors(self) -> Iterator[Wanted]:
        n, n_pixels = self.n, 3 * self.patch_size**2
        yield table("v.class_embd", "vision_model.class_embedding", n)
        yield Wanted("v.patch_embd.weight", "vision_model.patch_embedding.linear.weight", (n, n_pixels), floats=True)
        yield table("v.position_embd.weight", "vision_model.positional_embedding_vlm", self.n_patches + 1, n)
        yield from norm("v.pre_ln", "vision_model.layernorm_pre", n)
        yield from self.layers()
        yield from norm("v.post_ln", "vision_model.layernorm_post", n)
        width, out = self.vision.count("projector_input_dim"), self.vision.count("projector_output_dim")
        names = ("vision_model.vision_adapter.mlp.fc1", "vision_model.vision_adapter.mlp.fc2")
        sizes = (n * self.factor**2, width, out)
        yield from self.two_layers(("mm.model.mlp.1", "mm.model.mlp.2"), names, sizes, bias=False)
        out = self.vision.count("vision_output_dim")
        yield from linear("mm.model.fc", "multi_modal_projector.linear_1", self.n_text, out, bias=False)
