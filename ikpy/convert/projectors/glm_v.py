"""GLM 4.1V to 4.6V and GLM-5.3 Flash: a convolution merges squares of patches, and a gated network stands behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import pixel_keys
from ikpy.convert.projectors.qwen_vl import BLOCK, GATED, MERGE, MergedProjector
from ikpy.convert.projectors.tensors import Wanted, linear, norm, paired_patches, table


class Glm4v(MergedProjector):
    """Positions are added too."""

    kind = "glm4v"
    modules: ClassVar[Mapping[str, str]] = {**BLOCK, "attn_qkv": "attn.qkv", **GATED}
    activations = ("silu",)
    norm_bias = False
    eps = 1e-5

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "out_hidden_size", self.n_text)

    def has_bias(self, target: str) -> bool:
        return target == "attn_qkv" and bool(self.vision.get("attention_bias", default=False))

    def shape(self, target: str) -> tuple[int, int]:
        n = self.n_text  # intermediate_size is that of the network behind the layers
        return {"ffn_up": (n, self.n), "ffn_gate": (n, self.n), "ffn_down": (self.n, n)}.get(
            target, super().shape(target)
        )

    @property
    def merger_width(self) -> int:
        """Of the network behind the layers."""
        return self.n_ff

    def positions(self) -> Iterator[Wanted]:
        """What is added to patches, behind a norm."""
        yield from norm("v.norm_embd", "visual.post_conv_layernorm", self.n, bias=False)
        yield table("v.position_embd.weight", "visual.embeddings.position_embedding.weight", self.n_patches, self.n)

    def tensors(self) -> Iterator[Wanted]:
        n, n_text = self.n, self.n_text
        yield from paired_patches("visual.patch_embed.proj", n, self.patch_size, bias=True)
        yield from self.positions()
        yield from self.layers()
        yield from norm("v.post_ln", "visual.post_layernorm", n, bias=False)
        shape = (n_text, n, MERGE, MERGE)
        yield Wanted("mm.patch_merger.weight", "visual.downsample.weight", shape, floats=True)
        yield Wanted("mm.patch_merger.bias", "visual.downsample.bias", (n_text,))
        yield from linear("mm.model.fc", "visual.merger.proj", n_text, n_text, bias=False)
        yield from norm("mm.post_norm", "visual.merger.post_projection_norm", n_text)
        for name in ("gate", "up"):
            yield from linear(f"mm.{name}", f"visual.merger.{name}_proj", self.merger_width, n_text, bias=False)
        yield from linear("mm.down", "visual.merger.down_proj", n_text, self.merger_width, bias=False)


class Glm5v(Glm4v):
    """Norms of heads, bounded networks, no positions that are added; limits of pictures."""

    kind = "glm5v"
    modules: ClassVar[Mapping[str, str]] = {
        **Glm4v.modules,
        "attn_q_norm": "attn.q_norm",
        "attn_k_norm": "attn.k_norm",
    }

    @property
    def merger_width(self) -> int:
        return self.vision.count("projection_intermediate_size", default=10240)

    def has_bias(self, target: str) -> bool:
        return bool(self.vision.get("attention_bias", default=True))

    def shape(self, target: str) -> tuple[int, int]:
        return MergedProjector.shape(self, target)

    def positions(self) -> Iterator[Wanted]:
        yield from ()

    def check(self) -> None:
        super().check()
        self.check_value(self.processor, "patch_expand_factor", 1)

    def keys(self) -> Keys:
        limit = self.vision.number("swiglu_limit", default=10.0)
        self.vision.require(f"swiglu_limit {limit:g}", 0 < limit < math.inf)
        names = (("min_image_tokens", 16), ("max_image_tokens", 8000))
        n_tokens = [self.processor.count(name, default=usual) for name, usual in names]
        self.processor.require("pictures of {} to {} tokens".format(*n_tokens), 0 < n_tokens[0] <= n_tokens[1])
        area = (self.patch_size * MERGE) ** 2
        return super().keys() | {"vision.swiglu_clamp": limit, **pixel_keys(*(n * area for n in n_tokens))}
