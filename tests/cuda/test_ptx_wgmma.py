"""wgmma of the PTX machine against numpy: layouts of operands in shared memory, accumulators, rules of order."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest

from tests.cuda.ptx.warp_ops import BITS, ENCODE, LANES, Block, FaultError, a_place, fragments, pointer

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


# wgmma. An operand is lines (rows of A, columns of B) of bytes along k, or for an MN-major one the transpose of it.


def descriptor(start: int, leading: int, stride: int, swizzle: int, base_offset: int = 0) -> int:
    """A matrix descriptor; swizzle: 0, 32, 64 or 128 bytes."""
    mode = {0: 0, 128: 1, 64: 2, 32: 3}[swizzle]
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base_offset << 49 | mode << 62


def store_atoms(memory: np.ndarray, start: int, lines: np.ndarray, swizzle: int, gap: int) -> tuple[int, int]:
    """Stores lines of bytes as atoms of 8 lines x (swizzle or 16) bytes, gap bytes of waste after each atom.

    Inside an atom, the 16 bytes at place j of line i lie at place j ^ i (128 bytes), j ^ (i / 2) (64), j ^ (i / 4)
    (32) of that line. Returns the distances of atoms along the lines' bytes and across the lines.
    """
    width = swizzle or 16
    across, along = lines.shape[0] // 8, lines.shape[1] // width
    step = 8 * width + gap
    for y in range(across):
        for x in range(along):
            at = start + (x * across + y) * step
            for i in range(8):
                line = lines[8 * y + i, x * width : (x + 1) * width].reshape(-1, 16)
                shift = {0: 0, 32: i // 4, 64: i // 2, 128: i}[swizzle]
                for j in range(len(line)):
                    place = at + i * width + (j ^ shift) * 16
                    memory[place : place + 16] = line[j]
    return across * step, step


class Operand:
    """A (64 rows) or B (n columns) in the shared memory of a block, k of 64 or 128 bytes; lines: (count, k)."""

    def __init__(
        self, block: Block, start: int, lines: np.ndarray, kind: str, swizzle: int, mn_major: bool, gap: int = 0
    ) -> None:
        encoded = np.ascontiguousarray(ENCODE[kind](lines))
        self.nbytes = encoded.dtype.itemsize
        self.start, self.swizzle, self.mn_major = start, swizzle, mn_major
        stored = np.ascontiguousarray(encoded.T if mn_major else encoded)
        as_bytes = stored.view(np.uint8).reshape(stored.shape[0], -1)
        self.along, self.across = store_atoms(block.memory, start, as_bytes, swizzle, gap)

    def descriptor(self, step: int) -> int:
        """Descriptor of the step-th 32 bytes of k."""
        if self.mn_major:  # 16 values of k are two atoms across
            start = self.start + 2 * step * self.across
            offsets = (self.across, self.along) if not self.swizzle else (self.along, self.across)
            return descriptor(start, *offsets, self.swizzle)
        if not self.swizzle:
            return descriptor(self.start + 2 * step * self.along, self.along, self.across, 0)
        atom, within = divmod(32 * step, self.swizzle)
        return descriptor(self.start + atom * self.along + within, 16, self.across, self.swizzle)


def d_place(warp: int, lane: int, i: int) -> tuple[int, int]:
    """Row and column of element i of a thread's accumulators."""
    return 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


