"""Attention that all devices share (-sm graph), as nodes: K/V heads with the heads that read them on each device.

From the projections of q, k and v to that of the output every value has a row of all heads for each token. Each device
has the same nodes with a part of that row, and a part of the layer's caches; columns of the output projection make a
part of the result of it, and these are added up. What differs where attention is latent is in `divide_latent`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ikpy.graph.attention_region import Region
from ikpy.graph.divide_latent import LatentRegion
from ikpy.graph.division import ATTENTION_OUTPUT, PER_HEAD, RULE, Division, Part, attention_tensor
from ikpy.graph.head_parts import HEADWISE, PREPARED, HeadParts, PartOfHeads, heads_dim, made_row
from ikpy.graph.ir import F32, Buffer, Node, Value, like
from ikpy.graph.placement import Placement
from ikpy.graph.weight_parts import WeightParts, is_contiguous
from ikpy.quants import registry

Replacements = dict[Node, dict[Node, str]]
"""For every node those of the parts, with their devices."""


class _Grouped(Region):
    """Attention with K/V heads. rows: bytes of the row of all heads of a token, by buffer."""

    def __init__(self, caches: set[Buffer], division: Division) -> None:
        super().__init__(caches, division)
        self.rows: dict[Buffer, int] = {}

    def is_start(self, node: Node) -> bool:
        """Whether a node is a projection of q, k, v or a gate."""
        return node.kind == "mul_mat" and not self.is_end(node)

    def _fits(self, node: Node) -> bool:
        x, dst = node.src[0], node.dst
        if node.writes or x is None:
            return False
        if node.kind == "mul_mat":
            return self._fits_product(node)
        row = self.rows.get(x.buffer, PREPARED)
        dim = heads_dim(x, row, self.division) if row != PREPARED else None
        if dim is None:
            return False
        if node.kind == "kv_store":
            return self._is_cache(dst)
        if node.kind == "act_prepare":
            self.rows[dst.buffer] = PREPARED
            return dim == 0
        if node.kind == "attention":
            keys, values, _, _, second, _, chosen = node.src[1:8]
            if dim != 1 or second or chosen or not (self._is_cache(keys) and self._is_cache(values)):
                return False
        elif node.kind not in HEADWISE or not HEADWISE[node.kind](node, dim, self._dims(node)):
            return False
        if dst.buffer in self.rows:
            return heads_dim(dst, self.rows[dst.buffer], self.division) == dim
        self.rows[dst.buffer] = row = made_row(dst, dim)
        return heads_dim(dst, row, self.division) == dim and dst.is_contiguous and not dst.offset

    def part(self, parts: HeadParts, part: Part) -> Callable[[Node], Node]:
        heads = PartOfHeads(parts, self.division, part, self.rows)

        def made(node: Node) -> Node:
            if self.is_end(node):
                return heads.output(node, first=part is self.division.parts[0])
            return heads.projection(node) if self.is_start(node) else heads.node(node)

        return made

    def _fits_product(self, node: Node) -> bool:
        weight, x, dst = node.src[0], node.src[1], node.dst
        assert weight is not None and x is not None
        if not is_contiguous(weight) or weight.shape[2] > 1 or dst.type_id != F32:
            return False
        if self.is_end(node):
            return self.rows.get(x.buffer) == PREPARED and weight.shape[0] == self.division.extent
        self.rows[dst.buffer] = made_row(dst, 0)
        is_cut = self.division.cuts(weight.shape[1], registry.by_id(weight.type_id).interleave)
        return x.buffer not in self.rows and is_cut and dst.is_contiguous and not dst.offset

    def _dims(self, node: Node) -> list[int | None]:
        """Of every source the dimension that counts heads, -1 if it cannot be divided; None for one without heads."""

        def dim(value: Value | None) -> int | None:
            if value is None or value.buffer not in self.rows:
                return None
            row = self.rows[value.buffer]
            found = heads_dim(value, row, self.division) if row != PREPARED else None
            return -1 if found is None else found

        return [dim(value) for value in node.src]

    def _is_cache(self, value: Value | None) -> bool:
        return value is not None and value.buffer in self.caches and not value.offset and value.is_contiguous


class AttentionDivider:
    """Divides the attention of layers; the parameters are those of `Divider`.

    Which layers are divided is settled once, as their caches lie in one place for all graphs.
    """

    def __init__(self, where: Placement, runs: Callable[[Node], bool], weights: WeightParts) -> None:
        self._where = where
        self._runs = runs
        self._heads = HeadParts(weights)
        tensors = {attention_tensor(name): division for name, division in where.divisions.items()}
        self._divisions = {layer: d for (layer, tensor), d in tensors.items() if tensor == ATTENTION_OUTPUT}
        self._latent = {layer for layer, tensor in tensors if tensor in PER_HEAD}
        self._caches: dict[int, set[Buffer]] = {}
        # Graphs that were settled and are to be run: each by its list of nodes, with what became of the layers.
        self._settled: list[tuple[list[Node], dict[int, tuple[Region, Replacements]]]] = []

    def settle(self, graphs: Sequence[list[Node]], caches: Mapping[int, Sequence[Buffer]]) -> dict[int, str]:
        """Decides for all graphs to come; returns why layers stay whole that were to be divided.

        caches: of the layers whose caches are on devices.
        """
        self._caches = {layer: set(caches.get(layer, ())) for layer in self._divisions}
        reasons = {layer: "its cache is in host memory" for layer, buffers in self._caches.items() if not buffers}
        self._settled = []
        for nodes in graphs:
            layers: dict[int, tuple[Region, Replacements]] = {}
            for layer, found in self._found(nodes).items():
                reason = found.reason or self._rule(found)
                if not reason:
                    layers[layer] = found, self._divided(layer, found)
                    reason = self._missing_kernel(layers[layer][1])
                if reason:
                    reasons.setdefault(layer, reason)
            self._settled.append((nodes, layers))
        self._caches = {layer: buffers for layer, buffers in self._caches.items() if layer not in reasons}
        return reasons

    def cache_parts(self, buffer: Buffer) -> list[tuple[str, Buffer]]:
        """The parts of a cache with their devices; none of one that stays whole."""
        is_divided = any(buffer in buffers for buffers in self._caches.values())
        return self._heads.cache_parts(buffer) if is_divided else []

    def run(self, nodes: list[Node]) -> tuple[list[Node], dict[Node, str]]:
        """The nodes with attention in parts, and the devices of the new ones."""
        replaced: dict[Node, list[Node]] = {}
        devices: dict[Node, str] = {}
        for found, parts in self._layers(nodes):
            n_early = found.nodes.index(found.first) if found.nodes else 0
            for i, (node, made) in enumerate(parts.items()):
                replaced.setdefault(node, [])
                replaced.setdefault(found.first if i < n_early else node, []).extend(made)
                devices |= {n: device for n, device in made.items() if n.kind != "act_prepare"}
        return [n for node in nodes for n in replaced.get(node, [node])], devices

    def _layers(self, nodes: list[Node]) -> list[tuple[Region, Replacements]]:
        """Attention of the layers that are divided, in a graph; of a settled one what was made then."""
        for i, (known, layers) in enumerate(self._settled):
            if known is nodes:
                del self._settled[i]
                return [found for layer, found in layers.items() if layer in self._caches]
        regions = self._found(nodes)
        for layer, found in regions.items():
            if found.reason:
                raise ValueError(f"attention of layer {layer} was settled to be divided: {found.reason}")
        return [(found, self._divided(layer, found)) for layer, found in regions.items()]

    def _found(self, nodes: list[Node]) -> dict[int, Region]:
        """Attention of the layers whose caches are known, in a graph."""
        found: dict[int, Region] = {
            layer: (LatentRegion if layer in self._latent else _Grouped)(buffers, self._divisions[layer])
            for layer, buffers in self._caches.items()
            if buffers
        }
        owners = {buffer: attention for attention in found.values() for buffer in attention.caches}
        for node in nodes:
            weight = node.src[0] if node.kind == "mul_mat" else None
            layer, tensor = attention_tensor(weight.buffer.name if weight is not None else "")
            starts = found.get(layer) if tensor and tensor != ATTENTION_OUTPUT else None
            values = [v for v in (node.dst, *node.src) if v is not None]
            touched = {id(a): a for v in values if (a := owners.get(v.buffer)) is not None}
            if starts is not None:
                touched[id(starts)] = starts
            for attention in touched.values():
                attention.add(node)
                if len(touched) > 1:
                    attention.reason = attention.reason or "another layer reads its cache"
                if not attention.is_end(node) and not attention.reason:
                    owners.setdefault(node.dst.buffer, attention)
        return found

    def _rule(self, found: Region) -> str:
        """Tensors that are derived from those of the file may be where a rule says, too."""
        where, weights = self._where, (node.src[0] for node in found.nodes if node.kind == "mul_mat")
        names = {weight.buffer.name for weight in weights if weight is not None}
        is_moved = any(where.device_of(name) != where.layer_device(name) for name in names)
        return RULE if is_moved else ""

    def _missing_kernel(self, parts: Replacements) -> str:
        for made in parts.values():
            for node in made:
                if node.kind != "act_prepare" and not self._runs(node):
                    return f"no kernel for {node.kind} of a part"
        return ""

    def _divided(self, layer: int, found: Region) -> Replacements:
        division = self._divisions[layer]
        own = self._where.layer_device(f"blk.{layer}.")
        parts = [(part.device, found.part(self._heads, part)) for part in division.parts]
        made: Replacements = {}
        for node in found.nodes:
            nodes = {device: one for device, make in parts if (one := make(node)) is not None}
            made[node] = _summed(node, nodes, own) if found.is_end(node) else {n: d for d, n in nodes.items()}
        return made


def _summed(node: Node, products: Mapping[str, Node], own: str) -> dict[Node, str]:
    """The products of the parts by device, and the sum of them, which the device of the layer makes."""
    made = {product: device for device, product in products.items()}
    # The own part first: those of other devices arrive while it is made.
    terms = [product.dst for _, product in sorted(products.items(), key=lambda item: item[0] != own)]
    total = terms[0]
    for value in terms[1:]:
        dst = node.dst if value is terms[-1] else like(node.dst)
        made[Node("add", dst, [total, value])] = own
        total = dst
    return made
