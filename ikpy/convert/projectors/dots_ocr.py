"""dots.ocr: RMSNorm and gated networks, a norm and two matrices behind squares of patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector, pixel_keys
from ikpy.convert.projectors.tensors import Wanted, norm, patches


class DotsOcr(Projector):
    """Names of its repository."""

    kind = "dots_ocr"
    parts = ("vision_tower.",)
    layer = "vision_tower.blocks"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "norm1",
        "attn_qkv": "attn.qkv",
        "attn_out": "attn.proj",
        "ln2": "norm2",
        "ffn_gate": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ffn_up": "mlp.fc3",
    }
    activations = ("silu",)
    norm_bias = False
    eps = 1e-5
    usual_image_size = 560

    def find_width(self) -> int:
        return self.vision.count("embed_dim")

    @property
    def merge(self) -> int:
        """Patches of the side of a square that becomes one token."""
        return self.vision.count("spatial_merge_size", default=2)

    def check(self) -> None:
        super().check()
        self.vision.require(f"spatial_merge_size {self.merge}", self.merge > 0)
        self.check_value(self.vision, "hidden_size", self.n_text)
        self.check_value(self.vision, "post_norm", True)
        for name in ("use_bias", "is_causal"):
            self.check_value(self.vision, name, False)
        self.check_rope(10000)

    def has_bias(self, target: str) -> bool:
        return False

    def keys(self) -> Keys:
        limits = pixel_keys(*self.processor.pixels())
        return super().keys() | {"vision.projector.scale_factor": self.merge, **limits}

    def tensors(self) -> Iterator[Wanted]:
        p, n = "vision_tower", self.n
        yield from patches(f"{p}.patch_embed.patchifier.proj", n, self.patch_size)
        yield from norm("v.pre_ln", f"{p}.patch_embed.patchifier.norm", n, bias=False)
        yield from self.layers()
        yield from norm("mm.post_norm", f"{p}.post_trunk_norm", n, bias=False)
        yield from norm("mm.input_norm", f"{p}.merger.ln_q", n)
        merged = n * self.merge**2
        names = (f"{p}.merger.mlp.0", f"{p}.merger.mlp.2")
        yield from self.two_layers(("mm.0", "mm.2"), names, (merged, merged, self.n_text))
