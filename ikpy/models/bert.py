"""bert: BERT and its look-alikes (BGE, E5, GTE, MiniLM ...): embedded positions, GELU (arXiv:1810.04805)."""

from __future__ import annotations

from ikpy.models.encoder import Encoder


class Bert(Encoder):
    """Biases everywhere in the published models; a file may lack them. q, k and v are apart or one tensor."""

    embeds_positions = True
