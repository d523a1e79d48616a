"""Routed experts that read and write latents, narrower than the model (Nemotron 3 Super, Kimi K3)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.blocks import Experts, moe_ffn, shared_expert
from ikpy.models.routing import Routing


@dataclass
class LatentExperts(Experts):
    """The router and the shared expert read the model's width. latent_norm: of the sum of the experts' outputs."""

    latent_down: Value | None = None
    latent_up: Value | None = None
    latent_norm: Value | None = None


def latent_moe(
    b: BatchGraph, experts: LatentExperts, routing: Routing, x: Value, eps: float, activation: str = "silu"
) -> Value:
    """Routed experts on the latents of x [D, T], plus the shared expert; eps: of the norm."""
    assert experts.latent_down is not None and experts.latent_up is not None
    g = b.graph
    logits = g.mul_mat(experts.gate_inp, x, experts.gate_inp_bias)
    routed = moe_ffn(b, replace(experts, shared=None), routing, g.mul_mat(experts.latent_down, x), activation, logits)
    if experts.latent_norm is not None:
        routed = g.rms_norm(routed, experts.latent_norm, eps)
    out = g.mul_mat(experts.latent_up, routed)
    shared = shared_expert(b, experts, x, activation)
    return out if shared is None else g.add(out, shared)
