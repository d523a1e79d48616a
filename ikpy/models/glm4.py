"""glm4: norms after both branches, fused SwiGLU, partly rotated heads; GLM-4.1V and GLM-OCR (text) among them."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.media import ReadsPictures
from ikpy.models.transformer import Transformer


class Glm4(ReadsPictures, Transformer):
    """Optional q/k/v biases; RoPE on the first n_rot elements of each head.

    Files of models that read pictures have the two elements of a pair half of these apart, not beside each other.
    """

    qkv_bias = "optional"
    post_norms = "required"
    fused_ffn = True
    rotates_whole_head = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.rope_neox = self.rope_sections is not None
        return hp
