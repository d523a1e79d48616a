"""What a driver would refuse, the emulated devices and the stand-in for PyCUDA refuse as well."""

from __future__ import annotations

import ast
import operator
import os
import re
import shutil
import subprocess
from typing import Any

import pytest

from ikpy.backends.cuda import emulator
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.arguments import pack
from ikpy.backends.cuda.emulated import EmulatedDevice
from ikpy.backends.cuda.launch import Launch, flash_shared_bytes, kernel_file, limits, lower, supports
from ikpy.backends.cuda.launch.base import ACT_Q8
from ikpy.graph.ir import F32, Buffer, Node, Value, contiguous_strides
from ikpy.quants import registry
from tests.cuda import fake_pycuda

pytestmark = pytest.mark.usefixtures("emulation")
FLASH = "flash64_256_256"


def arguments(kernel: str) -> list[bytes]:
    """Arguments of the right sizes."""
    return [bytes(nbytes) for nbytes, _ in emulator.library().parameters(kernel)]


@pytest.mark.parametrize(
    ("grid", "block", "reason"),
    [
        ((1, 65536, 1), (32, 1, 1), r"grid \(1, 65536, 1\): at most"),
        ((2**31, 1, 1), (32, 1, 1), "grid"),
        ((0, 1, 1), (32, 1, 1), "nothing empty"),
        ((1, 1, 1), (1, 1, 128), "block"),
        ((1, 1, 1), (256, 1, 1), "256 threads per block: at most 128"),
        ((1, 1, 1), (33, 1, 1), "multiple of 32"),
    ],
)
def test_sizes_that_no_device_takes(grid: limits.Dim3, block: limits.Dim3, reason: str) -> None:
    with pytest.raises(emulator.EmulationError, match=rf"^kernel rope: .*{reason}"):
        emulator.library().launch("rope", grid, block, 0, arguments("rope"))


@pytest.mark.parametrize(
    ("kind", "type_name", "most"),
    [
        ("mul_mat", "q4_0", 524280),
        ("mul_mat_up_gate", "q4_0", 262140),
        ("mul_mat", "q4_0_r8", 4194240),
    ],
)
def test_products_of_more_rows_than_a_grid_has_run_on_the_cpu(kind: str, type_name: str, most: int) -> None:
    """At the limit the launch is one that a driver takes, above it the node has no kernel."""
    row = registry.by_name(type_name)

    def product(n_out: int) -> Node:
        weight = value(row.id, (256, n_out))
        x, dst = value(F32, (256, 1)), value(F32, (n_out, 1))
        more, numbers = ([weight], [ACT_Q8, 1, 0]) if kind.endswith("gate") else ([], [ACT_Q8, 1])
        return Node(kind, dst, [weight, *more, x, None, None], numbers)

    assert supports(product(most)) is None
    (launch,) = lower(product(most), lambda _: 1 << 20)
    assert launch.grid[1] == limits.MAX_GRID[1]
    assert limits.geometry_fault(launch.kernel, launch.grid, launch.block) is None
    above = most + row.interleave
    assert supports(product(above)) == f"{above} rows are above {most}"


def value(type_id: int, shape: tuple[int, int]) -> Value:
    """A contiguous matrix without memory."""
    strides = contiguous_strides(type_id, shape)
    return Value(Buffer(strides[2]), type_id, (*shape, 1, 1), strides)


def test_arguments_that_are_not_the_parameters() -> None:
    right = arguments("rms_norm")
    for wrong in (right[:-1], [*right, bytes(4)], [right[0][:-8], *right[1:]]):
        with pytest.raises(emulator.EmulationError, match=r"arguments of .* bytes for parameters of \[64, 64, 64"):
            emulator.library().launch("rms_norm", (1, 1, 1), (32, 1, 1), 0, wrong)
    assert "at most 4096" in str(limits.argument_fault([bytes(4104)], [(4104, 8)]))


