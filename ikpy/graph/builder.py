"""Graph builder: one method per op, with shape rules. Architectures use it through models/blocks.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from ikpy.errors import UnsupportedError
from ikpy.graph.activations import ActivationCollector
from ikpy.graph.adapters import GraphAdapters, LowRank
from ikpy.graph.ir import ALWAYS, F16, F32, I32, Buffer, CellRange, Node, Value, contiguous_strides

UNARY_KINDS = {
    "silu": 0,
    "gelu": 1,
    "relu": 2,
    "relu_squared": 3,
    "sigmoid": 4,
    "tanh": 5,
    "swiglu_oai": 6,
    "gelu_erf": 7,
    "softplus": 8,
}
# Sources that kernels read as f32: norm weights, biases, sinks, frequency factors.
FLOAT_SOURCES = {
    "rms_norm": (1,),
    "layer_norm": (1, 2),
    "add": (1,),
    "mul": (1,),
    "rope_table": (1,),
    "attention": (4,),
    "choose_cells": (0, 1),
    "mul_mat": (2,),
    "mul_mat_up_gate": (3, 4),
    "mul_mat_id": (3,),
    "mul_mat_id_up_gate": (4, 5),
    "moe_route": (1,),
    "causal_conv": (1,),
}
MAX_I32 = 2**31 - 1
"""Largest parameter of a node: no position comes behind a longer window or period."""
GATINGS = {"softmax": 1, "sigmoid": 2, "selected_softmax": 3, "sqrt_softplus": 4, "selected_sigmoid": 5}
MAX_CONV_TAPS = 16
"""Longest filter of causal_conv."""


class KeptStates(NamedTuple):
    """Copies of states behind single tokens: states as those of the op, [..., n], and slots i32 [T], which of them gets
    the copy behind each token; -1: none."""

    states: Value
    slots: Value


class Graph:
    """Nodes in execution order. core is the native module (activation formats and sizes).

    With a collector, every matmul also adds its input to the statistics of its weight. With adapters, products with
    their weights get the low-rank addition.
    """

    def __init__(
        self, core: Any, collector: ActivationCollector | None = None, adapters: GraphAdapters | None = None
    ) -> None:
        self.core = core
        self.collector = collector
        self.adapters = adapters
        if collector is not None:
            collector.start_graph()
        self.nodes: list[Node] = []
        self._prepared: dict[tuple[int, int], tuple[Value, Value]] = {}
        self._cells = ALWAYS
        self._limited: set[Buffer] = set()

    @contextmanager
    def only(self, cells: CellRange) -> Iterator[None]:
        """Nodes added meanwhile run only with so many attended cells; others must not read what they leave out."""
        before, self._cells = self._cells, cells
        try:
            yield
        finally:
            self._cells = before

    def new(self, *shape: int, type_id: int = F32, dynamic_dim: int | None = None, name: str = "") -> Value:
        """A contiguous arena value."""
        strides = contiguous_strides(type_id, shape)
        full = (*shape, *([1] * (4 - len(shape))))
        nbytes = strides[1] * full[1] * full[2] * full[3]
        value = Value(Buffer(nbytes), type_id, full, strides, dynamic_dim=dynamic_dim, name=name)  # type: ignore[arg-type]
        return value

    def _emit(
        self,
        kind: str,
        dst: Value,
        src: Sequence[Value | None],
        ip: Sequence[int] = (),
        fp: Sequence[float] = (),
        writes: Sequence[Value] = (),
    ) -> Value:
        for i in FLOAT_SOURCES.get(kind, ()):
            value = src[i]
            if value is not None and value.type_id != F32:
                raise UnsupportedError(f"tensor '{value.name}' has type {value.type_name}; it is read as f32 only")
        cells = self._cells
        if kind == "act_prepare" and src[0] is not None and src[0].buffer not in self._limited:
            cells = ALWAYS  # others may share the prepared activations
        if cells != ALWAYS:
            self._limited.add(dst.buffer)
        self.nodes.append(Node(kind, dst, list(src), list(ip), list(fp), list(writes), cells))
        return dst

    # rows and norms

    def get_rows(self, table: Value, ids: Value) -> Value:
        """Rows of table [K, V] picked by ids i32 [T], as f32 [K, T]."""
        rows = self._emit("get_rows", self.new(table.shape[0], ids.shape[0]), [table, ids])
        for pair in self._pairs(table):
            low = self.mul(self.get_rows(pair.b, ids), self._adapter_scale(pair, ids.shape[0]))
            assert pair.rows is not None
            rows = self.add(rows, self.mul_mat(pair.rows, low))
        return rows

    def rms_norm(self, x: Value, weight: Value | None, eps: float) -> Value:
        """x / rms(x) * weight over dimension 0; weight is [n] or one row per dimension 1."""
        return self._emit("rms_norm", self.new(*x.shape), [x, weight, None, None], fp=[eps])

    def layer_norm(self, x: Value, weight: Value | None, bias: Value | None, eps: float) -> Value:
        """(x - mean) / std * weight + bias over dimension 0."""
        return self._emit("layer_norm", self.new(*x.shape), [x, weight, bias], fp=[eps])

    # element-wise

    def add(self, a: Value, b: Value) -> Value:
        """a + b; b is broadcast along dimensions of extent 1."""
        return self._emit("add", self.new(*a.shape), [a, b])

    def mul(self, a: Value, b: Value) -> Value:
        """a * b; b is broadcast along dimensions of extent 1."""
        return self._emit("mul", self.new(*a.shape), [a, b])

    def scale(self, x: Value, factor: float, offset: float = 0.0) -> Value:
        """x * factor + offset."""
        return self._emit("scale", self.new(*x.shape), [x], fp=[factor, offset])

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self._emit("softcap", self.new(*x.shape), [x], fp=[cap])

    def block_maxima(self, x: Value, size: int) -> Value:
        """The largest of every `size` elements of rows x [n, T], f32 [n / size rounded up, T]; NaN if one is."""
        return self._emit("block_maxima", self.new(-(-x.shape[0] // size), x.shape[1]), [x], ip=[size])

    def unary(self, x: Value, kind: str) -> Value:
        """An activation function of UNARY_KINDS."""
        return self._emit("unary", self.new(*x.shape), [x], ip=[UNARY_KINDS[kind]])

    def gated(self, gate: Value, up: Value, kind: str) -> Value:
        """act(gate) * up."""
        return self._emit("gated_unary", self.new(*gate.shape), [gate, up], ip=[UNARY_KINDS[kind]])

    def copy(self, x: Value, dst: Value) -> Value:
        """Strided copy into dst (f32 or f16)."""
        return self._emit("copy", dst, [x])

    # positions and attention

    def rope_table(self, pos: Value, n_rot: int, factors: Value | None, params: Sequence[float]) -> Value:
        """(cos, sin) pairs f32 [n_rot, T]. params: base, freq_scale, ext_factor, attn_factor, low, high."""
        return self._emit("rope_table", self.new(n_rot, pos.shape[0]), [pos, factors], fp=params)

    def rope(self, x: Value, table: Value, *, neox: bool, offset: int = 0) -> Value:
        """Rotates table.shape[0] elements from offset of every head of x [d, H, T], in place."""
        return self._emit("rope", x, [x, table], ip=[table.shape[0], int(neox), offset])

    def attention_temperature(self, pos: Value, scale: float, period: int, offset: int) -> Value:
        """1 + scale * ln(1 + floor((pos + offset) / period)) of every token, f32 [1, 1, T]."""
        dst = self.new(1, 1, pos.shape[0])
        return self._emit("attention_temperature", dst, [pos], ip=[min(period, MAX_I32), offset], fp=[scale])

    def hadamard(self, x: Value, block: int) -> Value:
        """Orthonormal Walsh-Hadamard transform of dimension 0 in blocks of a power of two, in place."""
        return self._emit("hadamard", x, [x], ip=[block])

    def kv_store(self, x: Value, cache: Value, cells: Value) -> Value:
        """Writes x f32 [n, H, T] to the cache [n, H, n_ctx] at cells i32 [T]."""
        return self._emit("kv_store", cache, [x, cells])

    def kv_shift(
        self, cache: Value, table: Value, deltas: Value, *, neox: bool, offset: int, hadamard: int = 0
    ) -> Value:
        """Re-rotates the keys of cache [n, H, n_ctx] by table [n_rot, n_ctx] where deltas i32 [n_ctx] is not 0.

        hadamard: block of the transform under which the keys are stored, 0 for none.
        """
        return self._emit("kv_shift", cache, [table, deltas], ip=[table.shape[0], int(neox), offset, hadamard])

    def kq_mask(
        self,
        cell_pos: Value,
        cell_seq: Value,
        pos: Value,
        seq: Value,
        *,
        window: str,
        n_swa: int,
        causal: bool,
        own: bool,
    ) -> tuple[Value, Value]:
        """Mask f16 [cells, T] and visible ranges i32 [2, T]. window: none, sliding, chunked.

        own: the cells are those of this window alone and all of them are looked at, not the first n_kv.
        """
        n_tokens = pos.shape[0]
        mask = self.new(cell_pos.shape[0], n_tokens, type_id=F16)
        ranges = self.new(2, n_tokens, type_id=I32)
        kind = {"none": 0, "sliding": 1, "chunked": 2}[window]
        src = [cell_pos, cell_seq, pos, seq, ranges]
        ip = [kind, min(n_swa, MAX_I32), int(causal), int(own)]
        self._emit("kq_mask", mask, src, ip=ip, writes=[ranges])
        return mask, ranges

    def attention(
        self,
        q: Value,
        keys: Sequence[Value],
        values: Value,
        mask: tuple[Value, Value],
        *,
        scale: float,
        flash: bool,
        heads_per_step: int = 1,
        softcap: float = 0.0,
        sinks: Value | None = None,
        dst: Value | None = None,
        chosen: Value | None = None,
        common: Value | None = None,
    ) -> Value:
        """softmax(scale * q.k + mask) v as f32 [dv, H, T]. keys: one or two segments of the head dimension.

        chosen: of choose_cells; the mask counts for tokens that chose all. common: another mask by which tokens that
        have cells in common are found, where the mask hides most of these.
        """
        dst = dst or self.new(values.shape[0], q.shape[1], q.shape[2])
        second = keys[1] if len(keys) > 1 else None
        src = [q, keys[0], values, mask[0], sinks, second, mask[1], chosen, common]
        return self._emit("attention", dst, src, ip=[int(flash), heads_per_step], fp=[scale, softcap])

    def choose_cells(self, q: Value, weights: Value, keys: Value, mask: tuple[Value, Value], top_k: int) -> Value:
        """The cells that each token attends to, i32 [1 + top_k, T]: their number, or -1 for all, then the cells in
        rising order.

        The top_k visible cells s with the largest sum_h weights[h, t] relu(q[:, h, t] . keys[:, s]) (DeepSeek-V3.2,
        arXiv:2512.02556), the first ones where scores are equal; all where a token sees no more. q f32 [n, H, T],
        weights f32 [H, T], keys [n, 1, n_kv] of any cache type.
        """
        if q.shape[0] != keys.shape[0] or keys.shape[1] != 1 or weights.shape[:2] != q.shape[1:3] or top_k < 1:
            raise ValueError(f"choice of {top_k} by q {q.shape}, weights {weights.shape}, keys {keys.shape}")
        dst = self.new(1 + top_k, q.shape[2], type_id=I32)
        return self._emit("choose_cells", dst, [q, weights, keys, *mask])

    def chosen_mask(self, mask: Value, chosen: Value, n_cells: int) -> Value:
        """The first n_cells of every row of a mask, with all cells hidden that a token did not choose."""
        dst = self.new(n_cells, mask.shape[1], type_id=F16)
        return self._emit("chosen_mask", dst, [mask, chosen])

    # recurrent layers

    def causal_conv(
        self, x: Value, weight: Value, state: Value, slots: Value, *, silu: bool, kept: KeptStates | None = None
    ) -> Value:
        """Causal convolution along the tokens of each sequence, one filter per channel, as f32 [C, T].

        y[c, t] = sum_j weight[j, c] * input[c, t - n + 1 + j], then SiLU if asked for. x f32 [C, T]; weight f32 [n, C],
        n up to MAX_CONV_TAPS; state f32 [n - 1, C, n_slots], the inputs before the batch, oldest first, is brought up
        to date; slots i32 [T]: the state of every token. Tokens of a slot come in the order of their positions, those
        of several slots in any. Kernels do not check slots: whoever fills them in, as with the cells of kv_store, keeps
        them within 0 .. n_slots - 1. kept: states behind some of the tokens are copied.
        """
        taps, channels = weight.shape[:2]
        if taps > MAX_CONV_TAPS:
            raise UnsupportedError(f"tensor '{weight.name}' has {taps} taps; at most {MAX_CONV_TAPS} are supported")
        if x.shape[:2] != (channels, slots.shape[0]) or state.shape[:2] != (taps - 1, channels):
            raise ValueError(f"convolution of {x.shape} with {weight.shape}, state {state.shape}, slots {slots.shape}")
        src = [x, weight, state, slots]
        writes = _updated_states(src, state, slots, kept, 2)
        return self._emit("causal_conv", self.new(*x.shape[:2]), src, ip=[int(silu)], writes=writes)

    def gated_delta_rule(
        self,
        q: Value,
        k: Value,
        v: Value,
        g: Value,
        beta: Value,
        state: Value,
        slots: Value,
        *,
        l2_eps: float,
        scale: float,
        interleaved: bool,
        kept: KeptStates | None = None,
    ) -> Value:
        """Gated delta rule (arXiv:2412.06464, per channel arXiv:2510.26692) as f32 [dv, Hv, T].

        Of every token: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = scale * S^T q. q and k f32 [dk, Hk, T], with
        l2_eps > 0 first divided by sqrt(x.x + l2_eps); v f32 [dv, Hv, T]; all three may be views whose dimension 0 is
        contiguous. g f32 [Hv, T], or [dk, Hv, T] for a decay per row of S; beta f32 [Hv, T]. state f32
        [dv, dk, Hv, n_slots], the columns of S contiguous, is brought up to date; slots and kept as in causal_conv.
        Head h of v meets head h // (Hv / Hk) of q and k if interleaved, else h % Hk.
        """
        (dk, key_heads, n_tokens), (dv, heads) = k.shape[:3], v.shape[:2]
        per_head, per_row = (heads, n_tokens, 1), (dk, heads, n_tokens)
        if heads % key_heads or q.shape != k.shape or v.shape[2] != n_tokens or slots.shape[0] != n_tokens:
            raise ValueError(f"delta rule of q {q.shape}, k {k.shape}, v {v.shape}, slots {slots.shape}")
        if state.shape[:3] != (dv, dk, heads) or beta.shape[:3] != per_head or g.shape[:3] not in (per_head, per_row):
            raise ValueError(f"delta rule of k {k.shape}, decay {g.shape}, beta {beta.shape}, state {state.shape}")
        src = [q, k, v, g, beta, state, slots]
        ip, fp = [int(interleaved), int(g.shape[:3] == per_row)], [l2_eps, scale]
        writes = _updated_states(src, state, slots, kept, 3)
        return self._emit("gated_delta_rule", self.new(dv, heads, n_tokens), src, ip=ip, fp=fp, writes=writes)

    # statistics of matmul inputs

    def observe(self, weight: Value, x: Value, *, stored_only: bool = False) -> None:
        """Adds x [K, T, B] to the statistics of weight, if anybody collects them.

        stored_only: for an input that reaches the weight in a rearranged form; only tensors of the file count.
        """
        if self.collector is None or (stored_only and not self.collector.is_stored(weight.name)):
            return
        entry = self.collector.dense_entry(weight, x)
        if entry is not None:
            self._emit("act_stats", entry.value, [x, None], ip=[entry.n_matrices, 1])
        for first, second, sums in self.collector.similarity_pairs(weight, x):
            self._emit("act_similarity", sums.value, [first, second], ip=[sums.n_slots])

    def observe_experts(self, op: str, weight: Value, x: Value, groups: Value, slots_per_row: int) -> None:
        """Adds the rows of x [K, R] to the statistics of the experts they are sent to."""
        if self.collector is None:
            return
        entry = self.collector.expert_entry(op, weight, x)
        if entry is not None:
            self._emit("act_stats", entry.value, [x, groups], ip=[entry.n_matrices, slots_per_row])

    # matrix multiplication

    def prepare(self, x: Value, weight_type: int) -> tuple[Value, int]:
        """Activations x [K, T, B] in the format that weights of this type read, shared by all its users."""
        return self._prepare(x, self.core.activation_format(weight_type, x.shape[1]))

    def prepare_for_experts(self, x: Value, weight: Value, ids: Value) -> tuple[Value, int]:
        """Activations x [K, R] in the format that the experts' weight [K, N, E] reads; ids [Ku, T]."""
        n_used, n_tokens = ids.shape[0], ids.shape[1]
        # Experts may take the format of many rows from fewer on than others; a batch that others find small keeps
        # theirs (Context.max_uniform_tokens), even if a token uses most of the experts.
        n_rows = min(n_used * n_tokens // weight.shape[2], n_tokens // 2)
        return self._prepare(x, self.core.activation_format(weight.type_id, n_rows, True))

    def _prepare(self, x: Value, fmt: int) -> tuple[Value, int]:
        key = (id(x), fmt)
        if key not in self._prepared:
            nbytes = self.core.activation_nbytes(fmt, x.shape[0], x.shape[1], x.shape[2] * x.shape[3])
            dst = self.new((nbytes + 3) // 4)
            self._emit("act_prepare", dst, [x], ip=[fmt])
            self._prepared[key] = (x, dst)  # holding x keeps its id unique
        return self._prepared[key][1], fmt

    def mul_mat(self, weight: Value, x: Value, bias: Value | None = None, *, dst: Value | None = None) -> Value:
        """weight [K, N, B] times x [K, T, B] as f32 [N, T, B] (or into dst, f32 or f16)."""
        if weight.shape[0] != x.shape[0]:
            raise ValueError(f"matmul of {weight.name} {weight.shape} with {x.shape}")
        self.observe(weight, x)
        prepared, fmt = self.prepare(x, weight.type_id)
        n_tokens = 0 if x.dynamic_dim == 1 else x.shape[1]
        pairs = self._pairs(weight)
        product = dst if dst is not None and not pairs else self.new(weight.shape[1], x.shape[1], x.shape[2])
        self._emit("mul_mat", product, [weight, prepared, bias], ip=[fmt, n_tokens])
        for i, pair in enumerate(pairs):
            low = self.mul(self.mul_mat(pair.a, x), self._adapter_scale(pair, x.shape[1]))
            last = dst if i == len(pairs) - 1 else None
            product = self._emit("add", last or self.new(*product.shape), [product, self.mul_mat(pair.b, low)])
        return product

    # adapters

    def _pairs(self, *weights: Value) -> list[LowRank]:
        return [pair for weight in weights for pair in self.adapters.of(weight)] if self.adapters else []

    def _adapter_scale(self, pair: LowRank, n_rows: int) -> Value:
        """Scale of every row [1, n_rows]: of all tokens, or of those the last layer keeps."""
        assert self.adapters is not None
        scale = self.adapters.scales[pair.adapter]
        if n_rows == self.adapters.n_tokens:
            return scale
        if n_rows != self.adapters.outputs.shape[0]:
            raise ValueError(f"adapter of {pair.tensor}: {n_rows} rows are neither tokens nor outputs")
        return self.get_rows(scale, self.adapters.outputs)

    def _adapted_experts(
        self, weight: Value, x: Value, ids: Value, groups: Value, product: Value, *, per_slot: bool
    ) -> Value:
        for pair in self._pairs(weight):
            low = self.mul_mat_id(pair.a, x, ids, groups, per_slot=per_slot)
            scale = self._adapter_scale(pair, ids.shape[1])
            low = self.mul(low, scale.reshape(1, 1, ids.shape[1]))
            product = self.add(product, self.mul_mat_id(pair.b, low, ids, groups, per_slot=True))
        return product

    def mul_mat_up_gate(
        self,
        up: Value,
        gate: Value,
        x: Value,
        kind: str,
        up_bias: Value | None = None,
        gate_bias: Value | None = None,
    ) -> Value:
        """act(gate x) * (up x) as f32 [F, T]; fused when both weights have one type."""
        if up.type_id != gate.type_id or self._pairs(up, gate):
            return self.gated(self.mul_mat(gate, x, gate_bias), self.mul_mat(up, x, up_bias), kind)
        self.observe(gate, x)
        self.observe(up, x)
        prepared, fmt = self.prepare(x, up.type_id)
        dst = self.new(up.shape[1], x.shape[1])
        src = [up, gate, prepared, up_bias, gate_bias]
        return self._emit("mul_mat_up_gate", dst, src, ip=[fmt, x.shape[1], UNARY_KINDS[kind]])

    # mixture of experts

    def moe_route(
        self,
        logits: Value,
        n_used: int,
        *,
        gating: str,
        bias: Value | None = None,
        normalize: bool = False,
        scale: float = 1.0,
        groups: tuple[int, int] = (1, 1),
        reduction: tuple[int, float] = (-1, 0.0),
        epsilon: float = 0.0,
    ) -> tuple[Value, Value]:
        """Expert ids i32 [K, T] and weights f32 [K, T] from router logits [E, T]."""
        ids = self.new(n_used, logits.shape[1], type_id=I32)
        weights = self.new(n_used, logits.shape[1])
        kept = max(reduction[0], 1) if reduction[0] >= 0 else -1  # the best expert always stays
        ip = [n_used, GATINGS[gating], int(normalize), groups[0], groups[1], kept]
        self._emit(
            "moe_route",
            ids,
            [logits, bias, weights],
            ip=ip,
            fp=[scale, reduction[1], epsilon],
            writes=[weights],
        )
        return ids, weights

    def moe_group(self, ids: Value, n_expert: int) -> Value:
        """Assignments sorted by expert: i32 [E + 1 offsets, then K*T entries]."""
        n = ids.shape[0] * ids.shape[1]
        return self._emit("moe_group", self.new(n_expert + 1 + n, type_id=I32), [ids], ip=[n_expert])

    def mul_mat_id(
        self, weight: Value, x: Value, ids: Value, groups: Value, bias: Value | None = None, *, per_slot: bool
    ) -> Value:
        """Expert matmul: weight [K, N, E], x [K, T] (or [K, Ku, T] if per_slot) -> f32 [N, Ku, T]."""
        n_used, n_tokens = ids.shape[0], ids.shape[1]
        rows = x.reshape(x.shape[0], n_used * n_tokens) if per_slot else x
        self.observe_experts("MUL_MAT_ID", weight, rows, groups, 1 if per_slot else n_used)
        prepared, fmt = self.prepare_for_experts(rows, weight, ids)
        dst = self.new(weight.shape[1], n_used, n_tokens)
        ip = [fmt, n_tokens, int(per_slot), n_used, weight.shape[2]]
        self._emit("mul_mat_id", dst, [weight, prepared, groups, bias], ip=ip)
        return self._adapted_experts(weight, x, ids, groups, dst, per_slot=per_slot)

    def mul_mat_id_up_gate(
        self,
        up: Value,
        gate: Value,
        x: Value,
        ids: Value,
        groups: Value,
        kind: str,
        up_bias: Value | None = None,
        gate_bias: Value | None = None,
    ) -> Value:
        """Experts' act(gate x) * (up x): x [K, T] -> f32 [F, Ku, T]."""
        if self._pairs(up, gate):
            up_product = self.mul_mat_id(up, x, ids, groups, up_bias, per_slot=False)
            return self.gated(self.mul_mat_id(gate, x, ids, groups, gate_bias, per_slot=False), up_product, kind)
        self.observe_experts("MOE_FUSED_UP_GATE", up, x, groups, ids.shape[0])
        n_used, n_tokens = ids.shape[0], ids.shape[1]
        prepared, fmt = self.prepare_for_experts(x, up, ids)
        dst = self.new(up.shape[1], n_used, n_tokens)
        ip = [fmt, n_tokens, UNARY_KINDS[kind], n_used, up.shape[2]]
        return self._emit("mul_mat_id_up_gate", dst, [up, gate, prepared, groups, up_bias, gate_bias], ip=ip)

    def moe_combine(self, outputs: Value, weights: Value | None, ids: Value, addend: Value | None = None) -> Value:
        """Weighted sum over slots of outputs [D, Ku, T], plus addend [D, T]."""
        dst = self.new(outputs.shape[0], ids.shape[1])
        return self._emit("moe_combine", dst, [outputs, weights, ids, addend])


def _updated_states(src: list[Value], state: Value, slots: Value, kept: KeptStates | None, dims: int) -> list[Value]:
    """What an op of a recurrent layer writes, states of so many dimensions each; adds what it keeps to its sources.
    Each is an output of its own, as those that are listed among the sources count as not read."""
    if kept is None:
        return [replace(state)]
    if kept.slots.shape != slots.shape or kept.states.shape[:dims] != state.shape[:dims]:
        raise ValueError(f"kept states {kept.states.shape} of {state.shape}, slots {kept.slots.shape}")
    src.extend(kept)
    return [replace(state), replace(kept.states)]
