"""A tiny checkpoint of Gemma 3n, made as those of seeded_checkpoints.py."""

from __future__ import annotations

from tests.cpu.convert.cohere_checkpoints import NAMES, WINDOW, attention
from tests.cpu.convert.seeded_checkpoints import FF, HEAD, HEADS, KV, D, Shapes, Tiny, V, gated, head

KINDS = ["sliding", "sliding", "full", "sliding", "full", "sliding", "full"]
N_SHARED, N_STREAMS, RANK, INPUT, N_OWN = 2, 3, 32, 32, 380
"""N_OWN: tokens with inputs of layers."""
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "laurel.post_laurel_norm",
    "altup.router_norm",
    "post_per_layer_input_norm",
)


def gemma3n_shapes() -> Shapes:
    """Names and shapes of all tensors."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (V, D),
        "model.embed_tokens_per_layer.weight": (N_OWN, len(KINDS) * INPUT),
        "model.per_layer_model_projection.weight": (len(KINDS) * INPUT, D),
        "model.per_layer_projection_norm.weight": (INPUT,),
        "model.norm.weight": (D,),
    }
    for i in range(N_STREAMS - 1):
        shapes |= {f"model.altup_{x}projections.{i}.weight": (D, D) for x in ("", "unembed_")}
    for il in range(len(KINDS)):
        p = f"model.layers.{il}"
        shapes |= {f"{p}.{name}.weight": (D,) for name in NORMS}
        shapes |= {**attention(p), **gated(f"{p}.mlp", FF, NAMES)}
        shapes |= {f"{p}.self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
        if il >= len(KINDS) - N_SHARED:
            for name in ("k_proj", "v_proj", "k_norm"):
                del shapes[f"{p}.self_attn.{name}.weight"]
        matrices: Shapes = {"laurel.linear_left": (RANK, D), "laurel.linear_right": (D, RANK)}
        matrices |= {"altup.correction_coefs": (N_STREAMS, N_STREAMS), "altup.modality_router": (N_STREAMS, D)}
        matrices |= {"altup.prediction_coefs": (N_STREAMS**2, N_STREAMS)}
        matrices |= {"per_layer_input_gate": (INPUT, D), "per_layer_projection": (D, INPUT)}
        shapes |= {f"{p}.{name}.weight": shape for name, shape in matrices.items()}
        shapes[f"{p}.altup.correct_output_scale"] = (D,)
    return shapes


GEMMA3N = Tiny(
    "gemma3n",
    {
        **head("Gemma3n", "gemma3n_text"),
        "activation_sparsity_pattern": [0.95, 0.6, 0.0, 0.3, 0.0, 0.0, 0.5],
        "altup_active_idx": 1,
        "altup_correct_scale": True,
        "altup_num_inputs": N_STREAMS,
        "final_logit_softcapping": 30.0,
        "head_dim": HEAD,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": INPUT,
        "intermediate_size": [FF] * len(KINDS),
        "laurel_rank": RANK,
        "layer_types": [f"{kind}_attention" for kind in KINDS],
        "max_position_embeddings": 256,
        "num_attention_heads": HEADS,
        "num_hidden_layers": len(KINDS),
        "num_key_value_heads": KV,
        "num_kv_shared_layers": N_SHARED,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size_per_layer_input": N_OWN,
    },
    gemma3n_shapes,
)

CHECKPOINTS = (GEMMA3N,)
