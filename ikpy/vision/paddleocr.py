"""PaddleOCR-VL (arXiv:2510.14528): as Kimi-VL with other positions, that of the text a grid."""

from __future__ import annotations

from ikpy.vision.grids import Limits
from ikpy.vision.kimi import KimiVLProjector
from ikpy.vision.native_size import NativeSizeProjector
from ikpy.vision.projector import Source


class PaddleOcrProjector(KimiVLProjector):
    """Rotated by row and column, pairs half a head apart; positions are interpolated linearly without smoothing, as the
    published code does it, and not with it as in llama.cpp.
    """

    begin = "<|IMAGE_START|>"
    end = "<|IMAGE_END|>"
    merge_key = "spatial_merge_size"
    neighbours = False
    interpolation = "linear"

    rotation_table = NativeSizeProjector.rotation_table

    def read_limits(self, source: Source) -> Limits:
        return self.file_limits(source)

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        return rows // self.merge, columns // self.merge
