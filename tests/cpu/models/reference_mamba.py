"""Layers of Mamba in random models, and their float64 definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.reference_models import RandomModel


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: of the residual stream, channels, rank of steps, elements of B and C, taps. norms: of steps, B
    and C, with weights ("weights"), without ("plain"), or none ("").
    """

    d: int
    inner: int
    rank: int = 8
    state: int = 16
    taps: int = 4
    norms: str = ""

    @property
    def keys(self) -> dict[str, int | bool]:
        """Metadata."""
        keys: dict[str, int | bool] = {
            "ssm.conv_kernel": self.taps,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.rank,
        }
        return keys | ({"ssm.dt_b_c_rms": True} if self.norms == "plain" else {})

    def add(self, m: RandomModel, p: str) -> None:
        """The tensors of a layer."""
        m.matrix(f"{p}.ssm_in", 2 * self.inner, self.d)
        m.matrix(f"{p}.ssm_conv1d", self.inner, self.taps)
        m.vector(f"{p}.ssm_conv1d.bias", self.inner)
        m.matrix(f"{p}.ssm_x", self.rank + 2 * self.state, self.inner)
        m.matrix(f"{p}.ssm_dt", self.inner, self.rank)
        m.vector(f"{p}.ssm_dt.bias", self.inner)
        m.weights[f"{p}.ssm_a"] = -m.random.uniform(0.1, 4, (self.inner, self.state)).astype(np.float32)
        m.vector(f"{p}.ssm_d", self.inner)
        m.matrix(f"{p}.ssm_out", self.d, self.inner)
        if self.norms == "weights":
            for name, n in (("dt", self.rank), ("b", self.state), ("c", self.state)):
                m.norm(f"{p}.ssm_{name}_norm", n)

    def branch(self, w: ref.Weights, h: np.ndarray, eps: float) -> np.ndarray:
        """Branch of a layer for a normed input h [T, D] (arXiv:2312.00752, algorithm 2)."""
        x, z = np.split(h @ w["ssm_in"].T, 2, axis=1)
        slots, past = np.zeros(len(h), int), np.zeros((1, self.inner, self.taps - 1))
        x, _ = recurrent.causal_conv(x, w["ssm_conv1d"], past, slots, silu=True, bias=w["ssm_conv1d.bias"])
        parts = dict(
            zip(("dt", "b", "c"), np.split(x @ w["ssm_x"].T, [self.rank, self.rank + self.state], axis=1), strict=True)
        )
        if self.norms:
            parts = {name: ref.rms_norm(v, w.get(f"ssm_{name}_norm", 1.0), eps) for name, v in parts.items()}
        dt = np.logaddexp(0, parts["dt"] @ w["ssm_dt"].T + w["ssm_dt.bias"])
        state = np.zeros((1, 1, self.state, self.inner))
        y, _ = recurrent.channel_scan(x, dt, w["ssm_a"].T, parts["b"], parts["c"], w["ssm_d"], state, slots)
        return (y * ref.silu(z)) @ w["ssm_out"].T
