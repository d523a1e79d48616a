"""llama-embed: llama blocks in which every token sees its text (Llama-Embed-Nemotron)."""

from __future__ import annotations

from ikpy.models.llama import Llama
from ikpy.models.normed_states import NormedStates
from ikpy.models.weights import WeightSource


class LlamaEmbed(NormedStates, Llama):
    """Embeds texts; an output matrix, which some files have, is left out."""

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        weights.skip("output.weight")
