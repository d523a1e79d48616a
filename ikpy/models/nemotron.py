"""nemotron: Nemotron 4 and Minitron, LayerNorm with biases, partly rotated heads, squared ReLU (arXiv:2402.16819)."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class Nemotron(Transformer):
    """The network has no gate. Checkpoints hold norm weights less 1, files the weights themselves."""

    layer_norm = True
    norm_bias = "required"
    qkv_bias = "optional"
    out_bias = "optional"
    ffn_bias = "optional"
    output_weight = "required"
    rope_neox = True
    rotates_whole_head = False
    activation = "relu_squared"
    gated_ffn = False
