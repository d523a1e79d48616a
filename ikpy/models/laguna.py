"""laguna: poolside Laguna. A softplus gate of what was attended to, layers of two kinds with heads of their own."""

from __future__ import annotations

from dataclasses import replace

from ikpy.errors import UnsupportedError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.rope import RopeParams
from ikpy.models.routed_moe import RoutedMoe
from ikpy.models.windows import periodic_window_layers

FULL_LAYER_PERIOD = 4  # of files without a pattern


class Laguna(RoutedMoe):
    """Window layers rotate without scaling, at a base of their own; full ones a part of their heads."""

    attn_gate = "required"
    gate_activation = "softplus"
    rotates_whole_head = False
    usually_sigmoid = True
    default_n_shared = 1
    default_scale = 1.0

    def read_hparams(self, keys: Keys) -> HParams:
        cap = keys.f32("router_logit_softcapping", 0.0)
        if cap:
            raise UnsupportedError(
                f"{keys.gguf.path}: {keys.arch}.router_logit_softcapping {cap:g}: capped logits are not supported"
            )
        hp = super().read_hparams(keys)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", hp.n_ff_shared)
        hp.yarn_beta_fast = keys.f32("rope.scaling.yarn_beta_fast", 32.0)
        hp.yarn_beta_slow = keys.f32("rope.scaling.yarn_beta_slow", 1.0)
        hp.n_swa = keys.u32("attention.sliding_window", 0)
        if hp.n_swa:
            n_all = hp.n_layer + self.n_predict_layers
            self.has_window = periodic_window_layers(keys, n_all, FULL_LAYER_PERIOD, full_first=True)
        return hp

    def rope_params(self, layer: int, context: RopeParams) -> RopeParams:
        rope = super().rope_params(layer, context)
        if self.window(layer)[0] == "none":
            return rope
        base = self.hp.window_freq_base or self.hp.rope_freq_base
        return replace(rope, freq_base=base, freq_scale=1.0, ext_factor=0.0, attn_factor=1.0)
