"""MiniMax M3: CLIP's layers behind patches of two frames, two matrices, and two more behind squares of patches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.families.base import Keys, View
from ikpy.convert.projectors.base import Projector
from ikpy.convert.projectors.tensors import Wanted, norm, paired_patches

_MERGE, _FRAMES = 2, 2


class MiniMaxM3(Projector):
    """Heads turn by time, row and column, a third each."""

    kind = "minimax_m3"
    parts = ("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")
    layer = "vision_tower.encoder.layers"
    renames: ClassVar[Mapping[str, str]] = {
        "vision_tower.vision_model.": "vision_tower.",
        "vision_tower.layers.": "vision_tower.encoder.layers.",
        "vision_tower.embeddings.proj.": "vision_tower.embeddings.patch_embedding.",
        "multi_modal_projector.merge_": "patch_merge_mlp.",
    }
    activations = ("gelu",)
    eps = 1e-5
    defaults: ClassVar[Mapping[str, int | float]] = {"image_size": 2016}

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "spatial_merge_size", _MERGE)
        self.check_value(self.vision, "temporal_patch_size", _FRAMES)
        self.check_rope(10000)

    def keys(self) -> Keys:
        return super().keys() | {"vision.spatial_merge_size": _MERGE}

    def view(self, target: str) -> View | None:
        return by_thirds(self.n_head) if target in ("attn_q", "attn_k") else None

    def tensors(self) -> Iterator[Wanted]:
        yield from paired_patches("vision_tower.embeddings.patch_embedding", self.n, self.patch_size, bias=False)
        yield from norm("v.pre_ln", "vision_tower.pre_layrnorm", self.n)
        yield from self.layers()
        width, n_text = self.config.count("projector_hidden_size"), self.n_text
        names = ("multi_modal_projector.linear_1", "multi_modal_projector.linear_2")
        yield from self.two_layers(("mm.1", "mm.2"), names, (self.n, width, n_text))
        names = ("patch_merge_mlp.linear_1", "patch_merge_mlp.linear_2")
        yield from self.two_layers(("mm.merger.fc1", "mm.merger.fc2"), names, (n_text * _MERGE**2, width, n_text))


def by_thirds(n_head: int) -> View:
    """Rows of q or k from pairs half of all rotated elements apart to pairs half of a third apart, third by third.

    What is left of a head behind three equal parts of pairs does not turn.
    """

    def view(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(n_head, rows.shape[0] // n_head, *rows.shape[1:])
        n_pairs = heads.shape[1] // 6
        turned = heads[:, : 6 * n_pairs].reshape(n_head, 2, 3, n_pairs, *rows.shape[1:]).swapaxes(1, 2)
        turned = turned.reshape(n_head, 6 * n_pairs, *rows.shape[1:])
        return np.concatenate([turned, heads[:, 6 * n_pairs :]], axis=1).reshape(rows.shape)

    return view
