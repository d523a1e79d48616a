"""step35: Step-3.5-Flash, a gate per attention head, layers of two kinds with heads of their own, bounded SwiGLU."""

from __future__ import annotations

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import GraphParams
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import limited, swiglu_limits
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.weights import WeightSource
from ikpy.models.windows import window_layers


class Step35(RoutedMoe):
    """Full layers rotate half of the elements that window layers rotate. Prediction layers read states before the
    output norm.
    """

    output_weight = "required"
    qk_norm = "optional"
    attn_gate = "optional"
    rotates_whole_head = False
    default_n_dense = 0
    dense_without_router = True
    usually_sigmoid = True
    default_n_shared = 0
    default_scale = 1.0
    predicts_from_normed = False
    heads_take_turns = True

    def read_hparams(self, keys: Keys) -> HParams:
        if keys.has("rope.freq_base_per_layer"):
            raise UnsupportedError(
                f"{keys.gguf.path}: {keys.arch}.rope.freq_base_per_layer: RoPE bases layer by layer are not supported"
            )
        hp = super().read_hparams(keys)
        n_all = hp.n_layer + self.n_predict_layers
        hp.n_swa = keys.u32("attention.sliding_window")
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0)
        hp.n_rot //= 2
        self.has_window = window_layers(keys, n_all, period=1)
        self.limits = swiglu_limits(keys, n_all, "swiglu_clamp_exp", "swiglu_limits")
        self.shared_limits = swiglu_limits(keys, n_all, "swiglu_clamp_shexp", "swiglu_limits_shared")
        return hp

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        n_pairs = max(self.hp.n_rot, self.hp.window_heads.rotated) // 2
        factors = weights.take("rope_freqs.weight", (n_pairs,), required=False)
        self.rope_freqs = factors.slice0(0, self.hp.n_rot // 2) if factors is not None else None

    def rope_factors(self, layer: int, params: GraphParams) -> Value | None:
        return None if self.has_window[layer] else self.rope_freqs

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        return limited(super().load_ffn(weights, il, prefix), self.limits[il], self.shared_limits[il])
