"""Layers of Mamba-2 in random models, and their float64 definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.cpu.models import reference_models as ref
from tests.cpu.models import reference_recurrent as recurrent
from tests.cpu.models.reference_models import RandomModel


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: of the residual stream, heads and their elements, groups, elements of B and C, taps."""

    d: int
    heads: int = 8
    size: int = 16
    groups: int = 2
    state: int = 32
    taps: int = 4

    @property
    def inner(self) -> int:
        """Elements of all heads."""
        return self.heads * self.size

    @property
    def channels(self) -> int:
        """What the convolution reads."""
        return self.inner + 2 * self.groups * self.state

    @property
    def keys(self) -> dict[str, int]:
        """Metadata."""
        return {
            "ssm.conv_kernel": self.taps,
            "ssm.inner_size": self.inner,
            "ssm.state_size": self.state,
            "ssm.time_step_rank": self.heads,
            "ssm.group_count": self.groups,
        }

    def add(self, m: RandomModel, p: str, *, normed: bool = True) -> None:
        """The tensors of a layer, with a norm or without."""
        m.matrix(f"{p}.ssm_in", self.inner + self.channels + self.heads, self.d)
        m.matrix(f"{p}.ssm_conv1d", self.channels, self.taps)
        m.vector(f"{p}.ssm_conv1d.bias", self.channels)
        m.vector(f"{p}.ssm_dt.bias", self.heads)
        m.weights[f"{p}.ssm_a"] = -m.random.uniform(0.1, 2, (self.heads, 1)).astype(np.float32)
        m.vector(f"{p}.ssm_d", self.heads, 1)
        if normed:
            m.norm(f"{p}.ssm_norm", self.groups, self.inner // self.groups)
        m.matrix(f"{p}.ssm_out", self.d, self.inner)

    def branch(self, w: ref.Weights, h: np.ndarray, eps: float) -> np.ndarray:
        """Branch of a layer for a normed input h [T, D] (arXiv:2405.21060, figure 6)."""
        z, mixed, dt = np.split(h @ w["ssm_in"].T, [self.inner, self.inner + self.channels], axis=1)
        slots = np.zeros(len(h), int)
        past = np.zeros((1, self.channels, self.taps - 1))
        mixed, _ = recurrent.causal_conv(
            mixed, w["ssm_conv1d"], past, slots, silu=True, bias=w.get("ssm_conv1d.bias", 0.0)
        )
        x, b, c = np.split(mixed, [self.inner, self.inner + self.groups * self.state], axis=1)
        b, c = (v.reshape(len(h), self.groups, self.state) for v in (b, c))
        dt = np.logaddexp(0, dt + w["ssm_dt.bias"])
        state = np.zeros((1, self.heads, self.state, self.size))
        x = x.reshape(len(h), self.heads, self.size)
        y, _ = recurrent.ssm_scan(x, dt, w["ssm_a"], b, c, w["ssm_d"], state, slots)
        gated = (y.reshape(len(h), -1) * ref.silu(z)).reshape(len(h), self.groups, -1)
        if "ssm_norm" not in w:
            return gated.reshape(len(h), -1) @ w["ssm_out"].T
        return ref.rms_norm(gated, w["ssm_norm"], eps).reshape(len(h), -1) @ w["ssm_out"].T
