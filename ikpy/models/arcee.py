"""arcee: AFM, llama blocks with a network by squared ReLU."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Arcee(Transformer):
    """The network has no gate."""

    qkv_bias = "optional"
    rope_freqs_weight = "optional"
    activation = "relu_squared"
    gated_ffn = False
