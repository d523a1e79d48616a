"""GLM-4, GLM-4.5/4.6 and Solar Open (glm4moe); the text parts of GLM-4.1V to 4.6V."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    DENSE,
    EXPERTS,
    HEAD_NORMS,
    QKV,
    SELECTION_BIAS,
    SHARED,
    Family,
    Keys,
    Modules,
    View,
    group_note,
    routing_keys,
)
from ikpy.convert.rope import section_keys


class Glm4(Family):
    """Norms before and after both branches; half of each head is rotated, in adjacent pairs."""

    arch = "glm4"
    biases = QKV
    rotates_part = True
    rotary_fraction = 0.5
    modules: ClassVar[Modules] = {
        **ATTENTION,
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }


def halves_of_part(head_dim: int, n_rot: int) -> View:
    """Rows of q or k: the rotated elements of every head, which come first, from adjacent pairs to halves."""

    def view(rows: np.ndarray) -> np.ndarray:
        heads = rows.reshape(-1, head_dim, *rows.shape[1:])
        order = [*range(0, n_rot, 2), *range(1, n_rot, 2), *range(n_rot, head_dim)]
        return heads[:, order].reshape(rows.shape)

    return view


class Glm4v(Glm4):
    """Rotation in sections, for which files have halves of the rotated part."""

    def keys(self) -> Keys:
        return super().keys() | section_keys(self.config, self.n_rot)

    def view(self, target: str, source: str) -> View | None:
        is_rotated = target in ("attn_q", "attn_k")
        return halves_of_part(self.config.head_dim, self.n_rot) if is_rotated else super().view(target, source)


class Glm4Moe(Family):
    """Leading dense layers, sigmoid routing with a selection bias."""

    arch = "glm4moe"
    biases = needed_biases = QKV
    rotates_part = True
    rotary_fraction = 0.5
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        **DENSE,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        "post_attention_layernorm": "post_attention_norm",
    }

    def keys(self) -> Keys:
        return super().keys() | routing_keys(self.config, gating=2)

    def notes(self) -> list[str]:
        return group_note(self.config)


class SolarOpen(Glm4Moe):
    """Experts in every layer, whole heads rotated; biases of q, k and v only if the checkpoint has them."""

    needed_biases: ClassVar[frozenset[str]] = frozenset()
    rotary_fraction = 1.0
    defaults: ClassVar[Mapping[str, int | float]] = {
        "head_dim": 128,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "rope_theta": 1e6,
    }
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **EXPERTS,
        **SELECTION_BIAS,
        **SHARED,
        "post_attention_layernorm": "post_attention_norm",
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        # No layer has a dense network, but the key must be there.
        width = config.integer("intermediate_size", default=config.integer("moe_intermediate_size"))
        config.values["intermediate_size"] = width

    def check(self) -> None:
        super().check()
        n_dense = self.config.integer("first_k_dense_replace", default=0)
        self.config.require(f"first_k_dense_replace {n_dense}", n_dense == 0)


class Glm4vMoe(Glm4Moe):
    """Rotation in sections."""

    def keys(self) -> Keys:
        return super().keys() | section_keys(self.config, self.n_rot)
