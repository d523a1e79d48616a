"""Step 3.7 Flash and Step3-VL: a tower rotated by column and row with scaled branches, two convolutions, one matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, linear, norm, patches, table

_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""CLIP's, which the repositories have in their code."""
_LONGEST = 3024
"""Pixels of the longer side of a picture, which they have there as well."""
_STRIDE = 2
"""Of both convolutions."""
_WINDOW = 504
"""Pixels of a side of the windows that large pictures are cut into."""


class Step3VL(Projector):
    """Names of its repository. q, k and v are stored together, in the order of pairs that engines rotate in."""

    kind = "step3vl"
    parts = ("vision_model.", "vit_large_projector.")
    layer = "vision_model.transformer.resblocks"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "ln_1",
        "attn_qkv": "attn.in_proj",
        "attn_out": "attn.out_proj",
        "ls1": "ls_1.gamma",
        "ln2": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
        "ls2": "ls_2.gamma",
    }
    activations = ("quick_gelu",)
    eps = 1e-5
    defaults: ClassVar[Mapping[str, int | float]] = {"image_size": 728, "patch_size": 14, "mlp_ratio": 8960 / 1536}

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        for name, values in _COLOURS.items():
            self.processor.values.setdefault(name, values)

    def find_width(self) -> int:
        return self.vision.count("width", "hidden_size", default=1536)

    def find_heads(self) -> int:
        return self.vision.count("heads", "num_attention_heads", default=16)

    def find_layers(self) -> int:
        return self.vision.count("layers", "num_hidden_layers", default=47)

    def find_ff(self) -> int:
        ratio = self.vision.number("mlp_ratio")
        self.vision.require(f"mlp_ratio {ratio:g}", 0 < ratio < math.inf)
        return self.vision.bounded("mlp_ratio", round(self.n * ratio))

    def check(self) -> None:
        super().check()
        self.check_value(self.config, "understand_projector_stride", _STRIDE)
        self.check_value(self.config, "projector_bias", False)
        self.check_value(self.processor, "max_image_size", _LONGEST)
        self.check_value(self.processor, "patch_size", _WINDOW)
        for name, known in (("use_cls_token", False), ("use_ln_post", False), ("use_ln_pre", True)):
            self.check_value(self.vision, name, known)
        for name in ("use_abs_posemb", "use_rope2d"):
            self.check_value(self.vision, name, True)
        self.check_rope(10000)

    def keys(self) -> Keys:
        longest = {"vision.preproc_image_size": _LONGEST, "vision.projector.scale_factor": _STRIDE**2}
        return super().keys() | longest

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        if target == "attn_qkv":
            yield Wanted(f"{full}.weight", f"{source}_weight", (3 * self.n, self.n))
            yield Wanted(f"{full}.bias", f"{source}_bias", (3 * self.n,))
        else:
            yield from super().module(full, target, source)

    def tensors(self) -> Iterator[Wanted]:
        p, n = "vision_model", self.n
        yield from patches(f"{p}.conv1", n, self.patch_size, bias=False)
        yield table("v.position_embd.weight", f"{p}.positional_embedding", self.n_patches, n)
        yield from norm("v.pre_ln", f"{p}.ln_pre", n)
        yield from self.layers()
        for i in range(2):
            name, n_out, n_in = f"{p}.vit_downsampler{i + 1}", 2 * n << i, n << i
            yield Wanted(f"mm.{i}.weight", f"{name}.weight", (n_out, n_in, 3, 3), floats=True)
            yield Wanted(f"mm.{i}.bias", f"{name}.bias", (n_out,))
        yield from linear("mm.model.fc", "vit_large_projector", self.n_text, 4 * n, bias=False)
