"""eurobert: EuroBERT, llama blocks in which every token sees its text (arXiv:2503.05500)."""

from __future__ import annotations

from ikpy.models.normed_states import NormedStates
from ikpy.models.transformer import Transformer


class EuroBert(NormedStates, Transformer):
    """Halves of heads are rotated, there are no biases."""

    rope_neox = True