def test_arguments_lie_where_kernels_read_them() -> None:
    """Packing knows sizes only, the compiler the alignment of every type."""
    machine = emulator.library()
    for kernel in machine.kernels():
        parameters = machine.parameters(kernel)
        places = limits.offsets(parameters)
        args = [bytes([i + 1]) * nbytes for i, (nbytes, _) in enumerate(parameters)]
        buffer = pack(args)
        assert len(buffer) == places[-1], kernel
        for place, value in zip(places, args, strict=False):
            assert buffer[place : place + len(value)] == value, kernel


def number(expression: str, text: str) -> int:
    """The value of a constant expression in C++; names are those of constants in the text."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Name):
            found = re.search(rf"\b{node.id} = ([^,;]+)[,;]", text)
            assert found, node.id
            return number(found[1], text)
        if isinstance(node, ast.BinOp):
            return {ast.Mult: operator.mul, ast.Add: operator.add}[type(node.op)](value(node.left), value(node.right))
        assert isinstance(node, ast.Constant) and isinstance(node.value, int), expression
        return node.value

    return value(ast.parse(expression.strip(), mode="eval").body)


def test_kernels_are_looked_for_in_the_file_that_has_them() -> None:
    """Those that no macro names; the others are looked at below."""
    seen = 0
    for source in emulator.sources():
        for kernel in re.findall(r"IKPY_KERNEL\s+(?:__launch_bounds__\([^)]*\)\s*)?([a-z]\w+)\(", source.read_text()):
            assert kernel_file(kernel) == source.stem, kernel
            seen += 1
    assert seen > 25


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="a C++ compiler is needed")
def test_kernels_are_compiled_for_the_threads_they_are_launched_with() -> None:
    compiler, seen = os.environ.get("CXX", "g++"), set()
    includes = [f"-I{path}" for path in (emulator.SHIM, *emulator.INCLUDE_DIRS)]
    for source in emulator.sources():
        command = [compiler, "-E", "-P", "-std=c++17", "-D__launch_bounds__(...)=BOUNDS[__VA_ARGS__]", *includes]
        text = subprocess.run([*command, "-x", "c++", str(source)], capture_output=True, text=True, check=True).stdout
        for bound, kernel in re.findall(r"BOUNDS\[([^,\]]*)[^\]]*\]\s*(\w+)\s*\(", text):
            assert limits.block_threads(kernel) <= number(bound, text), kernel
            assert kernel_file(kernel) == source.stem, kernel
            seen.add(kernel.partition("_")[0])
    assert {"matvec1", "matmul", "wgmma", "gemm", "flash64"} <= seen


def test_shared_memory_that_a_device_does_not_have() -> None:
    launch = Launch(FLASH, (1, 1, 1), (128, 1, 1), flash_shared_bytes(FLASH), arguments(FLASH))
    assert launch.shared_bytes > 64 << 10
    EmulatedDevice(0, 1 << 20, lambda _: None).new_stream().launch(launch)
    turing = EmulatedDevice(0, 1 << 20, lambda _: None, compute_capability=(7, 5))
    with pytest.raises(DeviceError, match=rf"CUDA0: kernel {FLASH}: \d+ bytes of dynamic shared memory, of 65536"):
        turing.new_stream().launch(launch)


@pytest.mark.parametrize(
    ("block", "shared", "what"),
    [((128, 1, 1), 99 << 10, "set_attribute"), ((256, 1, 1), 0, "launch"), ((128, 1, 65), 0, "launch")],
)
def test_the_stand_in_refuses_what_a_driver_refuses(
    driver: Any, block: limits.Dim3, shared: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_pycuda.Function, "launcher", lambda *_: pytest.fail("was launched"))
    stream = driver.devices[0].new_stream()
    with pytest.raises(DeviceError, match=f"CUDA0: .*{what}.*invalid argument"):
        stream.launch(Launch(FLASH, (1, 1, 1), block, shared, arguments(FLASH)))
