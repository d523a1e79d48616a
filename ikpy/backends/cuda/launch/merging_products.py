"""Matrix-vector products of one launch: packed, and several launches made one.

Queries, keys and values of a token are products of the same activations; the blocks of each know theirs by blockIdx.y.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ikpy.backends.cuda.launch.base import MAX_GRID_YZ, Launch
from ikpy.backends.cuda.launch.places import Place, Touched
from ikpy.backends.cuda.launch.product import LAYOUT

# ikpy::cuda::kMaxProducts.
MAX_PRODUCTS = 4
# First block of products that are not there.
_NO_BLOCK = 2**31 - 1


def pack_products(products: Sequence[bytes], first: Sequence[int]) -> bytes:
    """ikpy::cuda::Products of up to MAX_PRODUCTS packed products; first: number of each one's first block."""
    numbers = [*first, *[_NO_BLOCK] * (MAX_PRODUCTS - len(first))]
    return b"".join(products).ljust(MAX_PRODUCTS * LAYOUT.size, b"\0") + struct.pack(f"<{MAX_PRODUCTS}i", *numbers)


def _unpack_products(packed: bytes) -> tuple[list[bytes], list[int]]:
    first = struct.unpack_from(f"<{MAX_PRODUCTS}i", packed, MAX_PRODUCTS * LAYOUT.size)
    blocks = [block for block in first if block != _NO_BLOCK]
    return [packed[i * LAYOUT.size :][: LAYOUT.size] for i in range(len(blocks))], blocks


def merged_products(one: Launch, other: Launch) -> Launch | None:
    """One launch of a matrix-vector kernel for two of the same kernel; None if they are not, or cannot be one."""
    if not one.kernel.startswith("matvec") or one.args[1:] != other.args[1:]:
        return None
    (columns, blocks, batches), grid = one.grid, other.grid
    if (grid[0], grid[2]) != (columns, batches) or blocks + grid[1] > MAX_GRID_YZ:
        return None
    (ours, our_first), (theirs, their_first) = _unpack_products(one.args[0]), _unpack_products(other.args[0])
    if len(ours) + len(theirs) > MAX_PRODUCTS:
        return None
    touched, others = ([_touched(p, batches) for p in products] for products in (ours, theirs))
    if any(a is None or b is None or a.meets(b) for a in touched for b in others):
        return None
    packed = pack_products([*ours, *theirs], [*our_first, *(blocks + first for first in their_first)])
    return Launch(one.kernel, (columns, blocks + grid[1], batches), one.block, 0, [packed, *one.args[1:]])


def _touched(packed: bytes, n_batches: int) -> Touched | None:
    """The memory of a product; None if it depends on the run."""
    fields = LAYOUT.unpack(packed)
    up, gate, x, dst, up_bias, gate_bias, groups, _ = fields[:8]
    row_bytes, matrix_bytes, x_stride, dst_nb1, dst_nb2, bias_stride = fields[8:14]
    _, n_out, n_tokens, n_matrices, _, _, n_used, n_experts, _, _ = fields[14:]
    if n_tokens == 0:
        return None
    outer, inner = (-(-n_tokens // n_used), n_used) if groups else (n_batches, n_tokens)
    weight = max(matrix_bytes * n_matrices, row_bytes * n_out)
    bias = 4 * (bias_stride * (n_matrices - 1) + n_out)
    sizes = [(up, weight), (gate, weight), (up_bias, bias), (gate_bias, bias)]
    sizes += [(x, x_stride * outer * inner), (groups, 4 * (n_experts + 1 + n_tokens))]
    written = Place.whole(dst, 4 * n_out + (inner - 1) * dst_nb1 + (outer - 1) * dst_nb2)
    return Touched([written], [Place.whole(address, nbytes) for address, nbytes in sizes if address])
