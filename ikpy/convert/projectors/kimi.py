"""MoonViT of Kimi-VL and Kimi K2.5: patches rotate by row and column beside positions that are added, squares of
patches side by side, two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import Keys, View
from ikpy.convert.projectors.base import Projector, pixel_keys
from ikpy.convert.projectors.tensors import Wanted, lines, norm, patches, table, third

_BLOCK = {"ln1": "norm0", "attn_out": "wo", "ln2": "norm1", "ffn_up": "mlp.fc0", "ffn_down": "mlp.fc1"}
_MERGE = 2


class KimiVL(Projector):
    """Queries, keys and values in one matrix."""

    kind = "kimivl"
    layer = "vision_tower.encoder.blocks"
    modules: ClassVar[Mapping[str, str]] = {**_BLOCK, **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "wqkv")}
    eps = 1e-5
    is_flat: ClassVar[bool] = True  # the table of positions
    projector: ClassVar[Mapping[str, str]] = {
        "mm.input_norm": "multi_modal_projector.pre_norm",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    }

    @property
    def grid(self) -> int:
        """Rows, and as many columns, of the table of positions."""
        height, width = (
            self.vision.count(f"init_pos_emb_{name}", f"pos_emb_{name}", default=64) for name in ("height", "width")
        )
        self.vision.require(f"a table of {height} x {width} positions", height == width and height > 0)
        return height

    @property
    def image_size(self) -> int:
        return self.grid * self.patch_size

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "merge_kernel_size", [_MERGE, _MERGE])
        self.check_value(self.vision, "projector_hidden_act", "gelu")
        self.check_value(self.vision, "mm_projector_type", "patchmerger")

    def keys(self) -> Keys:
        return super().keys() | {"vision.projector.scale_factor": _MERGE}

    def view(self, target: str) -> View | None:
        turned, parts = by_axis(self.n_head), {"attn_q": 0, "attn_k": 1, "attn_v": 2}
        if target == "attn_qkv":
            return lambda rows: np.concatenate([turned(q_or_k) for q_or_k in np.split(rows, 3)[:2]] + [third(2)(rows)])
        if target in ("attn_q", "attn_k"):
            return lambda rows: turned(third(parts[target])(rows))
        return super().view(target)

    def tensors(self) -> Iterator[Wanted]:
        yield from patches("vision_tower.patch_embed.proj", self.n, self.patch_size)
        name, shape = "vision_tower.patch_embed.pos_emb.weight", (self.grid, self.grid, self.n)
        yield table("v.position_embd.weight", name, *shape, view=lines if self.is_flat else None)
        yield from self.layers()
        yield from norm("v.post_ln", "vision_tower.encoder.final_layernorm", self.n)
        (target, source), *matrices = self.projector.items()
        yield from norm(target, source, self.n)
        n = self.n * _MERGE**2
        (first, first_source), (second, second_source) = matrices
        yield from self.two_layers((first, second), (first_source, second_source), (n, n, self.n_text))


class KimiK25(KimiVL):
    """MoonViT-3D, of which films have one more part."""

    kind = "kimik25"
    parts = ("vision_tower.", "mm_projector.")
    unused = ("vision_tower.patch_embed.pos_emb.time_weight",)  # of frames of a film
    modules: ClassVar[Mapping[str, str]] = {**_BLOCK, "attn_qkv": "wqkv"}
    is_flat = False
    projector: ClassVar[Mapping[str, str]] = {
        "mm.input_norm": "mm_projector.pre_norm",
        "mm.1": "mm_projector.proj.0",
        "mm.2": "mm_projector.proj.2",
    }
    least_patches = 8
    most_patches = 16384

    def find_width(self) -> int:
        return self.vision.count("vt_hidden_size", "hidden_size")

    def find_ff(self) -> int:
        return self.vision.count("vt_intermediate_size", "intermediate_size")

    def find_heads(self) -> int:
        return self.vision.count("vt_num_attention_heads", "num_attention_heads")

    def find_layers(self) -> int:
        return self.vision.count("vt_num_hidden_layers", "num_hidden_layers")

    def keys(self) -> Keys:
        n_patches = self.processor.count("in_patch_limit", default=self.most_patches)
        area = self.patch_size**2
        return super().keys() | {
            "vision.attention.layer_norm_epsilon": self.vision.epsilon("projector_ln_eps", default=self.eps),
            **pixel_keys(self.least_patches * area, n_patches * area),
        }


def by_axis(n_head: int) -> View:
    """Rows of q or k from pairs of elements that turn by column and by row in turns to all by column, then all by row.

    The products of queries and keys stay as they are. Engines rotate in this order.
    """

    def view(rows: np.ndarray) -> np.ndarray:
        pairs = rows.reshape(n_head, rows.shape[0] // n_head // 4, 2, 2, *rows.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    return view
