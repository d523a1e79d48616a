"""The machine that executes PTX: rules of control flow, memory and warps, by small programs."""

from __future__ import annotations

import shutil
import struct
from fractions import Fraction

import numpy as np
import pytest

from tests.cuda.programs import ORDERS
from tests.cuda.ptx.launcher import MachineFault, load
from tests.cuda.ptx.parser import PtxError

pytestmark = [
    pytest.mark.usefixtures("emulation"),
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
]

HEAD = """.version 9.0
.target sm_80
.address_size 64
{variables}
.visible .entry test(
	.param .u64 .ptr .align 1 test_param_0
)
{{
	.reg .pred %p<20>;
	.reg .b16 %rs<20>;
	.reg .b32 %r<40>;
	.reg .f32 %f<20>;
	.reg .b64 %rd<20>;
	.shared .align 16 .b8 tile[256];
	ld.param.u64 %rd0, [test_param_0];
	cvta.to.global.u64 %rd1, %rd0;
	mov.u32 %r0, %tid.x;
	mul.wide.u32 %rd2, %r0, 4;
	add.s64 %rd3, %rd1, %rd2;
	shl.b32 %r1, %r0, 2;
	mov.u32 %r2, tile;
	add.s32 %r3, %r2, %r1;
{body}
	ret;
}}
"""
STORE = "	st.global.u32 [%rd3], %r10;\n"


def run(
    body: str, threads: int = 32, data: np.ndarray | None = None, *, order: int = 0, variables: str = ""
) -> np.ndarray:
    """Words of memory behind a run of a program. %r0: thread, %rd3: its word in memory, %r3: its word of `tile`."""
    memory = np.zeros(threads, np.uint32) if data is None else data.copy()
    program = load(HEAD.format(body=body, variables=variables)).program("test")
    args = [struct.pack("<Q", memory.ctypes.data)]
    program.launch((1, 1, 1), (threads, 1, 1), 0, args, [(memory.ctypes.data, memory.nbytes)], order=order)
    return memory


def test_lanes_part_and_meet() -> None:
    """Odd lanes take another branch; the shuffle needs all of them."""
    body = """
	and.b32 %r4, %r0, 1;
	setp.eq.s32 %p1, %r4, 0;
	@%p1 bra EVEN;
	mul.lo.s32 %r10, %r0, 100;
	bra.uni MEET;
EVEN:
	add.s32 %r10, %r0, 7;
MEET:
	shfl.sync.bfly.b32 %r10, %r10, 1, 31, -1;
"""
    lanes = np.arange(32) ^ 1
    np.testing.assert_array_equal(run(body + STORE), np.where(lanes % 2, lanes * 100, lanes + 7))


def test_loops_of_lanes_end_at_different_times() -> None:
    """Each lane adds 0 ... its number; a vote counts them behind the loop."""
    body = """
	mov.u32 %r10, 0;
	mov.u32 %r4, 0;
AGAIN:
	add.s32 %r10, %r10, %r4;
	add.s32 %r4, %r4, 1;
	setp.le.u32 %p1, %r4, %r0;
	@%p1 bra AGAIN;
	setp.gt.u32 %p2, %r10, 100;
	vote.sync.ballot.b32 %r5, %p2, -1;
	popc.b32 %r6, %r5;
	shl.b32 %r6, %r6, 16;
	or.b32 %r10, %r10, %r6;
"""
    sums = np.cumsum(np.arange(32))
    np.testing.assert_array_equal(run(body + STORE), sums | (sums > 100).sum() << 16)


def test_lanes_wait_for_those_named_by_the_mask() -> None:
    """The lanes below 16 exchange values among themselves while the others are elsewhere or have ended."""
    body = """
	setp.gt.u32 %p1, %r0, 15;
	@%p1 bra OTHERS;
	shfl.sync.idx.b32 %r10, %r0, 3, 31, 65535;
	bra.uni MEET;
OTHERS:
	setp.gt.u32 %p2, %r0, 29;
	@%p2 ret;
	mov.u32 %r10, 9;
MEET:
"""
    np.testing.assert_array_equal(run(body + STORE), [3] * 16 + [9] * 14 + [0] * 2)


