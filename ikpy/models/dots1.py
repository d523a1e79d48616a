"""dots1: multi-head attention with q/k norms, routed and shared experts."""

from __future__ import annotations

from ikpy.models.routed_moe import RoutedMoe


class Dots1(RoutedMoe):
    """The routed-experts base as it is."""

    output_weight = "required"
