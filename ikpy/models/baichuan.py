"""baichuan: Baichuan 7B and Baichuan 2 7B, the blocks of llama."""

from __future__ import annotations

from ikpy.errors import UnsupportedError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.xverse import Xverse

LAYERS_13B = 40


class Baichuan(Xverse):
    """The 13B model, which has another kind of positions (ALiBi), is refused."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        if hp.n_layer == LAYERS_13B:
            raise UnsupportedError(
                f"{keys.gguf.path}: baichuan with {hp.n_layer} layers has ALiBi, which is not supported"
            )
        return hp