@pytest.mark.parametrize("order", ORDERS)
def test_barrier_orders_warps(order: int) -> None:
    """Every thread reads what a thread of another warp wrote."""
    body = """
	st.shared.u32 [%r3], %r0;
	bar.sync 0;
	xor.b32 %r4, %r1, 128;
	add.s32 %r4, %r4, %r2;
	ld.shared.u32 %r10, [%r4];
"""
    np.testing.assert_array_equal(run(body + STORE, 64, order=order), np.arange(64) ^ 32)


def test_a_missing_barrier_shows_as_garbage() -> None:
    body = """
	st.shared.u32 [%r3], %r0;
	xor.b32 %r4, %r1, 128;
	add.s32 %r4, %r4, %r2;
	ld.shared.u32 %r10, [%r4];
"""
    forward, reverse = (run(body + STORE, 64, order=order) for order in (0, 1))
    assert (forward[:32] == 0xFFFFFFFF).all() and (reverse[32:] == 0xFFFFFFFF).all()


def test_lanes_do_not_keep_step_by_themselves() -> None:
    """Without a barrier of the warp, the random order uncovers lanes that read before others wrote."""
    body = """
	st.shared.u32 [%r3], %r0;
	SYNC
	xor.b32 %r4, %r1, 4;
	add.s32 %r4, %r4, %r2;
	ld.shared.u32 %r10, [%r4];
"""
    seeds = range(2, 22)
    bare = [run(body.replace("SYNC", "") + STORE, order=seed) for seed in seeds]
    assert any((found == 0xFFFFFFFF).any() for found in bare)
    for seed in seeds:
        found = run(body.replace("SYNC", "bar.warp.sync -1;") + STORE, order=seed)
        np.testing.assert_array_equal(found, np.arange(32) ^ 1)


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("width", [32, 8])
@pytest.mark.parametrize("by", [1, 5])
def test_shuffles(mode: str, width: int, by: int) -> None:
    """CUDA's __shfl_sync with a width: lanes beyond a segment give the own value, and a false predicate."""
    clamp = (32 - width) << 8 | (0 if mode == "up" else 31)
    body = f"""
	shfl.sync.{mode}.b32 %r10|%p1, %r0, {by}, {clamp}, -1;
	selp.b32 %r4, 256, 0, %p1;
	or.b32 %r10, %r10, %r4;
"""
    lane = np.arange(32)
    first = lane // width * width
    source = {"up": lane - by, "down": lane + by, "bfly": lane ^ by, "idx": first + by % width}[mode]
    inside = (source >= first) & (source < first + width)
    np.testing.assert_array_equal(run(body + STORE), np.where(inside, source | 256, lane))


