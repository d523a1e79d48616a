"""The kernels as nvcc sees them: files of the smaller families compile and no kernel of theirs spills registers.

Needs nvcc, no GPU. Everything is compiled by scripts/cuda_resources.py, which scripts/test runs beside the tests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ikpy.backends.cuda import emulator, launch, modules, resources
from ikpy.backends.cuda.api import DeviceError
from ikpy.backends.cuda.launch import limits, products, products_bf16

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "cuda_resources.py"
LOG = """
ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 33280 bytes smem, 500 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""


def has_nvcc() -> bool:
    try:
        return bool(modules.nvcc_version())
    except DeviceError:
        return False


needs_nvcc = pytest.mark.skipif(not has_nvcc(), reason="no nvcc")


def test_report_of_the_compiler() -> None:
    assert resources.parse(LOG) == [
        resources.Usage("first", 80, 40, 33280, 0, 0),
        resources.Usage("second", 90, 255, 0, 16, 20),
    ]


def test_blocks_of_a_multiprocessor_and_what_limits_them() -> None:
    def limits(arch: int, registers: int, shared: int, threads: int) -> tuple[dict[str, int], int]:
        row = resources.Usage("any", arch, registers, 128, 0, 0)
        return row.limits(threads, shared), row.blocks(threads, shared)

    # 7168 registers of a warp: two in each of four parts; 2 x (52224 + 128 + 1024) bytes are more than 100 KiB.
    found = limits(86, 212, 52224, 128)
    assert found == ({"shared memory": 1, "registers": 2, "threads": 12, "blocks": 16}, 1)
    assert limits(80, 212, 52224, 128)[0] == {"shared memory": 3, "registers": 2, "threads": 16, "blocks": 32}
    # Nine warps: twenty have registers, five in each part.
    assert limits(90, 90, 99328, 288)[0] == {"shared memory": 2, "registers": 2, "threads": 7, "blocks": 32}
    # Blocks of one warp, and shared memory that no block can have.
    assert limits(86, 32, 0, 32)[1] == 16 and limits(75, 32, 70000, 128)[1] == 0


def test_architectures_share_the_ptx_that_the_kernels_need() -> None:
    assert modules.code_flag(["sm_80", "sm_120"]) == "-gencode=arch=compute_80,code=[sm_80,sm_120]"
    assert modules.code_flag(["sm_75"]) == "-gencode=arch=compute_75,code=[sm_75]"


@needs_nvcc
@pytest.mark.parametrize(
    "stem", ["elementwise", "norm", "rope", "kv_cache", "moe", "act_prepare", "hyper_connections", "compress"]
)
def test_compiles_without_spills(stem: str) -> None:
    rows = resources.usage(emulator.KERNELS / f"{stem}.cu", (80, 90))
    assert {row.arch for row in rows} == {80, 90}
    assert not [row for row in rows if row.spill_bytes]


def test_reports_are_kept_by_what_nvcc_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of the kernels makes them void, one of the emulation does not."""
    monkeypatch.setattr(modules, "nvcc_version", lambda: "any")
    kernel, header, shim = (tmp_path / name for name in ("kernel.cu", "header.cuh", "shim/cuda_shim.hpp"))
    shim.parent.mkdir()
    kernel.write_text('#include "header.cuh"\n#include "cuda_shim.hpp"\n')
    monkeypatch.setattr(emulator, "SHIM", shim.parent)
    keys = []
    for in_header, in_shim in (("", ""), ("", "// edited"), ("// edited", "")):
        header.write_text(in_header)
        shim.write_text(in_shim)
        keys.append((resources._reports(kernel, [80]), emulator.sources_digest(kernel, (shim.parent,))))
    (first, built), (second, rebuilt), (third, _) = keys
    assert first == second != third and built != rebuilt


_ENTRY = re.compile(r"\.visible \.entry (\w+)\(([^)]*)\)([^{]*)\{")
_LINE = re.compile(r"\.param (?:\.align (\d+) )?\.[bsuf](\d+) (?:\.ptr \S+ \d+ )?\w+(?:\[(\d+)\])?$")


@needs_nvcc
@pytest.mark.parametrize("stem", ["norm", "moe", "kv_cache", "weights_small", "attention_any", "gemm_bf16"])
def test_parameters_and_threads_as_nvcc_sees_them(stem: str, tmp_path: Path) -> None:
    """The compiler for devices lays out parameters as that of the host does, from which launches are checked."""
    target = tmp_path / "kernel.ptx"
    modules.compile_cubin(emulator.KERNELS / f"{stem}.cu", "compute_80", target)
    entries = _ENTRY.findall(target.read_text())
    assert entries
    for kernel, text, directives in entries:
        lines = [line.strip().rstrip(",") for line in text.splitlines() if line.strip()]
        found = []
        for line in lines:
            alignment, bits, length = (int(n or 0) for n in _LINE.match(line).groups())  # type: ignore[union-attr]
            found.append((length or bits // 8, alignment or bits // 8))
        assert found == emulator.library().parameters(kernel), kernel
        bound = re.search(r"\.maxntid (\d+)", directives)
        assert bound is None or int(bound[1]) >= limits.block_threads(kernel), kernel


@needs_nvcc
def test_products_of_sm_90_compile_without_spills() -> None:
    """For sm_90 alone; two blocks must find room on a multiprocessor."""
    source = emulator.KERNELS / "gemm_wgmma.cu"
    ((_, rows),) = resources.usages([source], (80, 90, 120), jobs=1)
    (row,) = rows
    assert (row.kernel, row.arch, row.spill_bytes, row.stack_bytes) == ("gemm_wgmma", 90, 0, 0)
    assert row.occupancy(products_bf16.WGMMA_THREADS, products_bf16.WGMMA_SHARED) == pytest.approx(2 * 288 / 2048)


@needs_nvcc
def test_int8_products_of_sm_90_compile_without_spills() -> None:
    """As above, of the types with most registers and with most shared memory."""
    for stem in ("wgmma_kquants", "wgmma_iqk_r4"):
        ((_, rows),) = resources.usages([emulator.KERNELS / f"{stem}.cu"], (80, 90, 120), jobs=1)
        assert {row.arch for row in rows} == {90} and all(row.kernel.startswith("wgmma_") for row in rows)
        assert not [row for row in rows if row.spill_bytes or row.stack_bytes]
        assert all(row.blocks(256, products.WGMMA_S8_SHARED) == 2 for row in rows)


TOUCHED = """
#include "wgmma.cuh"
using namespace ikpy::cuda;

