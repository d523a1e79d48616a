"""GLM-Edge-V: SigLIP, squares of whose states a convolution joins, a gated network, learned rows around the picture."""

from __future__ import annotations

import numpy as np

from ikpy.graph.ir import Value
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.llava import LlavaProjector
from ikpy.vision.resize import BLACK
from ikpy.vision.weights import Linear, ProjectorWeights, value_of


class GlmEdgeProjector(LlavaProjector):
    """Files call it "adapter". All layers are run."""

    n_left_out = 0
    bars = BLACK

    def load_projection(self, weights: ProjectorWeights, n_in: int) -> None:
        name = "adapter.conv"
        n = weights.shape(f"{name}.weight")[-1]
        filters = weights.array(f"{name}.weight", (2, 2, n_in, n)).transpose(0, 2, 3, 1).reshape(n, -1)
        self.joining = Linear(value_of(filters, name), weights.vector(f"{name}.bias", n))
        p = "adapter.linear"
        self.matrix = weights.linear(f"{p}.linear", n)
        n = self.matrix.n_out
        self.norm = weights.norm(f"{p}.norm1", n)
        self.gate = weights.linear(f"{p}.gate", n)
        self.up = weights.linear(f"{p}.dense_h_to_4h", n, self.gate.n_out)
        self.down = weights.linear(f"{p}.dense_4h_to_h", self.gate.n_out)
        n_out = self.down.n_out
        self.ends = value_of(np.stack([weights.array(f"adapter.{end}", (n_out,)) for end in ("boi", "eoi")]))

    @property
    def n_out(self) -> int:
        return self.down.n_out

    def project(self, b: PictureGraph, x: Value) -> Value:
        g = b.graph
        x = b.linear(self.matrix, b.linear(self.joining, b.merged(x, 2)))
        x = b.activated(b.layer_norm(self.norm, x, self.params.eps), "gelu_erf")
        x = g.gated(b.linear(self.gate, x), b.linear(self.up, x), "silu")
        n = x.shape[1]
        whole = g.new(self.n_out, n + 2)
        g.copy(self.ends.slice(1, 0, 1), whole.slice(1, 0, 1))
        b.linear(self.down, x, dst=whole.slice(1, 1, n))
        g.copy(self.ends.slice(1, 1, 1), whole.slice(1, n + 1, 1))
        return whole
