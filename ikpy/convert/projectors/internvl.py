"""InternVL 3 and on in the layout of transformers: InternViT, squares of patches side by side, two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys, flat
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, lines, norm, patches, table


class InternVL(Projector):
    """Branches have scales. Pictures are cut into tiles."""

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
    large = (3200, 45)
    """Width and layers of InternViT 6B, which alone has RMSNorm, also of all queries and all keys."""

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
        ratio = self.config.number("downsample_ratio", default=0.5)
        factor = round(1 / ratio) if ratio > 0 else 0
        side = self.image_size // self.patch_size
        self.config.require(f"downsample_ratio {ratio:g}", factor > 0 and factor * ratio == 1 and side % factor == 0)
        return factor

    def check(self) -> None:
        super().check()
        is_large = (self.n, self.n_layer) == self.large
        norm_type = self.vision.get("norm_type", default="layer_norm")
        self.vision.require(f"norm_type '{norm_type}'", norm_type == ("rms_norm" if is_large else "layer_norm"))
        has_norms = bool(self.vision.get("use_qk_norm", default=False))
        self.vision.require(f"use_qk_norm {has_norms}", has_norms == is_large)
        for name in ("use_mean_pooling", "use_absolute_position_embeddings"):
            self.check_value(self.vision, name, True)
        self.check_value(self.config, "vision_feature_layer", -1)
        self.check_value(self.config, "vision_feature_select_strategy", "default")
        self.check_value(self.config, "projector_hidden_act", "gelu")

    def keys(self) -> Keys:
        keys = super().keys() | {"vision.projector.scale_factor": self.factor}
        for name, key in (("min_patches", "preproc_min_tiles"), ("max_patches", "preproc_max_tiles")):
            n_tiles = self.processor.count(name, default=0)
            keys |= {f"vision.{key}": n_tiles} if n_tiles else {}
        return keys

    def has_bias(self, target: str) -> bool:
        is_qkv = target in ("attn_q", "attn_k", "attn_v")
        return bool(self.vision.get("attention_bias", default=False)) if is_qkv else True

    def layers(self) -> Iterator[Wanted]:
        yield from super().layers()
        if (self.n, self.n_layer) == self.large:
            for il in range(self.n_layer):
                for name in "qk":
                    source = f"{self.layer}.{il}.attention.{name}_norm"
                    yield from norm(f"v.blk.{il}.attn_{name}_norm", source, self.n, bias=False)

    def tensors(self) -> Iterator[Wanted]:
        n = self.n
        yield Wanted("v.class_embd", "vision_tower.embeddings.cls_token", (1, 1, n), flat)
        yield from patches("vision_tower.embeddings.patch_embeddings.projection", n, self.patch_size)
        name = "vision_tower.embeddings.position_embeddings"
        yield table("v.position_embd.weight", name, 1, self.n_patches + 1, n, view=lines)
        yield from self.layers()
        n *= self.factor**2
        yield from norm("mm.model.mlp.0", "multi_modal_projector.layer_norm", n)
        names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
        yield from self.two_layers(("mm.model.mlp.1", "mm.model.mlp.3"), names, (n, self.n_text, self.n_text))
