"""grovemoe: GroveMoE 33B-A3B. Experts in groups, each with a small one that all of it share (arXiv:2508.07785)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ikpy.errors import FileFormatError
from ikpy.graph.ir import I32, Value, external
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import DenseFFN, Experts, choose_experts, chosen_experts
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.qwen3moe import Qwen3Moe
from ikpy.models.weights import WeightSource


@dataclass
class GroveExperts(Experts):
    """shared_by_group: an expert of each group; group_of: i32 [1, E], the group of every expert."""

    shared_by_group: Experts | None = None
    group_of: Value | None = None


class GroveMoe(Qwen3Moe):
    """Attention of qwen3; a chosen expert brings that of its group along, with its weight times group_scale."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        self.group_size = keys.u32("experts_per_group")
        self.group_width = keys.u32("expert_chunk_feed_forward_length")
        self.group_scale = keys.f32("expert_group_scale")
        if not hp.n_expert or not self.group_size or hp.n_expert % self.group_size:
            raise FileFormatError(f"{keys.gguf.path}: {hp.n_expert} experts in groups of {self.group_size}")
        return hp

    def load_ffn(self, weights: WeightSource, il: int, prefix: str) -> DenseFFN | Experts:
        experts = super().load_ffn(weights, il, prefix)
        assert isinstance(experts, Experts)
        d, f, n = self.hp.n_embd, self.group_width, self.hp.n_expert // self.group_size
        shared = Experts(
            gate_inp=experts.gate_inp,
            gate=weights.take(f"{prefix}.ffn_gate_chexps.weight", (d, f, n)),
            up=weights.take(f"{prefix}.ffn_up_chexps.weight", (d, f, n)),
            down=weights.take(f"{prefix}.ffn_down_chexps.weight", (f, d, n)),
        )
        groups = (np.arange(self.hp.n_expert) // self.group_size).astype(np.int32)
        table = external(groups.ctypes.data, groups, I32, (1, self.hp.n_expert), f"{prefix}.ffn_groups", "weight")
        return GroveExperts(**vars(experts), shared_by_group=shared, group_of=table)

    def ffn(self, b: BatchGraph, ffn: DenseFFN | Experts, x: Value) -> Value:
        assert isinstance(ffn, GroveExperts) and ffn.shared_by_group is not None and ffn.group_of is not None
        g = b.graph
        logits = g.mul_mat(ffn.gate_inp, x)
        ids, weights = choose_experts(b, ffn, self.hp.routing, x, logits)
        own = chosen_experts(b, ffn, x, ids, weights, self.activation)
        n = ids.shape[0] * ids.shape[1]
        # Looked up as experts of tokens are, the ids being the tokens; weights come with it that are of no use.
        rows = logits.view((logits.shape[0], n), (0,))
        groups, _ = g.moe_route(rows, 1, gating="selected_softmax", fixed=(ffn.group_of, ids.reshape(n)))
        scaled = g.scale(weights, self.group_scale)
        return chosen_experts(b, ffn.shared_by_group, x, groups.reshape(*ids.shape[:2]), scaled, self.activation, own)
