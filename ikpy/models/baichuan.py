"""baichuan: Baichuan 7B and 13B, Baichuan 2 7B and 13B, the blocks of llama (arXiv:2309.10305)."""

from __future__ import annotations

from ikpy.models.alibi import MAX_BIAS
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.xverse import Xverse

LAYERS_13B = 40


class Baichuan(Xverse):
    """The 13B models, which files tell by their layers, have linear biases (ALiBi) instead of rotation."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.max_alibi_bias = MAX_BIAS if hp.n_layer == LAYERS_13B else 0.0
        return hp

    def is_rotated(self, layer: int) -> bool:
        return not self.hp.max_alibi_bias
