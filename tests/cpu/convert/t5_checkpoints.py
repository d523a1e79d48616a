"""Tiny checkpoints of T5, UMT5 and their encoders, in the names that transformers saves."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.cpu.convert.seeded_checkpoints import FF, D, Shapes, Tiny, V, head, tokens

N_LAYER, HEADS, HEAD, N_BUCKETS = 3, 6, 16, 32


def stack_shapes(stack: str, n_layer: int, *, gated: bool, own_biases: bool) -> Shapes:
    """Tensors of the encoder or the decoder."""
    shapes: Shapes = {f"{stack}.final_layer_norm.weight": (D,)}
    branches = ["SelfAttention", "EncDecAttention"][: 1 + (stack == "decoder")]
    for il in range(n_layer):
        for place, branch in enumerate(branches):
            p = f"{stack}.block.{il}.layer.{place}"
            shapes[f"{p}.layer_norm.weight"] = (D,)
            shapes |= {f"{p}.{branch}.{x}.weight": (HEADS * HEAD, D) for x in "qkv"}
            shapes[f"{p}.{branch}.o.weight"] = (D, HEADS * HEAD)
        if own_biases or il == 0:
            shapes[f"{stack}.block.{il}.layer.0.SelfAttention.relative_attention_bias.weight"] = (N_BUCKETS, HEADS)
        p = f"{stack}.block.{il}.layer.{len(branches)}"
        shapes[f"{p}.layer_norm.weight"] = (D,)
        shapes |= {f"{p}.DenseReluDense.{x}.weight": (FF, D) for x in (("wi_0", "wi_1") if gated else ("wi",))}
        shapes[f"{p}.DenseReluDense.wo.weight"] = (D, FF)
    return shapes


def config(name: str, model_type: str, **values: Any) -> dict[str, Any]:
    """config.json."""
    return {
        **head(name, model_type),
        "architectures": [name],
        "d_model": D,
        "d_ff": FF,
        "d_kv": HEAD,
        "num_heads": HEADS,
        "num_layers": N_LAYER,
        "relative_attention_num_buckets": N_BUCKETS,
        "layer_norm_epsilon": 1e-6,
        "decoder_start_token_id": 0,
        "torch_dtype": "bfloat16",
        **values,
    }


def encoder_shapes(*, gated: bool, own_biases: bool) -> Shapes:
    """An encoder alone."""
    return {"shared.weight": (V, D), **stack_shapes("encoder", N_LAYER, gated=gated, own_biases=own_biases)}


T5_ENCODER = Tiny(
    "t5-encoder",
    config("T5EncoderModel", "t5", feed_forward_proj="relu"),
    lambda: encoder_shapes(gated=False, own_biases=False),
    is_encoder=True,
)
UMT5_ENCODER = Tiny(
    "umt5-encoder",
    config("UMT5EncoderModel", "umt5", feed_forward_proj="gated-gelu"),
    lambda: encoder_shapes(gated=True, own_biases=True),
    is_encoder=True,
)
CHECKPOINTS = (T5_ENCODER, UMT5_ENCODER)


def whole_shapes(n_decoder: int, *, gated: bool, own_biases: bool, output: bool) -> Shapes:
    """An encoder and a decoder."""
    decoder = stack_shapes("decoder", n_decoder, gated=gated, own_biases=own_biases)
    own = {"lm_head.weight": (V, D)} if output else {}
    return encoder_shapes(gated=gated, own_biases=own_biases) | decoder | own


T5 = Tiny(
    "t5",
    config("T5ForConditionalGeneration", "t5", feed_forward_proj="relu", num_decoder_layers=2),
    lambda: whole_shapes(2, gated=False, own_biases=False, output=False),
)
UMT5 = Tiny(
    "umt5",
    config(
        "UMT5ForConditionalGeneration",
        "umt5",
        feed_forward_proj="gated-gelu",
        num_decoder_layers=2,
        tie_word_embeddings=False,
    ),
    lambda: whole_shapes(2, gated=True, own_biases=True, output=True),
)
DECODERS = (T5, UMT5)
"""Whose golden logits are those of `decoder_tokens` behind the text of all tokens."""


def decoder_tokens() -> np.ndarray:
    """What the decoder reads, i32 [T]."""
    return np.array([0, *tokens()[::-1][:-1]], np.int32)