FAULTS = {
    "a lane has ended": (
        "setp.eq.u32 %p1, %r0, 5;\n@%p1 ret;\nshfl.sync.bfly.b32 %r10, %r0, 1, 31, -1;",
        "shfl.sync.bfly.*lanes 0x20 are missing, which have ended",
    ),
    "lanes wait in different places": (
        "setp.lt.u32 %p1, %r0, 8;\n@%p1 bra A;\nbar.warp.sync -1;\nbra.uni B;\n"
        "A:\nshfl.sync.idx.b32 %r10, %r0, 0, 31, -1;\nB:",
        r"lanes 0xff wait .* lanes 0xffffff00 wait|lanes 0xffffff00 wait .* lanes 0xff wait",
    ),
    "a lane that its mask does not name": ("shfl.sync.idx.b32 %r10, %r0, 0, 31, 65535;", "that its mask does not name"),
    "a matrix without all lanes": (
        "setp.eq.u32 %p1, %r0, 0;\n@%p1 bra A;\n"
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];\nA:",
        "lanes are missing: lanes 0xfffffffe wait at PTX line 25 .ldmatrix",
    ),
    "a barrier under a predicate": ("setp.lt.u32 %p1, %r0, 8;\n@%p1 bar.sync 0;", "bar.sync.*disagree"),
    "a wild address": ("st.global.u32 [%rd3+4096], %r0;", "4 bytes at 0x.* are not memory of the device"),
    "one word behind": ("ld.global.u32 %r10, [%rd3+4];", "lanes 0xffffffff: 4 bytes at .* are not memory"),
    "an address that is no multiple": ("ld.global.u32 %r10, [%rd3+2];", "is not a multiple of 4"),
    "a vector that is no multiple": ("ld.global.v2.u32 {%r10, %r11}, [%rd3];", "is not a multiple of 8"),
    "beyond shared memory": ("st.shared.u32 [%r3+256], %r0;", "4 bytes at 0x510 of shared memory, which has 1296"),
    "beyond the parameters": ("ld.param.u64 %rd5, [test_param_0+8];", "of parameter memory, which has 8"),
    "an address in a register that nobody wrote": ("ld.global.u32 %r10, [%rd9];", "0xffffffffffffffff"),
    "asynchronous copies of a wild source": (
        "setp.ne.u32 %p1, %r0, 0;\n@%p1 ret;\ncp.async.cg.shared.global [%r2], [%rd1+1024], 16, 16;",
        "cp.async.*not memory of the device",
    ),
    "a barrier object that nobody arrives at": (
        "mbarrier.init.shared::cta.b64 [tile], 1;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [tile], 0;\n@!%p1 bra AGAIN;",
        "nobody can go on: warp 0 waits for an mbarrier",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults(case: str) -> None:
    body, message = FAULTS[case]
    if "mbarrier" in body:
        body = f"	setp.ne.u32 %p5, %r0, 0;\n	@%p5 ret;\n{body}"
    with pytest.raises(MachineFault, match=f"kernel test: .*({message})"):
        run(body + "\n")


def test_warps_at_different_barriers_never_go_on() -> None:
    body = "	setp.lt.u32 %p1, %r0, 32;\n	@%p1 bra A;\n	bar.sync 0;\n	bra.uni B;\nA:\n	bar.sync 1;\nB:\n"
    message = "nobody can go on: warp 0 waits at barrier 1; warp 1 waits at barrier 0"
    with pytest.raises(MachineFault, match=message):
        run(body, 64)


def test_warps_that_have_ended_hold_no_barrier_up() -> None:
    body = "	setp.lt.u32 %p1, %r0, 32;\n	@%p1 ret;\n	bar.sync 0;\n	mov.u32 %r10, 5;\n"
    np.testing.assert_array_equal(run(body + STORE, 64), [0] * 32 + [5] * 32)


@pytest.mark.parametrize(("order", "arrived"), [(0, True), (1, False)])
def test_asynchronous_copies_may_be_late(order: int, arrived: bool) -> None:
    """What is read without a wait: in the first order the data, in the others what was there before."""
    body = """
	setp.ne.u32 %p1, %r0, 0;
	@%p1 ret;
	cp.async.cg.shared.global [tile], [%rd1], 16, 16;
	cp.async.commit_group;
	ld.shared.u32 %r10, [tile+4];
	cp.async.wait_group 0;
	ld.shared.u32 %r11, [tile+4];
	st.global.u32 [%rd3], %r10;
	st.global.u32 [%rd3+8], %r11;
"""
    found = run(body, data=np.arange(100, 132, dtype=np.uint32), order=order)
    assert found[0] == (101 if arrived else 0xFFFFFFFF) and found[2] == 101


def test_generic_addresses_reach_shared_memory_and_constants() -> None:
    body = """
	cvta.shared.u64 %rd5, tile;
	add.s64 %rd6, %rd5, %rd2;
	st.u32 [%rd6], %r0;
	ld.shared.u32 %r10, [%r3];
	and.b32 %r4, %r0, 3;
	cvt.u64.u32 %rd7, %r4;
	mov.u64 %rd8, table;
	add.s64 %rd8, %rd8, %rd7;
	ld.const.s8 %rs1, [%rd8];
	cvt.s32.s16 %r5, %rs1;
	add.s32 %r10, %r10, %r5;
"""
    found = run(body + STORE, variables=".const .align 1 .b8 table[4] = {255, 2, 3, 128};")
    lane = np.arange(32)
    np.testing.assert_array_equal(found.view(np.int32), lane + np.array([-1, 2, 3, -128])[lane % 4])


def test_atomic_additions_of_many_threads() -> None:
    body = """
	mov.u32 %r4, 0;
	setp.ne.u32 %p1, %r0, 0;
	@%p1 bra A;
	st.shared.u32 [tile], %r4;
A:
	bar.sync 0;
	atom.shared.add.u32 %r10, [tile], 3;
"""
    for order in ORDERS:
        np.testing.assert_array_equal(np.sort(run(body + STORE, 128, order=order)), 3 * np.arange(128))


def lanewise(instructions: str, data: np.ndarray, register: str = "%r10") -> np.ndarray:
    """Each lane's word through instructions from %r4 (%f4 as a float) to a register."""
    suffix = "f32" if "f" in register else "u32"
    body = f"	ld.global.u32 %r4, [%rd3];\n	mov.b32 %f4, %r4;\n	{instructions}\n"
    body += f"	st.global.{suffix} [%rd3], {register};\n"
    return run(body, data=data.view(np.uint32))


FLOATS = np.resize(
    np.array(
        [0.0, -0.0, 1.5, 2.5, -2.5, -0.7, 3e9, -3e9, np.inf, -np.inf, np.nan, 1e-40, 65520, 1e6, 0.1, -7.5], np.float32
    ),
    32,
)


def test_conversions_clamp_and_round_as_the_isa_says() -> None:
    with np.errstate(invalid="ignore"):
        limited = np.clip(np.nan_to_num(FLOATS.astype(np.float64), nan=0), -(2.0**31), 2.0**31 - 1)
    for mode, rounding in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        found = lanewise(f"cvt.{mode}.s32.f32 %r10, %f4;", FLOATS).view(np.int32)
        np.testing.assert_array_equal(found, rounding(limited).astype(np.int64), err_msg=mode)
    halves = lanewise("cvt.rn.f16x2.f32 %r10, %f4, 0f3F800000;", FLOATS)
    with np.errstate(over="ignore"):
        expected = FLOATS.astype(np.float16)
    upper = (halves >> 16).astype(np.uint16).view(np.float16)
    assert ((upper == expected) | np.isnan(expected)).all() and (halves & 0xFFFF == 0x3C00).all()
    np.testing.assert_array_equal(
        lanewise("cvt.sat.f32.f32 %f5, %f4;", FLOATS, "%f5").view(np.float32),
        np.clip(np.nan_to_num(FLOATS, nan=0), 0, 1),
    )


def rounded_f16(exact: Fraction) -> np.float16:
    """The nearest f16, of two the one with an even last bit."""
    near = np.float16(float(exact))
    around = [np.nextafter(near, np.float16(way)) for way in (-np.inf, np.inf)]
    return min([near, *around], key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.uint16)) & 1))


