"""Gemma 3n: MobileNet-V5, whose last two stages are fused, a norm and one matrix."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.gemma3n_audio import Gemma3nAudio
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table
from ikpy.vision.gemma3n import SIDE, STAGES

_TOWER = "vision_tower.timm_model"
_NETWORKS = (None, "mobilenetv5_300m_enc")
_ROWS = SIDE * SIDE


class Gemma3n(Projector):
    """Pictures, and sound where the configuration has an encoder of it. Names of tensors tell which blocks there are.
    llama.cpp reads filters in 16 bits, some in these alone. Heads, networks and layers are numbers that other engines
    want to see."""

    kind = "gemma3nv"
    parts = ("vision_tower.", "embed_vision.", *Gemma3nAudio.parts)
    unused = (
        *Gemma3nAudio.unused,
        "embed_vision.embedding.",
        "embed_vision.hard_embedding_norm.",
        "embed_vision.embedding_post_projection_norm.",
    )

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        values = checkpoint.config.get("audio_config")
        self.sound = Gemma3nAudio(checkpoint, values, self.n_text) if isinstance(values, dict) else None

    # sizes

    def find_width(self) -> int:
        return self.vision.count("hidden_size", default=2048)

    def find_heads(self) -> int:
        return 8

    def find_ff(self) -> int:
        return 4 * self.n

    def find_layers(self) -> int:
        return 128

    @property
    def image_size(self) -> int:
        return self.processor.edge("size", "height") or 768

    def side(self, name: str) -> int:
        """The square of pixels that one row of the text stands for in other engines, as 256 of these are a side."""
        return self.image_size // _ROWS

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "architecture", *_NETWORKS)
        self.check_value(self.vision, "model_args", None, {})
        width = self.processor.edge("size", "width") or self.image_size
        fits = width == self.image_size and width % _ROWS == 0
        self.processor.require(f"size {self.image_size} x {width}", fits)
        self.check_value(self.config, "vision_soft_tokens_per_image", _ROWS)
        if self.sound:
            self.sound.check()

    # what a file has

    def keys(self) -> Keys:
        keys = super().keys()
        keys = {"vision.projector_type": keys.pop("projector_type"), **keys}
        return keys | (self.sound.keys() if self.sound else {})

    def left_out(self) -> tuple[str, ...]:
        return self.unused if self.sound else (*self.unused, *Gemma3nAudio.parts)

    def tensors(self) -> Iterator[Wanted]:
        name = "conv_stem"
        n = self.stored(f"{_TOWER}.{name}.conv.weight", 4)[0]
        yield table(f"v.{name}.conv.weight", f"{_TOWER}.{name}.conv.weight", n, 3, 3, 3)
        yield table(f"v.{name}.conv.bias", f"{_TOWER}.{name}.conv.bias", n, view=_spread)
        yield from norm(f"v.{name}.bn", f"{_TOWER}.{name}.bn", n, bias=False)
        ends = []
        for stage in range(STAGES):
            for block in range(self.n_blocks(stage)):
                yield from self.block(f"{stage}.{block}", n)
                n = self.width_behind(f"{_TOWER}.blocks.{stage}.{block}")
            ends.append(n)
        n = sum(ends[-2:])
        for part in ("pw_exp", "pw_proj"):
            yield from self.pointwise(f"v.msfa.ffn.{part}", f"{_TOWER}.msfa.ffn.{part}", n)
            n = self.stored(f"{_TOWER}.msfa.ffn.{part}.conv.weight", 4)[0]
        yield from norm("v.msfa.norm", f"{_TOWER}.msfa.norm", self.n, bias=False)
        yield from norm("mm.soft_emb_norm", "embed_vision.soft_embedding_norm", self.n, bias=False)
        yield from linear("mm.input_projection", "embed_vision.embedding_projection", self.n_text, self.n, bias=False)
        if self.sound:
            yield from self.sound.tensors()

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor."""
        return any(full in self.checkpoint.tensors for full in (name, f"model.{name}"))

    def n_blocks(self, stage: int) -> int:
        """Blocks of a stage, at least one."""
        return max(1, self.count_under(f"{_TOWER}.blocks.{stage}"))

    def width_behind(self, source: str) -> int:
        """Elements of a state behind a block."""
        ends = ("conv_pwl", "attn.output.proj", "pw_proj.conv")
        last = next((end for end in ends if self.has(f"{source}.{end}.weight")), ends[-1])
        return self.stored(f"{source}.{last}.weight", 4)[0]

    def block(self, number: str, n: int) -> Iterator[Wanted]:
        """Tensors of a block that reads states of n elements."""
        source, target = f"{_TOWER}.blocks.{number}", f"v.blk.{number}"
        if self.has(f"{source}.conv_exp.weight"):
            inner = self.stored(f"{source}.conv_exp.weight", 4)[0]
            yield self.filters(f"{target}.conv_exp", f"{source}.conv_exp", inner, n, 3)
            yield from norm(f"{target}.bn1", f"{source}.bn1", inner, bias=False)
            out = self.width_behind(source)
            yield self.filters(f"{target}.conv_pwl", f"{source}.conv_pwl", out, inner, 1)
            yield from norm(f"{target}.bn2", f"{source}.bn2", out, bias=False)
            return
        if self.has(f"{source}.attn.query.proj.weight"):
            yield from self.attention(target, source, n)
        else:
            yield from self.depthwise(target, source, "dw_start", n)
            yield from self.pointwise(f"{target}.pw_exp", f"{source}.pw_exp", n)
            inner = self.stored(f"{source}.pw_exp.conv.weight", 4)[0]
            yield from self.depthwise(target, source, "dw_mid", inner)
            yield from self.pointwise(f"{target}.pw_proj", f"{source}.pw_proj", inner)
        if self.has(f"{source}.layer_scale.gamma"):
            out = self.width_behind(source)
            yield table(f"{target}.layer_scale.gamma", f"{source}.layer_scale.gamma", out, view=_spread)

    def attention(self, target: str, source: str, n: int) -> Iterator[Wanted]:
        """A norm, queries, keys and values, and what leads back."""
        yield from norm(f"{target}.norm", f"{source}.norm", n, bias=False)
        n_q = self.stored(f"{source}.attn.query.proj.weight", 4)[0]
        yield self.filters(f"{target}.attn.query.proj", f"{source}.attn.query.proj", n_q, n, 1)
        for part in ("key", "value"):
            name = f"attn.{part}"
            if self.has(f"{source}.{name}.down_conv.weight"):
                yield self.filters(f"{target}.{name}.down_conv", f"{source}.{name}.down_conv", n, 1, 3)
                yield from norm(f"{target}.{name}.norm", f"{source}.{name}.norm", n, bias=False)
            head = self.stored(f"{source}.{name}.proj.weight", 4)[0]
            yield self.filters(f"{target}.{name}.proj", f"{source}.{name}.proj", head, n, 1)
        yield self.filters(f"{target}.attn.output.proj", f"{source}.attn.output.proj", n, n_q, 1)

    def depthwise(self, target: str, source: str, name: str, n: int) -> Iterator[Wanted]:
        """Filters of every element by itself, if a block has them, and the norm behind them."""
        if self.has(f"{source}.{name}.conv.weight"):
            width = self.stored(f"{source}.{name}.conv.weight", 4)[-1]
            yield self.filters(f"{target}.{name}.conv", f"{source}.{name}.conv", n, 1, width)
            yield from norm(f"{target}.{name}.bn", f"{source}.{name}.bn", n, bias=False)

    def pointwise(self, target: str, source: str, n: int) -> Iterator[Wanted]:
        """A matrix and the norm behind it."""
        out = self.stored(f"{source}.conv.weight", 4)[0]
        yield self.filters(f"{target}.conv", f"{source}.conv", out, n, 1)
        yield from norm(f"{target}.bn", f"{source}.bn", out, bias=False)

    @staticmethod
    def filters(target: str, source: str, n_out: int, n_in: int, width: int) -> Wanted:
        """Filters [n_out, n_in, width, width]."""
        return Wanted(f"{target}.weight", f"{source}.weight", (n_out, n_in, width, width), half=True)


def _spread(values: np.ndarray) -> np.ndarray:
    """A vector that is broadcast over rows and columns."""
    return values.reshape(1, -1, 1, 1)
