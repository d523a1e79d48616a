"""apertus: Apertus, llama blocks with normed heads and a network by xIELU (arXiv:2509.14233, 2411.13010)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer
from ikpy.models.weights import WeightSource


@dataclass
class XieluFFN(DenseFFN):
    """A network without gate; parameters of its activation as `Graph.xielu` has them."""

    parameters: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)


class Apertus(Transformer):
    """Every layer has an activation of its own."""

    qk_norm = "required"
    rope_neox = True
    rope_freqs_weight = "optional"
    gated_ffn = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        names = ("alpha_p", "alpha_n", "beta", "eps")
        lists = [keys.bare_floats_per_layer(f"xielu.{name}", hp.n_layer) for name in names]
        self.activations = [
            (softplus(positive), beta + softplus(negative), beta, eps)
            for positive, negative, beta, eps in zip(*lists, strict=True)
        ]
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        return XieluFFN(**vars(super().load_ffn(weights, il, prefix)), parameters=self.activations[il])

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        assert isinstance(ffn, XieluFFN)
        g = b.graph
        return g.mul_mat(ffn.down, g.xielu(g.mul_mat(ffn.up, x), *ffn.parameters))


def softplus(x: float) -> float:
    """ln(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
