"""nomic-bert: rotated positions, fused q/k/v, SwiGLU (arXiv:2402.01613)."""

from __future__ import annotations

from ikpy.models.encoder import Encoder


class NomicBert(Encoder):
    """No biases in the published models; heads rotate in halves."""

    rope_neox = True
    gated = True
