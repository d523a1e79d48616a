"""nomic-bert, nomic-bert-moe, jina-bert-v3: BERT with rotated positions (arXiv:2402.01613, 2502.07972, 2409.10173)."""

from __future__ import annotations

from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.encoder import Encoder
from ikpy.models.feed_forward import take_experts
from ikpy.models.hparams import HParams, check_experts
from ikpy.models.keys import Keys
from ikpy.models.routing import Routing
from ikpy.models.weights import WeightSource


class NomicBert(Encoder):
    """No biases in the published models, SwiGLU; heads rotate in halves."""

    rope_neox = True
    gated = True
    activation = "silu"


class JinaBertV3(Encoder):
    """Biases, GELU; heads rotate in halves. Adapters for tasks are files of their own."""

    rope_neox = True


class NomicBertMoe(Encoder):
    """Biases, GELU; in every n-th layer experts without gates and biases, by softmax over all, not renormalised."""

    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.moe_period = keys.u32("moe_every_n_layers", 0)
        if self.moe_period:
            check_experts(keys, hp)
        hp.routing = Routing(hp.n_expert_used, "softmax", normalize=False)
        return hp

    def is_moe(self, layer: int) -> bool:
        return self.moe_period > 0 and layer % self.moe_period == 1

    def load_network(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        if not self.is_moe(il):
            return super().load_network(weights, il, prefix)
        hp = self.hp
        return take_experts(weights, prefix, hp.n_embd, hp.n_expert, hp.n_ff[il], gated=False)
