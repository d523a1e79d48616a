"""Granite 4 Vision: SigLIP, whose states behind several layers windows of queries read (Q-Former)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.families.granite import PictureParts, picture_parts
from ikpy.convert.projectors.siglip import SiglipProjector
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table
from ikpy.vision.granite4 import HEAD, QUERY_EPS

_LAYER = "qformer.encoder.layer.0"
_ATTENTION = {"q": "attention.query", "k": "attention.key", "v": "attention.value", "out": "output.dense"}
_NORMS = {
    "norm": "norm",
    "post_norm": "qformer.layernorm",
    "self_attn_norm": f"{_LAYER}.attention.output.LayerNorm",
    "cross_attn_norm": f"{_LAYER}.crossattention.output.LayerNorm",
    "ffn_norm": f"{_LAYER}.output_query.LayerNorm",
}


class Granite4Vision(SiglipProjector):
    """A block for every part of the rows, in the order of the text model's layers."""

    kind = "granite4_vision"
    parts = ("vision_tower.", "layerwise_projectors.", "spatial_projectors.", "image_newline")
    unused = ("vision_tower.head.",)
    renames: ClassVar[Mapping[str, str]] = {"vision_tower.vision_model.": "vision_tower."}

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        given = self.config.get("qformer_config", default={})
        self.queries = Config(given if isinstance(given, dict) else {}, self.config.path)
        self.blocks = picture_parts(self.config)

    def check(self) -> None:
        super().check()
        config = self.config
        config.require("no parts of pictures' rows (deepstack_layer_map)", bool(self.blocks))
        config.require(f"downsample_rate {self.rate}", len(self.sides) == 2)
        query, window = self.sides
        side = self.image_size // self.patch_size
        fits = 0 < 2 * query == window and side % window == 0
        config.require(f"downsample_rate {self.rate} of {side} patches", fits)
        self.check_value(config, "vision_feature_select_strategy", "full")
        self.check_value(config, "use_image_newline_parameter", True)
        for name, known in (
            ("num_hidden_layers", (1,)),
            ("cross_attention_frequency", (1,)),
            ("hidden_act", ("gelu",)),
            ("hidden_size", (self.n,)),
            ("encoder_hidden_size", (self.n,)),
            ("num_attention_heads", (self.n // HEAD,)),
            ("layer_norm_eps", (QUERY_EPS,)),
        ):
            self.check_value(self.queries, name, *known)

    @property
    def rate(self) -> Any:
        """Queries and patches of the side of a window, as the configuration has them."""
        return self.config.get("downsample_rate")

    @property
    def sides(self) -> list[int]:
        """Queries and patches of the side of a window; none if the rate is not two numbers."""
        numbers = self.rate.split("/") if isinstance(self.rate, str) else []
        return (
            [int(n) for n in numbers]
            if len(numbers) == 2 and all(n.isdecimal() and len(n) < 5 for n in numbers)
            else []
        )

    @property
    def pinpoints(self) -> list[int]:
        """Width and height of the grids of tiles."""
        sizes, side = self.config.get("image_grid_pinpoints"), self.image_size
        is_list = isinstance(sizes, list) and all(isinstance(each, list) and len(each) == 2 for each in sizes)
        fits = is_list and all(type(n) is int and 0 < n < 1 << 16 and n % side == 0 for each in sizes for n in each)
        self.config.require(f"image_grid_pinpoints for tiles of {side} pixels", bool(sizes) and fits)
        return [n for height, width in sizes for n in (width, height)]

    def layer_of(self, part: PictureParts) -> int:
        """The layer behind which a part's states are, counted from 0; the configuration counts what is before the
        first layer, too."""
        layer = part.states - 1 if part.states >= 0 else self.n_layer + part.states
        self.config.require(f"states {part.states} of {self.n_layer} layers", 0 <= layer < self.n_layer)
        return layer

    def keys(self) -> Keys:
        query, window = self.sides
        return super().keys() | {
            "vision.preproc_image_size": self.image_size,
            "vision.feature_layer": np.array([self.layer_of(part) for part in self.blocks], np.int32),
            "vision.projector.spatial_offsets": np.array([part.corner for part in self.blocks], np.int32),
            "vision.projector.query_side": query,
            "vision.projector.window_side": window,
            "vision.image_grid_pinpoints": np.array(self.pinpoints, np.int32),
        }

    def tensors(self) -> Iterator[Wanted]:
        yield from self.encoder()
        yield table("v.image_newline", "image_newline", self.n_text)
        for i, part in enumerate(self.blocks):
            yield from self.block(f"v.proj_blk.{i}", part.module)

    def block(self, target: str, source: str) -> Iterator[Wanted]:
        """The tensors of one part."""
        n, (query, window) = self.n, self.sides
        n_ff = self.queries.count("intermediate_size", default=3072)
        yield Wanted(f"{target}.query", f"{source}.query", (1, query**2, n), lambda rows: rows[0], exact=True)
        positions = f"{source}.image_positions"
        yield Wanted(f"{target}.img_pos", positions, (1, window**2, n), lambda rows: rows[0], exact=True)
        for mine, theirs in _NORMS.items():
            yield from norm(f"{target}.{mine}", f"{source}.{theirs}", n)
        for kind, module in (("self_attn", "attention"), ("cross_attn", "crossattention")):
            for mine, theirs in _ATTENTION.items():
                yield from linear(f"{target}.{kind}_{mine}", f"{source}.{_LAYER}.{module}.{theirs}", n, n)
        yield from linear(f"{target}.ffn_up", f"{source}.{_LAYER}.intermediate_query.dense", n_ff, n)
        yield from linear(f"{target}.ffn_down", f"{source}.{_LAYER}.output_query.dense", n, n_ff)
        yield from linear(f"{target}.linear", f"{source}.out_linear", self.n_text, n)
