"""All tiny checkpoints that are made from a seed and whose logits transformers recorded."""

from __future__ import annotations

from tests.cpu.convert import (
    alibi_checkpoints,
    cohere_checkpoints,
    dense_checkpoints,
    dots3note_checkpoints,
    gemma3n_checkpoints,
    glm5_next_checkpoints,
    ling_checkpoints,
    mamba2_checkpoints,
    mimo2_checkpoints,
    minimax_m3_checkpoints,
    older_moe_checkpoints,
    omni_checkpoints,
    picture_text_checkpoints,
    plain_checkpoints,
    qwen4_exp_checkpoints,
    seeded_checkpoints,
    shelf_checkpoints,
    t5_checkpoints,
    tencent_checkpoints,
    unigram_checkpoints,
)

KINDS = (
    *seeded_checkpoints.CHECKPOINTS,
    *mamba2_checkpoints.CHECKPOINTS,
    *ling_checkpoints.CHECKPOINTS,
    *cohere_checkpoints.CHECKPOINTS,
    *dense_checkpoints.CHECKPOINTS,
    *shelf_checkpoints.CHECKPOINTS,
    *tencent_checkpoints.CHECKPOINTS,
    *glm5_next_checkpoints.CHECKPOINTS,
    *mimo2_checkpoints.CHECKPOINTS,
    *minimax_m3_checkpoints.CHECKPOINTS,
    *dots3note_checkpoints.CHECKPOINTS,
    *gemma3n_checkpoints.CHECKPOINTS,
    *plain_checkpoints.CHECKPOINTS,
    *older_moe_checkpoints.CHECKPOINTS,
    *qwen4_exp_checkpoints.CHECKPOINTS,
    *alibi_checkpoints.CHECKPOINTS,
    *picture_text_checkpoints.CHECKPOINTS,
    *omni_checkpoints.CHECKPOINTS,
    *unigram_checkpoints.CHECKPOINTS,
    *t5_checkpoints.CHECKPOINTS,
)
