"""Speed of the kernels of a GPU next to what its memory and its tensor cores reach.

    python -m benchmarks.gpu.kernels [--rows REGEX] [--out FILE.json] [--small]

Rows are printed as they are measured. What FILE.json has is not measured again: a row that hangs, or that the GPU does
not survive (status 3), is left out when the command is given again. Of a type: GB/s of one token's product, which
reads the weights once (share of the speed of a copy), and TFLOP/s of 512 tokens in int8 and on bf16 tensor cores. Of
attention: one token over 32768 cells in GB/s of cache, 2048 tokens in TFLOP/s. Of the delta rule and the selective
scan: one token in GB/s of states, read and written, and microseconds of 512 tokens. Of sparse attention: microseconds
of the choice of 2048 of 32768 cells for one token and for 64. Products of PyTorch, where it is installed, say what the
tensor cores reach. All weights are random bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.gpu.commands import DEVICE_LOST
from benchmarks.gpu.device import works
from benchmarks.gpu.results import write
from ikpy._native import core
from ikpy.backends.cuda import devices, launch, ways
from ikpy.backends.cuda.api import Device, DeviceError
from ikpy.graph.ir import F16, F32, I32, Buffer, Node, Value, contiguous_strides
from ikpy.quants import registry

REPEATS, LAUNCHES = 3, 8
COPY = "copy of f32"
POOL_BYTES = 32 << 20
# Query heads, key heads, elements of a K row and of a V row, which is a part of the K row where there is one key head.
ATTENTION = {
    "gqa 32/8 x 64": (32, 8, 64, 64),
    "gqa 32/8 x 128": (32, 8, 128, 128),
    "mla 16 x 576/512": (16, 1, 576, 512),
    "mla 128 x 576/512": (128, 1, 576, 512),
    "mla 16 x 192/128": (16, 16, 192, 128),
}
CACHE_TYPES = ("f16", "bf16", "q8_0")
DELTA_RULE, SCAN, CHOICE = "delta rule", "selective scan", "choice of cells"


class Sizes:
    """What is measured: sizes that fill a GPU and exceed its caches, or such as an emulated one bears."""

    def __init__(self, *, small: bool) -> None:
        self.n_in, self.vector_rows, self.rows = (256, 64, 64) if small else (4096, 131072, 8192)
        self.tokens, self.cells, self.prompt = (20, 64, 20) if small else (512, 32768, 2048)
        self.copied = 1 << 14 if small else 1 << 30


class Memory:
    """Values on a device, filled with random bytes; a context manager that gives the memory back."""

    def __init__(self, device: Device) -> None:
        self._device, self.stream = device, device.new_stream()
        self._blocks: list[int] = []
        self._addresses: dict[int, int] = {}
        self._buffers: list[Buffer] = []
        self._runtime = self._allocated(16)

    def __enter__(self) -> Memory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for address in self._blocks:
            try:
                self._device.release(address)
            except DeviceError:  # a kernel that failed takes the whole device with it
                return

    def _allocated(self, nbytes: int) -> int:
        self._blocks.append(self._device.alloc(nbytes))
        return self._blocks[-1]

    def value(self, type_id: int, shape: Sequence[int], pool: np.ndarray | None = None) -> Value:
        """A value of this type and shape; its bytes are those of the pool, again and again."""
        strides = contiguous_strides(type_id, shape)
        buffer = Buffer(registry.by_id(type_id).tensor_nbytes((*shape, *([1] * (4 - len(shape))))))
        address = self._allocated(buffer.nbytes)
        self._addresses[id(buffer)] = address
        self._buffers.append(buffer)
        for start in range(0, buffer.nbytes if pool is not None else 0, POOL_BYTES):
            assert pool is not None
            self.stream.upload(address + start, pool[: min(POOL_BYTES, buffer.nbytes - start)])
        self.stream.synchronize()
        return Value(buffer, type_id, (*shape, *([1] * (4 - len(shape)))), strides)

    def milliseconds(self, node: Node, target: launch.Target) -> float:
        """Shortest time of a node's launches, of many in a row; the first ones do not count."""
        work = self._allocated(launch.work_bytes(node, target))

        def address(value: Value) -> int:
            if value is launch.WORK:
                return work
            return self._runtime if value is launch.RUNTIME else self._addresses[id(value.buffer)] + value.offset

        steps = launch.lower(node, address, target)
        self._device.prepare({step.kernel for step in steps})

        def issue() -> None:
            for _ in range(LAUNCHES):
                for step in steps:
                    self.stream.launch(step)

        self.stream.milliseconds(issue)
        return min(self.stream.milliseconds(issue) for _ in range(REPEATS)) / LAUNCHES


