"""RoPE parameters of a context and of special layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ikpy.errors import UsageError

LEAST, MOST = 1e-9, 1e30
"""Bounds of bases and scales: angles of all positions are float32 numbers."""
MOST_MAGNITUDE = 1e3
"""Bound of factors of rotated queries and keys, which F16 caches hold; published ones are below 2."""


@dataclass(frozen=True)
class RopeParams:
    """freq_base, freq_scale = 1/factor, YaRN mix and magnitude (arXiv:2309.00071)."""

    freq_base: float
    freq_scale: float
    n_ctx_orig: int
    ext_factor: float
    attn_factor: float
    beta_fast: float
    beta_slow: float

    def check(self) -> None:
        """Raises UsageError for values without angles."""
        if not (possible(self.freq_base) and possible(self.freq_scale)):
            raise UsageError(
                f"RoPE base {self.freq_base:g} and scale {self.freq_scale:g} must be from {LEAST:g} to {MOST:g}"
            )
        if not abs(self.attn_factor) <= MOST_MAGNITUDE:
            raise UsageError(
                f"the factor of rotated queries and keys is {self.attn_factor:g}, above {MOST_MAGNITUDE:g}"
            )
        if self.ext_factor and self.freq_base == 1:
            raise UsageError("YaRN needs a RoPE base other than 1")
        betas = self.beta_fast, self.beta_slow
        if self.ext_factor and not (self.n_ctx_orig > 0 and all(0 < beta < math.inf for beta in betas)):
            raise UsageError("YaRN needs an original context and betas above 0")

    def kernel_params(self, n_rot: int) -> list[float]:
        """base, freq_scale, ext_factor, attn_factor and the corner dimensions low, high."""
        low, high = 0.0, float(n_rot - 1)
        if self.ext_factor != 0:
            low = max(0.0, math.floor(self._corner(n_rot, self.beta_fast)))
            high = min(n_rot - 1.0, math.ceil(self._corner(n_rot, self.beta_slow)))
        return [self.freq_base, self.freq_scale, self.ext_factor, self.attn_factor, low, high]

    def without_magnitude(self) -> RopeParams:
        """The same angles with magnitude 1: for keys that already carry the magnitude."""
        yarn = 1.0 + 0.1 * math.log(1.0 / self.freq_scale) if self.ext_factor != 0 else 1.0
        return replace(self, attn_factor=1.0 / yarn)

    def _corner(self, n_rot: int, beta: float) -> float:
        return n_rot * math.log(self.n_ctx_orig / (2 * math.pi * beta)) / (2 * math.log(self.freq_base))


def possible(base_or_scale: float) -> bool:
    """Whether a base or scale gives angles."""
    return LEAST <= base_or_scale <= MOST
