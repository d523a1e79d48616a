"""InternVL 2 and on: InternViT, squares of patches side by side, two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys, flat
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, lines, norm, patches, table


def joined_side(config: Config, side: int) -> int:
    """Patches of the side of a square that becomes one token; a picture has `side` of them."""
    ratio = config.number("downsample_ratio", default=0.5)
    factor = round(1 / ratio) if ratio > 0 else 0
    config.require(f"downsample_ratio {ratio:g}", factor > 0 and factor * ratio == 1 and side % factor == 0)
    return factor


class InternVL(Projector):
    """Names of transformers. Branches have scales. Pictures are cut into tiles."""

    kind = "internvl"
    layer = "vision_tower.encoder.layer"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "layernorm_before",
        **{f"attn_{name}": f"attention.{name}_proj" for name in "qkv"},
        "attn_out": "attention.projection_layer",
        "ln2": "layernorm_after",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ls1": "lambda_1",
        "ls2": "lambda_2",
    }
    activations = ("gelu",)
    usual_tiles = 12  # at most, where files do not say it
    large = (3200, 45)
    """Width and layers of InternViT 6B, which alone has RMSNorm, also of all queries and all keys."""
    # Values of the configuration, and modules.
    qkv_bias = "attention_bias"
    qk_norm = "use_qk_norm"
    qk_norms = "attention.{}_norm"
    embeddings: ClassVar[tuple[str, str, str]] = (
        "vision_tower.embeddings.cls_token",
        "vision_tower.embeddings.patch_embeddings.projection",
        "vision_tower.embeddings.position_embeddings",
    )
    projector: ClassVar[tuple[str, str, str]] = (
        "multi_modal_projector.layer_norm",
        "multi_modal_projector.linear_1",
        "multi_modal_projector.linear_2",
    )

    @property
    def is_large(self) -> bool:
        """Whether the encoder is InternViT 6B."""
        return (self.n, self.n_layer) == self.large

    def side(self, name: str) -> int:
        value = self.vision.get(name)
        if isinstance(value, list):
            fits = len(value) == 2 and value[0] == value[1]
            self.vision.require(f"{name} {value}", fits)
            self.vision.values = {**self.vision.values, name: value[0]}
        return super().side(name)

    @property
    def factor(self) -> int:
        """Patches of the side of a square that becomes one token."""
        return joined_side(self.config, self.image_size // self.patch_size)

    def check(self) -> None:
        super().check()
        norm_type = self.vision.get("norm_type", default="layer_norm")
        self.vision.require(f"norm_type '{norm_type}'", norm_type == ("rms_norm" if self.is_large else "layer_norm"))
        has_norms = bool(self.vision.get(self.qk_norm, default=False))
        self.vision.require(f"{self.qk_norm} {has_norms}", has_norms == self.is_large)
        for name in ("use_mean_pooling", "use_absolute_position_embeddings"):
            self.check_value(self.vision, name, True)
        self.check_value(self.config, "vision_feature_layer", -1)
        self.check_value(self.config, "vision_feature_select_strategy", "default")
        self.check_value(self.config, "projector_hidden_act", "gelu")

    def keys(self) -> Keys:
        keys = super().keys() | {"vision.projector.scale_factor": self.factor}
        least, most = self.tiles()
        # Grids have as many rows and as many columns at least.
        self.config.require(f"pictures of {least} to {most} tiles", (least or 1) ** 2 <= (most or self.usual_tiles))
        for key, n_tiles in (("preproc_min_tiles", least), ("preproc_max_tiles", most)):
            keys |= {f"vision.{key}": n_tiles} if n_tiles else {}
        return keys

    def tiles(self) -> tuple[int, int]:
        """Fewest and most tiles of a picture, 0 where nothing is said."""
        return self.processor.count("min_patches", default=0), self.processor.count("max_patches", default=0)

    def has_bias(self, target: str) -> bool:
        is_qkv = target in ("attn_q", "attn_k", "attn_v")
        return bool(self.vision.get(self.qkv_bias, default=False)) if is_qkv else True

    def has_norm_bias(self) -> bool:
        return not self.is_large

    def layers(self) -> Iterator[Wanted]:
        yield from super().layers()
        for il in range(self.n_layer if self.is_large else 0):
            for name in "qk":
                source = f"{self.layer}.{il}.{self.qk_norms.format(name)}"
                yield from norm(f"v.blk.{il}.attn_{name}_norm", source, self.n, bias=False)

    def tensors(self) -> Iterator[Wanted]:
        n, (token, embedding, positions), (first_norm, *matrices) = self.n, self.embeddings, self.projector
        yield Wanted("v.class_embd", token, (1, 1, n), flat)
        yield from patches(embedding, n, self.patch_size)
        yield table("v.position_embd.weight", positions, 1, self.n_patches + 1, n, view=lines)
        yield from self.layers()
        n *= self.factor**2
        yield from norm("mm.model.mlp.0", first_norm, n)
        targets, (first, second) = ("mm.model.mlp.1", "mm.model.mlp.3"), matrices
        yield from self.two_layers(targets, (first, second), (n, self.n_text, self.n_text))


class InternVLChat(InternVL):
    """Names of the model's own repositories."""

    parts = ("vision_model.", "mlp1.")
    layer = "vision_model.encoder.layers"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "norm1",
        **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv"),
        "attn_out": "attn.proj",
        "ln2": "norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
        "ls1": "ls1",
        "ls2": "ls2",
    }
    qkv_bias = "qkv_bias"
    qk_norm = "qk_normalization"
    qk_norms = "attn.{}_norm"
    embeddings = (
        "vision_model.embeddings.class_embedding",
        "vision_model.embeddings.patch_embedding",
        "vision_model.embeddings.position_embedding",
    )
    projector = ("mlp1.0", "mlp1.1", "mlp1.3")

    def check(self) -> None:
        super().check()
        self.check_value(self.config, "select_layer", -1)
        self.check_value(self.config, "ps_version", "v2")

    def tiles(self) -> tuple[int, int]:
        config = self.config
        return config.count("min_dynamic_patch", default=0), config.count("max_dynamic_patch", default=0)
