"""The emulation itself: kernels that would fail on a device fail here too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import emulator
from ikpy.backends.cuda.launch import pointer

KERNELS = """
#include "mma.cuh"
using namespace ikpy::cuda;

// Sum of neighbours through shared memory, with and without the barrier.
template <bool Barrier>
__device__ void neighbours(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = threadIdx.x;
    if (Barrier) __syncthreads();
    out[threadIdx.x] = values[threadIdx.x] + values[(threadIdx.x + 1) % 64];
    if (Barrier) __syncthreads();
    values[threadIdx.x] = 0;
}
IKPY_KERNEL with_barrier(int* out) { neighbours<true>(out); }
IKPY_EXPORT(with_barrier);
IKPY_KERNEL without_barrier(int* out) { neighbours<false>(out); }
IKPY_EXPORT(without_barrier);

IKPY_KERNEL some_threads_at_a_barrier(int* out) {
    if (threadIdx.x < 40) __syncthreads();
    out[threadIdx.x] = 1;
}
IKPY_EXPORT(some_threads_at_a_barrier);

IKPY_KERNEL some_lanes_in_a_shuffle(int* out) {
    if (threadIdx.x != 7) out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1, 1);
}
IKPY_EXPORT(some_lanes_in_a_shuffle);

IKPY_KERNEL misaligned(int* out) {
    out[threadIdx.x] = __ldg(reinterpret_cast<const int*>(reinterpret_cast<const char*>(out) + 2));
}
IKPY_EXPORT(misaligned);

template <bool Wait>
__device__ void copied(int* out) {
    __shared__ uint4 values[64];
    values[threadIdx.x] = uint4{9, 9, 9, 9};
    copy16_async(&values[threadIdx.x], out + 4 * threadIdx.x, true);
    commit_copies();
    if (Wait) wait_copies<0>();
    const unsigned found = values[threadIdx.x].x;
    __syncthreads();
    out[threadIdx.x] = found;
}
IKPY_KERNEL with_wait(int* out) { copied<true>(out); }
IKPY_EXPORT(with_wait);
IKPY_KERNEL without_wait(int* out) { copied<false>(out); }
IKPY_EXPORT(without_wait);
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> emulator.Emulator:
    source: Path = tmp_path_factory.mktemp("kernels") / "faulty.cu"
    source.write_text(KERNELS)
    return emulator.build([source])


def run(machine: emulator.Emulator, kernel: str, *, reverse: bool = False) -> np.ndarray:
    memory = np.full(256 + 4, 5, np.int32)
    out = memory[-memory.ctypes.data // 4 % 4 :][:256]
    machine.set_reverse(reverse)
    machine.launch(kernel, (1, 1, 1), (64, 1, 1), 0, [pointer(out.ctypes.data)])
    return out[:64].copy()


def test_a_missing_barrier_shows_in_one_order(machine: emulator.Emulator) -> None:
    expected = np.arange(64) + (np.arange(64) + 1) % 64
    assert all((run(machine, "with_barrier", reverse=r) == expected).all() for r in (False, True))
    assert not all((run(machine, "without_barrier", reverse=r) == expected).all() for r in (False, True))


def test_a_missing_wait_shows_in_one_order(machine: emulator.Emulator) -> None:
    assert all((run(machine, "with_wait", reverse=r) == 5).all() for r in (False, True))
    assert not all((run(machine, "without_wait", reverse=r) == 5).all() for r in (False, True))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("some_threads_at_a_barrier", "40 threads wait at a block barrier"),
        ("some_lanes_in_a_shuffle", "31 in a warp operation"),
        ("misaligned", "misaligned read"),
    ],
)
def test_what_a_device_would_not_survive_is_an_error(machine: emulator.Emulator, kernel: str, reason: str) -> None:
    with pytest.raises(emulator.EmulationError, match=reason):
        run(machine, kernel)
    assert (run(machine, "with_barrier") >= 0).all()  # the next launch works
