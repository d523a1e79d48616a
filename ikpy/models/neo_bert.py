"""neo-bert: NeoBERT, llama blocks in which every token sees its text (arXiv:2502.19587)."""

from __future__ import annotations

from ikpy.models.classifier import Classifier
from ikpy.models.normed_states import NormedStates
from ikpy.models.transformer import Transformer
from ikpy.models.weights import WeightSource


class NeoBert(NormedStates, Transformer):
    """Fused matrices; heads of rerankers are those of BERT."""

    fused_qkv = "optional"
    fused_ffn = True
    output_norm_name = "enc.output_norm"

    @property
    def classifier(self) -> Classifier | None:
        return self._classifier

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        self._classifier = Classifier.take(weights, self.hp.n_embd, self.hp.norm_eps)
