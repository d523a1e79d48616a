"""phi3: fused projections, LongRoPE factors, optional sliding window."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.long_rope import LongRope
from ikpy.models.transformer import Transformer


class Phi3(LongRope, Transformer):
    """Attention in the window of the file, if it has one."""

    output_weight = "required"
    fused_qkv = "required"
    fused_ffn = True
    rope_neox = True
    rotates_whole_head = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_swa = keys.u32("attention.sliding_window", _old_file_window(hp) or REQUIRED)
        return hp

    def window(self, layer: int) -> tuple[str, int]:
        return ("sliding", self.hp.n_swa) if self.hp.n_swa else ("none", 0)


def _old_file_window(hp: HParams) -> int:
    """Window of published models whose files predate the key; 0 if the model is none of them."""
    if hp.n_layer in (32, 40) and hp.n_ctx_train == 4096:
        return 2047
    if hp.n_layer == 32 and hp.n_head_kv[0] == 32 and hp.n_ctx_train == 131072:
        return 262144
    return 131072 if hp.n_layer == 40 and hp.n_ctx_train == 131072 else 0
