"""plm: PLM 1.8B. Latent attention, squared ReLU without a gate (arXiv:2503.12167)."""

from __future__ import annotations

from typing import ClassVar

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts, dense_ffn
from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.feed_forward import take_dense
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.rope import RopeParams
from ikpy.models.weights import Presence, WeightSource


class Plm(DeepSeek2):
    """No low-rank query and no experts; the token embedding is the output matrix."""

    output_weight: ClassVar[Presence] = "none"

    def read_experts(self, keys: Keys, hp: HParams) -> None:
        if hp.n_expert:
            raise UnsupportedError(f"{keys.gguf.path}: {keys.arch} with experts is not supported")

    def _load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        return take_dense(weights, prefix, self.hp.n_embd, self.hp.n_ff[il], gated=False)

    def _ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        assert isinstance(ffn, DenseFFN)
        return dense_ffn(b, ffn, x, "relu_squared")

    def _scales(self, rope: RopeParams, k: int) -> tuple[float, RopeParams]:
        return k**-0.5, rope
