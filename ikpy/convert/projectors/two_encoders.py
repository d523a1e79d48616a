"""Segment Anything's encoder, another one behind it, one matrix: what DeepSeek-OCR and DeepSeek-OCR 2 share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, at, linear, norm, table
from ikpy.errors import FileFormatError
from ikpy.vision.sam import PATCH

_SAM = "sam_vit_b"
_SAM_LAYER = {"pre_ln": "norm1", "post_ln": "norm2"}


def widths_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """What config.json says of encoders by their names, nothing where there is no such table."""
    values = checkpoint.config.get("vision_config")
    widths = values.get("width") if isinstance(values, dict) else None
    return widths if isinstance(widths, dict) else {}


class TwoEncoders(Projector):
    """config.json has no sizes of networks and windows; the tensors tell. second: the encoder that reads the states of
    the first one."""

    second: ClassVar[str]

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / "config.json"
        widths = widths_of(checkpoint)
        if not all(isinstance(widths.get(name), dict) for name in (_SAM, self.second)):
            raise FileFormatError(
                f"{path}: 'vision_config' has no 'width' of '{_SAM}' and '{self.second}' (DeepSeek-OCR)"
            )
        self.sam = Config(widths[_SAM], path.with_name(f"config.json ({_SAM})"))
        self.behind = Config(widths[self.second], path.with_name(f"config.json ({self.second})"))
        super().__init__(checkpoint)
        self.n_sam = self.sam.count("width")
        self.n_sam_heads = self.sam.count("heads")
        self.n_sam_layers = self.sam.count("layers")

    @property
    def reaches(self) -> list[int]:
        """Patches of a side of what every layer of the first encoder sees."""
        names = (f"sam_model.blocks.{il}.attn.rel_pos_h" for il in range(self.n_sam_layers))
        return [(self.stored(name, 2)[0] + 1) // 2 for name in names]

    def check(self) -> None:
        super().check()
        sam, heads = self.sam, self.n_sam_heads
        sam.require(f"{heads} heads in {self.n_sam}", heads > 0 and self.n_sam > 0 and self.n_sam % heads == 0)
        reaches, whole = self.reaches, self.sam.get("global_attn_indexes", default=[])
        local = {reach for il, reach in enumerate(reaches) if il not in whole}
        sam.require(f"windows of {sorted(local)}", len(local) == 1)
        self.check_value(self.config, "global_view_pos", "head")
        self.check_value(self.config, "tile_tag", "2D")
        kind: Any = self.config.get("projector_config", default={})
        kind = kind.get("projector_type") if isinstance(kind, dict) else kind
        self.config.require(f"projector of type {kind}", kind in (None, "linear"))

    # what a file has

    def keys(self) -> Keys:
        whole = self.sam.get("global_attn_indexes", default=[])
        return super().keys() | {
            "vision.sam.block_count": self.n_sam_layers,
            "vision.sam.head_count": self.n_sam_heads,
            "vision.sam.embedding_length": self.n_sam,
            "vision.window_size": next(reach for il, reach in enumerate(self.reaches) if il not in whole),
        }

    def first_encoder(self) -> Iterator[Wanted]:
        """Segment Anything, and the convolutions behind it."""
        n, source, target = self.n_sam, "sam_model", "v.sam"
        yield Wanted(
            f"{target}.patch_embd.weight", f"{source}.patch_embed.proj.weight", (n, 3, PATCH, PATCH), floats=True
        )
        yield Wanted(f"{target}.patch_embd.bias", f"{source}.patch_embed.proj.bias", (n,))
        side = self.stored(f"{source}.pos_embed", 4)[1]
        yield table(f"{target}.pos_embd.weight", f"{source}.pos_embed", 1, side, side, n, view=at(0, 0))
        for il, reach in enumerate(self.reaches):
            yield from self.first_layer(f"{target}.blk.{il}", f"{source}.blocks.{il}", reach)
        n_neck = self.stored(f"{source}.neck.0.weight", 4)[0]
        n_half = self.stored(f"{source}.net_2.weight", 4)[0]
        for name, n_out, n_in, size in (
            ("neck.0", n_neck, n, 1),
            ("neck.2", n_neck, n_neck, 3),
            ("net_2", n_half, n_neck, 3),
            ("net_3", self.n, n_half, 3),
        ):
            shape = (n_out, n_in, size, size)
            yield Wanted(f"{target}.{name}.weight", f"{source}.{name}.weight", shape, floats=True)
        for i in (1, 3):
            yield from norm(f"{target}.neck.{i}", f"{source}.neck.{i}", n_neck)

    def first_layer(self, target: str, source: str, reach: int) -> Iterator[Wanted]:
        """A layer of the first encoder, which sees reach x reach patches."""
        n = self.n_sam
        for mine, theirs in _SAM_LAYER.items():
            yield from norm(f"{target}.{mine}", f"{source}.{theirs}", n)
        yield from linear(f"{target}.attn.qkv", f"{source}.attn.qkv", 3 * n, n)
        yield from linear(f"{target}.attn.out", f"{source}.attn.proj", n, n)
        for axis in "hw":
            name = f"{source}.attn.rel_pos_{axis}"
            yield table(f"{target}.attn.pos_{axis}.weight", name, 2 * reach - 1, n // self.n_sam_heads)
        n_ff = self.stored(f"{source}.mlp.lin1.weight", 2)[0]
        yield from linear(f"{target}.mlp.lin1", f"{source}.mlp.lin1", n_ff, n)
        yield from linear(f"{target}.mlp.lin2", f"{source}.mlp.lin2", n, n_ff)