class Bench:
    """The measurements on one device."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self.device, self.sizes = device, sizes
        self._target = launch.Target.of([device.compute_capability])
        rng = np.random.default_rng(1)
        self._bytes = rng.integers(0, 256, POOL_BYTES, np.uint8)
        self._floats = rng.standard_normal(POOL_BYTES // 4, np.float32).view(np.uint8)
        self._halves = rng.standard_normal(POOL_BYTES // 2, np.float32).astype(np.float16).view(np.uint8)
        self.formats = [launch.ACT_BF16] if device.compute_capability >= (8, 0) else []
        if ways.wgmma_works(device, print):
            self.formats.append(launch.ACT_TILES)
        self.wgmma_s8 = ways.wgmma_s8_works(device, print)
        self.copy_rate = 0.0

    def copy(self) -> dict[str, Any]:
        """GB/s of a copy, read and written bytes together: what the others are compared with."""
        n = self.sizes.copied
        with Memory(self.device) as memory:
            source = memory.value(F32, (1024, n // 4096), self._floats)
            node = Node("copy", memory.value(F32, source.shape[:2]), [source])
            self.copy_rate = 2 * n / memory.milliseconds(node, self._target) / 1e6
        return {"name": COPY, "copy GB/s": self.copy_rate}

    def _share(self, rate: float) -> dict[str, float]:
        return {"of copy": rate / self.copy_rate} if self.copy_rate else {}

    def weight(self, type_name: str) -> dict[str, Any]:
        """Products with weights of a type."""
        s, row = self.sizes, registry.by_name(type_name)
        found: dict[str, Any] = {"name": type_name}
        milliseconds, nbytes = self._product(type_name, s.vector_rows, 1, launch.Large(0))
        found["matvec GB/s"] = nbytes / milliseconds / 1e6
        found |= self._share(found["matvec GB/s"])
        work = 2 * s.n_in * s.rows * s.tokens / 1e9
        found["matmul TFLOP/s"] = work / self._product(type_name, s.rows, s.tokens, launch.Large(0))[0]
        if row.is_quantized and self.wgmma_s8:
            milliseconds, _ = self._product(type_name, s.rows, s.tokens, launch.Large(0, wgmma=1))
            found["wgmma TFLOP/s"] = work / milliseconds
        if row.is_quantized or type_name == "bf16":
            for fmt in self.formats:
                kernel = "gemm_wgmma" if fmt == launch.ACT_TILES else "gemm_bf16"
                milliseconds, _ = self._product(type_name, s.rows, s.tokens, launch.Large(1, fmt))
                found[f"{kernel} TFLOP/s"] = work / milliseconds
        return found

    def _product(self, type_name: str, n_out: int, n_tokens: int, large: launch.Large) -> tuple[float, int]:
        """Milliseconds of a product without the preparation of its activations, and bytes of the weights."""
        s, target = self.sizes, launch.Target.of([self.device.compute_capability], {"": large})
        with Memory(self.device) as memory:
            weight = memory.value(registry.by_name(type_name).id, (s.n_in, n_out), self._bytes)
            out = memory.value(F32, (n_out, n_tokens))
            plain = core.activation_format(weight.type_id, 1)
            fmt = launch.large_format(Node("mul_mat", out, [weight, out, None], [plain, n_tokens]), target) or plain
            tiled = fmt == launch.ACT_TILES
            nbytes = launch.tiled_bytes(s.n_in, n_tokens) if tiled else core.activation_nbytes(fmt, s.n_in, n_tokens, 1)
            x = memory.value(F32, (-(-nbytes // 4),), self._floats)
            node = Node("mul_mat", out, [weight, x, None], [fmt, n_tokens])
            return memory.milliseconds(node, target), weight.buffer.nbytes

    def attention(self, shape: str, cache: str) -> dict[str, Any]:
        """One token over the whole cache, and a prompt over as many cells as it has tokens."""
        found: dict[str, Any] = {"name": f"{shape} {cache}"}
        heads, _, dk, dv = ATTENTION[shape]
        if dk != 192:
            milliseconds, nbytes = self._attention(shape, cache, 1, self.sizes.cells)
            found["one token GB/s"] = nbytes / milliseconds / 1e6
            found |= self._share(found["one token GB/s"])
        n = self.sizes.prompt
        milliseconds, _ = self._attention(shape, cache, n, n)
        found["prompt TFLOP/s"] = 2 * heads * n * n * (dk + dv) / milliseconds / 1e9
        return found

    def _attention(self, shape: str, cache: str, n_tokens: int, cells: int) -> tuple[float, int]:
        heads, kv_heads, dk, dv = ATTENTION[shape]
        type_id = registry.by_name(cache).id
        pool = self._halves if cache == "f16" else self._bytes
        with Memory(self.device) as memory:
            q = memory.value(F32, (dk, heads, n_tokens), self._floats)
            k = memory.value(type_id, (dk, kv_heads, cells), pool)
            inside = kv_heads == 1
            v = k.slice0(0, dv) if inside else memory.value(type_id, (dv, kv_heads, cells), pool)
            out = memory.value(F32, (dv, heads, n_tokens))
            node = Node("attention", out, [q, k, v, None, None, None, None], [1, heads], [dk**-0.5, 0.0])
            return memory.milliseconds(node, self._target), k.buffer.nbytes + (0 if inside else v.buffer.nbytes)

    def delta_rule(self) -> dict[str, Any]:
        """32 heads of 128 x 128 with 16 of keys, as of Qwen3-Next, of one sequence."""
        milliseconds, nbytes = self._delta_rule(1)
        rate = 2 * nbytes / milliseconds / 1e6
        prompt = 1e3 * self._delta_rule(self.sizes.tokens)[0]
        return {"name": DELTA_RULE, "one token GB/s": rate, **self._share(rate), "prompt us": prompt}

    def _delta_rule(self, n_tokens: int) -> tuple[float, int]:
        size, key_heads, heads = 128, 16, 32
        with Memory(self.device) as memory:
            zeros = np.zeros(POOL_BYTES, np.uint8)
            keys = [memory.value(F32, (size, key_heads, n_tokens), self._floats) for _ in range(2)]
            out, values = (memory.value(F32, (size, heads, n_tokens), self._floats) for _ in range(2))
            # A log decay of 0 and a factor of 0: numbers stay numbers however often this runs.
            decay, beta = (memory.value(F32, (heads, n_tokens), zeros) for _ in range(2))
            state = memory.value(F32, (size, size, heads, 1), self._floats)
            slots = memory.value(I32, (n_tokens,), zeros)
            src: list[Value | None] = [*keys, values, decay, beta, state, slots]
            node = Node("gated_delta_rule", out, src, [1, 0], [1e-6, size**-0.5])
            return memory.milliseconds(node, self._target), state.buffer.nbytes

    def scan(self) -> dict[str, Any]:
        """128 heads of 64 with states of 128 rows in 8 groups, as of Nemotron-H 8B, of one sequence."""
        milliseconds, nbytes = self._scan(1)
        rate = 2 * nbytes / milliseconds / 1e6
        return {
            "name": SCAN,
            "one token GB/s": rate,
            **self._share(rate),
            "prompt us": 1e3 * self._scan(self.sizes.tokens)[0],
        }

    def _scan(self, n_tokens: int) -> tuple[float, int]:
        size, heads, rows, groups = 64, 128, 128, 8
        with Memory(self.device) as memory:
            zeros = np.zeros(POOL_BYTES, np.uint8)
            out, x = (memory.value(F32, (size, heads, n_tokens), self._floats) for _ in range(2))
            b, c = (memory.value(F32, (rows, groups, n_tokens), self._floats) for _ in range(2))
            # Steps of 0: numbers stay numbers however often this runs.
            steps = memory.value(F32, (heads, n_tokens), zeros)
            a, d = (memory.value(F32, (1, heads), self._floats) for _ in range(2))
            state = memory.value(F32, (size, rows, heads, 1), self._floats)
            src: list[Value | None] = [x, steps, a, b, c, d, state, memory.value(I32, (n_tokens,), zeros)]
            return memory.milliseconds(Node("ssm_scan", out, src), self._target), state.buffer.nbytes

    def choice(self) -> dict[str, Any]:
        """64 heads of 128, as of DeepSeek V3.2, over f16 keys."""
        return {"name": CHOICE, "one token us": 1e3 * self._choice(1), "64 tokens us": 1e3 * self._choice(64)}

    def _choice(self, n_tokens: int) -> float:
        size, heads, cells = 128, 64, self.sizes.cells
        with Memory(self.device) as memory:
            q = memory.value(F32, (size, heads, n_tokens), self._floats)
            weights = memory.value(F32, (heads, n_tokens), self._floats)
            keys = memory.value(F16, (size, 1, cells), self._halves)
            mask = memory.value(F16, (cells, n_tokens), np.zeros(POOL_BYTES, np.uint8))
            ranges = memory.value(I32, (2, n_tokens), np.tile(np.array([0, cells], np.int32), n_tokens).view(np.uint8))
            node = Node(
                "choose_cells", memory.value(I32, (1 + cells // 16, n_tokens)), [q, weights, keys, mask, ranges]
            )
            return memory.milliseconds(node, self._target)


def library_rates(n: int) -> dict[str, Any]:
    """TFLOP/s of products of PyTorch's libraries, n in every direction."""
    import torch

    def rate(product: Callable[[Any, Any], Any], a: Any, b: Any) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        best = 0.0
        for _ in range(REPEATS + 1):
            begin.record()
            product(a, b)
            end.record()
            end.synchronize()
            best = max(best, 2 * n**3 / begin.elapsed_time(end) / 1e9)
        return best

    x, y = (torch.randn(n, n, device="cuda").bfloat16() for _ in range(2))
    i, j = (torch.randint(-127, 128, (n, n), device="cuda").to(torch.int8) for _ in range(2))
    found = {"name": "PyTorch", "bf16 TFLOP/s": rate(torch.matmul, x, y)}
    return {**found, "int8 TFLOP/s": rate(torch._int_mm, i, j.t())}


