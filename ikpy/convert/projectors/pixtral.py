"""Pixtral, Mistral Small 3.1 and on, Ministral 3: patches rotate by row and column, a token ends a line of them.

LightOnOCR is the same without that token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikpy.convert.families.base import Keys, View, rope_pairs
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, at, linear, norm, patches, table
from ikpy.errors import FileFormatError

_BREAK = "[IMG_BREAK]"


class Pixtral(Projector):
    """Two matrices, behind a norm and a matrix that merges patches in Mistral 3."""

    kind = "pixtral"
    merges_by_default: ClassVar[bool] = False
    renames: ClassVar[Mapping[str, str]] = {"language_model.model.": "language_model."}
    layer = "vision_tower.transformer.layers"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "attention_norm",
        **{f"attn_{name}": f"attention.{name}_proj" for name in "qkv"},
        "attn_out": "attention.o_proj",
        "ln2": "ffn_norm",
        **{f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
    }
    activations = ("gelu", "silu")
    norm_bias = False
    eps = 1e-5
    defaults: ClassVar[Mapping[str, int | float]] = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "image_size": 1024,
        "patch_size": 16,
    }

    @property
    def merges(self) -> bool:
        """Whether squares of patches become one token."""
        return self.merges_by_default or self.model_type == "mistral3"

    @property
    def merge(self) -> int:
        """Patches of the side of a square that becomes one token."""
        return self.config.count("spatial_merge_size", default=2 if self.merges else 1)

    def check(self) -> None:
        super().check()
        self.check_value(self.config, "vision_feature_layer", -1)
        self.check_value(self.config, "vision_feature_select_strategy", "full")
        self.check_value(self.config, "projector_hidden_act", "gelu")
        self.config.require(f"spatial_merge_size {self.merge}", self.merge > 0)
        self.check_rope(10000)

    def keys(self) -> Keys:
        return super().keys() | ({"vision.spatial_merge_size": self.merge} if self.merges else {})

    def has_bias(self, target: str) -> bool:
        return False

    def view(self, target: str) -> View | None:
        return rope_pairs(self.n_head) if target in ("attn_q", "attn_k") else None

    def tensors(self) -> Iterator[Wanted]:
        yield from patches("vision_tower.patch_conv", self.n, self.patch_size, bias=False)
        yield from norm("v.pre_ln", "vision_tower.ln_pre", self.n, bias=False)
        yield from self.layers()
        if self.merges:
            yield from norm("mm.input_norm", "multi_modal_projector.norm", self.n, bias=False)
            name = "multi_modal_projector.patch_merger.merging_layer"
            yield from linear("mm.patch_merger", name, self.n, self.n * self.merge**2, bias=False, floats=True)
        names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
        bias = bool(self.config.get("multimodal_projector_bias", default=not self.merges))
        yield from self.two_layers(("mm.1", "mm.2"), names, (self.n, self.n_text, self.n_text), bias=bias)
        yield from self.line_end()

    def line_end(self) -> Iterator[Wanted]:
        """The row behind a line of patches."""
        n_vocab = self.config.integer("vocab_size")
        token = self.break_token()
        self.config.require(f"token {token} of {n_vocab}", 0 <= token < n_vocab)
        name = "language_model.embed_tokens.weight"
        yield table("v.token_embd.img_break", name, n_vocab, self.n_text, view=at(0, token))

    def break_token(self) -> int:
        """The number of the token at the end of a line of patches."""
        named = self.checkpoint.json("tokenizer_config.json").get("added_tokens_decoder") or {}
        found = [int(number) for number, token in named.items() if _content(token) == _BREAK]
        if not found:
            added = self.checkpoint.json("tokenizer.json").get("added_tokens") or []
            found = [int(token["id"]) for token in added if _content(token) == _BREAK]
        if not found:
            folder = self.checkpoint.folder
            raise FileFormatError(f"{folder}: the tokenizer has no {_BREAK}, whose embedding a projector file holds")
        return found[0]


class LightOnOcr(Pixtral):
    """As Mistral 3, without marks behind lines; pictures are brought to one length of their longer side."""

    kind = "lightonocr"
    merges_by_default = True
    renames: ClassVar[Mapping[str, str]] = {
        "vision_encoder.": "vision_tower.",
        "vision_projection.": "multi_modal_projector.",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {**Pixtral.defaults, "image_size": 1540, "patch_size": 14}

    def keys(self) -> Keys:
        edge = self.processor.edge("size", "longest_edge")
        return super().keys() | ({} if edge in (None, self.image_size) else {"vision.preproc_image_size": edge})

    def line_end(self) -> Iterator[Wanted]:
        return iter(())


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else None
