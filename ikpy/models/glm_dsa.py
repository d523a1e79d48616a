"""glm-dsa: GLM-5, 5.1 and 5.2, built as DeepSeek V3.2."""

from __future__ import annotations

from ikpy.models.deepseek32 import DeepSeek32


class GlmDsa(DeepSeek32):
    """What its files may leave out."""

    default_n_dense = 0
    indexer_neox = False
