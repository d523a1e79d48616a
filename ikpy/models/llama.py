"""llama: LLaMA 1/2/3, Mistral, Mixtral and look-alikes."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Llama(Transformer):
    """Optional biases and frequency factors (rope_freqs.weight); experts in every layer if the file has any."""

    qkv_bias = "optional"
    out_bias = "optional"
    ffn_bias = "optional"
    rope_freqs_weight = "optional"
