"""dots3 note: the tower of dots.ocr with norms of heads, and experts in some layers."""

from __future__ import annotations

from dataclasses import dataclass

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.vision.dots_ocr import DotsOcrProjector
from ikpy.vision.encoder import EncoderLayer, VisionTransformer
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.params import VisionParams, size
from ikpy.vision.projector import Source
from ikpy.vision.weights import Linear, ProjectorWeights


@dataclass
class ExpertLayer(EncoderLayer):
    """`up` is the router here, and `down` holds the matrices [F, D, E] of all experts, as expert_up and expert_gate
    [D, F, E]; bias [E] counts for their choice only."""

    expert_up: Value
    expert_gate: Value
    bias: Value | None


class ExpertTransformer(VisionTransformer):
    """RMSNorm; layers with a router have experts, n_used of which each patch takes by sigmoid scores."""

    def __init__(self, weights: ProjectorWeights, params: VisionParams, n_used: int) -> None:
        super().__init__(weights, params, rms=True)
        self._n_used = n_used

    def _load_ffn(self, weights: ProjectorWeights, prefix: str) -> tuple[Linear, Linear]:
        if not weights.has(f"{prefix}.ffn_gate_inp.weight"):
            return super()._load_ffn(weights, prefix)
        n, router = self.params.n_embd, weights.linear(f"{prefix}.ffn_gate_inp", self.params.n_embd)
        name = f"{prefix}.ffn_down_exps.weight"
        return router, Linear(weights.source.take(name, (weights.shape(name)[0], n, router.n_out)))

    def _load_layer(self, weights: ProjectorWeights, prefix: str) -> EncoderLayer:
        layer = super()._load_layer(weights, prefix)
        if not weights.has(f"{prefix}.ffn_gate_inp.weight"):
            return layer
        shape = self.params.n_embd, layer.down.weight.shape[0], layer.up.n_out
        up, gate = (weights.source.take(f"{prefix}.ffn_{part}_exps.weight", shape) for part in ("up", "gate"))
        bias = weights.vector(f"{prefix}.exp_probs_b.weight", layer.up.n_out)
        return ExpertLayer(**vars(layer), expert_up=up, expert_gate=gate, bias=bias)

    def feed_forward(self, b: PictureGraph, layer: EncoderLayer, x: Value) -> Value:
        if not isinstance(layer, ExpertLayer):
            return super().feed_forward(b, layer, x)
        g, logits = b.graph, b.linear(layer.up, x)
        ids, shares = g.moe_route(logits, self._n_used, gating="sigmoid", bias=layer.bias, normalize=True)
        groups = g.moe_group(ids, layer.up.n_out)
        inner = g.mul_mat_id_up_gate(layer.expert_up, layer.expert_gate, x, ids, groups, "silu")
        return g.moe_combine(g.mul_mat_id(layer.down.weight, inner, ids, groups, per_slot=True), shares, ids)


class Dots3NoteProjector(DotsOcrProjector):
    """As dots.ocr, behind these layers."""

    merge_key = "spatial_merge_size"

    def load_tower(self, source: Source) -> VisionTransformer:
        n_used = size(source.keys, "expert_used_count")
        tower = ExpertTransformer(source.weights, self.params, n_used)
        for block in tower.blocks:
            if isinstance(block, ExpertLayer) and block.up.n_out < n_used:
                raise FileFormatError(f"{self.path}: {n_used} experts used of {block.up.n_out}")
        return tower
