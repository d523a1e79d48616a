"""mamba: Mamba alone (arXiv:2312.00752), and Falcon Mamba, which norms steps, B and C (arXiv:2410.05355)."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.mamba_layers import Mamba, MambaLayers
from ikpy.models.weights import WeightSource


@dataclass
class Block:
    """The norm and the network of a layer."""

    norm: Value
    net: Mamba


class MambaModel(MambaLayers):
    """Every layer is recurrent: files count no heads and no network."""

    may_lack_heads = True
    has_rope = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.n_head_kv = [0] * hp.n_layer
        self.read_mamba(keys)
        self.norms_inside = keys.boolean("ssm.dt_b_c_rms", False)
        return hp

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> Block:
        norm = weights.take(f"{prefix}.attn_norm.weight", (self.hp.n_embd,))
        return Block(norm, self.load_mamba(weights, prefix))

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        block: Block = self.layers[il]  # type: ignore[assignment]
        mixed = self.scan(b, il, block.net, self.norm(b, x, block.norm))
        kept, kept_x = b.keep_outputs(il, self.hp.n_layer, mixed, x)
        if b.keeps_states and kept_x is not x:
            # Apart from the output rows: those must round as they do in a context that keeps no states.
            b.unreduced = b.graph.add(x, b.graph.mul_mat(block.net.out, mixed))
        return b.graph.add(kept_x, b.graph.mul_mat(block.net.out, kept))
