"""deepseek (V1, arXiv:2401.06066) and bailingmoe (Ling 1): softmax-routed and shared experts."""

from __future__ import annotations

from typing import ClassVar

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing
from ikpy.models.transformer import Transformer


class DeepSeek(Transformer):
    """Leading dense layers; weights of the chosen experts are not renormalised."""

    normalizes_weights: ClassVar[bool] = False
    rope_freqs_weight = "optional"

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_dense_layers = keys.u32("leading_dense_block_count")
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = hp.n_ff_exp * keys.u32("expert_shared_count")
        hp.routing = Routing(
            hp.n_expert_used,
            "softmax",
            normalize=self.normalizes_weights and keys.boolean("expert_weights_norm", False),
            scale=keys.f32("expert_weights_scale"),
        )
        return hp


class BailingMoe(DeepSeek):
    """The file says whether weights are renormalised."""

    normalizes_weights = True
    output_weight = "required"
