"""Granite 3 and 4, dense and with experts."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    Keys,
    Modules,
    View,
)
from ikpy.convert.families.llama import Llama


class PictureParts(NamedTuple):
    """One of the parts that rows of pictures have (Granite 4 Vision). states: behind which layer of the encoder, -1 the
    last, they are made of; corner: of squares of four patches, -1: none; module: of the checkpoint that makes them;
    layer: of the text model, before which they are added."""

    states: int
    corner: int
    module: str
    layer: int


def picture_parts(config: Config) -> list[PictureParts]:
    """Parts of rows by the layer that they are added before; none of models that read no pictures."""
    pairs = config.get("deepstack_layer_map", default=None)
    if pairs is None:
        return []
    corners = config.get("spatial_target_layers", default=[12, 15, 18, 21])
    are_pairs = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    config.require(f"deepstack_layer_map {pairs}", are_pairs and all(type(n) is int for pair in pairs for n in pair))
    fits = isinstance(corners, list) and len(corners) == 4 and all(type(n) is int for n in corners)
    config.require(f"spatial_target_layers {corners}", fits)
    states = config.integer("spatial_vision_layer", default=-1)
    found = [PictureParts(of, -1, f"layerwise_projectors.{i}", to) for i, (of, to) in enumerate(pairs)]
    found += [PictureParts(states, i, f"spatial_projectors.{i}", to) for i, to in enumerate(corners)]
    found.sort(key=lambda part: part.layer)
    layers, n_layer = [part.layer for part in found], config.count("num_hidden_layers")
    fits = layers[0] == 0 and len({*layers}) == len(layers) and layers[-1] < n_layer
    config.require(f"parts of pictures' rows for layers {layers} of {n_layer}", fits)
    return found


class Granite(Llama):
    """Scaled embeddings, branches, scores and logits; parts of pictures' rows for some layers."""

    arch = "granite"

    def keys(self) -> Keys:
        config = self.config
        parts = picture_parts(config)
        mapping = [-1] * config.count("num_hidden_layers")
        for i, part in enumerate(parts[1:], 1):  # the first part is in place of the embedding
            mapping[part.layer] = i
        pictures: Keys = {"deepstack_mapping": np.array(mapping, np.int32)} if parts else {}
        return super().keys() | {
            **pictures,
            "embedding_scale": config.number("embedding_multiplier", default=1.0),
            "residual_scale": config.number("residual_multiplier", default=1.0),
            "attention.scale": config.number("attention_multiplier", default=1.0),
            "logit_scale": config.number("logits_scaling", default=1.0),
        }


class GraniteMoe(Granite):
    """Gate and up of all experts in one tensor [E, 2F, D]."""

    arch = "granitemoe"
    modules: ClassVar[Modules] = {
        **ATTENTION,
        "block_sparse_moe.router.layer": "ffn_gate_inp",
        "block_sparse_moe.input_linear": ("ffn_gate_exps", "ffn_up_exps"),
        "block_sparse_moe.output_linear": "ffn_down_exps",
    }

    def view(self, target: str, source: str) -> View | None:
        if source.endswith("input_linear"):
            return lambda values: np.split(values, 2, axis=1)[target == "ffn_up_exps"]
        return super().view(target, source)
