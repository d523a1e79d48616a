"""Qwen 2, 2.5 and 3 VL with Qwen 3.5, and GLM 4.1V to 4.6V: patches of two frames, squares of them merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, linear, norm, paired_patches, table

_BLOCK = {"ln1": "norm1", "attn_out": "attn.proj", "ln2": "norm2"}
_SPLIT = dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv")
_GATED = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
_MERGE, _FRAMES = 2, 2


class MergedProjector(Projector):
    """Squares of patches become rows of the text model."""

    parts = ("visual.",)
    layer = "visual.blocks"

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "spatial_merge_size", _MERGE)
        self.check_value(self.vision, "temporal_patch_size", _FRAMES)
        self.check_rope(10000)

    def keys(self) -> Keys:
        return super().keys() | {"vision.spatial_merge_size": _MERGE}

    def merger(self, first: str, second: str) -> Iterator[Wanted]:
        """Two matrices from squares of patches to rows of the text model."""
        n = self.n * _MERGE**2
        yield from self.two_layers(("mm.0", "mm.2"), (f"visual.{first}", f"visual.{second}"), (n, n, self.n_text))


class Qwen2VL(MergedProjector):
    """Networks without gates; LayerNorm."""

    kind = "qwen2vl_merger"
    modules: ClassVar[Mapping[str, str]] = {**_BLOCK, **_SPLIT, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
    activations = ("quick_gelu",)
    usual_image_size = 560

    def find_width(self) -> int:
        return self.vision.count("embed_dim")

    def find_ff(self) -> int:
        width = int(self.n * self.vision.number("mlp_ratio", default=4))
        return self.vision.bounded("mlp_ratio", width)

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "hidden_size", self.n_text)

    def tensors(self) -> Iterator[Wanted]:
        yield from paired_patches("visual.patch_embed.proj", self.n, self.patch_size, bias=False)
        yield from self.layers()
        yield from norm("v.post_ln", "visual.merger.ln_q", self.n, bias=self.norm_bias)
        yield from self.merger("merger.mlp.0", "merger.mlp.2")


class Qwen25VL(Qwen2VL):
    """Gated networks; RMSNorm; windows in all but every so many layers."""

    kind = "qwen2.5vl_merger"
    modules: ClassVar[Mapping[str, str]] = {**_BLOCK, **_SPLIT, **_GATED}
    activations = ("silu",)
    norm_bias = False
    window = 112  # pixels of a side

    def find_width(self) -> int:
        return self.vision.count("hidden_size")

    def find_ff(self) -> int:
        return self.vision.count("intermediate_size")

    def check(self) -> None:
        MergedProjector.check(self)
        self.check_value(self.vision, "out_hidden_size", self.n_text)
        self.check_value(self.vision, "window_size", self.window)

    def keys(self) -> Keys:
        whole = self.vision.get("fullatt_block_indexes", default=[])
        period = whole[0] + 1 if whole else 0
        usual = period > 0 and whole == list(range(period - 1, self.n_layer, period))
        self.vision.require(f"fullatt_block_indexes {whole}", usual)
        return super().keys() | {"vision.n_wa_pattern": period}


class Qwen3VL(MergedProjector):
    """Positions as vectors too; features of some layers go to the first layers of the text model."""

    kind = "qwen3vl_merger"
    modules: ClassVar[Mapping[str, str]] = {
        **_BLOCK,
        "attn_qkv": "attn.qkv",
        "ffn_up": "mlp.linear_fc1",
        "ffn_down": "mlp.linear_fc2",
    }

    @property
    def grid(self) -> int:
        """Patches of a side of the table of positions."""
        n_positions = self.vision.count("num_position_embeddings")
        grid = math.isqrt(n_positions)
        self.vision.require(f"num_position_embeddings {n_positions}", grid > 0 and grid**2 == n_positions)
        return grid

    @property
    def image_size(self) -> int:
        return self.grid * self.patch_size

    @property
    def deep_layers(self) -> list[int]:
        """Layers behind which features are taken, in the order in which the text model adds them."""
        layers = self.vision.get("deepstack_visual_indexes", default=[])
        fits = layers == sorted({*layers}) and all(0 <= layer < self.n_layer for layer in layers)
        self.vision.require(f"deepstack_visual_indexes {layers}", fits)
        return list(layers)

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "out_hidden_size", self.n_text)

    def keys(self) -> Keys:
        deep = self.deep_layers
        return super().keys() | {"vision.is_deepstack_layers": [il in deep for il in range(self.n_layer)]}

    def tensors(self) -> Iterator[Wanted]:
        yield from paired_patches("visual.patch_embed.proj", self.n, self.patch_size, bias=True)
        yield table("v.position_embd.weight", "visual.pos_embed.weight", self.grid**2, self.n)
        yield from self.layers()
        yield from norm("v.post_ln", "visual.merger.norm", self.n)
        yield from self.merger("merger.linear_fc1", "merger.linear_fc2")
        n = self.n * _MERGE**2
        for i, layer in enumerate(self.deep_layers):
            target, source = f"v.deepstack.{layer}", f"visual.deepstack_merger_list.{i}"
            yield from norm(f"{target}.norm", f"{source}.norm", n)
            names = (f"{source}.linear_fc1", f"{source}.linear_fc2")
            yield from self.two_layers((f"{target}.fc1", f"{target}.fc2"), names, (n, n, self.n_text))


class Glm4v(MergedProjector):
    """Positions as vectors too; a convolution that merges, and a gated network behind it."""

    kind = "glm4v"
    modules: ClassVar[Mapping[str, str]] = {**_BLOCK, "attn_qkv": "attn.qkv", **_GATED}
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

    def tensors(self) -> Iterator[Wanted]:
        n, n_text = self.n, self.n_text
        yield from paired_patches("visual.patch_embed.proj", n, self.patch_size, bias=True)
        yield from norm("v.norm_embd", "visual.post_conv_layernorm", n, bias=False)
        yield table("v.position_embd.weight", "visual.embeddings.position_embedding.weight", self.n_patches, n)
        yield from self.layers()
        yield from norm("v.post_ln", "visual.post_layernorm", n, bias=False)
        shape = (n_text, n, _MERGE, _MERGE)
        yield Wanted("mm.patch_merger.weight", "visual.downsample.weight", shape, floats=True)
        yield Wanted("mm.patch_merger.bias", "visual.downsample.bias", (n_text,))
        yield from linear("mm.model.fc", "visual.merger.proj", n_text, n_text, bias=False)
        yield from norm("mm.post_norm", "visual.merger.post_projection_norm", n_text)
        for name, rows, columns in (
            ("gate", self.n_ff, n_text),
            ("up", self.n_ff, n_text),
            ("down", n_text, self.n_ff),
        ):
            yield from linear(f"mm.{name}", f"visual.merger.{name}_proj", rows, columns, bias=False)
