"""DeepSeek-OCR 2: the encoder of Segment Anything, a causal transformer behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table
from ikpy.convert.projectors.two_encoders import TwoEncoders
from ikpy.models.keys import MAX_LAYERS
from ikpy.vision.deepseekocr2 import TILE, WHOLE, states_of
from ikpy.vision.sam import PATCH

_HEAD = 64
_ATTENTION = ("attn_q", "attn_k", "attn_v")


class DeepseekOcr2(TwoEncoders):
    """Qwen2 of 0.5B is the second encoder; config.json has its width alone, and its heads have 64 elements. The
    activation that the file names is that of the first one, as llama.cpp reads it."""

    kind = "deepseekocr2"
    second = "qwen2-0-5b"
    parts = ("sam_model.", "qwen2_model.", "projector.", "view_seperator")
    unused = ("qwen2_model.model.model.embed_tokens.",)
    layer = "qwen2_model.model.model.layers"
    norm_bias = False
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "input_layernorm",
        **{name: f"self_attn.{name[-1]}_proj" for name in _ATTENTION},
        "attn_out": "self_attn.o_proj",
        "ln2": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }

    # sizes

    def find_width(self) -> int:
        return self.behind.count("dim")

    def find_heads(self) -> int:
        return self.n // _HEAD

    def find_layers(self) -> int:
        return self.count_under(self.layer)

    def find_ff(self) -> int:
        return self.stored(f"{self.layer}.0.mlp.up_proj.weight", 2)[0]

    def side(self, name: str) -> int:
        return {"image_size": WHOLE, "patch_size": PATCH}[name]

    @property
    def n_kv(self) -> int:
        """Heads of keys and values."""
        return self.stored(f"{self.layer}.0.self_attn.k_proj.weight", 2)[0] // _HEAD

    def check(self) -> None:
        super().check()
        self.behind.require(f"{self.n_layer} layers", 0 < self.n_layer <= MAX_LAYERS)
        self.behind.require(f"heads of {self.head_dim} elements in {self.n}", self.head_dim == _HEAD)
        self.behind.require(f"{self.n_kv} heads of keys", self.n_kv > 0 and self.n_head % self.n_kv == 0)

    # what a file has

    def keys(self) -> Keys:
        return super().keys() | {"vision.attention.head_count_kv": self.n_kv}

    def tensors(self) -> Iterator[Wanted]:
        n = self.n
        yield from self.first_encoder()
        for side in (TILE, WHOLE):
            yield table(f"v.resample_query_{side}.weight", f"qwen2_model.query_{side}.weight", states_of(side), n)
        yield from self.layers()
        yield from norm("v.post_ln", "qwen2_model.model.model.norm", n, bias=False)
        yield from linear("mm.model.fc", "projector.layers", self.n_text, n)
        yield table("v.view_seperator", "view_seperator", self.n_text)

    def shape(self, target: str) -> tuple[int, int]:
        return (self.n_kv * _HEAD, self.n) if target in ("attn_k", "attn_v") else super().shape(target)

    def has_bias(self, target: str) -> bool:
        return target in _ATTENTION
