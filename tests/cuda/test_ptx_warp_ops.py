"""mma.sync, ldmatrix, asynchronous copies and barriers of the PTX machine against numpy and the PTX ISA's tables."""

from __future__ import annotations

import ctypes
import re
import shutil

import numpy as np
import pytest

from tests.cuda.ptx.warp_ops import (
    BITS,
    LANES,
    Block,
    FaultError,
    a_place,
    b_place,
    c_place,
    check,
    fragments,
    library,
    pointer,
)

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


def mma(suffix: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """D of one mma.sync, in the type of the suffix."""
    match = re.match(r"m(\d+)n8k(\d+)\.row\.col\.(?:satfinite\.)?(\w+)\.(\w+)\.(\w+)\.(\w+)$", suffix)
    assert match
    m, k = int(match[1]), int(match[2])
    kind_d, kind_a, kind_b, kind_c = match.groups()[2:]
    registers_a = fragments(a, kind_a, lambda g, t, i: a_place(m, k, BITS[kind_a], g, t, i))
    registers_b = fragments(b, kind_b, lambda g, t, i: b_place(k, BITS[kind_b], g, t, i))
    registers_c = fragments(c, kind_c, c_place)
    counts = (ctypes.c_int * 4)()
    check(library().ptx_mma_registers(suffix.encode(), counts))
    expected = [len(registers_a), len(registers_b), len(registers_c), m * 8 * BITS[kind_d] // 1024]
    assert list(counts) == expected
    out = np.full((expected[3], LANES), 0xDEADBEEF, np.uint32)
    operands = (registers_a, registers_b, registers_c, out)
    check(library().ptx_mma(suffix.encode(), *map(pointer, operands)))
    plain = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[kind_d]
    elements = np.ascontiguousarray(out.T).view(plain)
    result = np.empty((m, 8), plain)
    for lane in range(LANES):
        for i in range(elements.shape[1]):
            result[c_place(lane // 4, lane % 4, i)] = elements[lane, i]
    return result


FLOAT_FORMS = [
    "m16n8k8.row.col.f32.f16.f16.f32",
    "m16n8k16.row.col.f32.f16.f16.f32",
    "m16n8k8.row.col.f16.f16.f16.f16",
    "m16n8k16.row.col.f16.f16.f16.f16",
    "m16n8k8.row.col.f32.bf16.bf16.f32",
    "m16n8k16.row.col.f32.bf16.bf16.f32",
    "m16n8k4.row.col.f32.tf32.tf32.f32",
    "m16n8k8.row.col.f32.tf32.tf32.f32",
]


@pytest.mark.parametrize("suffix", FLOAT_FORMS)
def test_mma_of_floats_is_the_product(suffix: str) -> None:
    """Multiples of 1/8 below 8: every sum is exact in float32, and in float16 after one rounding."""
    rng = np.random.default_rng(1)
    k = int(suffix.split(".", maxsplit=1)[0].split("k")[1])
    a, b, c = (rng.integers(-63, 64, shape) / 8 for shape in ((16, k), (k, 8), (16, 8)))
    got = mma(suffix, a, b, c)
    np.testing.assert_array_equal(got, (a @ b + c).astype(got.dtype))


def test_mma_of_floats_adds_in_ascending_order() -> None:
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(s).astype(np.float16).astype(np.float32) for s in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8)).astype(np.float32)
    expected = c.copy()
    for k in range(16):
        expected += a[:, k : k + 1] * b[k]
    np.testing.assert_array_equal(mma("m16n8k16.row.col.f32.f16.f16.f32", a, b, c), expected)


def test_tf32_operands_lose_their_low_bits() -> None:
    a, b = np.zeros((16, 8), np.float32), np.zeros((8, 8), np.float32)
    a[3, 2], b[2, 5] = 1 + 2**-10 + 2**-11, 1
    got = mma("m16n8k8.row.col.f32.tf32.tf32.f32", a, b, np.zeros((16, 8)))
    assert got[3, 5] == 1 + 2**-10


@pytest.mark.parametrize("types", ["s8.s8", "u8.u8", "s8.u8", "u8.s8"])
@pytest.mark.parametrize("shape", [(8, 16), (16, 16), (16, 32)])
def test_mma_of_integers_is_the_product(shape: tuple[int, int], types: str) -> None:
    rng = np.random.default_rng(3)
    m, k = shape
    ranges = {"s8": (-128, 128), "u8": (0, 256)}
    a = rng.integers(*ranges[types.split(".", maxsplit=1)[0]], (m, k))
    b = rng.integers(*ranges[types.split(".")[1]], (k, 8))
    c = rng.integers(-(10**6), 10**6, (m, 8))
    got = mma(f"m{m}n8k{k}.row.col.s32.{types}.s32", a, b, c)
    np.testing.assert_array_equal(got, a @ b + c)


def test_integer_sums_wrap_or_saturate() -> None:
    a, b = np.full((16, 32), -128), np.full((32, 8), -128)
    c = np.full((16, 8), 2**31 - 1)
    wrapped = mma("m16n8k32.row.col.s32.s8.s8.s32", a, b, c)
    assert (wrapped == 2**31 - 1 + 32 * 128 * 128 - 2**32).all()
    assert (mma("m16n8k32.row.col.satfinite.s32.s8.s8.s32", a, b, c) == 2**31 - 1).all()


@pytest.mark.parametrize(
    "suffix",
    ["m8n8k4.row.col.f32.f16.f16.f32", "m16n8k16.col.row.f32.f16.f16.f32", "m16n8k16.row.col.f32.f16.bf16.f32"],
)
def test_unknown_forms_are_faults(suffix: str) -> None:
    with pytest.raises(FaultError, match="form not known"):
        check(library().ptx_mma_registers(suffix.encode(), (ctypes.c_int * 4)()))


def test_f16_results_round_to_nearest_even() -> None:
    """Values of all magnitudes plus up to two steps, up to infinity and down to subnormal values."""
    rng = np.random.default_rng(4)
    values = np.concatenate([rng.uniform(-70000, 70000, 1024), 2.0 ** rng.uniform(-24, 17, 1024)])
    values = values.astype(np.float32)
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    for start in range(0, 2048, 128):
        chunk = values[start : start + 128].reshape(16, 8)
        high = chunk.clip(-65504, 65504).astype(np.float16).astype(np.float32)
        a[:, :8], b[:, :] = high, 0
        b[:8, :8] = np.eye(8)
        low = (high * rng.uniform(-(2.0**-9), 2.0**-9, (16, 8))).astype(np.float16)
        with np.errstate(over="ignore"):
            expected = (high + low.astype(np.float32)).astype(np.float16)
        got = mma("m16n8k16.row.col.f16.f16.f16.f16", a, b, low)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, transposed: bool) -> None:
    block = Block(4096)
    rng = np.random.default_rng(5)
    block.memory[:] = rng.integers(0, 256, 4096)
    rows = rng.permutation(256)[:LANES] * 16
    out = np.zeros((count, LANES), np.uint32)
    block.call("ldmatrix", pointer(rows.astype(np.uint32)), count, int(transposed), 0, pointer(out))
    for i in range(count):
        matrix = np.stack([block.memory[r : r + 16].view(np.uint16) for r in rows[8 * i : 8 * i + 8]])
        expected = (matrix.T if transposed else matrix).copy().view(np.uint32).reshape(LANES)
        np.testing.assert_array_equal(out[i], expected)


def test_ldmatrix_checks_the_addresses_it_uses() -> None:
    block = Block(256)
    out = np.zeros((4, LANES), np.uint32)
    addresses = np.zeros(LANES, np.uint32)
    addresses[8] = 8
    block.call("ldmatrix", pointer(addresses), 1, 0, 0, pointer(out))
    with pytest.raises(FaultError, match="not a multiple of 16"):
        block.call("ldmatrix", pointer(addresses), 2, 0, 0, pointer(out))
    with pytest.raises(FaultError, match="not a multiple of 16"):
        block.call("ldmatrix", pointer(addresses), 1, 0, 1, pointer(out))
    addresses[8] = 256
    with pytest.raises(FaultError, match="outside of the 256 bytes"):
        block.call("ldmatrix", pointer(addresses), 2, 0, 0, pointer(out))


def aligned(nbytes: int, seed: int = 6) -> np.ndarray:
    """Random bytes at an address of 16 bytes alignment."""
    raw = np.random.default_rng(seed).integers(1, 256, nbytes + 16).astype(np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + nbytes]


def test_copies_arrive_at_the_wait_of_their_group() -> None:
    block, source = Block(64), aligned(64)
    for i in range(3):
        block.call("copy", 16 * i, pointer(source, 16 * i), 16, 16)
        block.lib.ptx_copy_commit(block.handle)
    block.call("copy", 48, pointer(source, 48), 16, 5)
    assert not block.memory.any()
    block.lib.ptx_copy_wait(block.handle, 2)
    np.testing.assert_array_equal(block.memory[:16], source[:16])
    assert not block.memory[16:].any()
    block.lib.ptx_copy_wait(block.handle, 0)
    np.testing.assert_array_equal(block.memory[:48], source[:48])
    assert not block.memory[48:].any()
    block.memory[48:] = 255
    block.lib.ptx_copy_wait_all(block.handle)
    np.testing.assert_array_equal(block.memory[48:53], source[48:53])
    assert not block.memory[53:].any()


def test_early_copies_arrive_at_once() -> None:
    block, source = Block(64, late=False), aligned(16)
    block.call("copy", 32, pointer(source), 8, 8)
    np.testing.assert_array_equal(block.memory[32:40], source[:8])
    assert not block.memory[40:].any()


@pytest.mark.parametrize(
    ("to", "offset", "size", "valid", "text"),
    [
        (8, 0, 16, 16, "not a multiple of 16"),
        (0, 4, 8, 8, "global address is not aligned"),
        (64, 0, 16, 0, "outside"),
        (0, 0, 12, 12, "size of 12"),
        (0, 0, 16, 17, "source of 17"),
    ],
)
def test_wrong_copies_are_faults(to: int, offset: int, size: int, valid: int, text: str) -> None:
    block, source = Block(64), aligned(64)
    with pytest.raises(FaultError, match=text):
        block.call("copy", to, pointer(source, offset), size, valid)


def test_barrier_phases() -> None:
    """A phase ends when all arrivals have come and no transaction bytes are open, in either order."""
    block = Block(64)
    block.call("barrier_init", 8, 2)
    assert not block.test(8, 0)
    assert block.test(8, 1)
    block.call("barrier_arrive", 8, 1)
    assert not block.test(8, 0)
    block.call("barrier_arrive", 8, 1)
    assert block.test(8, 0)
    assert not block.test(8, 1)
    block.call("barrier_expect", 8, 48, 1)
    block.call("barrier_arrive", 8, 1)
    block.call("barrier_complete", 8, 32)
    assert not block.test(8, 1)
    block.call("barrier_complete", 8, 16)
    assert block.test(8, 1)
    block.call("barrier_complete", 8, 16)
    block.call("barrier_arrive", 8, 2)
    assert not block.test(8, 0)
    block.call("barrier_expect", 8, 16, 0)
    assert block.test(8, 0)


def test_wrong_uses_of_barriers_are_faults() -> None:
    block = Block(64)
    with pytest.raises(FaultError, match="no initialised mbarrier"):
        block.call("barrier_arrive", 0, 1)
    block.memory[:] = 255
    with pytest.raises(FaultError, match="no initialised mbarrier"):
        block.test(0, 0)
    block.call("barrier_init", 0, 2)
    with pytest.raises(FaultError, match="3 arrivals, 2 pending of 2"):
        block.call("barrier_arrive", 0, 3)
    with pytest.raises(FaultError, match="count of 0"):
        block.call("barrier_init", 0, 0)
    with pytest.raises(FaultError, match="holds an mbarrier object"):
        block.call("barrier_init", 0, 2)
    with pytest.raises(FaultError, match="parity of 2"):
        block.test(0, 2)
    with pytest.raises(FaultError, match="beyond 2"):
        block.call("barrier_expect", 0, 1 << 20, 0)
    with pytest.raises(FaultError, match="not a multiple of 8"):
        block.call("barrier_arrive", 4, 1)


@pytest.mark.parametrize("late", [False, True])
def test_bulk_copies_complete_their_barrier(late: bool) -> None:
    block, source = Block(128, late), aligned(64)
    block.call("barrier_init", 0, 1)
    block.lib.ptx_proxy_fence(block.handle, 0)
    block.call("barrier_expect", 0, 64, 1)
    block.call("bulk", 16, pointer(source), 48, 0)
    block.call("bulk", 96, pointer(source, 48), 16, 0)
    if late:
        assert not block.memory[16:].any()
        block.call("bulk_deliver", 1)
        np.testing.assert_array_equal(block.memory[96:112], source[48:])
        assert not block.memory[16:96].any()
        assert not block.test(0, 0)
        block.call("bulk_deliver", 0)
    np.testing.assert_array_equal(block.memory[16:64], source[:48])
    np.testing.assert_array_equal(block.memory[96:112], source[48:])
    assert block.test(0, 0)
    assert not block.test(0, 1)


@pytest.mark.parametrize(
    ("to", "offset", "nbytes", "barrier", "text"),
    [
        (24, 0, 16, 0, "not a multiple of 16"),
        (16, 8, 16, 0, "global address is not a multiple of 16"),
        (16, 0, 24, 0, "24 bytes"),
        (112, 0, 32, 0, "outside"),
        (16, 0, 16, 8, "no initialised mbarrier"),
    ],
)
def test_wrong_bulk_copies_are_faults(to: int, offset: int, nbytes: int, barrier: int, text: str) -> None:
    block, source = Block(128), aligned(64)
    block.call("barrier_init", 0, 1)
    block.lib.ptx_proxy_fence(block.handle, 0)
    with pytest.raises(FaultError, match=text):
        block.call("bulk", to, pointer(source, offset), nbytes, barrier)


def test_the_async_proxy_needs_a_fence() -> None:
    block, source = Block(128), aligned(16)

    def bulk() -> None:
        block.call("bulk", 16, pointer(source), 16, 0)

    block.call("barrier_init", 0, 1)
    with pytest.raises(FaultError, match="mbarrier: shared address 0 holds what thread 0 wrote"):
        bulk()
    block.lib.ptx_proxy_fence(block.handle, 0)
    bulk()
    block.lib.ptx_generic_write(block.handle, 20, 4, 7)
    block.lib.ptx_proxy_fence(block.handle, 6)
    with pytest.raises(FaultError, match="shared address 20 holds what thread 7 wrote"):
        bulk()
    block.lib.ptx_block_barrier(block.handle)
    with pytest.raises(FaultError, match="thread 7"):
        bulk()
    block.lib.ptx_proxy_fence(block.handle, 6)
    bulk()
    block.lib.ptx_generic_write(block.handle, 31, 1, 7)
    block.lib.ptx_proxy_fence(block.handle, 7)
    bulk()
