"""cohere2: command-r blocks; three rotated window layers for every full one without RoPE."""

from __future__ import annotations

from ikpy.models.command_r import CommandR
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys


class Cohere2(CommandR):
    """Only window layers know positions."""

    window_rope_of_file = True
    may_norm_heads = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window")
        return hp

    def is_rotated(self, layer: int) -> bool:
        return layer % 4 < 3

    def window(self, layer: int) -> tuple[str, int]:
        return ("sliding", self.hp.n_swa) if self.is_rotated(layer) else ("none", 0)
