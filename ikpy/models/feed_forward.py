"""Takes the tensors of dense and expert feed-forward networks from a file."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.graph.ir import Value
from ikpy.models.blocks import DenseFFN, Experts
from ikpy.models.keys import Keys
from ikpy.models.weights import Presence, WeightSource, split_rows


def take_dense(
    weights: WeightSource,
    prefix: str,
    n_embd: int,
    n_ff: int,
    *,
    suffix: str = "",
    bias: Presence = "none",
    gated: bool = True,
) -> DenseFFN:
    """`prefix.ffn_{gate,up,down}suffix` of width n_ff; the gate only if gated."""
    name = f"{prefix}.ffn_%s{suffix}"
    return DenseFFN(
        gate=weights.take(f"{name % 'gate'}.weight", (n_embd, n_ff)) if gated else None,
        up=weights.take(f"{name % 'up'}.weight", (n_embd, n_ff)),
        down=weights.take(f"{name % 'down'}.weight", (n_ff, n_embd)),
        gate_bias=weights.take_if(bias, f"{name % 'gate'}.bias", (n_ff,)) if gated else None,
        up_bias=weights.take_if(bias, f"{name % 'up'}.bias", (n_ff,)),
        down_bias=weights.take_if(bias, f"{name % 'down'}.bias", (n_embd,)),
    )


def swiglu_limits(keys: Keys, n_layer: int, *names: str) -> list[float]:
    """Bounds of SwiGLU per layer under the first name that the file has; 0: none. Negative ones are none, too."""
    name = next((name for name in names if keys.has(name)), names[0])
    return [max(limit, 0.0) for limit in keys.floats_per_layer(name, n_layer, 0.0)]


def swiglu_clamps(keys: Keys, n_layer: int) -> tuple[list[float], list[float]]:
    """Bounds of routed experts and of shared ones per layer, those of prediction layers behind them if the file says
    some; 0: none.
    """
    limits, shared = (
        keys.floats_per_layer(name, keys.n_listed(name, n_layer), 0.0)
        for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp")
    )
    return limits, shared if keys.has("swiglu_clamp_shexp") else limits


def limited(ffn: DenseFFN | Experts, limit: float, shared: float) -> DenseFFN | Experts:
    """A network with bounds of its SwiGLU: limit of routed experts, shared of the shared one and of dense networks."""
    if isinstance(ffn, DenseFFN):
        ffn.limit = shared
        return ffn
    ffn.limit = limit
    if ffn.shared is not None:
        ffn.shared.limit = shared
    return ffn


def take_fused_dense(weights: WeightSource, prefix: str, n_embd: int, n_ff: int, *, suffix: str = "") -> DenseFFN:
    """Gate rows, then up rows in one tensor ffn_up`suffix` [D, 2F] (fused SwiGLU), as views of it."""
    fused = weights.take(f"{prefix}.ffn_up{suffix}.weight", (n_embd, 2 * n_ff), parts=(n_ff, n_ff))
    gate, up = split_rows(fused, n_ff, n_ff)
    return DenseFFN(
        gate=gate,
        up=up,
        down=weights.take(f"{prefix}.ffn_down{suffix}.weight", (n_ff, n_embd)),
    )


def take_experts(
    weights: WeightSource,
    prefix: str,
    n_embd: int,
    n_expert: int,
    n_ff: int,
    *,
    n_ff_shared: int = 0,
    selection_bias: Presence = "none",
    bias: Presence = "none",
    gated: bool = True,
    n_latent: int = 0,
) -> Experts:
    """Router, experts of width n_ff and, if n_ff_shared is not 0, the shared expert.

    The experts are 3-D tensors, with gate and up fused or apart, or the legacy tensor per expert; if not gated, up and
    down alone. n_latent: elements that routed experts read and write where these are not the model's.
    """
    router = weights.take(f"{prefix}.ffn_gate_inp.weight", (n_embd, n_expert))
    legacy = weights.has(f"{prefix}.ffn_gate.0.weight")
    take = _join_legacy if legacy else _take_3d
    n_in = n_latent or n_embd
    gate, up = _take_gate_up(weights, prefix, n_in, n_expert, n_ff) if gated and not legacy else (None, None)
    if gated and gate is None:
        gate = take(weights, f"{prefix}.ffn_gate", n_expert, (n_in, n_ff))
    experts = Experts(
        gate_inp=router,
        gate=gate,
        up=up or take(weights, f"{prefix}.ffn_up", n_expert, (n_in, n_ff)),
        down=take(weights, f"{prefix}.ffn_down", n_expert, (n_ff, n_in)),
        gate_inp_bias=weights.take_if(bias, f"{prefix}.ffn_gate_inp.bias", (n_expert,)),
        selection_bias=weights.take_if(selection_bias, f"{prefix}.exp_probs_b.bias", (n_expert,)),
    )
    if bias != "none":
        _take_biases(weights, prefix, experts, bias)
    if n_ff_shared:
        experts.shared = take_dense(weights, prefix, n_embd, n_ff_shared, suffix="_shexp", gated=gated)
    return experts


def _take_3d(weights: WeightSource, name: str, n_expert: int, shape: tuple[int, int]) -> Value:
    return weights.take(f"{name}_exps.weight", (*shape, n_expert))


def _take_gate_up(
    weights: WeightSource, prefix: str, n_embd: int, n_expert: int, n_ff: int
) -> tuple[Value | None, Value | None]:
    """Halves of the fused tensor ffn_gate_up_exps [D, 2F, E] (gate rows first), or None twice."""
    name = f"{prefix}.ffn_gate_up_exps.weight"
    fused = weights.take(name, (n_embd, 2 * n_ff, n_expert), required=False, parts=(n_ff,))
    if fused is None:
        return None, None
    gate, up = split_rows(fused, n_ff, n_ff, named=1)  # the product of both reports as its up matrix
    return gate, up


def _take_biases(weights: WeightSource, prefix: str, experts: Experts, presence: Presence) -> None:
    n_embd, n_ff, n_expert = experts.up.shape[:3]
    experts.down_bias = weights.take_if(presence, f"{prefix}.ffn_down_exps.bias", (n_embd, n_expert))
    fused = weights.take(f"{prefix}.ffn_gate_up_exps.bias", (2 * n_ff, n_expert), required=False)
    if fused is not None:
        experts.gate_bias, experts.up_bias = fused.slice0(0, n_ff), fused.slice0(n_ff, n_ff)
        return
    experts.gate_bias = weights.take_if(presence, f"{prefix}.ffn_gate_exps.bias", (n_ff, n_expert))
    experts.up_bias = weights.take_if(presence, f"{prefix}.ffn_up_exps.bias", (n_ff, n_expert))


def _join_legacy(weights: WeightSource, name: str, n_expert: int, shape: tuple[int, int]) -> Value:
    """Concatenates the 2-D tensors `name.X.weight` along the expert axis."""
    parts = [weights.take(f"{name}.{e}.weight", shape) for e in range(n_expert)]
    if len({p.type_id for p in parts}) != 1:
        raise FileFormatError(f"{weights.gguf.path}: the experts of {name} have different types")
    return weights.join(parts, (*shape, n_expert), f"{name}_exps.weight")
