"""How kernels access memory, counted on the machine that executes PTX: no GPU would wait for what is asked for here."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ikpy.backends.cuda import launch, modules
from ikpy.backends.cuda.launch import pointer
from ikpy.backends.cuda.launch.files import kernel_file
from ikpy.quants import by_name
from tests.cuda import programs
from tests.cuda.programs import Program
from tests.cuda.ptx import build, launcher
from tests.cuda.ptx.launcher import Library
from tests.cuda.test_kernels_attention import grouped
from tests.cuda.test_kernels_compile import needs_nvcc
from tests.cuda.test_kernels_weights import packed

pytestmark = [needs_nvcc, pytest.mark.usefixtures("emulation")]

# Every lane loads a word of global memory, `stride` words from the next one's, and stores it to shared memory likewise.
STRIDED = """
.version 7.0
.target sm_80
.address_size 64
.shared .align 16 .b8 memory[8192];
.visible .entry strided(.param .u64 source, .param .u32 stride)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [source];
    ld.param.u32 %r1, [stride];
    mov.u32 %r2, %tid.x;
    mul.lo.s32 %r3, %r2, %r1;
    mul.wide.s32 %rd2, %r3, 4;
    add.s64 %rd3, %rd1, %rd2;
    ld.global.u32 %r4, [%rd3];
    shl.b32 %r3, %r3, 2;
    mov.u32 %r5, memory;
    add.s32 %r5, %r5, %r3;
    st.shared.u32 [%r5], %r4;
    ret;
}
"""


@pytest.mark.parametrize(
    ("stride", "sectors", "lines", "passes"), [(0, 1, 1, 1), (1, 4, 1, 1), (2, 8, 2, 2), (8, 32, 8, 8), (33, 32, 32, 1)]
)
def test_counts(stride: int, sectors: int, lines: int, passes: int) -> None:
    program = launcher.load(STRIDED).program("strided")
    program.measure()
    raw = np.zeros(4 * 40 * 40 + 128, np.uint8)
    start = raw.ctypes.data + -raw.ctypes.data % 128
    args = [pointer(start), int(stride).to_bytes(4, "little")]
    program.launch((2, 1, 1), (32, 1, 1), 0, args, [(start, 4 * 40 * 40)])
    load, store = program.traffic()
    assert (load.requests, load.sectors, load.lines) == (2, 2 * sectors, 2 * lines)
    assert load.bytes == 2 * 4 * (32 if stride else 1)
    assert (store.requests, store.least_passes, store.passes) == (2, 2, 2 * passes)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """Programs run on the machine, once, and accesses are counted."""
    library = Library(80, measured=True)
    monkeypatch.setattr(programs, "PTX", library)
    monkeypatch.setattr(programs, "ORDERS", (0,))
    yield library


def product(type_name: str, shape: tuple[int, int], n_tokens: int, large: launch.Large | None = None) -> Program:
    p = Program(launch.Target(large={"": large} if large else {}))
    x = np.random.default_rng(1).standard_normal((n_tokens, shape[0]), np.float32)
    p.out = p.graph.mul_mat(p.weight(packed(type_name, shape, 1), type_name, shape), p.array(x))  # type: ignore[attr-defined]
    return p


@pytest.mark.parametrize("type_name", ["q8_0", "q4_K", "iq2_ks"])
def test_decoded_rows_are_stored_16_bytes_at_a_time(type_name: str, machine: Library) -> None:
    kernel = f"rows_{type_name.lower()}"
    p = product(type_name, (512, 128), 20, launch.Large(1))
    p.run([p.out], on_cuda=True)  # type: ignore[attr-defined]
    stores = [t for t in machine.program(kernel).traffic() if t.instruction.startswith("st.global")]
    assert stores and all(t.waste <= 2 for t in stores)


@pytest.mark.parametrize("type_name", ["q8_0", "q4_K", "q6_K"])
def test_tiles_meet_no_bank_twice(type_name: str, machine: Library) -> None:
    kernel = f"matmul_{type_name.lower()}"
    p = product(type_name, (512, 64), 128)
    p.run([p.out], on_cuda=True)  # type: ignore[attr-defined]
    matrices = [t for t in machine.program(kernel).traffic() if t.instruction.startswith("ldmatrix")]
    assert matrices and all(t.passes == t.least_passes for t in matrices)


@pytest.mark.parametrize(
    ("type_name", "least"), [("bf16", 100), ("q8_0", 16), ("q8_KV", 35), ("q4_0", 12), ("q6_0", 8)]
)
def test_cells_meet_few_lines(type_name: str, least: float, machine: Library) -> None:
    """Bytes of keys and values for every line of the cache that loads meet (element by element 1 to 6)."""
    case = grouped(128, 1, type_name)
    case.p.run([case.out], on_cuda=True, n_kv=96)
    traffic = machine.program("flash16_128_128").traffic()
    loads = [t for t in traffic if t.instruction.startswith("ld.global.nc")]
    n_rows = 2 * 2 * 96
    assert n_rows * by_name(type_name).row_nbytes(128) / sum(t.lines for t in loads) > least


@pytest.mark.parametrize(
    ("type_name", "least"),
    [
        *(("q8_0", 24), ("q4_0", 22), ("q5_0", 20), ("q4_K", 20), ("q6_K", 15), ("q2_K", 21), ("q3_K", 17)),
        *(("iq2_k", 20), ("iq3_k", 17), ("iq2_ks", 14.5), ("iq3_ks", 15), ("iq2_kl", 13.5)),
        *(("iq4_nl", 26), ("iq4_xs", 24), ("iq4_k", 31.5), ("iq4_ks", 21.5), ("iq4_kss", 24.5), ("mxfp4", 20)),
        *(("nvfp4", 18), ("iq5_k", 17), ("iq5_ks", 19.5), ("iq6_k", 17)),
        *(("iq1_kt", 13), ("iq2_kt", 18), ("iq3_kt", 21), ("iq4_kt", 13.5)),
        # Interleaved rows: a lane takes two or four of them.
        *(("q4_0_r8", 23), ("q5_0_r4", 18), ("q6_0_r4", 16), ("q8_0_r8", 25), ("q8_kv_r8", 29), ("q8_k_r8", 26)),
        *(("q8_k_r16", 22), ("q2_k_r4", 29), ("q3_k_r4", 26), ("q4_k_r4", 23), ("q5_k_r4", 26), ("q6_k_r4", 27)),
        *(("iq2_k_r4", 24), ("iq3_k_r4", 26), ("iq4_k_r4", 20.5), ("iq5_k_r4", 24), ("iq4_ks_r4", 23)),
        *(("iq5_ks_r4", 27), ("iq4_xs_r8", 27), ("iq4_nl_r4", 20), ("mxfp4_r8", 22), ("iq2_bn_r4", 30)),
        # Their points are looked up in shared memory, in lines of global memory it was 1.4 to 4.5.
        *(("iq2_xxs_r4", 11.5), ("iq2_xs_r4", 10.3), ("iq2_s_r4", 10.5), ("iq3_xxs_r4", 9.6), ("iq3_s_r4", 8.6)),
        *(("iq1_s_r4", 6.2), ("iq1_m_r4", 6.8)),
        *(("iq2_xxs", 8.2), ("iq2_xs", 7.5), ("iq2_s", 6.3), ("iq3_xxs", 7.3), ("iq3_s", 6.6)),
        *(("iq1_s", 4.7), ("iq1_m", 5.4)),
    ],
)
def test_rows_of_one_token_take_few_turns(type_name: str, least: float, machine: Library) -> None:
    """Bytes of weights for every line of the cache that loads meet, and every pass over the banks of shared memory. A
    multiprocessor takes one per cycle at best: an H100 brings 14.5 bytes in that time.
    """
    p = product(type_name, (4096, 16), 1)
    p.run([p.out], on_cuda=True)  # type: ignore[attr-defined]
    traffic = machine.program(f"matvec1_{type_name.lower()}").traffic()
    weights = by_name(type_name).row_nbytes(4096) * 16
    assert weights / sum(t.lines + t.passes for t in traffic) > least


@pytest.mark.parametrize(("type_name", "least"), [("iq2_xxs", 9.0), ("iq3_xxs", 8.4)])
def test_long_rows_have_copies_of_short_tables(type_name: str, least: float, machine: Library) -> None:
    """Bytes of weights per turn, as above; two lanes share a copy, so that no lookup takes more than two passes."""
    p = product(type_name, (8192, 16), 1)
    p.run([p.out], on_cuda=True)  # type: ignore[attr-defined]
    traffic = machine.program(f"matvec1_{type_name}").traffic()
    assert by_name(type_name).row_nbytes(8192) * 16 / sum(t.lines + t.passes for t in traffic) > least
    shared = [t for t in traffic if t.instruction.startswith(("ld.shared", "st.shared"))]
    assert shared and all(t.passes <= 2 * t.requests for t in shared)


@pytest.mark.parametrize(
    ("type_name", "blocks", "passes"),
    [
        *((name, 4, 2) for name in ("q2_K", "q3_K", "iq2_k", "iq3_k", "iq2_ks", "iq3_ks", "iq2_kl")),
        *((name, 4, 1.3) for name in ("iq1_kt", "iq2_kt", "iq3_kt")),
        *(("iq5_k", 2, 2.3), ("iq5_ks", 2, 1.6), ("iq6_k", 2, 2.9), ("iq4_kt", 2, 1.8)),
    ],
)
def test_super_blocks_are_read_in_whole_lines(type_name: str, blocks: int, passes: float, machine: Library) -> None:
    """By eight lanes each, in every step of some super-blocks; few words of them are in each other's way."""
    p = product(type_name, (4096, 16), 1)
    p.run([p.out], on_cuda=True)  # type: ignore[attr-defined]
    traffic = machine.program(f"matvec1_{type_name.lower()}").traffic()
    copies = [t for t in traffic if t.instruction.startswith("cp.async")]
    steps = 16 // blocks
    assert sum(t.lines for t in copies) / (steps * 16) < by_name(type_name).row_nbytes(4096) / steps / 128 + 1
    assert all(t.passes == t.least_passes for t in copies)
    words = [t for t in traffic if t.instruction.startswith("ld.shared")]
    assert 0 < sum(t.passes for t in words) <= passes * sum(t.least_passes for t in words)


@pytest.mark.parametrize("type_name", ["q3_K", "q6_K", "q4_0", "tq2_0", "q6_k_r4"])
def test_biases_of_levels_are_left_to_the_sums(type_name: str) -> None:
    """Bytes are not subtracted one word at a time: that sets their highest bits and clears them again."""
    kernel = f"matvec1_{type_name.lower()}"
    text = build.compile_ptx(modules.KERNELS / f"{kernel_file(kernel)}.cu", "compute_80").read_text()
    body = text.partition(f".entry {kernel}(")[2].partition(".entry ")[0]
    assert "dp4a" in body and "-2139062144" not in body
