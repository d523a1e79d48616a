"""The emulation itself: kernels that would fail on a device fail here too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import emulator
from ikpy.backends.cuda.launch import pointer

ORDERS = (emulator.FORWARD, emulator.REVERSE, 77)

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
// The second half of the block reads what lane 0 of its warp wrote, with and without __syncwarp; a shuffle orders
// nothing.
template <bool Sync>
__device__ void from_first_lane(int* out) {
    __shared__ int first[2];
    if (lane_id() == 0) first[warp_id()] = 5;
    const int lane = __shfl_sync(kAllLanes, lane_id(), 0);
    if (Sync) __syncwarp();
    out[threadIdx.x] = first[warp_id()] + lane;
}
IKPY_KERNEL with_syncwarp(int* out) { from_first_lane<true>(out); }
IKPY_EXPORT(with_syncwarp);
IKPY_KERNEL without_syncwarp(int* out) { from_first_lane<false>(out); }
IKPY_EXPORT(without_syncwarp);

// All threads read before one writes.
template <bool Barrier>
__device__ void read_then_written(int* out) {
    __shared__ int value;
    if (threadIdx.x == 0) value = 5;
    __syncthreads();
    const int found = value;
    if (Barrier) __syncthreads();
    if (threadIdx.x == 0) value = 6;
    out[threadIdx.x] = found;
}
IKPY_KERNEL read_barrier_written(int* out) { read_then_written<true>(out); }
IKPY_EXPORT(read_barrier_written);
IKPY_KERNEL read_written(int* out) { read_then_written<false>(out); }
IKPY_EXPORT(read_written);

IKPY_KERNEL same_place_in_all_blocks(int* out) { out[threadIdx.x] = 5; }
IKPY_EXPORT(same_place_in_all_blocks);

IKPY_KERNEL counted(int* out) { atomicAdd(&out[64], 1); }
IKPY_EXPORT(counted);

IKPY_KERNEL misaligned_vector(int* out) {
    if (threadIdx.x == 7)
        *reinterpret_cast<float4*>(out + 1) = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
}
IKPY_EXPORT(misaligned_vector);

// Lanes vote and shuffle at the same time.
IKPY_KERNEL lanes_apart(int* out) {
    if (lane_id() < 16)
        out[threadIdx.x] = __shfl_xor_sync(kAllLanes, 1, 1);
    else
        out[threadIdx.x] = static_cast<int>(__ballot_sync(kAllLanes, 1));
}
IKPY_EXPORT(lanes_apart);

// Blocks but the first one find what the one before left behind.
template <bool Write>
__device__ void left_behind(int* out) {
    __shared__ int values[64];
    if (Write || blockIdx.x == 0) values[threadIdx.x] = 5;
    __syncthreads();
    out[64 * blockIdx.x + threadIdx.x] = values[threadIdx.x];
}
IKPY_KERNEL written_by_all(int* out) { left_behind<true>(out); }
IKPY_EXPORT(written_by_all);
IKPY_KERNEL written_by_first(int* out) { left_behind<false>(out); }
IKPY_EXPORT(written_by_first);

// Every thread reads what another one copied.
template <bool Barrier>
__device__ void copied_by_other(int* out) {
    __shared__ uint4 values[64];
    copy16_async(&values[threadIdx.x], out, true);
    commit_copies();
    wait_copies<0>();
    if (Barrier) __syncthreads();
    const unsigned found = values[threadIdx.x ^ 32].x;
    __syncthreads();
    out[threadIdx.x] = found;
}
IKPY_KERNEL copied_with_barrier(int* out) { copied_by_other<true>(out); }
IKPY_EXPORT(copied_with_barrier);
IKPY_KERNEL copied_without_barrier(int* out) { copied_by_other<false>(out); }
IKPY_EXPORT(copied_without_barrier);

// Reads through the cache for memory that stays as it is, of what it writes before or after, or of shared memory.
IKPY_KERNEL written_and_read_only(int* out) {
    out[threadIdx.x] = 5;
    __syncthreads();
    out[64 + threadIdx.x] = __ldg(out + threadIdx.x);
}
IKPY_EXPORT(written_and_read_only);
IKPY_KERNEL read_only_and_written(int* out) { out[threadIdx.x] = __ldg(out + threadIdx.x) + 1; }
IKPY_EXPORT(read_only_and_written);
IKPY_KERNEL read_only_beside_written(int* out) { out[threadIdx.x] = __ldg(out + 64 + threadIdx.x); }
IKPY_EXPORT(read_only_beside_written);
IKPY_KERNEL read_only_shared(int* out) {
    __shared__ int values[64];
    values[threadIdx.x] = 5;
    out[threadIdx.x] = __ldg(values + threadIdx.x);
}
IKPY_EXPORT(read_only_shared);

// Takes 256 bytes of dynamic shared memory.
template <bool Copy>
__device__ void dynamic_memory(int* out) {
    IKPY_DYNAMIC_SHARED(memory);
    auto* values = reinterpret_cast<int*>(memory);
    if (Copy && threadIdx.x < 16) copy16_async(values + 4 * threadIdx.x, out + 4 * threadIdx.x, true);
    if (Copy) commit_copies();
    if (Copy) wait_copies<0>();
    if (!Copy) values[threadIdx.x] = 5;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
IKPY_KERNEL in_dynamic_memory(int* out) { dynamic_memory<false>(out); }
IKPY_EXPORT(in_dynamic_memory);
IKPY_KERNEL copied_to_dynamic_memory(int* out) { dynamic_memory<true>(out); }
IKPY_EXPORT(copied_to_dynamic_memory);

IKPY_KERNEL with_wait(int* out) { copied<true>(out); }
IKPY_EXPORT(with_wait);
IKPY_KERNEL without_wait(int* out) { copied<false>(out); }
IKPY_EXPORT(without_wait);
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("kernels") / "faulty.cu"
    path.write_text(KERNELS)
    return path


@pytest.fixture(scope="module")
def machine(source: Path) -> emulator.Emulator:
    return emulator.build([source])


@pytest.fixture(scope="module")
def checked(source: Path) -> emulator.Emulator:
    return emulator.build([source], checked=True)


def run(
    machine: emulator.Emulator, kernel: str, order: int = emulator.FORWARD, blocks: int = 1, shared_bytes: int = 0
) -> np.ndarray:
    memory = np.full(256 + 4, 5, np.int32)
    out = memory[-memory.ctypes.data // 4 % 4 :][:256]
    machine.set_order(order)
    machine.launch(kernel, (blocks, 1, 1), (64, 1, 1), shared_bytes, [pointer(out.ctypes.data)])
    return out[:64].copy()


def test_a_missing_barrier_shows_in_one_order(machine: emulator.Emulator) -> None:
    expected = np.arange(64) + (np.arange(64) + 1) % 64
    assert all((run(machine, "with_barrier", r) == expected).all() for r in ORDERS)
    assert not all((run(machine, "without_barrier", r) == expected).all() for r in ORDERS)


def test_a_missing_wait_shows_in_one_order(machine: emulator.Emulator) -> None:
    assert all((run(machine, "with_wait", r) == 5).all() for r in ORDERS)
    assert not all((run(machine, "without_wait", r) == 5).all() for r in ORDERS)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("some_threads_at_a_barrier", "40 threads wait at a block barrier"),
        ("some_lanes_in_a_shuffle", "31 in a warp operation"),
        ("misaligned", "misaligned read"),
        ("lanes_apart", "different operations"),
    ],
)
def test_what_a_device_would_not_survive_is_an_error(machine: emulator.Emulator, kernel: str, reason: str) -> None:
    with pytest.raises(emulator.EmulationError, match=reason):
        run(machine, kernel)
    assert (run(machine, "with_barrier") >= 0).all()  # the next launch works


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kernel", "blocks", "reason"),
    [
        ("without_barrier", 1, "race in shared memory"),
        ("without_syncwarp", 1, "race in shared memory"),
        ("read_written", 1, "race in shared memory"),
        ("same_place_in_all_blocks", 2, r"race in global \(two blocks\) memory: written by thread .*, written by"),
        ("misaligned_vector", 1, "misaligned access"),
        ("written_by_first", 2, "memory that nobody wrote is read"),
        ("copied_without_barrier", 1, "(race in shared|that nobody wrote)"),
        ("written_and_read_only", 1, "__ldg.* from what the launch has written"),
        ("read_only_and_written", 1, "written that the launch reads"),
        ("read_only_shared", 1, "memory that is not global"),
        ("in_dynamic_memory", 1, "beyond the dynamic shared memory"),
        ("copied_to_dynamic_memory", 1, "beyond the dynamic shared memory"),
    ],
)
def test_checks_find_faults_in_every_order(
    checked: emulator.Emulator, kernel: str, blocks: int, reason: str, order: int
) -> None:
    with pytest.raises(emulator.EmulationError, match=reason):
        run(checked, kernel, order, blocks)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "kernel",
    [
        "with_barrier",
        "with_syncwarp",
        "read_barrier_written",
        "with_wait",
        "counted",
        "written_by_all",
        "copied_with_barrier",
        "read_only_beside_written",
    ],
)
def test_checks_find_nothing_where_nothing_is(checked: emulator.Emulator, kernel: str, order: int) -> None:
    assert (run(checked, kernel, order, 3 if kernel in ("counted", "written_by_all") else 1) >= 0).all()


@pytest.mark.parametrize("kernel", ["in_dynamic_memory", "copied_to_dynamic_memory"])
def test_dynamic_memory_ends_where_the_launch_says(checked: emulator.Emulator, kernel: str) -> None:
    for order in ORDERS:
        assert (run(checked, kernel, order, shared_bytes=256) == 5).all()
        with pytest.raises(emulator.EmulationError, match="beyond the dynamic shared memory"):
            run(checked, kernel, order, shared_bytes=240)


def test_blocks_that_write_apart_are_no_race(checked: emulator.Emulator) -> None:
    assert (run(checked, "same_place_in_all_blocks", blocks=1) == 5).all()
