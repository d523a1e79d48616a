"""The arguments of a matrix product."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ikpy.backends.cuda.launch.base import FLOAT_WEIGHTS, RUNTIME, OpContext, optional_address
from ikpy.graph.ir import F16, Node, Value

# ikpy::cuda::Product.
LAYOUT = struct.Struct("<8Q6q10i")


@dataclass
class Product:
    """A matrix product in the terms of ikpy::cuda::Product."""

    context: OpContext
    up: Value
    gate: Value | None
    fmt: int
    x: Value
    up_bias: Value | None
    gate_bias: Value | None
    groups: Value | None
    n_tokens: int  # 0 = n_kv at run time
    activation: int = 0
    n_used: int = 1
    n_experts: int = 0
    per_slot: int = 0

    @property
    def op(self) -> Node:
        """The op that is lowered."""
        return self.context.op

    @property
    def is_float(self) -> bool:
        """Whether weights are floats."""
        return self.up.type_name in FLOAT_WEIGHTS

    @property
    def is_by_expert(self) -> bool:
        """Whether every token has matrices of its own."""
        return self.groups is not None

    @property
    def max_columns(self) -> int:
        """Tokens of a batch, or assignments of all experts, at most."""
        if self.is_by_expert:
            return self.n_tokens * self.n_used
        return self.n_tokens or self.op.dst.shape[1]

    def pack(self, x: int, x_stride: int, split: int) -> bytes:
        """ikpy::cuda::Product. x: address of the activations; split: warps that share a row."""
        address, dst = self.context.address, self.op.dst
        pointers = [
            address(self.up),
            optional_address(self.gate, address),
            x,
            address(dst),
            optional_address(self.up_bias, address),
            optional_address(self.gate_bias, address),
            optional_address(self.groups, address),
            address(RUNTIME),
        ]
        bias = self.up_bias
        bias_stride = bias.strides[1] // 4 if bias is not None and bias.shape[1] > 1 else 0
        longs = [self.up.strides[1], self.up.strides[2], x_stride, dst.strides[1], dst.strides[2], bias_stride]
        n_matrices = self.n_experts if self.is_by_expert else self.up.shape[2]
        integers = [self.up.shape[0], self.up.shape[1], self.max_columns if self.is_by_expert else self.n_tokens]
        integers += [n_matrices, self.activation, int(dst.type_id == F16)]
        integers += [self.n_used, self.n_experts, self.per_slot, split]
        return LAYOUT.pack(*pointers, *longs, *integers)
