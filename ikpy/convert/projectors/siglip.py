"""Encoders of SigLIP and CLIP: Gemma 3, SmolVLM and Idefics3, LFM2-VL, LLaVA 1.5 and 1.6."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, flat_patches, linear, norm, patches, table
from ikpy.vision.params import MAX_SIZE

_OLD = {"vision_tower.vision_model.": "vision_tower."}


class SiglipProjector(Projector):
    """Patches, positions, layers, a last norm."""

    tower: ClassVar[str] = "vision_tower"

    def embedding(self) -> Iterator[Wanted]:
        """Patches and positions."""
        yield from patches(f"{self.tower}.embeddings.patch_embedding", self.n, self.patch_size)
        name = f"{self.tower}.embeddings.position_embedding.weight"
        yield table("v.position_embd.weight", name, self.n_patches, self.n)

    def encoder(self) -> Iterator[Wanted]:
        """All but the projector."""
        yield from self.embedding()
        yield from self.layers()
        yield from norm("v.post_ln", f"{self.tower}.post_layernorm", self.n)


class Gemma3(SiglipProjector):
    """Means of squares of patches, a norm and one matrix."""

    kind = "gemma3"
    unused = ("vision_tower.head.",)
    renames = _OLD
    usual_factor = 4

    @property
    def factor(self) -> int:
        """Patches of the side of a square that becomes one token."""
        n_tokens = self.config.count("mm_tokens_per_image", default=256)
        side, tokens = self.image_size // self.patch_size, math.isqrt(n_tokens)
        self.config.require(f"mm_tokens_per_image {n_tokens}", tokens > 0 and tokens**2 == n_tokens)
        self.config.require(f"mm_tokens_per_image {n_tokens} of {side**2} patches", side % tokens == 0)
        return side // tokens

    def keys(self) -> Keys:
        size = self.processor.edge("size", "height")
        self.processor.require(f"size {size} instead of {self.image_size}", size in (None, self.image_size))
        keys = super().keys()
        return keys if self.factor == self.usual_factor else keys | {"vision.projector.scale_factor": self.factor}

    def tensors(self) -> Iterator[Wanted]:
        yield from self.encoder()
        name = "multi_modal_projector.mm_input_projection_weight"
        yield Wanted("mm.input_projection.weight", name, (self.n, self.n_text), floats=True)
        name = "multi_modal_projector.mm_soft_emb_norm.weight"
        yield Wanted("mm.soft_emb_norm.weight", name, (self.n,), change=lambda values: values + 1)


class Idefics3(SiglipProjector):
    """Squares of patches side by side, one matrix. Large pictures are cut into slices."""

    kind = "idefics3"
    parts = ("vision_model.", "connector.")
    tower = "vision_model"
    layer = "vision_model.encoder.layers"
    defaults: ClassVar[Mapping[str, int | float]] = {
        "hidden_size": 1152,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 12,
    }

    @property
    def factor(self) -> int:
        """Patches of the side of a square that becomes one token."""
        return self.config.count("scale_factor", default=2)

    def check(self) -> None:
        super().check()
        side = self.image_size // self.patch_size
        self.config.require(
            f"scale_factor {self.factor} of {side} patches", self.factor > 0 and side % self.factor == 0
        )
        slice_size = self.processor.edge("max_image_size", "longest_edge")
        fits = slice_size in (None, self.image_size)
        self.processor.require(f"max_image_size {slice_size} instead of {self.image_size}", fits)
        self.check_value(self.processor, "do_image_splitting", True)

    def keys(self) -> Keys:
        return super().keys() | {
            "vision.projector.scale_factor": self.factor,
            "vision.preproc_image_size": self.processor.edge("size", "longest_edge") or self.image_size,
        }

    def tensors(self) -> Iterator[Wanted]:
        yield from self.encoder()
        name = "connector.modality_projection.proj"
        yield from linear("mm.model.fc", name, self.n_text, self.n * self.factor**2, bias=False)


class Lfm2(SiglipProjector):
    """SigLIP 2 for pictures of any size, squares of patches side by side, two matrices."""

    kind = "lfm2"
    unused = ("vision_tower.head.",)
    renames = _OLD
    usual_image_size = 256
    resize_algorithms: ClassVar[Mapping[int, str]] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}

    @property
    def factor(self) -> int:
        """Patches of the side of a square that becomes one token."""
        return self.config.count("downsample_factor", default=2)

    @property
    def has_norm(self) -> bool:
        """Whether the projector begins with one."""
        return bool(self.config.get("projector_use_layernorm", default=True))

    def find_layers(self) -> int:
        feature = self.config.integer("vision_feature_layer", default=-1)
        n_layer = super().find_layers()
        self.config.require(f"vision_feature_layer {feature}", -n_layer <= feature < 0)
        return n_layer + 1 + feature

    def check(self) -> None:
        super().check()
        self.check_value(self.config, "projector_hidden_act", "gelu")
        self.config.require(f"downsample_factor {self.factor}", self.factor > 0)

    def embedding(self) -> Iterator[Wanted]:
        yield from flat_patches("vision_tower.embeddings.patch_embedding", self.n, self.patch_size, bias=True)
        n_patches = self.vision.count("num_patches", default=256)
        yield table("v.position_embd.weight", "vision_tower.embeddings.position_embedding.weight", n_patches, self.n)

    def keys(self) -> Keys:
        keys = super().keys() | {"vision.projector.scale_factor": self.factor}
        resample = self.processor.get("resample", default=None)
        if resample is None:
            return keys
        self.processor.require(f"resample {resample}", resample in self.resize_algorithms)
        return keys | {"vision.image_resize_algo": self.resize_algorithms[resample]}

    def tensors(self) -> Iterator[Wanted]:
        yield from self.encoder()
        n, width = self.n * self.factor**2, self.config.count("projector_hidden_size", default=2560)
        if self.has_norm:
            yield from norm("mm.input_norm", "multi_modal_projector.layer_norm", n)
        names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
        bias = bool(self.config.get("projector_bias", default=True))
        yield from self.two_layers(("mm.1", "mm.2"), names, (n, width, self.n_text), bias=bias)


class Llava(SiglipProjector):
    """CLIP up to the layer whose features are taken, two matrices."""

    kind = "mlp"
    unused = ("vision_tower.post_layernorm.",)
    renames = _OLD
    activations = ("quick_gelu", "gelu")
    eps = 1e-5
    defaults: ClassVar[Mapping[str, int | float]] = {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "image_size": 224,
        "patch_size": 32,
    }

    def find_text_width(self) -> int:
        return self.config.count("hidden_size", default=4096)  # LLaVA 1.5 7B leaves it out

    def find_layers(self) -> int:
        feature = self.config.get("vision_feature_layer", default=-2)
        n_layer = super().find_layers()
        fits = isinstance(feature, int) and -n_layer <= feature < 0
        self.config.require(f"vision_feature_layer {feature}", fits)
        self.n_left_out = -1 - feature
        return n_layer - self.n_left_out

    def left_out(self) -> tuple[str, ...]:
        return (*self.unused, *(f"{self.layer}.{self.n_layer + i}." for i in range(self.n_left_out)))

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "model_type", "clip_vision_model")
        self.check_value(self.config, "vision_feature_select_strategy", "default")
        self.check_value(self.config, "projector_hidden_act", "gelu")

    def keys(self) -> Keys:
        layers = np.array([self.n_layer], np.int32)
        return super().keys() | {"has_llava_projector": True, "vision.feature_layer": layers}

    def tensors(self) -> Iterator[Wanted]:
        yield table("v.class_embd", "vision_tower.embeddings.class_embedding", self.n)
        yield from patches("vision_tower.embeddings.patch_embedding", self.n, self.patch_size, bias=False)
        name = "vision_tower.embeddings.position_embedding.weight"
        yield table("v.position_embd.weight", name, self.n_patches + 1, self.n)
        yield from norm("v.pre_ln", "vision_tower.pre_layrnorm", self.n)
        yield from self.layers()
        names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
        bias = bool(self.config.get("multimodal_projector_bias", default=True))
        yield from self.two_layers(("mm.0", "mm.2"), names, (self.n, self.n_text, self.n_text), bias=bias)


class LlavaNext(Llava):
    """LLaVA 1.6: larger pictures are also cut into tiles, in one of several sizes."""

    usual_sizes: ClassVar[list[list[int]]] = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

    @property
    def sizes(self) -> list[list[int]]:
        """Heights and widths that pictures are cut in."""
        value = self.config.get("image_grid_pinpoints", default=None)
        value = self.usual_sizes if value is None else value
        self.config.require(f"image_grid_pinpoints {value}", isinstance(value, list) and all(map(self.fits, value)))
        return value

    def fits(self, size: object) -> bool:
        """Whether it is the height and the width of tiles."""
        if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int for n in size):
            return False
        return all(0 < n <= MAX_SIZE and n % self.image_size == 0 for n in size)

    def check(self) -> None:
        super().check()
        for name, key in (("size", "shortest_edge"), ("crop_size", "height")):
            side = self.processor.edge(name, key)
            self.processor.require(f"{name} {side} instead of {self.image_size}", side in (None, self.image_size))
        self.check_value(self.processor, "image_grid_pinpoints", self.sizes)
        self.check_value(self.processor, "do_pad", True)

    def keys(self) -> Keys:
        sizes = np.array([n for height, width in self.sizes for n in (width, height)], np.int32)
        return super().keys() | {"vision.image_grid_pinpoints": sizes}

    def notes(self) -> list[str]:
        return ["tiles of pictures get no 'image_newline' behind their lines, which the files have no place for"]
