"""seed_oss: q/k/v biases, NEOX rotation."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class SeedOss(Transformer):
    """post_attention_norm is the norm before the feed-forward network here."""

    qkv_bias = "optional"
    rope_neox = True
    ffn_norm_name = "post_attention_norm"
