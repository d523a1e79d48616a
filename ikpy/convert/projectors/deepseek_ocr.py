"""DeepSeek-OCR: the encoder of Segment Anything, CLIP behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.projectors.base import FileProjector
from ikpy.convert.projectors.deepseek_ocr2 import DeepseekOcr2
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table
from ikpy.convert.projectors.two_encoders import TwoEncoders, widths_of


class DeepseekOcr(TwoEncoders):
    """CLIP is the second encoder."""

    kind = "deepseekocr"
    second = "clip-l-14-224"
    parts = ("sam_model.", "vision_model.", "projector.", "image_newline", "view_seperator")
    unused = ("vision_model.embeddings.patch_embedding.",)
    layer = "vision_model.transformer.layers"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "layer_norm1",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_out": "self_attn.out_proj",
        "ln2": "layer_norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }

    @classmethod
    def chosen(cls, checkpoint: Checkpoint) -> type[FileProjector]:
        return DeepseekOcr2 if DeepseekOcr2.second in widths_of(checkpoint) else cls

    # sizes

    def find_width(self) -> int:
        return self.behind.count("width")

    def find_heads(self) -> int:
        return self.behind.count("heads")

    def find_layers(self) -> int:
        return self.behind.count("layers")

    def find_ff(self) -> int:
        return self.stored(f"{self.layer}.0.mlp.fc1.weight", 2)[0]

    def side(self, name: str) -> int:
        return self.behind.count(name)

    def tensors(self) -> Iterator[Wanted]:
        n = self.n
        yield from self.first_encoder()
        name = "vision_model.embeddings"
        yield table("v.class_embd", f"{name}.class_embedding", n)
        count = self.stored(f"{name}.position_embedding.weight", 2)[0]
        yield table("v.position_embd.weight", f"{name}.position_embedding.weight", count, n)
        yield from norm("v.pre_ln", "vision_model.pre_layrnorm", n)
        yield from self.layers()
        yield from linear("mm.model.fc", "projector.layers", self.n_text, 2 * n)
        for part in ("image_newline", "view_seperator"):
            yield table(f"v.{part}", part, self.n_text)
