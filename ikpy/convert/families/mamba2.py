"""What families with layers of Mamba-2 share: names of modules, changes of layout."""

from __future__ import annotations

import numpy as np

from ikpy.convert.families.base import Change, Targets, View, decay_rates

CONV = "ssm_conv1d"
"""The convolution, whose bias belongs to its channels."""


def mamba2(prefix: str) -> dict[str, Targets]:
    """Modules of a layer."""
    names = {"in_proj": "ssm_in", "conv1d": CONV, "norm": "ssm_norm", "out_proj": "ssm_out"}
    names |= {"dt_bias": "ssm_dt.bias", "A_log": "ssm_a", "D": "ssm_d"}
    return {f"{prefix}.{name}": target for name, target in names.items()}


def mamba2_view(target: str, n_groups: int) -> View | None:
    """Change of layout of a tensor: a row per head or group, taps without a dimension of 1."""
    if target in ("ssm_a", "ssm_d"):
        return lambda values: values.reshape(-1, 1)
    if target == "ssm_norm":
        return lambda weights: weights.reshape(n_groups, -1)
    return _without_ones if target == CONV else None


def mamba2_change(target: str) -> Change | None:
    """Change of the values of a tensor."""
    return decay_rates if target == "ssm_a" else None


def _without_ones(values: np.ndarray) -> np.ndarray:
    return values.reshape(values.shape[0], -1) if values.ndim > 1 else values
