"""GLM-Edge-V: SigLIP, a convolution of squares of patches, a gated network, rows around the picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import flat
from ikpy.convert.projectors.siglip import SiglipProjector
from ikpy.convert.projectors.tensors import Wanted, linear, norm

_ADAPTER = "vision.adapter"
_GATED = {
    "linear": "linear_proj",
    "gate": "gate_proj",
    "dense_h_to_4h": "dense_h_to_4h",
    "dense_4h_to_h": "dense_4h_to_h",
}
_SIDE = 2
"""Patches of the side of a square that becomes one row."""


class GlmEdge(SiglipProjector):
    """Sizes of the network behind the encoder are those of the tensors."""

    kind = "adapter"
    parts = ("vision.",)
    tower = "vision.vit.model.vision_model"
    layer = f"{tower}.encoder.layers"
    unused = (f"{tower}.head.",)
    defaults: ClassVar[Mapping[str, int | float]] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "image_size": 224,
        "patch_size": 16,
    }

    def check(self) -> None:
        super().check()
        side = self.image_size // self.patch_size
        self.vision.require(f"pictures of {side} x {side} patches", side > 0 and side % _SIDE == 0)

    def tensors(self) -> Iterator[Wanted]:
        yield from self.encoder()
        joined = self.stored(f"{_ADAPTER}.conv.weight", 4)[0]
        name = f"{_ADAPTER}.conv"
        yield Wanted("adapter.conv.weight", f"{name}.weight", (joined, self.n, _SIDE, _SIDE), floats=True)
        yield Wanted("adapter.conv.bias", f"{name}.bias", (joined,))
        inner = self.stored(f"{_ADAPTER}.linear_proj.gate_proj.weight", 2)[0]
        sizes = {"linear": (self.n_text, joined), "dense_4h_to_h": (self.n_text, inner)}
        for target, module in _GATED.items():
            shape = sizes.get(target, (inner, self.n_text))
            yield from linear(f"adapter.linear.{target}", f"{_ADAPTER}.linear_proj.{module}", *shape, bias=False)
        yield from norm("adapter.linear.norm1", f"{_ADAPTER}.linear_proj.norm1", self.n_text)
        for end in ("boi", "eoi"):
            yield Wanted(f"adapter.{end}", f"{_ADAPTER}.{end}", (1, 1, self.n_text), flat)
