"""Asynchronous copies and products of sm_90 as PTX: the machine finds every step that is missing or wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ikpy.backends.cuda.launch import ACT_TILES, pointer
from tests.cuda import programs
from tests.cuda.programs import Program
from tests.cuda.ptx import build, launcher
from tests.cuda.ptx.cut import CutLibrary
from tests.cuda.test_async_proxy import KERNEL, ORDERS, instance, operands
from tests.cuda.test_kernels_large import MISTAKES, rounded, target
from tests.cuda.test_kernels_weights import packed, values

pytestmark = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")

# Calculations with registers pass wgmma.fence in the compiler's hands unless it takes the registers for changed.
FENCE = "    if (Wrong != kSecondFence) wgmma_fence();\n"
KEEP = '    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");\n'
WRONG = "the result is wrong"
FAULTS = {  # what is left out or wrong: (operands by ordinary stores, what the machine says)
    "InitFence": (False, "mbarrier: shared address .* and no fence.proxy.async follows"),
    "InitBarrier": (False, "no initialised mbarrier"),
    "Announce": (False, "warp 0 waits for an mbarrier"),
    "Arrival": (False, f"bulk copies are under way|{WRONG}"),
    "StoreFence": (True, "wgmma: shared address .* and no fence.proxy.async follows"),
    "StoreBarrier": (True, f"no fence.proxy.async follows|{WRONG}"),
    "ProductFence": (False, "follows no wgmma.fence"),
    "Commit": (False, "accessed before wait_group"),
    "Wait": (False, "accessed before wait_group"),
    "SecondFence": (False, "accessed and no wgmma.fence follows"),
    "Touch": (False, f"accessed before wait_group|{WRONG}"),
    "Overwrite": (True, f"no fence.proxy.async follows|{WRONG}"),
    "CopyOver": (False, f"bulk copies are under way|{WRONG}"),
    "OwnDescriptor": (False, "different descriptors"),
    "ThreeWarps": (False, "different instructions|accessed before wait_group"),
    "NoSwizzle": (False, WRONG),
    "Base": (False, "not in the first row of the 128 byte swizzle"),
    "Columns": (False, "leaves the rows of 128 bytes"),
    "Stride": (False, WRONG),
    "OddSize": (False, "not a multiple of 16"),
    "Twice": (False, "holds an mbarrier object"),
    "TooMany": (False, "1 arrivals, 0 pending|waits for an mbarrier"),
    "LateCopy": (False, "bulk copies are under way|waits for an mbarrier"),
}
# Seen in the orders in which asynchronous work comes late, or warps in another order.
ONLY_LATE = {"InitBarrier", "Overwrite", "CopyOver"}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> launcher._Module:
    path = tmp_path_factory.mktemp("kernels") / "async.cu"
    assert KERNEL.count(FENCE) == 1
    all_kernels = [("Nothing", False), ("Nothing", True), *((name, how) for name, (how, _) in FAULTS.items())]
    instances = [instance(name, stores=stores) for name, stores in all_kernels]
    path.write_text(KERNEL.replace(FENCE, KEEP + FENCE) + "".join(instances))
    return launcher.load(build.compile_ptx(path, "compute_90a").read_text())


def run(kernels: launcher._Module, name: str, order: int, *, stores: bool) -> None:
    """Raises MachineFault, or when the result is wrong AssertionError."""
    a, b, arrays = operands()
    program = kernels.program(f"product_{name}_{int(stores)}")
    args = [pointer(x.ctypes.data) for x in arrays]
    memory = [(x.ctypes.data, x.nbytes) for x in arrays]
    program.launch((1, 1, 1), (128, 1, 1), 26 * 1024, args, memory, order=order, arch=90)
    wrong = np.argwhere(arrays[2] != 2 * (a @ b.T) + 1)
    assert not len(wrong), f"{WRONG} at {len(wrong)} places, first {wrong[0]}"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stores", [False, True], ids=["bulk copies", "stores"])
def test_product(kernels: launcher._Module, order: int, stores: bool) -> None:
    run(kernels, "Nothing", order, stores=stores)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(kernels: launcher._Module, fault: str) -> None:
    stores, reason = FAULTS[fault]
    for order in ORDERS[fault in ONLY_LATE :]:
        with pytest.raises((launcher.MachineFault, AssertionError), match=reason):
            run(kernels, fault, order, stores=stores)


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_mistakes_in_a_pipeline_are_found(mistake: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of gemm_wgmma that the emulation finds, when copies and products come late."""
    edits = None if mistake is None else {MISTAKES[mistake][0]: MISTAKES[mistake][1]}
    library = CutLibrary(90, tmp_path, edits)
    monkeypatch.setattr(programs, "DEVICE", None)
    monkeypatch.setattr(programs, "PTX", library)
    library.set_order(1)
    p, shape = Program(target(ACT_TILES)), (6 * 64, 128)
    x, data = np.random.default_rng(7).standard_normal((20, shape[0]), np.float32), packed("bf16", shape, 2)
    out = p.graph.mul_mat(p.weight(data, "bf16", shape), p.array(x))
    expected = rounded(x) @ rounded(values(data, "bf16", shape)).T

    def run_once() -> bool:
        (actual,) = p._run_once([out], 0, on_cuda=True)
        return bool(np.abs(actual.reshape(expected.shape) - expected).max() < 1e-5 * np.abs(expected).max())

    if mistake is None:
        assert run_once()
        return
    try:
        right = run_once()
    except launcher.MachineFault:
        right = False
    assert not right
    assert library.all_edited()
