"""Names of layers that predict further tokens (multi-token prediction) in checkpoints, and what they become."""

from __future__ import annotations

from collections.abc import Mapping

from ikpy.convert.families.base import Modules

# Layers behind the others: DeepSeek V3, GLM-4.5 and their kin.
BEHIND: Modules = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
# Layers behind the others whose last norm is one of the layer: Ling 2 and 3.
WITH_LAYER_NORM: Modules = {**BEHIND, "final_layernorm": "layer_output_norm"}
# Layers apart (`mtp.layers.0`), with what joins their inputs beside them: Qwen3-Next and on, K-EXAONE.
APART: Modules = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}


def columns(*modules: str) -> Mapping[str, int]:
    """Modules whose matrices side by side are what joins the inputs, with their places."""
    return {module: i for i, module in enumerate(modules)}
