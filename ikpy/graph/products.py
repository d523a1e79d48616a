"""Products with weights: of matrices and of experts, with what adapters add and what statistics of inputs need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ikpy.graph.activations import ActivationCollector
from ikpy.graph.adapters import GraphAdapters, LowRank
from ikpy.graph.elementwise import UNARY_KINDS, ElementwiseOps
from ikpy.graph.ir import I32, Value

GATINGS = {
    "softmax": 1,
    "sigmoid": 2,
    "selected_softmax": 3,
    "sqrt_softplus": 4,
    "selected_sigmoid": 5,
    "sparse_mixer": 6,
}


def _has_factor(*weights: Value) -> bool:
    return any(weight.buffer.factor is not None for weight in weights)


class ProductOps(ElementwiseOps):
    """Ops that read weights of any type. core is the native module (activation formats and sizes).

    With a collector, every matmul also adds its input to the statistics of its weight. With adapters, products with
    their weights get the low-rank addition.
    """

    def __init__(
        self, core: Any, collector: ActivationCollector | None = None, adapters: GraphAdapters | None = None
    ) -> None:
        super().__init__()
        self.core = core
        self.collector = collector
        self.adapters = adapters
        if collector is not None:
            collector.start_graph()
        self._prepared: dict[tuple[int, int], tuple[Value, Value]] = {}

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
        if weight.buffer.factor is not None:
            return self._factored(weight, x, bias, dst)
        return self._product(weight, x, bias, dst)

    def _product(self, weight: Value, x: Value, bias: Value | None, dst: Value | None) -> Value:
        """As `mul_mat`, without the factor of the weight."""
        self.observe(weight, x)
        prepared, fmt = self.prepare(x, weight.type_id)
        n_tokens = 0 if x.dynamic_dim == 1 else x.shape[1]
        pairs = [] if weight.buffer.factor is not None else self._pairs(weight)
        product = dst if dst is not None and not pairs else self.new(weight.shape[1], x.shape[1], x.shape[2])
        self._emit("mul_mat", product, [weight, prepared, bias], ip=[fmt, n_tokens])
        return self._adapted(pairs, x, product, dst)

    def _factored(self, weight: Value, x: Value, bias: Value | None, dst: Value | None) -> Value:
        """As `mul_mat`, of a weight with a factor."""
        product = self._times_factor(weight, self._product(weight, x, None, None))
        product = product if bias is None else self.add(product, bias)
        product = self._adapted(self._pairs(weight), x, product, None)
        return product if dst is None else self.copy(product, dst)

    def _adapted(self, pairs: Sequence[LowRank], x: Value, product: Value, dst: Value | None) -> Value:
        """A product plus what adapters add to it, of the last one in dst."""
        for i, pair in enumerate(pairs):
            low = self.mul(self.mul_mat(pair.a, x), self._adapter_scale(pair, x.shape[1]))
            last = dst if i == len(pairs) - 1 else None
            product = self._emit("add", last or self.new(*product.shape), [product, self.mul_mat(pair.b, low)])
        return product

    def _times_factor(self, weight: Value, product: Value, ids: Value | None = None) -> Value:
        """A product [N, T, B], of experts ids [Ku, T] [N, Ku, T], times the factor of its weight if that has one."""
        factor = weight.buffer.factor
        if factor is None or isinstance(factor, float):
            return product if factor is None else self.scale(product, factor)
        if ids is None:
            return self.mul(product, factor.reshape(1, 1, factor.shape[1]))
        chosen = self.get_rows(factor, ids.reshape(ids.shape[0] * ids.shape[1]))
        return self.mul(product, chosen.reshape(1, *ids.shape[:2]))

    def get_rows(self, table: Value, ids: Value) -> Value:
        """Rows of table [K, V] picked by ids i32 [T], as f32 [K, T]; -1 gives zeros, on devices from floats only."""
        rows = self._emit("get_rows", self.new(table.shape[0], ids.shape[0]), [table, ids])
        rows = self._times_factor(table, rows)
        for pair in self._pairs(table):
            low = self.mul(self.get_rows(pair.b, ids), self._adapter_scale(pair, ids.shape[0]))
            assert pair.rows is not None
            rows = self.add(rows, self.mul_mat(pair.rows, low))
        return rows

    def mul_mat_up_gate(
        self,
        up: Value,
        gate: Value,
        x: Value,
        kind: str,
        up_bias: Value | None = None,
        gate_bias: Value | None = None,
    ) -> Value:
        """act(gate x) * (up x) as f32 [F, T]; fused when both weights have one type and no factor."""
        if up.type_id != gate.type_id or _has_factor(up, gate) or self._pairs(up, gate):
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
        fixed: tuple[Value, Value] | None = None,
    ) -> tuple[Value, Value]:
        """Expert ids i32 [K, T] and weights f32 [K, T] from router logits [E, T]; bias [E] counts for the choice only.

        fixed: a table i32 [K, V] and tokens i32 [T], whose rows are the experts instead of the best ones; bias, groups
        and reduction do not count. Tokens and experts that there are not give id -1 and weight 0.

        reduction: behind so many of the best experts, those with a score below that share of the best one's are dropped
        (id -1, weight 0); -1: none. The other parameters are those of ikpy.models.routing.Routing.
        """
        ids = self.new(n_used, logits.shape[1], type_id=I32)
        weights = self.new(n_used, logits.shape[1])
        kept = max(reduction[0], 1) if reduction[0] >= 0 else -1  # the best expert always stays
        ip = [n_used, GATINGS[gating], int(normalize), groups[0], groups[1], kept]
        src = [logits, bias, weights]
        if fixed is not None:
            table, tokens = fixed
            if (
                table.shape[0] != n_used
                or tokens.shape[0] != logits.shape[1]
                or {table.type_id, tokens.type_id} != {I32}
            ):
                raise ValueError(f"{n_used} experts of tokens {tokens.shape} by table {table.shape} {table.type_name}")
            src += [table, tokens]
        self._emit("moe_route", ids, src, ip=ip, fp=[scale, reduction[1], epsilon], writes=[weights])
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
        late_bias = bias if _has_factor(weight) else None
        self._emit("mul_mat_id", dst, [weight, prepared, groups, None if late_bias else bias], ip=ip)
        dst = self._times_factor(weight, dst, ids)
        if late_bias is not None:
            chosen = self.get_rows(late_bias, ids.reshape(n_used * n_tokens))
            dst = self.add(dst, chosen.reshape(*dst.shape))
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
        if _has_factor(up, gate) or self._pairs(up, gate):
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
