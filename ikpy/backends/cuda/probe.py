"""One matrix product on a device, of random data, in every way that it can be computed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import numpy as np

from ikpy._native import core
from ikpy.backends.cuda import launch
from ikpy.backends.cuda.api import Device, DeviceError
from ikpy.graph.ir import F32, Buffer, Node, Value, contiguous_strides
from ikpy.quants import registry

RUNTIME_BYTES = 16


class Probe:
    """A weight [n_in, n_out] (two with a gate) and f32 activations [n_in, n_tokens] on a device.

    A context manager: the device's memory is given back at its end. BF16 weights, and others that are asked to be
    `encoded`, are normally distributed; else they are random bytes, whose products are good for nothing but the time
    they take.
    """

    def __init__(
        self,
        device: Device,
        type_name: str,
        n_in: int,
        n_out: int,
        n_tokens: int,
        *,
        gate: bool = False,
        encoded: bool = False,
    ) -> None:
        self._device, self._stream = device, device.new_stream()
        self._blocks: list[int] = []
        self._addresses: dict[int, int] = {}
        self._values: list[Value] = []
        self._n_tokens = n_tokens
        rng = np.random.default_rng(n_in + n_tokens)
        self._x = self._value(F32, (n_in, n_tokens))
        self._upload(self._x, rng.standard_normal((n_tokens, n_in), np.float32))
        self._weights = []
        for _ in range(2 if gate else 1):
            weight = self._value(registry.by_name(type_name).id, (n_in, n_out))
            if type_name == "bf16":
                data = (rng.standard_normal((n_out, n_in), np.float32).view(np.uint32) >> 16).astype(np.uint16)
            elif encoded:
                data = core.quantize(rng.standard_normal((n_out, n_in), np.float32), weight.type_id)
            else:
                data = rng.integers(0, 256, weight.buffer.nbytes, np.uint8)
            self._upload(weight, data)
            self._weights.append(weight)
        self._out = self._value(F32, (n_out, n_tokens))
        self._runtime = self._alloc(RUNTIME_BYTES)

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address in self._blocks:
            with suppress(DeviceError):  # a kernel that failed takes the whole device with it
                self._device.release(address)
        self._blocks.clear()

    def launches(self, large: launch.Large) -> list[launch.Launch]:
        """Launches that prepare the activations and multiply in a way; Large(0): in int8."""
        target = launch.Target.of([self._device.compute_capability], {"": large})
        node = self._product(core.activation_format(self._weights[0].type_id, 1), self._out)
        fmt = launch.large_format(node, target) or node.ip[0]
        prepared = self._vector(self._prepared_bytes(fmt))
        prepare, product = Node("act_prepare", prepared, [self._x], [fmt]), self._product(fmt, prepared)
        work = self._alloc(launch.work_bytes(product, target))

        def address(value: Value) -> int:
            if value is launch.WORK:
                return work
            return self._runtime if value is launch.RUNTIME else self._addresses[id(value.buffer)] + value.offset

        return [*launch.lower(prepare, address, target), *launch.lower(product, address, target)]

    def result(self, steps: Sequence[launch.Launch]) -> np.ndarray:
        """The product as launches compute it, f32 [n_tokens, n_out]. NaN where nothing was stored."""
        found = np.empty((self._n_tokens, self._out.shape[0]), np.float32)
        place = self._addresses[id(self._out.buffer)]
        self._stream.fill(place, 0xFF, found.nbytes)
        for step in steps:
            self._stream.launch(step)
        self._stream.download(found, place)
        self._stream.synchronize()
        return found

    def milliseconds(self, large: launch.Large, repeats: int) -> float:
        """Shortest time of the product computed in a way; the first run does not count."""
        steps = self.launches(large)
        self._device.prepare({step.kernel for step in steps})

        def issue() -> None:
            for step in steps:
                self._stream.launch(step)

        self._stream.milliseconds(issue)
        return min(self._stream.milliseconds(issue) for _ in range(repeats))

    def _product(self, fmt: int, x: Value) -> Node:
        if len(self._weights) == 1:
            return Node("mul_mat", self._out, [*self._weights, x, None], [fmt, self._n_tokens])
        return Node("mul_mat_up_gate", self._out, [*self._weights, x, None, None], [fmt, self._n_tokens, 0])

    def _prepared_bytes(self, fmt: int) -> int:
        n_in = self._x.shape[0]
        if fmt == launch.ACT_TILES:
            return launch.tiled_bytes(n_in, self._n_tokens)
        return core.activation_nbytes(fmt, n_in, self._n_tokens, 1)

    def _alloc(self, nbytes: int) -> int:
        self._blocks.append(self._device.alloc(nbytes))
        return self._blocks[-1]

    def _vector(self, nbytes: int) -> Value:
        return self._value(F32, (-(-nbytes // 4), 1))

    def _value(self, type_id: int, shape: tuple[int, int]) -> Value:
        strides = contiguous_strides(type_id, shape)
        value = Value(Buffer(strides[2]), type_id, (*shape, 1, 1), strides)
        self._addresses[id(value.buffer)] = self._alloc(strides[2])
        # Ids of buffers are theirs as long as they live.
        self._values.append(value)
        return value

    def _upload(self, value: Value, data: np.ndarray) -> None:
        self._stream.upload(self._addresses[id(value.buffer)], data)
        self._stream.synchronize()
