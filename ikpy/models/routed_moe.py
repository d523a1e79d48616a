"""Leading dense layers, then routed and shared experts with the routing of the metadata (model semantics 5)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.base import Architecture
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.feed_forward import take_dense
from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.routing import Routing, gating_func
from ikpy.models.transformer import Transformer
from ikpy.models.weights import Presence, WeightSource


@dataclass
class Prediction:
    """How a prediction layer joins the embedding of a token with the hidden state behind the token before it."""

    joined: Value  # [2D, D], the embedding's columns first
    token_norm: Value
    state_norm: Value


class RoutedMoe(Transformer):
    """Base of glm4moe, dots1 and bailingmoe2. The last n_predict_layers layers are heads that predict further tokens;
    they are not part of the model's own graph (see `prediction_head`).
    """

    prediction: Prediction | None = None
    qk_norm: ClassVar[Presence] = "required"
    selection_bias: ClassVar[Presence] = "optional"
    rope_neox = True
    default_n_dense: ClassVar[Any] = REQUIRED
    default_gating: ClassVar[Any] = 1
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
            gating_func(keys, self.gating_value(keys.u32("expert_gating_func", self.default_gating))),
            normalize=keys.boolean("expert_weights_norm", False),
            scale=keys.f32("expert_weights_scale", self.default_scale) or 1.0,
        )
        self.n_predict_layers = keys.u32("nextn_predict_layers", 0)
        if self.n_predict_layers >= hp.n_layer:
            raise FileFormatError(
                f"{keys.gguf.path}: {self.n_predict_layers} prediction layers of {hp.n_layer} layers leave none to run"
            )
        hp.n_layer -= self.n_predict_layers
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        if self.dense_without_router and not weights.has(f"{prefix}.ffn_gate_inp.weight"):
            return take_dense(weights, prefix, self.hp.n_embd, self.hp.n_ff[il])
        return super().load_ffn(weights, il, prefix)

    def gating_value(self, value: int) -> int:
        """The value of expert_gating_func in effect."""
        return value

    def load_global(self, weights: WeightSource) -> None:
        super().load_global(weights)
        for il in range(self.hp.n_layer, self.hp.n_layer + self.n_predict_layers):
            weights.skip_layer(il)

    # --- prediction of further tokens (model semantics 3.9) -----------------------------------------------------

    @property
    def reads_states(self) -> bool:
        return self.prediction is not None

    def prediction_head(self, weights: WeightSource) -> Architecture:
        il = self.hp.n_layer
        if not self.n_predict_layers or not weights.has(f"blk.{il}.nextn.eh_proj.weight"):
            return super().prediction_head(weights)
        d, n_vocab, prefix = self.hp.n_embd, self.hp.n_vocab, f"blk.{il}.nextn"
        head = copy.copy(self)
        head.layers = [self.load_layer(weights, il, f"blk.{il}")]
        head.has_window = self.has_window[il:]
        head.hp = replace(
            self.hp,
            n_layer=1,
            n_dense_layers=0,
            n_ff=self.hp.n_ff[il:],
            n_head=self.hp.n_head[il:],
            n_head_kv=self.hp.n_head_kv[il:],
        )
        head.prediction = Prediction(
            weights.take(f"{prefix}.eh_proj.weight", (2 * d, d)),
            weights.take(f"{prefix}.enorm.weight", (d,)),
            weights.take(f"{prefix}.hnorm.weight", (d,)),
        )
        own_embedding = weights.take(f"{prefix}.embed_tokens.weight", (d, n_vocab), required=False)
        own_output = weights.take(f"{prefix}.shared_head_head.weight", (d, n_vocab), required=False)
        own_norm = weights.take(f"{prefix}.shared_head_norm.weight", (d,), required=False)
        head.token_embd = own_embedding or self.token_embd
        head.output = own_output or self.output
        head.output_norm = own_norm or self.output_norm
        return head

    def embed(self, b: BatchGraph) -> Value:
        x = super().embed(b)
        if self.prediction is None:
            return x
        assert b.states is not None
        g, d = b.graph, self.hp.n_embd
        both = g.new(2 * d, b.n_tokens)
        g.copy(self.norm(b, x, self.prediction.token_norm), both.slice0(0, d))
        g.copy(self.norm(b, b.states, self.prediction.state_norm), both.slice0(d, d))
        return g.mul_mat(self.prediction.joined, both)
