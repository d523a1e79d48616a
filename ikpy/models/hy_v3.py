"""hy_v3: Tencent Hy3. q/k norms, sigmoid-routed and shared experts."""

from __future__ import annotations

from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.weights import WeightSource


class HyV3(RoutedMoe):
    """Layers without a router are dense. Files give the width of the shared expert instead of a count."""

    default_n_dense = 0
    dense_without_router = True
    usually_sigmoid = True
    default_n_shared = 1
    default_scale = 1.0
    heads_take_turns = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", hp.n_ff_shared)
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        ffn = super().load_ffn(weights, il, prefix)
        if isinstance(ffn, Experts) and ffn.selection_bias is None:
            # llama.cpp's converter gives the name without a suffix.
            ffn.selection_bias = weights.take(f"{prefix}.exp_probs_b", (self.hp.n_expert,), required=False)
        return ffn
