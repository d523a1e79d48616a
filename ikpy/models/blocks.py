"""Building blocks shared by the architectures: attention over the cache, dense and expert feed-forward networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ikpy.graph.ir import F32, Value, contiguous_strides
from ikpy.models.batch import BatchGraph
from ikpy.models.routing import Routing
from ikpy.models.sparse_attention import Visible

MIB = 1 << 20


@dataclass
class Experts:
    """Expert tensors of a layer; biases and the shared expert (with a sigmoid gate or without) are optional. Without
    gate the activation applies to up.

    output_scales: factors [1, E] of the experts' outputs. limit, input_limit, caps: as of DenseFFN. by_token: i32
    [n_used, n_vocab], the experts of every token where it chooses them.
    """

    gate_inp: Value
    up: Value
    gate: Value | None
    down: Value
    gate_inp_bias: Value | None = None
    selection_bias: Value | None = None
    up_bias: Value | None = None
    gate_bias: Value | None = None
    down_bias: Value | None = None
    shared: DenseFFN | None = None
    shared_gate: Value | None = None
    output_scales: Value | None = None
    limit: float = 0.0
    input_limit: float = 0.0
    caps: tuple[float, float] = (0.0, 0.0)
    by_token: Value | None = None


@dataclass
class DenseFFN:
    """Weights of a feed-forward network, of act(gate) * up or, without gate, of act(up); biases are optional.

    limit: bound of act(gate) from above and of up from both sides; input_limit: of gate itself and of up; 0: none.
    caps: if the first is above 0, the network is of sigmoid(gate) * capped(gate) * capped(up) (SiTU), where
    capped(x) = cap * tanh(x / cap); a second of 0 or below leaves up as it is.
    """

    gate: Value | None
    up: Value
    down: Value
    gate_bias: Value | None = None
    up_bias: Value | None = None
    down_bias: Value | None = None
    limit: float = 0.0
    input_limit: float = 0.0
    caps: tuple[float, float] = (0.0, 0.0)


def split_heads(x: Value, head_size: int) -> Value:
    """[head_size * H, T] seen as [head_size, H, T]."""
    return x.reshape(head_size, x.shape[0] // head_size, x.shape[1])


def part_of_rows(x: Value, start: int, length: int) -> Value:
    """Elements start .. start+length of dimension 0, for block types too (multiples of the block size)."""
    offset = contiguous_strides(x.type_id, (start,))[1] if start else 0
    shape = (length, *x.shape[1:])
    return Value(x.buffer, x.type_id, shape, x.strides, x.offset + offset, x.dynamic_dim)


def hadamard_block(head_size: int) -> int:
    """Block of the transform of cached heads, 0 for sizes that have none."""
    if head_size & (head_size - 1) == 0:
        return head_size
    return next((n for n in (512, 256, 128, 64) if head_size % n == 0), 0)


def heads_per_step(b: BatchGraph, n_head: int) -> int:
    """Heads whose scores are materialized at once without flash attention."""
    budget = b.params.attn_max_batch
    if budget:
        budget = max(budget, 128)
        need = b.params.n_ctx * b.n_tokens * n_head * 4 // MIB
        if need > budget:
            steps = min(-(-need // budget), n_head)
            return -(-n_head // steps)
    return n_head


def cached_attention(
    b: BatchGraph,
    layer: int,
    q: Value,
    k: Value,
    v: Value,
    *,
    scale: float,
    window: tuple[str, int] = ("none", 0),
    softcap: float = 0.0,
    sinks: Value | None = None,
    max_bias: float = 0.0,
    biases: Value | None = None,
) -> Value:
    """Stores k [dk, Hk, T] and v [dv, Hk, T], attends with q [dk, H, T]; returns [dv*H, T]."""
    store_heads(b, layer, k, v)
    return attend_cached(
        b, layer, q, scale=scale, window=window, softcap=softcap, sinks=sinks, max_bias=max_bias, biases=biases
    )


def store_heads(b: BatchGraph, layer: int, k: Value, v: Value) -> None:
    """Writes k [dk, Hk, T] and v [dv, Hk, T] to the cache of a layer."""
    g = b.graph
    k_block = hadamard_block(k.shape[0]) if b.params.k_hadamard else 0
    v_block = hadamard_block(v.shape[0]) if b.params.v_hadamard else 0
    b.store(layer, "k", g.hadamard(k, k_block) if k_block else k)
    b.store(layer, "v", g.hadamard(v, v_block) if v_block else v)


def attend_cached(
    b: BatchGraph,
    layer: int,
    q: Value,
    *,
    scale: float,
    window: tuple[str, int] = ("none", 0),
    softcap: float = 0.0,
    sinks: Value | None = None,
    seen: Visible | None = None,
    max_bias: float = 0.0,
    biases: Value | None = None,
) -> Value:
    """Attends with q [dk, H, T] to the cache of a layer, as far as it is seen; returns [dv*H, T].

    max_bias: of linear biases by the distance of positions, 0: none. biases: f32 [n, H] by differences of these.
    """
    g, seen = b.graph, seen or Visible(b.mask(*window))
    k, v = b.attended(layer, "k"), b.attended(layer, "v")
    k_block = hadamard_block(k.shape[0]) if b.params.k_hadamard else 0
    v_block = hadamard_block(v.shape[0]) if b.params.v_hadamard else 0
    out = g.attention(
        g.hadamard(q, k_block) if k_block else q,
        [k],
        v,
        seen.mask,
        scale=scale,
        flash=b.params.flash_attn,
        heads_per_step=heads_per_step(b, q.shape[1]),
        softcap=softcap,
        sinks=sinks,
        chosen=seen.chosen,
        common=seen.common,
        distances=b.distances(layer, max_bias, biases) if max_bias or biases else None,
    )
    if v_block:
        g.hadamard(out, v_block)
    return out.reshape(out.shape[0] * out.shape[1], out.shape[2])


def gated_heads(
    b: BatchGraph, gate: Value, h: Value, attended: Value, head_size: int, activation: str = "sigmoid"
) -> Value:
    """attended [dv*H, T] times the activation of gate h, which has a row per head or per element."""
    heads = split_heads(attended, head_size)
    weights = b.graph.unary(b.graph.mul_mat(gate, h), activation)
    n_head, n_tokens = heads.shape[1:3]
    per_head = weights.reshape(weights.shape[0] // n_head, n_head, n_tokens)
    return b.graph.mul(heads, per_head).reshape(*attended.shape[:2])


def dense_ffn(b: BatchGraph, ffn: DenseFFN, x: Value, activation: str = "silu") -> Value:
    """down(act(gate x) * (up x)) for x [D, T], or down(act(up x)) without gate."""
    g = b.graph
    if ffn.gate is None:
        hidden = g.unary(g.mul_mat(ffn.up, x, ffn.up_bias), activation)
        return g.mul_mat(ffn.down, hidden, ffn.down_bias)
    if is_limited(ffn):
        gate, up = g.mul_mat(ffn.gate, x, ffn.gate_bias), g.mul_mat(ffn.up, x, ffn.up_bias)
        return g.mul_mat(ffn.down, limited_gated(b, gate, up, activation, ffn), ffn.down_bias)
    hidden = g.mul_mat_up_gate(ffn.up, ffn.gate, x, activation, ffn.up_bias, ffn.gate_bias)
    return g.mul_mat(ffn.down, hidden, ffn.down_bias)


def is_limited(ffn: DenseFFN | Experts) -> bool:
    """Whether gate and up are no plain gated unit."""
    return bool(ffn.limit or ffn.input_limit or ffn.caps[0])


def limited_gated(b: BatchGraph, gate: Value, up: Value, activation: str, ffn: DenseFFN | Experts) -> Value:
    """min(act(gate), limit) * clamp(up, -limit, limit), or with the bound before the activation, or SiTU."""
    g, limit, (cap, up_cap) = b.graph, ffn.limit, ffn.caps
    if cap:
        up = g.softcap(up, up_cap) if up_cap > 0 else up
        return g.mul(g.gated(gate, g.softcap(gate, cap), "sigmoid"), up)
    if ffn.input_limit:
        return g.gated(gate, up, activation, ffn.input_limit)

    return g.mul(at_most(b, g.unary(gate, activation), limit), clamped(b, up, limit))


def at_most(b: BatchGraph, x: Value, limit: float) -> Value:
    """min(x, limit) as limit - relu(limit - x)."""
    g = b.graph
    return g.scale(g.unary(g.scale(x, -1.0, limit), "relu"), -1.0, limit)


def clamped(b: BatchGraph, x: Value, limit: float) -> Value:
    """x between -limit and limit."""
    g = b.graph
    return g.scale(g.unary(g.scale(at_most(b, x, limit), 1.0, limit), "relu"), 1.0, -limit)


def moe_ffn(
    b: BatchGraph,
    experts: Experts,
    routing: Routing,
    x: Value,
    activation: str = "silu",
    logits: Value | None = None,
) -> Value:
    """Routed experts on x [D, T], plus the shared expert. logits [E, T]: of a router that reads something else."""
    g = b.graph
    ids, weights = choose_experts(b, experts, routing, x, logits)
    if routing.weigh_inputs:
        groups = g.moe_group(ids, experts.gate_inp.shape[1])
        hidden = weighted_expert_hidden(b, experts, x, ids, groups, weights, activation)
        outputs = g.mul_mat_id(experts.down, hidden, ids, groups, experts.down_bias, per_slot=True)
        return g.moe_combine(outputs, None, ids, shared_expert(b, experts, x, activation))
    return chosen_experts(b, experts, x, ids, weights, activation)


def choose_experts(
    b: BatchGraph, experts: Experts, routing: Routing, x: Value, logits: Value | None = None
) -> tuple[Value, Value]:
    """Ids i32 [K, T] and weights [K, T] of the experts of x [D, T]; logits [E, T] as of `moe_ffn`."""
    g = b.graph
    if logits is None:
        logits = g.mul_mat(experts.gate_inp, x, experts.gate_inp_bias)
    ids, weights = g.moe_route(
        logits,
        routing.n_used,
        gating=routing.gating,
        bias=experts.selection_bias,
        normalize=routing.normalize,
        scale=routing.scale,
        groups=routing.groups if routing.limited or b.params.grouped_experts else (1, 1),
        reduction=b.params.expert_reduction,
        epsilon=routing.epsilon,
        fixed=None if experts.by_token is None else (experts.by_token, b.inputs["tokens"]),
    )
    if experts.output_scales is not None:
        scales = g.get_rows(experts.output_scales, ids.reshape(ids.shape[0] * ids.shape[1]))
        weights = g.mul(weights, scales.reshape(*weights.shape))
    return ids, weights


def chosen_experts(
    b: BatchGraph,
    experts: Experts,
    x: Value,
    ids: Value,
    weights: Value,
    activation: str = "silu",
    addend: Value | None = None,
) -> Value:
    """Sum of the experts ids [K, T] of x [D, T] by weights [K, T], plus the shared expert or an addend [D, T]."""
    g = b.graph
    groups = g.moe_group(ids, experts.up.shape[2])
    hidden = expert_hidden(b, experts, x, ids, groups, activation)
    outputs = g.mul_mat_id(experts.down, hidden, ids, groups, experts.down_bias, per_slot=True)
    return g.moe_combine(outputs, weights, ids, addend or shared_expert(b, experts, x, activation))


def shared_expert(b: BatchGraph, experts: Experts, x: Value, activation: str) -> Value | None:
    """The shared expert on x [D, T], times its sigmoid gate if there is one."""
    g = b.graph
    if experts.shared is None:
        return None
    out = dense_ffn(b, experts.shared, x, activation)
    if experts.shared_gate is None:
        return out
    return g.mul(out, g.unary(g.mul_mat(experts.shared_gate, x), "sigmoid"))


def expert_hidden(
    b: BatchGraph, experts: Experts, x: Value, ids: Value, groups: Value, activation: str, *, per_slot: bool = False
) -> Value:
    """act(gate x) * (up x) of the chosen experts, [F, K, T], or act(up x) without gate; x [D, T], or [D, K, T] if
    per_slot.
    """
    g = b.graph
    if experts.gate is None:
        return g.unary(g.mul_mat_id(experts.up, x, ids, groups, experts.up_bias, per_slot=per_slot), activation)
    limited = is_limited(experts)
    if experts.up.type_id == experts.gate.type_id and not per_slot and not limited:
        return g.mul_mat_id_up_gate(
            experts.up, experts.gate, x, ids, groups, activation, experts.up_bias, experts.gate_bias
        )
    up = g.mul_mat_id(experts.up, x, ids, groups, experts.up_bias, per_slot=per_slot)
    gate = g.mul_mat_id(experts.gate, x, ids, groups, experts.gate_bias, per_slot=per_slot)
    if limited:
        return limited_gated(b, gate, up, activation, experts)
    return g.gated(gate, up, activation)


def weighted_expert_hidden(
    b: BatchGraph, experts: Experts, x: Value, ids: Value, groups: Value, weights: Value, activation: str
) -> Value:
    """expert_hidden where each chosen expert reads x [D, T] times its weight [K, T]."""
    d, n_used, n_tokens = x.shape[0], weights.shape[0], x.shape[1]
    repeated = x.view((d, n_used, n_tokens), (0, x.strides[1], x.strides[2]))
    weighted = b.graph.mul(repeated, weights.reshape(1, n_used, n_tokens))
    if n_used == 1:  # one row per token: the fused form applies
        return expert_hidden(b, experts, weighted.reshape(d, n_tokens), ids, groups, activation)
    return expert_hidden(b, experts, weighted, ids, groups, activation, per_slot=True)


def concat_heads(b: BatchGraph, parts: Sequence[Value], n_head: int) -> Value:
    """Parts [n_i, H or 1, T] joined along dimension 0 for every head; a single head is repeated."""
    g = b.graph
    width = sum(p.shape[0] for p in parts)
    out = g.new(width, n_head, b.n_tokens, type_id=F32)
    start = 0
    for part in parts:
        source = part
        if part.shape[1] != n_head:
            source = part.view((part.shape[0], n_head, part.shape[2]), (0, part.strides[2], part.strides[3]))
        g.copy(source, out.slice0(start, part.shape[0]))
        start += part.shape[0]
    return out
