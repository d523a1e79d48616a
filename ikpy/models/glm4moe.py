"""glm4moe: GLM-4.5, and the text part of GLM-4.5V, with biased projections, Solar Open without; sigmoid routing with a
selection bias."""

from __future__ import annotations

from ikpy.models.media import ReadsPictures
from ikpy.models.routed_moe import RoutedMoe


class Glm4Moe(ReadsPictures, RoutedMoe):
    """post_attention_norm is the norm before the feed-forward network here."""

    qkv_bias = "optional"
    qk_norm = "optional"
    selection_bias = "required"
    ffn_norm_name = "post_attention_norm"
    rotates_whole_head = False
    default_n_dense = 0
    usually_sigmoid = True
