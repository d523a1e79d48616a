"""Asynchronous copies and products of sm_90 in the emulator: right results, and an error for every missing step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda import emulator
from ikpy.backends.cuda.emulator import FORWARD, REVERSE
from ikpy.backends.cuda.launch import pointer

ORDERS = (FORWARD, REVERSE, 5, 77)
ROWS, COLUMNS, DEPTH = 64, 128, 64

# One product of 64 x 128 x 64 by four warps, whose operands come by bulk copies or by ordinary stores.
KERNEL = """
#include "wgmma.cuh"
using namespace ikpy::cuda;

enum Step {
    kNothing, kStores, kInitFence, kInitBarrier, kAnnounce, kArrival, kStoreFence, kStoreBarrier, kProductFence,
    kCommit, kWait, kSecondFence, kTouch, kOverwrite, kCopyOver, kOwnDescriptor, kThreeWarps, kNoSwizzle, kBase,
    kColumns, kStride, kLateCopy, kOddSize, kTwice, kTooMany
};
constexpr int kABytes = 64 * 128, kBBytes = 128 * 128;

__device__ void store(uint8_t* to, const uint8_t* from, int bytes) {
    for (int i = threadIdx.x; i < bytes / 16; i += blockDim.x)
        reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}

// Without the step, or with the mistake, that Wrong names.
template <int Wrong, bool Stores>
__device__ void product(const uint8_t* a, const uint8_t* b, float* out) {
    IKPY_DYNAMIC_SHARED(shared);
    __shared__ Barrier barrier;
    uint8_t* own = shared + (1024 - shared_address(shared) % 1024) % 1024;
    uint8_t* other = own + kABytes;
    if (threadIdx.x == 0) {
        barrier_init(&barrier, 1);
        if (Wrong == kTwice) barrier_init(&barrier, 1);
        if (Wrong != kInitFence) fence_async();
    }
    if (Wrong != kInitBarrier) __syncthreads();
    if (Stores) {
        store(own, a, kABytes);
        store(other, b, kBBytes);
        if (Wrong != kStoreFence) fence_async();
        if (Wrong != kStoreBarrier) __syncthreads();
    } else {
        if (threadIdx.x == 32) {
            barrier_expect(&barrier, kABytes + kBBytes + (Wrong == kAnnounce ? 16 : 0));
            copy_bulk(own, a, kABytes, &barrier);
            copy_bulk(other, b, Wrong == kOddSize ? kBBytes - 8 : kBBytes, &barrier);
            if (Wrong == kTooMany) barrier_arrive(&barrier);
        }
        if (Wrong != kArrival) barrier_wait(&barrier, 0);
    }
    float sums[64];
    unsigned long long da = matrix_descriptor(own), db = matrix_descriptor(other);
    if (Wrong == kNoSwizzle) da &= ~(3ull << 62);
    if (Wrong == kBase) db += 128 >> 4;
    if (Wrong == kColumns) da += 7;
    if (Wrong == kStride) db = (db & ~(0x3fffull << 32)) | (512ull >> 4) << 32;
    if (Wrong == kOwnDescriptor && warp_id() == 2) da += 1024 >> 4;
    if (Wrong != kProductFence) wgmma_fence();
    if (Wrong != kThreeWarps || warp_id() < 3)
        for (int i = 0; i < 4; ++i) wgmma_bf16_n128(sums, da + i * kNextK, db + i * kNextK, i > 0);
    if (Wrong == kTouch) sums[3] = 1.0f;
    if (Wrong == kOverwrite && threadIdx.x == 0) own[17] = 1;
    if (Wrong == kCopyOver && threadIdx.x == 0) {
        barrier_expect(&barrier, 16);
        copy_bulk(own, b, 16, &barrier);
    }
    if (Wrong != kCommit) wgmma_commit();
    if (Wrong != kWait) wgmma_wait<0>();
    // Twice the product, by adding it to itself.
    for (int i = 0; i < 64; ++i) sums[i] += 1.0f;
    if (Wrong != kSecondFence) wgmma_fence();
    for (int i = 0; i < 4; ++i) wgmma_bf16_n128(sums, da + i * kNextK, db + i * kNextK, true);
    wgmma_commit();
    wgmma_wait<0>();
    if (Wrong == kLateCopy && threadIdx.x == 0) {
        barrier_expect(&barrier, 16);
        copy_bulk(own, b, 16, &barrier);
    }
    const int lane = lane_id();
    for (int i = 0; i < 64; ++i) {
        const int row = 16 * warp_id() + lane / 4 + 8 * (i / 2 % 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        out[128 * row + column] = sums[i];
    }
}
"""
FAULTS = {  # what is left out or wrong: (operands by ordinary stores, error)
    "InitFence": (False, "used by the async proxy without a proxy fence"),
    "InitBarrier": (False, "no block barrier after its initialization|not initialized"),
    "Announce": (False, "128 for a phase of a barrier that does not end"),
    "Arrival": (False, "without waiting for the copy"),
    "StoreFence": (True, "without a proxy fence"),
    "StoreBarrier": (True, "written without a barrier|operands are overwritten"),
    "ProductFence": (False, "a product without wgmma_fence"),
    "Commit": (False, "sums were written while products"),
    "Wait": (False, "sums were written while products"),
    "SecondFence": (False, "sums were written and no wgmma_fence"),
    "Touch": (False, "sums were written while products"),
    "Overwrite": (True, "operands are overwritten while products"),
    "CopyOver": (False, "operands are overwritten while products"),
    "OwnDescriptor": (False, "ask for different products"),
    "ThreeWarps": (False, "ask for different products|did not take part"),
    "NoSwizzle": (False, "without 128-byte swizzle"),
    "Base": (False, "does not start at a multiple of 1024"),
    "Columns": (False, "beyond its rows of 128 bytes"),
    "Stride": (False, "stride of a matrix is no multiple of 1024"),
    "OddSize": (False, "misaligned places or sizes"),
    "Twice": (False, "initialized twice"),
    "TooMany": (False, "more arrivals|a phase of a barrier that does not end"),
}
# Copies that are done at once cannot be missed at the end of a block.
LATE_FAULTS = {"LateCopy": "a block ends while a copy"}


def instance(name: str, *, stores: bool) -> str:
    kernel = f"product_{name}_{int(stores)}"
    return (
        f"IKPY_KERNEL {kernel}(const uint8_t* a, const uint8_t* b, float* out) "
        f"{{ product<k{name}, {str(stores).lower()}>(a, b, out); }}\nIKPY_EXPORT({kernel});\n"
    )


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> emulator.Emulator:
    path: Path = tmp_path_factory.mktemp("kernels") / "async.cu"
    kernels = [("Nothing", False), ("Nothing", True), *((name, how) for name, (how, _) in FAULTS.items())]
    kernels += [(name, False) for name in LATE_FAULTS]
    path.write_text(KERNEL + "".join(instance(name, stores=stores) for name, stores in kernels))
    return emulator.build([path], checked=True)


def swizzled(x: np.ndarray) -> np.ndarray:
    """float32 [rows, 64] as bf16 in rows of 128 bytes whose pieces of 16 bytes are exchanged by the row number."""
    rows = (x.view(np.uint32) >> 16).astype(np.uint16).reshape(len(x), 8, 8)
    pieces = np.arange(8)[None, :] ^ (np.arange(len(x)) % 8)[:, None]
    return rows[np.arange(len(x))[:, None], pieces].copy()


def operands() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Integers [ROWS, DEPTH] and [COLUMNS, DEPTH], and the kernel's arrays, aligned to 16 bytes: both as it reads them,
    and zeros for the result."""
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-8, 9, (n, DEPTH)).astype(np.float32) for n in (ROWS, COLUMNS))
    arrays = []
    for x in (swizzled(a), swizzled(b), np.zeros((ROWS, COLUMNS), np.float32)):
        memory = np.zeros(x.nbytes + 16, np.uint8)
        place = memory[-memory.ctypes.data % 16 :][: x.nbytes].view(x.dtype).reshape(x.shape)
        place[...] = x
        arrays.append(place)
    return a, b, arrays


def run(machine: emulator.Emulator, name: str, order: int, *, stores: bool) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's result and the true one, both [ROWS, COLUMNS]."""
    a, b, arrays = operands()
    machine.set_order(order)
    args = [pointer(x.ctypes.data) for x in arrays]
    machine.launch(f"product_{name}_{int(stores)}", (1, 1, 1), (128, 1, 1), 26 * 1024, args)
    return arrays[2], 2 * (a @ b.T) + 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stores", [False, True], ids=["bulk copies", "stores"])
def test_product(machine: emulator.Emulator, order: int, stores: bool) -> None:
    actual, expected = run(machine, "Nothing", order, stores=stores)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_errors_in_every_order(machine: emulator.Emulator, fault: str, order: int) -> None:
    stores, reason = FAULTS[fault]
    with pytest.raises(emulator.EmulationError, match=reason):
        run(machine, fault, order, stores=stores)
    actual, expected = run(machine, "Nothing", order, stores=False)  # the next launch works
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("fault", LATE_FAULTS)
def test_faults_that_show_when_copies_arrive_late(machine: emulator.Emulator, fault: str) -> None:
    with pytest.raises(emulator.EmulationError, match=LATE_FAULTS[fault]):
        run(machine, fault, REVERSE, stores=False)
