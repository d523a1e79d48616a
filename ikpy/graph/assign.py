"""Which device runs each node of a graph.

A node runs where its weights are, or its cache, or else where its newest input was made. What every device can make for
itself from inputs (masks, rotation tables, prepared activations, expert groups) is made on each device that reads it,
so that only activations cross from one device to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ikpy.graph.adapters import adapted_tensor
from ikpy.graph.division import TIED_OUTPUT
from ikpy.graph.ir import F32, Buffer, Node, Value, contiguous_strides, like
from ikpy.graph.offload_policy import EXPERT_MATMUL, FUSED_EXPERTS, FUSED_MATMUL, MATMUL
from ikpy.graph.placement import CPU, Placement

REPLICATED = {"act_prepare", "rope_table", "kq_mask", "attention_temperature", "moe_group"}
EXPERT_KINDS = {"mul_mat_id": EXPERT_MATMUL, "mul_mat_id_up_gate": FUSED_EXPERTS}
MATMUL_KINDS = {"mul_mat": MATMUL, "mul_mat_up_gate": FUSED_MATMUL, **EXPERT_KINDS}
FUSED_KINDS = ("mul_mat_up_gate", "mul_mat_id_up_gate")
OUTPUT = "output.weight"


@dataclass
class Step:
    """A node on a device. uploads: weights that stay in host memory and are copied for this node alone."""

    device: str
    node: Node
    uploads: list[Value] = field(default_factory=list)


@dataclass
class DeviceRules:
    """What decides where nodes run.

    cache_devices: device of every cache buffer by its name. supports: why a node cannot run on a device ("": any
    GPU), or None. activation_format: format of the activations of a product on a device; prepared_nbytes: bytes of an
    act_prepare node's result. offload_batch: smallest batch for which a product with weights in host memory goes to a
    device (times experts over used experts for routed ones), 0 = never. policy: operations that may do so.
    """

    placement: Placement
    cache_devices: Mapping[str, str]
    supports: Callable[[Node, str], str | None]
    activation_format: Callable[[Node, str], int]
    prepared_nbytes: Callable[[Node, str], int]
    offload_batch: int = 32
    policy: Mapping[str, bool] = field(default_factory=dict)

    def runs(self, node: Node) -> bool:
        """Whether GPUs have a kernel for a node, and for what prepares the activations of a product."""
        if node.kind in MATMUL_KINDS:
            fmt, x = self.activation_format(node, ""), node.src[2 if node.kind in FUSED_KINDS else 1]
            assert x is not None
            if self.supports(Node("act_prepare", x, [x], [fmt]), "") is not None:
                return False
            node = replace(node, ip=[fmt, *node.ip[1:]])
        return self.supports(node, "") is None

    def weight_device(self, value: Value, kind: str) -> str:
        """Device of a weight as this kind of node uses it."""
        name = adapted_tensor(value.buffer.name)
        # A tied embedding matrix is looked up in host memory and multiplied on the device of the output.
        if name == TIED_OUTPUT and kind != "get_rows" and name not in self.placement.overridden:
            return self.placement.output
        return self.placement.device_of(name)


@dataclass
class Assignment:
    """Steps in an order that is valid on one device; fallbacks: reason and kind of nodes kept on the CPU -> count."""

    steps: list[Step]
    fallbacks: Counter[tuple[str, str]]


def smallest_expert_batch(smallest: int, n_expert: int, n_used: int) -> int:
    """Smallest batch for which an expert gets as many tokens on average as are enough for a matrix."""
    return smallest * n_expert // max(1, n_used)


def written(node: Node) -> list[Value]:
    """Values that a node writes."""
    return [node.dst, *node.writes]


def read(node: Node) -> list[Value]:
    """Values that a node reads; outputs that are listed among the sources do not count."""
    if not node.writes:
        return [v for v in node.src if v is not None]
    outputs = {id(v) for v in node.writes}
    return [v for v in node.src if v is not None and id(v) not in outputs]


def assign(nodes: list[Node], rules: DeviceRules, fixed: Mapping[Node, str] | None = None) -> Assignment:
    """Decides the device of every node; fused nodes whose weights lie apart are divided.

    fixed: devices of nodes that were decided before.
    """
    return _Assigner(rules, fixed or {}).run(nodes)


class _Assigner:
    def __init__(self, rules: DeviceRules, fixed: Mapping[Node, str]) -> None:
        self.rules = rules
        self.fixed = fixed
        self.steps: list[Step] = []
        self.made_on: dict[Buffer, str] = {}
        self.order: dict[Buffer, int] = {}
        self.prepare: dict[Buffer, Node] = {}
        self.own: dict[Buffer, dict[tuple[int, int], Node]] = {}
        self.fallbacks: Counter[tuple[str, str]] = Counter()

    def run(self, nodes: list[Node]) -> Assignment:
        for node in nodes:
            if node in self.fixed:
                self._append(self.fixed[node], node, [])
                continue
            for part in self._divided(node):
                self._place(part)
        return Assignment(self._replicated(), self.fallbacks)

    # rewriting

    def _divided(self, node: Node) -> list[Node]:
        """The node, or what replaces it when its operands lie on several devices."""
        if node.kind in FUSED_KINDS:
            up, gate = node.src[0], node.src[1]
            assert up is not None and gate is not None
            if self.rules.weight_device(up, node.kind) != self.rules.weight_device(gate, node.kind):
                return _unfused(node)
        if node.kind == "moe_combine" and node.src[3] is not None:
            outputs, addend = node.src[0], node.src[3]
            assert outputs is not None
            if self.made_on.get(outputs.buffer, CPU) != self.made_on.get(addend.buffer, CPU):
                self._place_sum_apart(node, addend)
                return []
        return [node]

    def _place_sum_apart(self, node: Node, addend: Value) -> None:
        """Experts are summed where they are; the addend's device, which has it ready by then, adds it."""
        total = like(node.dst)
        self._place(Node(node.kind, total, [*node.src[:3], None], node.ip, node.fp))
        self._append(self.made_on.get(addend.buffer, CPU), Node("add", node.dst, [addend, total]), [])

    # devices

    def _place(self, node: Node) -> None:
        if node.kind in REPLICATED or all(v.buffer.role == "input" for v in read(node)):
            if node.kind == "act_prepare":
                self.prepare[node.dst.buffer] = node
            self.steps.append(Step("", node))
            return
        device = self._device(node)
        if device == CPU and self._is_offloaded(node):
            # One matrix at a time: the memory it is copied to is as large as the largest one.
            for part in _unfused(node) if node.kind in FUSED_KINDS else [node]:
                weight = part.src[0]
                uploads = [weight] if weight is not None and weight.buffer.role == "weight" else []
                self._append(self._offload_device(node), part, uploads)
            return
        self._append(device, node, [])

    def _append(self, device: str, node: Node, uploads: list[Value]) -> None:
        if device != CPU:
            own = self._with_own_activations(node, device)
            reason = self._reason(own, device)
            if reason is None:
                node = own
            else:
                self.fallbacks[reason, node.kind] += 1
                device, uploads = CPU, []
        for value in written(node):
            self.made_on[value.buffer] = device
            self.order[value.buffer] = len(self.steps)
        self.steps.append(Step(device, node, uploads))

    def _with_own_activations(self, node: Node, device: str) -> Node:
        """A product whose activations are prepared as devices want them; the CPU may have another format for it."""
        if node.kind not in MATMUL_KINDS:
            return node
        fmt = self.rules.activation_format(node, device)
        known = self.prepare.keys()
        sources = [v if v is None or v.buffer not in known else self._own_prepared(v, fmt, device) for v in node.src]
        return replace(node, src=sources, ip=[fmt, *node.ip[1:]])

    def _own_prepared(self, prepared: Value, fmt: int, device: str) -> Value:
        variants = self.own.setdefault(prepared.buffer, {})
        node = replace(self.prepare[prepared.buffer], ip=[fmt])
        key = fmt, self.rules.prepared_nbytes(node, device)
        if key not in variants:
            node.dst = _vector((key[1] + 3) // 4)
            variants[key] = self.prepare[node.dst.buffer] = node
        return variants[key].dst

    def _reason(self, node: Node, device: str) -> str | None:
        """Why a node, or what prepares its activations, cannot run on a device."""
        made_from = [self.prepare[v.buffer] for v in read(node) if v.buffer in self.prepare]
        reasons = [self.rules.supports(n, device) for n in (node, *made_from)]
        return next((r for r in reasons if r is not None), None)

    def _device(self, node: Node) -> str:
        values = [node.dst, *read(node)]
        if any(v.buffer.role == "host" for v in values):
            return CPU
        for value in values:
            if value.buffer.role == "cache":
                return self.rules.cache_devices.get(value.buffer.name, CPU)
        weights = [v for v in values if v.buffer.role == "weight"]
        if weights:
            return self.rules.weight_device(max(weights, key=lambda v: v.n_elements), node.kind)
        if node.kind == "moe_combine":
            values = values[1:2]
        made = [v.buffer for v in values if v.buffer in self.made_on]
        return self.made_on[max(made, key=lambda b: self.order[b])] if made else CPU

    def _is_offloaded(self, node: Node) -> bool:
        """Whether a product with weights in host memory has so many rows that copying them to a device pays."""
        rules, weight = self.rules, node.src[0]
        if node.kind not in MATMUL_KINDS or not rules.offload_batch or weight is None:
            return False
        smallest = rules.offload_batch
        if node.kind in EXPERT_KINDS:
            n_used, n_expert = node.ip[3], node.ip[4]
            smallest = smallest_expert_batch(rules.offload_batch, n_expert, n_used)
        wanted = rules.policy.get(MATMUL_KINDS[node.kind], True)
        device = self._offload_device(node)
        # Rows of all attended cells (keys and values made again of latents) are many; they are made where the cache is.
        enough = node.ip[1] >= smallest if node.dst.dynamic_dim is None else self._made_from_on(node) == device
        return wanted and weight.buffer.role == "weight" and enough and device != CPU

    def _made_from_on(self, node: Node) -> str:
        """Device of the activations of a product, before they are prepared for it."""
        value = node.src[1]
        assert value is not None
        origin = self.prepare[value.buffer].src[0] if value.buffer in self.prepare else value
        return CPU if origin is None else self.made_on.get(origin.buffer, CPU)

    def _offload_device(self, node: Node) -> str:
        """Device that large products with a weight in host memory go to: that of its layer, or the first one."""
        assert node.src[0] is not None
        name = node.src[0].buffer.name
        placement = self.rules.placement
        own = placement.layer_device(OUTPUT if name == TIED_OUTPUT else name)
        used = [d for d in (*placement.layers, placement.output) if d != CPU]
        return own if own != CPU or not used else used[0]

    # what every device makes for itself

    def _replicated(self) -> list[Step]:
        """Replaces the steps without a device by one per device that reads their result."""
        wanted: dict[Buffer, set[str]] = {}
        result: list[Step] = []
        for step in reversed(self.steps):
            steps = [step] if step.device else self._replicas(step.node, wanted)
            for one in steps:
                for value in read(one.node):
                    wanted.setdefault(value.buffer, set()).add(one.device)
            result += reversed(steps)
        result.reverse()
        return result

    def _replicas(self, node: Node, wanted: dict[Buffer, set[str]]) -> list[Step]:
        """The node, and its variants for devices, on every device that reads them."""
        found = []
        for variant in (node, *self.own.get(node.dst.buffer, {}).values()):
            devices = set().union(*(wanted.get(v.buffer, set()) for v in written(variant)))
            found += [Step(d, variant) for d in sorted({self._replica(variant, d) for d in devices})]
        return found

    def _replica(self, node: Node, device: str) -> str:
        reason = self.rules.supports(node, device) if device != CPU else None
        if reason is None:
            return device
        self.fallbacks[reason, node.kind] += 1
        return CPU


def _vector(n: int) -> Value:
    strides = contiguous_strides(F32, (n,))
    return Value(Buffer(strides[1]), F32, (n, 1, 1, 1), strides)


def _unfused(node: Node) -> list[Node]:
    """Two products and the gated activation instead of the fused node."""
    up, gate = like(node.dst), like(node.dst)
    if node.kind == "mul_mat_up_gate":
        (up_weight, gate_weight, x, up_bias, gate_bias), ip = node.src, node.ip[:2]
        products = [
            Node("mul_mat", up, [up_weight, x, up_bias], ip),
            Node("mul_mat", gate, [gate_weight, x, gate_bias], ip),
        ]
    else:
        up_weight, gate_weight, x, groups, up_bias, gate_bias = node.src
        ip = [node.ip[0], node.ip[1], 0, node.ip[3], node.ip[4]]
        products = [
            Node("mul_mat_id", up, [up_weight, x, groups, up_bias], ip),
            Node("mul_mat_id", gate, [gate_weight, x, groups, gate_bias], ip),
        ]
    return [*products, Node("gated_unary", node.dst, [gate, up], [node.ip[2]])]