def test_fused_halves_are_rounded_once() -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(32) * 8).astype(np.float16)
    x[:4] = np.float16([1 + 2.0**-10, -1 - 2.0**-10, 2.0**-14, 1.5])
    # The products of the first ones lie within 2**-24 of the middle of two f16.
    for y, z in ((1 + 2.0**-10, 2.0**-11), (1.0, 2.0**-11 + 2.0**-21), (1.0, 2.0**-11 - 2.0**-22), (0.37, -1.9)):
        factor, addend = np.float16(y), np.float16(z)
        words = [int(half.view(np.uint16)) * 0x10001 for half in (factor, addend)]
        both = x.view(np.uint16).astype(np.uint32) * 0x10001
        found = lanewise("fma.rn.f16x2 %r10, %r4, 0x{:08X}, 0x{:08X};".format(*words), both)
        expected = [rounded_f16(Fraction(float(a)) * Fraction(float(factor)) + Fraction(float(addend))) for a in x]
        halves = np.array(expected, np.float16).view(np.uint16).astype(np.uint32)
        np.testing.assert_array_equal(found, halves * 0x10001)


def test_rounding_modes() -> None:
    """The products and sums lie between two floats."""
    data = np.resize(np.array([1, -1], np.float32), 32)
    factor, addend = 1 + 2.0**-23, 2.0**-24
    for instruction, way in (
        ("add.rn.f32 %f5, %f4, 0f33800000;", "even"),
        ("add.rz.f32 %f5, %f4, 0f33800000;", "zero"),
        ("fma.rm.f32 %f5, %f4, 0f3F800001, 0f33800000;", "down"),
        ("fma.rp.f32 %f5, %f4, 0f3F800001, 0f33800000;", "up"),
    ):
        exact = data[:2].astype(np.float64) * (factor if "fma" in instruction else 1) + addend
        nearest = exact.astype(np.float32)
        below = np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)
        above = np.where(nearest < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)
        expected = {"even": nearest, "zero": np.where(exact > 0, below, above), "down": below, "up": above}[way]
        found = lanewise(instruction, data, "%f5").view(np.float32)
        np.testing.assert_array_equal(found[:2], expected, err_msg=instruction)


