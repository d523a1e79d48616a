"""The checked build finds what the language or the memory model leaves undefined, though no order of threads does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import emulator
from ikpy.backends.cuda.launch import pointer

ORDERS = (emulator.FORWARD, emulator.REVERSE, 77)

# Every kernel takes a number with which it is right (0) or wrong (1), which the compiler does not know.
KERNELS = """
#include "mma.cuh"
using namespace ikpy::cuda;

IKPY_KERNEL shifts(int* out, int wrong) {
    out[threadIdx.x] = static_cast<int>(1u << (threadIdx.x % 32 + wrong));
}
IKPY_EXPORT(shifts);

IKPY_KERNEL indexes(int* out, int wrong) {
    __shared__ int first[64], second[64];
    first[threadIdx.x] = second[threadIdx.x] = 3;
    __syncthreads();
    out[threadIdx.x] = first[63 - threadIdx.x + wrong];
}
IKPY_EXPORT(indexes);

IKPY_KERNEL converts(int* out, int wrong) {
    out[threadIdx.x] = static_cast<int>(wrong ? 3e9f : 3.0f);
}
IKPY_EXPORT(converts);


IKPY_KERNEL multiplies(int* out, int wrong) {
    const int rows = 1 << 16, bytes = (1 << 15) << wrong;
    out[threadIdx.x] = rows / 2 * bytes;
}
IKPY_EXPORT(multiplies);

// As conversions of devices: those of numbers beyond an integer, and of NaN, are defined there.
IKPY_KERNEL rounds(int* out, int) {
    if (threadIdx.x) return;
    const float x[] = {2.5f, 3.5f, -2.5f, 3e9f, -3e9f, NAN, INFINITY, -2147483648.0f};
    for (int i = 0; i < 8; ++i) {
        out[i] = round_even(x[i]);
        out[8 + i] = truncated(x[i]);
    }
}
IKPY_EXPORT(rounds);

IKPY_KERNEL divides(int* out, int wrong) { out[threadIdx.x] = 5 / (1 - wrong); }
IKPY_EXPORT(divides);

// An array that only the right one assigns to.
IKPY_KERNEL assigns(int* out, int wrong) {
    int values[8];
    for (int i = 0; i < 8 && !wrong; ++i) values[i] = 7;
    out[threadIdx.x] = values[threadIdx.x % 8];
}
IKPY_EXPORT(assigns);

IKPY_KERNEL asks_some_lanes(int* out, int wrong) {
    out[threadIdx.x] = __shfl_xor_sync(wrong ? 0xffffu : kAllLanes, 1, 1);
}
IKPY_EXPORT(asks_some_lanes);

// All threads count, then read.
IKPY_KERNEL counts(int* out, int wrong) {
    __shared__ int count;
    if (threadIdx.x == 0) count = 0;
    __syncthreads();
    atomicAdd(&count, 1);
    if (!wrong) __syncthreads();
    out[threadIdx.x] = count > 0;
}
IKPY_EXPORT(counts);

// Lanes exchange what lies in device memory; a shuffle keeps their order, but orders nothing.
IKPY_KERNEL exchanges(int* out, int wrong) {
    const int found = out[threadIdx.x ^ 1], sum = __shfl_xor_sync(kAllLanes, found, 1);
    if (!wrong) __syncwarp();
    out[threadIdx.x] = sum;
}
IKPY_EXPORT(exchanges);

// A block reads what another one writes.
IKPY_KERNEL reads_of_others(int* out, int wrong) {
    const int place = 64 * blockIdx.x + threadIdx.x;
    const int found = out[wrong ? place ^ 64 : place];
    out[place] = found;
}
IKPY_EXPORT(reads_of_others);

// What is copied changes before the copy is waited for.
IKPY_KERNEL copies(int* out, int wrong) {
    __shared__ uint4 values[64];
    copy16_async(&values[threadIdx.x], out + 4 * (threadIdx.x % 16), true);
    commit_copies();
    if (!wrong) wait_copies<0>();
    if (!wrong) __syncthreads();
    out[threadIdx.x] = 6;
    wait_copies<0>();
}
IKPY_EXPORT(copies);
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> emulator.Emulator:
    source: Path = tmp_path_factory.mktemp("kernels") / "undefined.cu"
    source.write_text(KERNELS)
    return emulator.build([source], checked=True)


def run(machine: emulator.Emulator, kernel: str, *, wrong: int, order: int) -> np.ndarray:
    blocks, threads = 2 if kernel == "reads_of_others" else 1, 32 if kernel == "rounds" else 64
    memory = np.full(256 + 4, 5, np.int32)
    out = memory[-memory.ctypes.data // 4 % 4 :][:256]
    machine.set_order(order)
    args = [pointer(out.ctypes.data), wrong.to_bytes(4, "little")]
    machine.launch(kernel, (blocks, 1, 1), (threads, 1, 1), 0, args)
    return out[:64].copy()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("shifts", r"a shift by too many bits at undefined\.cu:6, thread 31|thread 63"),
        ("indexes", r"an index beyond an array at undefined\.cu:14"),
        ("converts", "a float beyond an integer"),
        ("multiplies", "a product beyond its type"),
        ("divides", "a division by zero"),
        ("asks_some_lanes", "not for all lanes"),
        ("counts", "race in shared memory: (changed atomically|read) by thread .*, (read|changed atomically) by"),
        ("exchanges", "race in global memory: read by thread .*, written by"),
        ("reads_of_others", r"race in global \(two blocks\) memory: (read|written) by"),
        ("copies", "race in global memory"),
    ],
)
def test_it_is_an_error_in_every_order(checked: emulator.Emulator, kernel: str, reason: str, order: int) -> None:
    run(checked, kernel, wrong=0, order=order)
    with pytest.raises(emulator.EmulationError, match=reason):
        run(checked, kernel, wrong=1, order=order)


def test_what_nothing_was_assigned_to_holds_a_pattern(checked: emulator.Emulator) -> None:
    assert (run(checked, "assigns", wrong=0, order=emulator.FORWARD) == 7).all()
    assert (run(checked, "assigns", wrong=1, order=emulator.FORWARD) < -(2**24)).all()


def test_floats_become_integers_as_on_devices(checked: emulator.Emulator) -> None:
    most, least = 2**31 - 1, -(2**31)
    found = run(checked, "rounds", wrong=0, order=emulator.FORWARD)
    assert found[:8].tolist() == [2, 4, -2, most, least, 0, most, least]
    assert found[8:16].tolist() == [2, 3, -2, most, least, 0, most, least]