class WarpGroup:
    """The accumulators of a warp group as a matrix (64, n)."""

    def __init__(self, block: Block, suffix: str, start: np.ndarray) -> None:
        self.block, self.suffix, self.n = block, suffix, start.shape[1]
        self.plain = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[suffix.split(".")[-3]]
        per = 4 // np.dtype(self.plain).itemsize
        elements = np.empty((4, LANES, self.n // 2), self.plain)
        for place in np.ndindex(elements.shape):
            elements[place] = start[d_place(*place)]
        words = elements.view(np.uint32).reshape(4, LANES, self.n // 2 // per)
        self.registers = np.ascontiguousarray(words.transpose(0, 2, 1))

    def issue(
        self,
        a: int,
        b: int,
        a_registers: np.ndarray | None = None,
        options: tuple[int, int, int, int, int] = (1, 1, 1, 0, 0),
        ranks: tuple[int, ...] = (2, 0, 3, 1),
    ) -> None:
        """One wgmma.mma_async by these warps."""
        for rank in ranks:
            of_a = None if a_registers is None else pointer(a_registers[rank])
            packed = (ctypes.c_int * 5)(*options)
            of_d = pointer(self.registers[rank])
            args = (ctypes.c_uint64(a), ctypes.c_uint64(b), of_a, packed, of_d)
            self.block.call("wgmma", rank, self.suffix.encode(), *args)

    def fence(self) -> None:
        for rank in range(4):
            self.block.lib.ptx_wgmma_fence(self.block.handle, rank)

    def commit(self) -> None:
        for rank in range(4):
            self.block.lib.ptx_wgmma_commit(self.block.handle, rank)

    def wait(self, groups: int) -> None:
        for rank in range(4):
            self.block.call("wgmma_wait", rank, groups)

    def touch(self, rank: int, register: int) -> None:
        """An ordinary instruction reads or writes an accumulator."""
        self.block.call("wgmma_touch", rank, pointer(self.registers[rank, register]))

    def result(self) -> np.ndarray:
        out = np.empty((64, self.n), self.plain)
        elements = np.ascontiguousarray(self.registers.transpose(0, 2, 1)).view(self.plain)
        for place in np.ndindex(elements.shape):
            out[d_place(*place)] = elements[place]
        return out


def values(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Values whose products and sums are exact in float32."""
    if kind in ("s8", "u8"):
        return rng.integers(*((-128, 128) if kind == "s8" else (0, 256)), shape)
    return rng.integers(-15, 16, shape) / 8


LAYOUTS = [(swizzle, mn) for swizzle in (0, 32, 64, 128) for mn in (False, True)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("b_swizzle", "b_mn"), LAYOUTS)
@pytest.mark.parametrize(("a_swizzle", "a_mn"), LAYOUTS)
def test_wgmma_reads_all_layouts(a_swizzle: int, a_mn: bool, b_swizzle: int, b_mn: bool, late: bool) -> None:
    """K of 64 in four steps of 16 and 128 columns, atoms with and without space between them."""
    block, rng = Block(131072, late), np.random.default_rng(7)
    a, b = values("bf16", rng, (64, 64)), values("bf16", rng, (128, 64))
    of_a = Operand(block, 1024, a, "bf16", a_swizzle, a_mn, gap=1024)
    of_b = Operand(block, 98304, b, "bf16", b_swizzle, b_mn)
    start = values("bf16", rng, (64, 128))
    group = WarpGroup(block, "m64n128k16.f32.bf16.bf16", start)
    group.fence()
    for step in range(4):
        group.issue(of_a.descriptor(step), of_b.descriptor(step), options=(1, 1, 1, int(a_mn), int(b_mn)))
    group.commit()
    if late:
        np.testing.assert_array_equal(group.result(), start)
    group.wait(0)
    np.testing.assert_array_equal(group.result(), a @ b.T + start)


FORMS = [
    ("m64n8k16.f32.f16.f16", 16),
    ("m64n256k16.f32.bf16.bf16", 16),
    ("m64n72k16.f16.f16.f16", 16),
    ("m64n40k8.f32.tf32.tf32", 8),
    ("m64n64k32.s32.s8.s8", 32),
    ("m64n24k32.s32.u8.s8", 32),
    ("m64n16k32.s32.s8.u8", 32),
    ("m64n96k32.satfinite.s32.u8.u8", 32),
]


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(("suffix", "k"), FORMS)
def test_wgmma_forms(suffix: str, k: int, swizzle: int) -> None:
    """All types; the second step of k, by a descriptor that was advanced."""
    block, rng = Block(131072), np.random.default_rng(8)
    kind_a, kind_b = suffix.split(".")[-2:]
    n = int(suffix[4 : suffix.index("k")])
    a, b = values(kind_a, rng, (64, 4 * k)), values(kind_b, rng, (n, 4 * k))
    of_a = Operand(block, 0, a, kind_a, swizzle, False)
    of_b = Operand(block, 65536, b, kind_b, swizzle, False)
    start = np.round(values("f16", rng, (64, n)) * 8)
    group = WarpGroup(block, suffix, start)
    group.fence()
    group.issue(of_a.descriptor(1), of_b.descriptor(1))
    group.commit()
    group.wait(0)
    expected = a[:, k : 2 * k] @ b[:, k : 2 * k].T + start
    np.testing.assert_array_equal(group.result(), expected.astype(group.plain))


def test_wgmma_scales_and_ignores_accumulators() -> None:
    block, rng = Block(8192), np.random.default_rng(9)
    a, b = values("f16", rng, (64, 16)), values("f16", rng, (8, 16))
    of_a, of_b = Operand(block, 0, a, "f16", 0, False), Operand(block, 4096, b, "f16", 0, False)
    start = values("f16", rng, (64, 8))
    for options, expected in [
        ((1, -1, 1, 0, 0), start - a @ b.T),
        ((1, 1, -1, 0, 0), start - a @ b.T),
        ((1, -1, -1, 0, 0), start + a @ b.T),
        ((0, 1, 1, 0, 0), a @ b.T),
    ]:
        group = WarpGroup(block, "m64n8k16.f32.f16.f16", np.full((64, 8), np.nan) if not options[0] else start)
        group.fence()
        group.issue(of_a.descriptor(0), of_b.descriptor(0), options=options)
        group.commit()
        group.wait(0)
        np.testing.assert_array_equal(group.result(), expected)


def test_wgmma_integers_wrap_or_saturate() -> None:
    block = Block(8192)
    of_a = Operand(block, 0, np.full((64, 32), -128), "s8", 0, False)
    of_b = Operand(block, 4096, np.full((8, 32), -128), "s8", 0, False)
    for kind, expected in (("", 32 * 2**14 - 2**31 - 1), ("satfinite.", 2**31 - 1)):
        group = WarpGroup(block, f"m64n8k32.{kind}s32.s8.s8", np.full((64, 8), 2**31 - 1))
        group.fence()
        group.issue(of_a.descriptor(0), of_b.descriptor(0))
        group.commit()
        group.wait(0)
        assert (group.result() == expected).all()


@pytest.mark.parametrize(
    ("suffix", "k"), [("m64n16k16.f32.f16.f16", 16), ("m64n16k8.f32.tf32.tf32", 8), ("m64n16k32.s32.u8.s8", 32)]
)
def test_wgmma_with_a_in_registers(suffix: str, k: int) -> None:
    block, rng = Block(4096), np.random.default_rng(10)
    kind_a, kind_b = suffix.split(".")[-2:]
    a, b = values(kind_a, rng, (64, k)), values(kind_b, rng, (16, k))
    of_b = Operand(block, 0, b, kind_b, 32, False)

    def place(g: int, t: int, i: int) -> tuple[int, int]:
        return a_place(16, k, BITS[kind_a], g, t, i)

    registers = np.stack([fragments(a[16 * w : 16 * w + 16], kind_a, place) for w in range(4)])
    group = WarpGroup(block, suffix, np.zeros((64, 16)))
    group.fence()
    group.issue(0, of_b.descriptor(0), a_registers=registers)
    with pytest.raises(FaultError, match="in flight"):
        block.call("wgmma_touch", 1, pointer(registers[1, 3]))
    group.commit()
    group.wait(0)
    np.testing.assert_array_equal(group.result(), a @ b.T)


def test_base_offset_of_a_pattern_off_its_boundary() -> None:
    """A 128 byte pattern that starts at 3 x 128 past a boundary of 1024 bytes."""
    block, rng = Block(16384), np.random.default_rng(11)
    a, b = values("f16", rng, (64, 64)), values("f16", rng, (8, 64))
    of_a, of_b = Operand(block, 384, a, "f16", 128, False), Operand(block, 12288, b, "f16", 128, False)
    group = WarpGroup(block, "m64n8k16.f32.f16.f16", np.zeros((64, 8)))
    group.fence()
    with pytest.raises(FaultError, match="not in the first row"):
        group.issue(of_a.descriptor(1), of_b.descriptor(1))
    group = WarpGroup(Block(16384), "m64n8k16.f32.f16.f16", np.zeros((64, 8)))
    group.block.memory[:] = block.memory
    group.fence()
    group.issue(of_a.descriptor(1) | 3 << 49, of_b.descriptor(1))
    group.commit()
    group.wait(0)
    np.testing.assert_array_equal(group.result(), a[:, 16:32] @ b[:, 16:32].T)


GOOD = descriptor(0, 128, 256, 0)


@pytest.mark.parametrize(
    ("suffix", "a", "b", "options", "text"),
    [
        ("m64n8k16.f32.f16.f16", GOOD | 1 << 52, GOOD, (1, 1, 1, 0, 0), "reserved bits"),
        ("m64n8k16.f32.f16.f16", GOOD | 1 << 49, GOOD, (1, 1, 1, 0, 0), "base offset without swizzle"),
        ("m64n8k16.f32.f16.f16", descriptor(0, 128, 512, 0), GOOD, (1, 1, 1, 0, 0), "outside of the 2048 bytes"),
        ("m64n8k16.f32.f16.f16", GOOD, descriptor(112, 16, 256, 128), (1, 1, 1, 0, 0), "leaves the rows"),
        ("m64n8k16.f32.f16.f16", GOOD, descriptor(128, 16, 256, 128), (1, 1, 1, 0, 0), "not in the first row"),
        ("m64n8k16.f32.f16.f16", GOOD, GOOD, (1, 2, 1, 0, 0), "1 or -1"),
        ("m64n8k32.s32.s8.s8", GOOD, GOOD, (1, -1, 1, 0, 0), "no imm-scale"),
        ("m64n8k32.s32.s8.s8", GOOD, GOOD, (1, 1, 1, 0, 1), "only 16 bit types"),
        ("m64n8k8.f32.tf32.tf32", GOOD, GOOD, (1, 1, 1, 1, 0), "only 16 bit types"),
        ("m64n8k32.f32.f16.f16", GOOD, GOOD, (1, 1, 1, 0, 0), "form not known"),
        ("m64n40k32.s32.s8.s8", GOOD, GOOD, (1, 1, 1, 0, 0), "form not known"),
        ("m64n264k16.f32.f16.f16", GOOD, GOOD, (1, 1, 1, 0, 0), "form not known"),
    ],
)
def test_wrong_wgmmas_are_faults(
    suffix: str, a: int, b: int, options: tuple[int, int, int, int, int], text: str
) -> None:
    group = WarpGroup(Block(2048), suffix, np.zeros((64, 8)))
    group.fence()
    with pytest.raises(FaultError, match=text):
        group.issue(a, b, options=options)


def test_rules_of_accumulators() -> None:
    """Access before the wait, a wgmma after an access without a fence, ends with work in flight."""
    block = Block(2048)
    group = WarpGroup(block, "m64n8k16.f32.f16.f16", np.zeros((64, 8)))
    with pytest.raises(FaultError, match="follows no wgmma"):
        group.issue(GOOD, GOOD)
    group.touch(0, 3)
    group.fence()
    group.issue(GOOD, GOOD)
    with pytest.raises(FaultError, match="in flight is accessed before wait_group"):
        group.touch(0, 3)
    with pytest.raises(FaultError, match="not committed"):
        block.call("wgmma_finish", 0)
    group.commit()
    group.issue(GOOD, GOOD)
    group.commit()
    group.wait(1)
    with pytest.raises(FaultError, match="in flight"):
        group.touch(0, 3)
    with pytest.raises(FaultError, match="not waited for"):
        block.call("wgmma_finish", 0)
    group.wait(0)
    block.call("wgmma_finish", 0)
    group.touch(0, 3)
    with pytest.raises(FaultError, match="accumulator was accessed and no wgmma"):
        group.issue(GOOD, GOOD, ranks=(0,))
    group.fence()
    group.issue(GOOD, GOOD)


def test_warps_of_a_group_must_agree() -> None:
    group = WarpGroup(Block(4096), "m64n8k16.f32.f16.f16", np.zeros((64, 8)))
    group.fence()
    group.issue(GOOD, GOOD)
    group.block.call("group_finish")
    group.issue(GOOD, GOOD, ranks=(0, 1, 2))
    with pytest.raises(FaultError, match="took no part"):
        group.block.call("group_finish")
    with pytest.raises(FaultError, match="different instructions"):
        group.issue(GOOD, GOOD + 8, ranks=(3,))


def test_wgmma_sees_generic_writes_only_after_a_fence() -> None:
    block = Block(2048)
    group = WarpGroup(block, "m64n8k16.f32.f16.f16", np.zeros((64, 8)))
    group.fence()
    block.lib.ptx_generic_write(block.handle, 2000, 16, 5)
    with pytest.raises(FaultError, match="wgmma: shared address 2000 holds what thread 5 wrote"):
        group.issue(GOOD, GOOD, ranks=(3,))
    block.lib.ptx_proxy_fence(block.handle, 5)
    group.issue(GOOD, GOOD)
