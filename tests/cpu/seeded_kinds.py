"""All tiny checkpoints that are made from a seed and whose logits transformers recorded."""

from __future__ import annotations

from tests.cpu import ling_checkpoints, mamba2_checkpoints, seeded_checkpoints, shelf_checkpoints, tencent_checkpoints

KINDS = (
    *seeded_checkpoints.CHECKPOINTS,
    *mamba2_checkpoints.CHECKPOINTS,
    *ling_checkpoints.CHECKPOINTS,
    *shelf_checkpoints.CHECKPOINTS,
    *tencent_checkpoints.CHECKPOINTS,
)
