"""dbrx: DBRX, experts under LayerNorm without biases, q, k and v bounded."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer


class Dbrx(Transformer):
    """Every layer has experts, whose weights are renormalised."""

    layer_norm = True
    ffn_norm_name = "attn_output_norm"
    fused_qkv = "optional"
    output_weight = "required"
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        if not hp.n_expert:
            raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.expert_count is 0")
        hp.qkv_clamp = keys.f32("attention.clamp_kqv")
        return hp
