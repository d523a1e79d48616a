"""pangu-embedded: openPangu 1B and 7B, llama blocks with biases of attention."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class PanguEmbedded(Transformer):
    """Biases of q, k, v and the output projection, NEOX rotation."""

    fused_qkv = "optional"
    qkv_bias = "optional"
    out_bias = "optional"
    rope_freqs_weight = "optional"
    rope_neox = True
