"""Qwen 2, 2.5 and 3 VL, Qwen 3.5, EXAONE 4.5: patches of two frames, squares of them merged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector, pixel_keys
from ikpy.convert.projectors.tensors import Wanted, norm, paired_patches, table

BLOCK = {"ln1": "norm1", "attn_out": "attn.proj", "ln2": "norm2"}
_SPLIT = dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv")
GATED = {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
MERGE, FRAMES = 2, 2


class MergedProjector(Projector):
    """Squares of patches become rows of the text model."""

    parts: ClassVar[tuple[str, ...]] = ("visual.",)
    layer = "visual.blocks"

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "spatial_merge_size", MERGE)
        self.check_value(self.vision, "temporal_patch_size", FRAMES)
        self.check_rope(10000)

    def keys(self) -> Keys:
        return super().keys() | {"vision.spatial_merge_size": MERGE}

    def merger(self, first: str, second: str) -> Iterator[Wanted]:
        """Two matrices from squares of patches to rows of the text model."""
        n = self.n * MERGE**2
        yield from self.two_layers(("mm.0", "mm.2"), (f"visual.{first}", f"visual.{second}"), (n, n, self.n_text))


class Qwen2VL(MergedProjector):
    """Networks without gates; LayerNorm."""

    kind = "qwen2vl_merger"
    modules: ClassVar[Mapping[str, str]] = {**BLOCK, **_SPLIT, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
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
    modules: ClassVar[Mapping[str, str]] = {**BLOCK, **_SPLIT, **GATED}
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


class Exaone45(Qwen25VL):
    """Fewer heads of keys and values; limits of pictures."""

    kind = "exaone4_5"
    modules: ClassVar[Mapping[str, str]] = {**BLOCK, "attn_qkv": "attn.qkv", **GATED}

    @property
    def n_head_kv(self) -> int:
        """Heads of keys, and of values."""
        n_head_kv = self.vision.count("num_key_value_heads", default=8)
        fits = n_head_kv > 0 and self.n_head % n_head_kv == 0
        self.vision.require(f"num_key_value_heads {n_head_kv} of {self.n_head} heads", fits)
        return n_head_kv

    def shape(self, target: str) -> tuple[int, int]:
        rows = self.n + 2 * self.n_head_kv * self.head_dim
        return (rows, self.n) if target == "attn_qkv" else super().shape(target)

    def keys(self) -> Keys:
        return super().keys() | {
            "vision.attention.head_count_kv": self.n_head_kv,
            "vision.window_size": self.window,
            **pixel_keys(*self.processor.pixels()),
        }


class Qwen3VL(MergedProjector):
    """Positions as vectors too; features of some layers go to the first layers of the text model.

    mergers: modules with what makes rows of these features. merger_parts: its norm and both matrices.
    """

    kind = "qwen3vl_merger"
    mergers: ClassVar[str] = "deepstack_merger_list"
    merger_parts: ClassVar[tuple[str, str, str]] = ("norm", "linear_fc1", "linear_fc2")
    modules: ClassVar[Mapping[str, str]] = {
        **BLOCK,
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
        last_norm, first, second = self.merger_parts
        yield from norm("v.post_ln", f"visual.merger.{last_norm}", self.n)
        yield from self.merger(f"merger.{first}", f"merger.{second}")
        n = self.n * MERGE**2
        for i, layer in enumerate(self.deep_layers):
            target, source = f"v.deepstack.{layer}", f"visual.{self.mergers}.{i}"
            yield from norm(f"{target}.norm", f"{source}.{last_norm}", n)
            names = (f"{source}.{first}", f"{source}.{second}")
            yield from self.two_layers((f"{target}.fc1", f"{target}.fc2"), names, (n, n, self.n_text))