def test_bits() -> None:
    data = np.random.default_rng(1).integers(0, 2**32, 32, np.uint32)
    wide = data.astype(np.uint64)
    cases = {
        "prmt.b32 %r10, %r4, 305419896, 29714;": None,
        "shf.r.wrap.b32 %r10, %r4, 305419896, 40;": ((wide | 305419896 << 32) >> 8) & 0xFFFFFFFF,
        "bfi.b32 %r10, %r4, 0, 8, 4;": (data & 15) << 8,
        "shl.b32 %r10, %r4, 32;": 0 * data,
        "shr.s32 %r10, %r4, 99;": np.where(data >> 31, 0xFFFFFFFF, 0),
        "mul.hi.u32 %r10, %r4, %r4;": wide * wide >> 32,
        "brev.b32 %r10, %r4;": [int(f"{x:032b}"[::-1], 2) for x in data.tolist()],
        "dp4a.s32.s32 %r10, %r4, 16909060, 5;": (data.view(np.int8).reshape(32, 4) @ np.array([4, 3, 2, 1]) + 5)
        .astype(np.int32)
        .view(np.uint32),
    }
    numbers, pairs = data.view(np.int16).reshape(32, 2).astype(np.int32), {"lo": [253, 2], "hi": [3, 4]}
    for half, factors in pairs.items():  # the bytes of 0x040302fd
        cases[f"dp2a.{half}.s32.u32 %r10, %r4, 67306237, 5;"] = (numbers @ np.array(factors) + 5).astype(np.uint32)
    words = np.stack([data, np.full(32, 305419896, np.uint32)], 1).view(np.uint8)  # the bytes that prmt chooses from
    selector = [29714 >> 4 * k & 15 for k in range(4)]
    cases["prmt.b32 %r10, %r4, 305419896, 29714;"] = np.ascontiguousarray(words[:, selector]).view(np.uint32)[:, 0]
    for instruction, expected in cases.items():
        np.testing.assert_array_equal(lanewise(instruction, data), expected, err_msg=instruction)


def test_fresh_registers_hold_garbage() -> None:
    assert (run("	mov.b32 %r10, %r20;\n" + STORE) == 0xFFFFFFFF).all()


def test_unknown_instructions_are_named() -> None:
    with pytest.raises(PtxError, match=r"line \d+: sad.s32 .*: the machine has no form sad.s32"):
        run("	sad.s32 %r10, %r0, %r1, %r2;\n")