// Sums are read while products that add to them are under way.
IKPY_KERNEL __launch_bounds__(128) touched(float* out, int n) {
    extern __shared__ __align__(1024) uint8_t tiles[];
    const unsigned long long a = matrix_descriptor(tiles), b = matrix_descriptor(tiles + 16384);
    float sums[64], seen = 0.0f;
    for (int k = 0; k < n; ++k) {
        wgmma_fence();
        wgmma_bf16_n128(sums, a, b, k > 0);
        wgmma_commit();
        seen += sums[k & 1];
    }
    wgmma_finish(sums);
    for (int i = 0; i < 64; ++i) out[64 * threadIdx.x + i] = sums[i] + seen;
}
"""


@needs_nvcc
def test_products_that_the_compiler_holds_up_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so in a line of its log and makes code that is right and slow."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "wgmma_touched.cu"
    source.write_text(TOUCHED)
    with pytest.raises(RuntimeError, match=r"wgmma_touched\.cu: .*is injected"):
        resources.usage(source, (90,))


# As many live values as three times the registers of a thread; an array picked from by a number known at run time;
# more registers than a block of 1024 threads can have.
FAULTS = {
    "SPILLS": """
        extern "C" __global__ void __launch_bounds__(1024, 2) greedy(float* x, int n) {
            float v[96];
        #pragma unroll
            for (int i = 0; i < 96; ++i) v[i] = x[i];
            for (int k = 0; k < n; ++k)
        #pragma unroll
                for (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i + 17) % 96] + 1.0f;
        #pragma unroll
            for (int i = 0; i < 96; ++i) x[i] = v[i];
        }""",
    "LOCAL MEMORY": """
        extern "C" __global__ void greedy(float* x, const int* which, int n) {
            float v[64];
            for (int i = 0; i < 64; ++i) v[i] = 0.0f;
            for (int k = 0; k < n; ++k) v[which[k] & 63] += x[k];
            for (int k = 0; k < n; ++k) x[k] = v[which[k] & 63];
        }""",
    "CANNOT START": """
        extern "C" __global__ void layer_norm(float* x, int n) {
            float v[80];
        #pragma unroll
            for (int i = 0; i < 80; ++i) v[i] = x[i];
            for (int k = 0; k < n; ++k)
        #pragma unroll
                for (int i = 0; i < 80; ++i) v[i] = v[i] * v[(i + 17) % 80] + 1.0f;
        #pragma unroll
            for (int i = 0; i < 80; ++i) x[i] = v[i];
        }""",
}


@needs_nvcc
@pytest.mark.parametrize("fault", FAULTS)
def test_kernels_that_a_gpu_would_run_badly_fail_the_script(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / "greedy.cu").write_text(FAULTS[fault])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code = (
        "import pathlib, runpy, sys\n"
        "from ikpy.backends.cuda import emulator\n"
        f"emulator.KERNELS = pathlib.Path({str(kernels)!r})\n"
        f"sys.argv = [{str(SCRIPT)!r}, '80']\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert fault in done.stdout and "1 kernels compiled, 1 spill, use local memory or cannot start" in done.stdout


def test_every_kernel_is_in_the_file_that_lowering_names() -> None:
    for kernel in emulator.library().kernels():
        text = (emulator.KERNELS / f"{launch.kernel_file(kernel)}.cu").read_text()
        family, _, name = kernel.partition("_")
        if family == "wgmma":
            text += (emulator.KERNELS / f"{launch.kernel_file(f'matmul_{name}')}.cu").read_text()
        by_macro = family in ("matvec1", "matvec4", "matmul", "rows", "wgmma") and f"_TYPE({name}," in text
        assert (
            by_macro
            or f"{kernel}(" in text
            or re.search(rf"IKPY_(FLASH(?:_BIASED)?|DELTA_RULE|SSM_SCAN|CHANNEL_SCAN|WKV)\({kernel},", text)
        ), kernel
