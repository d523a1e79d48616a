"""Leading dense layers, then routed and shared experts with the routing of the metadata."""

from __future__ import annotations

from typing import Any, ClassVar

from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_dense
from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.prediction import PredictionLayers
from ikpy.models.routing import SIGMOID, Routing, gating_func
from ikpy.models.transformer import Transformer
from ikpy.models.weights import Presence, WeightSource


class RoutedMoe(PredictionLayers, Transformer):
    """Base of glm4moe, dots1 and bailingmoe2."""

    qk_norm: ClassVar[Presence] = "required"
    selection_bias: ClassVar[Presence] = "optional"
    rope_neox = True
    default_n_dense: ClassVar[Any] = REQUIRED
    default_gating: ClassVar[Any] = 1
    usually_sigmoid: ClassVar[bool] = False
    """Whether files mean the sigmoid that have no expert_gating_func, or a 0."""
    default_n_shared: ClassVar[Any] = REQUIRED
    default_scale: ClassVar[Any] = REQUIRED
    dense_without_router: ClassVar[bool] = False
    """Whether layers without a router are dense, wherever they are."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_dense_layers = keys.u32("leading_dense_block_count", self.default_n_dense)
        hp.n_ff_exp = keys.u32("expert_feed_forward_length")
        hp.n_ff_shared = hp.n_ff_exp * keys.u32("expert_shared_count", self.default_n_shared)
        hp.routing = Routing(
            hp.n_expert_used,
            self._gating(keys),
            normalize=keys.boolean("expert_weights_norm", False),
            scale=keys.f32("expert_weights_scale", self.default_scale) or 1.0,
        )
        self.take_off_prediction_layers(keys, hp)
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        if self.dense_without_router and not weights.has(f"{prefix}.ffn_gate_inp.weight"):
            return take_dense(weights, prefix, self.hp.n_embd, self.hp.n_ff[il])
        return super().load_ffn(weights, il, prefix)

    def _gating(self, keys: Keys) -> str:
        if self.usually_sigmoid:
            return gating_func(keys, keys.u32("expert_gating_func", 0) or SIGMOID)
        return gating_func(keys, keys.u32("expert_gating_func", self.default_gating))

    def start_at(self, layer: int) -> None:
        super().start_at(layer)
        self.has_window = self.has_window[layer:]
