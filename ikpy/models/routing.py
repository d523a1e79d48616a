"""How a layer picks and weighs its experts (models.md#adding-an-architecture)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ikpy.errors import FileFormatError
from ikpy.models.keys import REQUIRED, Keys

# Values of the key expert_gating_func.
SIGMOID = 2
GATING_FUNCS = {1: "softmax", 2: "sigmoid", 3: "selected_softmax", 4: "sqrt_softplus"}


@dataclass(frozen=True)
class Routing:
    """n_used experts per token; gating is one of ikpy.graph.products.GATINGS.

    normalize: weights are divided by their sum (+ epsilon); scale: factor after that; groups: number of expert groups
    and of groups used, honoured if limited, or when the context asks for grouped experts; weigh_inputs: the weight
    multiplies the expert's input instead of its output.
    """

    n_used: int
    gating: str = "softmax"
    normalize: bool = False
    scale: float = 1.0
    groups: tuple[int, int] = (1, 1)
    limited: bool = False
    epsilon: float = 0.0
    weigh_inputs: bool = False


def expert_groups(keys: Keys, n_expert: int, default: Any = REQUIRED) -> tuple[int, int]:
    """Number of expert groups and of groups used; FileFormatError if the experts cannot be parted so."""
    n_group, n_used = keys.u32("expert_group_count", default), keys.u32("expert_group_used_count", default)
    if n_group > 1 and (n_expert % n_group or not 0 < n_used <= n_group):
        raise FileFormatError(f"{keys.gguf.path}: {n_used} of {n_group} expert groups used with {n_expert} experts")
    return n_group, n_used


def gating_func(keys: Keys, value: int) -> str:
    """Name of a value of expert_gating_func; FileFormatError for unknown ones."""
    if value not in GATING_FUNCS:
        raise FileFormatError(f"{keys.gguf.path}: unknown expert_gating_func {value}")
    return GATING_FUNCS[value]
