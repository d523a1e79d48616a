"""Latent attention (MLA) that all devices share (-sm graph): heads of queries on each device.

Low-rank queries and the row that is cached are made on the device of the layer and go to the others. Each device stores
that row in its copy of the layer's cache, and has the projections of its heads: rows of attn_q_b (attn_q), matrices of
attn_k_b and attn_v_b, rows of attn_kv_b where cells are expanded. With -mla 0 the caches have heads, and are divided.
"""

from __future__ import annotations

from collections.abc import Callable

from ikpy.graph.attention_region import Region
from ikpy.graph.division import Division, Part
from ikpy.graph.head_parts import HEADWISE, HeadParts
from ikpy.graph.ir import Buffer, Node, Value
from ikpy.graph.latent_parts import Heads, Known, LatentPart, new_row
from ikpy.graph.weight_parts import is_contiguous
from ikpy.quants import registry

# Norms of all heads with one weight are no part of any model.
HEADWISE_LATENT = {kind: fits for kind, fits in HEADWISE.items() if kind not in ("rms_norm", "layer_norm")}


class LatentRegion(Region):
    """Latent attention of a layer. The division counts heads."""

    def __init__(self, caches: set[Buffer], division: Division) -> None:
        super().__init__(caches, division)
        self._known = Known(division.extent)

    @property
    def first(self) -> Node:
        # The row to be stored is made ahead of queries: it leaves before the device starts on its own heads.
        return next((node for node in self.nodes if node.kind == "kv_store"), self.nodes[0])

    def part(self, parts: HeadParts, part: Part) -> Callable[[Node], Node | None]:
        made = LatentPart(parts, self._known, part, first=part is self.division.parts[0])
        return lambda node: made.output(node) if self.is_end(node) else made.node(node)

    def _fits(self, node: Node) -> bool:
        if node.writes or node.src[0] is None:
            return False
        kinds = {
            "mul_mat": self._fits_product,
            "act_prepare": self._fits_preparation,
            "kv_store": self._fits_store,
            "copy": self._fits_copy,
            "attention": self._fits_attention,
        }
        return kinds.get(node.kind, self._fits_headwise)(node)

    def _is_all(self, heads: Heads | None, dim: int) -> bool:
        return heads == Heads(dim, 0, self._known.n_heads)

    def _makes(self, dst: Value, heads: Heads) -> bool:
        """Whether a node can write these heads there; the rows of a new buffer are known then."""
        if dst.buffer not in self._known.rows:
            row = None if dst in self._known or dst.buffer.role != "value" else new_row(dst, heads)
            if row is None:
                return False
            self._known.rows[dst.buffer] = row
        return self._known.heads(dst) == heads

    # products

    def _fits_product(self, node: Node) -> bool:
        weight, x, bias = node.src
        assert weight is not None and x is not None
        source = self._known.prepared.get(x.buffer)
        heads = self._known.heads(source) if source is not None else None
        if self.is_end(node):
            return self._is_all(heads, 0) and weight.shape[0] % self._known.n_heads == 0 and is_contiguous(weight)
        if not self._is_parted(weight):
            return False
        if heads is not None:
            if bias is not None or not self._is_all(heads, 2) or weight.shape[2] != heads.n:
                return False
            return self._makes(node.dst, heads)
        is_whole = x not in self._known if source is None else source.buffer in self._known.copies
        return is_whole and self._fits_rows(node)

    def _is_parted(self, weight: Value) -> bool:
        """Whether the rows of heads can be taken out of the tensor that a matrix is some of."""
        kind, n = registry.by_id(weight.type_id), self._known.rows_per_head(weight)
        row = kind.row_nbytes(weight.shape[0])
        if kind.tensor_extra_bytes or not n or weight.strides[1] != row:
            return False
        if not self.division.cuts(n * self._known.n_heads, kind.interleave):
            return False
        if weight.shape[2] > 1:
            return weight.strides[2] == n * row and weight.offset + weight.shape[1] * row <= n * row
        return weight.offset % (n * row) == 0 and weight.shape[1] % n == 0

    def _fits_rows(self, node: Node) -> bool:
        """A product with rows of heads, of all or of some of them."""
        weight, bias = node.src[0], node.src[2]
        assert weight is not None
        n = self._known.rows_per_head(weight)
        heads = Heads(0, weight.offset // (n * weight.strides[1]), weight.shape[1] // n)
        if weight.shape[2] > 1 or (bias is not None and heads.n < self._known.n_heads):
            return False
        return self._makes(node.dst, heads)

    def _fits_preparation(self, node: Node) -> bool:
        x = node.src[0]
        assert x is not None
        heads = self._known.heads(x)
        self._known.prepared[node.dst.buffer] = x
        return x.buffer in self._known.copies or self._is_all(heads, 0) or self._is_all(heads, 2)

    # caches

    def _fits_store(self, node: Node) -> bool:
        x, dst = node.src[0], node.dst
        assert x is not None
        if dst.buffer not in self.caches:
            return False
        if x in self._known:
            self._known.divided.add(dst.buffer)
            return self._is_all(self._known.heads(x), 1) and self._is_divided(dst)
        self._known.stored.add(dst.buffer)
        return dst.buffer not in self._known.divided

    def _is_divided(self, cache: Value) -> bool:
        is_whole = cache.shape[1] == self._known.n_heads and cache.is_contiguous and not cache.offset
        return cache.buffer in self._known.divided and is_whole

    def _fits_copy(self, node: Node) -> bool:
        x, dst = node.src[0], node.dst
        assert x is not None
        if x.buffer in self._known.stored:
            self._known.copies.add(dst.buffer)
            return dst.is_contiguous and not dst.offset and dst.buffer.role == "value"
        if x in self._known:
            return self._fits_headwise(node)
        heads = self._known.heads(dst)
        return heads is not None and x.strides[heads.dim] == 0 and x.shape[heads.dim] == heads.n

    def _fits_attention(self, node: Node) -> bool:
        q, keys, values, _, sinks, second, _, chosen, _ = node.src
        assert q is not None and keys is not None and values is not None
        heads = self._known.heads(q)
        if heads is None or heads.dim != 1 or sinks is not None or chosen is not None:
            return False
        if not all(v is None or self._is_attended(v, heads) for v in (keys, values, second)):
            return False
        return self._makes(node.dst, heads)

    def _is_attended(self, value: Value, heads: Heads) -> bool:
        """Whether a part has the keys or values of its heads: one of all heads, or one of each."""
        if value.buffer in self._known.stored:
            return value.shape[1] == 1
        if value.buffer in self._known.divided:
            return self._is_all(heads, 1) and self._is_divided(value)
        return self._known.heads(value) == heads

    # all others

    def _fits_headwise(self, node: Node) -> bool:
        x, dst = node.src[0], node.dst
        assert x is not None
        if x.buffer in self._known.copies:
            return node.kind == "hadamard" and dst.buffer is x.buffer
        heads, fits = self._known.heads(x), HEADWISE_LATENT.get(node.kind)
        if heads is None or fits is None or not fits(node, heads.dim, self._dims(node, heads)):
            return False
        return self._makes(dst, heads)

    def _dims(self, node: Node, heads: Heads) -> list[int | None]:
        """Of every source the dimension that counts these heads, -1 if it is none; None for one without heads."""

        def dim(value: Value | None) -> int | None:
            if value is None or value not in self._known:
                return None
            found = self._known.heads(value)
            return heads.dim if found == heads else -1

        return [dim(value) for value in node.src]