def measurements(bench: Bench, *, library: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name and function of every row."""
    yield COPY, bench.copy
    if library:
        yield "PyTorch", lambda: library_rates(8192)
    families = list(launch.family_types().values())
    # One type of every family first, should the time not last.
    for name in [*families, *sorted(launch.weight_types() - set(families))]:
        yield name, lambda name=name: bench.weight(name)  # type: ignore[misc]
    yield DELTA_RULE, bench.delta_rule
    yield SCAN, bench.scan
    yield CHOICE, bench.choice
    for shape in ATTENTION:
        for cache in CACHE_TYPES:
            yield f"{shape} {cache}", lambda s=shape, c=cache: bench.attention(s, c)  # type: ignore[misc]


class Table:
    """The rows, in a file that is written before and after each."""

    def __init__(self, path: Path | None, device: Device) -> None:
        self._path, self._device = path, str(device)
        self.rows: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self.rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}

    def put(self, row: dict[str, Any]) -> None:
        """Adds a row, or replaces the one of this name."""
        self.rows[row["name"]] = row
        if self._path is not None:
            found = {"device": self._device, "rows": list(self.rows.values())}
            write(self._path, json.dumps(found, indent=1) + "\n")


def text(row: dict[str, Any]) -> str:
    """A row as a line."""
    numbers = {key: value for key, value in row.items() if isinstance(value, float)}
    cells = [f"{key} {value:.0%}" if key == "of copy" else f"{key} {value:.4g}" for key, value in numbers.items()]
    return f"{row['name']:<24} {'  '.join([*cells, *([row['error']] if 'error' in row else [])])}"


def main() -> None:
    """Measure, print, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=".*", help="regular expression of the rows' names")
    parser.add_argument("--out", type=Path, help="file of all rows")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for an emulated device")
    arguments = parser.parse_args()
    found = devices.available()
    if not found:
        raise SystemExit(f"no device: {devices.why_none()}")
    bench, table = Bench(found[0], Sizes(small=arguments.small)), Table(arguments.out, found[0])
    bench.copy_rate = table.rows.get(COPY, {}).get("copy GB/s", 0.0)
    if not works(found[0]):  # the trial of a newer kernel, which is not tried again
        raise SystemExit(DEVICE_LOST)
    library = not arguments.small and find_spec("torch") is not None
    for name, measure in measurements(bench, library=library):
        if name in table.rows or not (name == COPY or re.fullmatch(arguments.rows, name)):
            continue
        table.put({"name": name, "error": "FAILED: does not end"})
        try:
            row = measure()
        except Exception as error:  # another library's too: the other rows are worth having
            row = {"name": name, "error": f"FAILED: {error}"}
        table.put(row)
        print(text(row), flush=True)
        if "error" in row and not works(found[0]):
            raise SystemExit(DEVICE_LOST)
    if failed := [row["name"] for row in table.rows.values() if "error" in row]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
