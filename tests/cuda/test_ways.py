"""Newer kernels are tried before they are used, and the fastest ones are found by measuring."""

from __future__ import annotations

import errno
import importlib
import json
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ikpy.backends.cuda import devices as cuda_devices
from ikpy.backends.cuda import emulator, launch, record, tune, ways
from ikpy.backends.cuda.api import DeviceError, LaunchLike
from ikpy.backends.cuda.emulated import EmulatedDevice
from ikpy.backends.cuda.launch import ACT_BF16, ACT_TILES, BF16_TOKENS, Large, kernel_file
from ikpy.backends.cuda.lowering import CudaKernels
from ikpy.cli import main
from ikpy.graph.placement import DeviceParams, PlacementParams
from tests.cuda import fake_pycuda
from tests.cuda.conftest import packed
from tests.cuda.models import logits_of, zoo
from tests.cuda.programs import Program
from tests.cuda.test_kernels_large import many_and_few

FILES = ("float.cu", "act_prepare.cu", "gemm_bf16.cu")
S8_FILES = ("act_prepare.cu", "weights_kquants.cu", "weights_legacy.cu")
S8 = ways.WGMMA_S8_TOKENS
MIB = 1 << 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of this test alone; the builds of the emulator stay where they are."""
    folder = tmp_path / "cubin"
    monkeypatch.setattr("ikpy.backends.cuda.modules.cache_dir", lambda: folder)
    return folder / "devices"


# trying


def machine(tmp_path: Path, right: str = "", wrong: str = "") -> emulator.Emulator:
    """The kernels that are tried, with a mistake in gemm_wgmma."""
    text = (emulator.KERNELS / "gemm_wgmma.cu").read_text()
    assert right in text
    source = tmp_path / "gemm_wgmma.cu"
    source.write_text(text.replace(right, wrong))
    return emulator.build([source, *(emulator.KERNELS / name for name in FILES)])


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package driver with a GPU of sm_90 in `device`; `launched` are the kernels that ran there."""

    def cubins(capability: tuple[int, int], kernels: Collection[str]) -> dict[str, Path]:
        paths = {name: tmp_path / f"{kernel_file(name)}.cubin" for name in kernels}
        for path in paths.values():
            s8 = (f"{kind}_{name}" for kind in ("matmul", "wgmma") for name in ways.CHECKED_S8)
            path.write_text(" ".join(["rows_float act_prepare_float act_prepare_q8 gemm_bf16 gemm_wgmma", *s8]))
        return paths

    monkeypatch.setattr(fake_pycuda.Device, "compute_capability", lambda _: (9, 0))
    monkeypatch.setattr(fake_pycuda.Device, "n_devices", 1)
    with fake_pycuda.installed():
        package = importlib.import_module("ikpy.backends.cuda.driver")
        monkeypatch.setattr(package.streams, "pack", packed)
        device = package.open_devices(cubins)[0]
        set_tried(device, wgmma_s8=True)
        yield SimpleNamespace(device=device, launched=[])


def set_tried(device: Any, **tried: bool | None) -> None:
    known = record.load(device)
    for name, works in tried.items():
        setattr(known, name, works)
    known.save()


def run_on(driver: Any, kernels: emulator.Emulator) -> None:
    def launcher(name: str, *rest: Any) -> None:
        driver.launched.append(name)
        kernels.launch(name, *rest)

    fake_pycuda.Function.launcher = staticmethod(launcher)  # type: ignore[assignment]


def test_a_kernel_that_agrees_is_used(driver: Any, tmp_path: Path, cache: Path) -> None:
    run_on(driver, machine(tmp_path))
    free, log = driver.device.memory().free, []
    assert ways.large_products([driver.device], None, log.append) == {"": Large(BF16_TOKENS, ACT_TILES, S8)}
    assert log == ["CUDA0: gemm_wgmma gives what gemm_bf16 gives and is used"]
    assert {"gemm_bf16", "gemm_wgmma"} < set(driver.launched)
    assert driver.device.memory().free == free
    (kept,) = cache.iterdir()
    assert kept.name.startswith("fake-gpu-0-") and json.loads(kept.read_text())["wgmma"] is True
    # It is tried once.
    driver.launched.clear()
    assert ways.large_products([driver.device], 64, log.append) == {"": Large(64, ACT_TILES, S8)}
    assert not driver.launched and len(log) == 1


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("b + i * kNextK", "b"),
        ("line + 8 * (i / 2 % 2)", "line + 7 * (i / 2 % 2)"),
        ("kTiledRows, 8,", "kTiledRows, 9,"),
        ("k > 0 || i > 0", "i > 0"),
        ("blockIdx.y * kTiledRows, kTiledRows", "blockIdx.y * kTiledRows, kTiledRows - 1"),
    ],
)
def test_a_kernel_that_differs_is_not_used(driver: Any, tmp_path: Path, right: str, wrong: str) -> None:
    run_on(driver, machine(tmp_path, right, wrong))
    log: list[str] = []
    assert ways.large_products([driver.device], None, log.append) == {"": Large(BF16_TOKENS, ACT_BF16, S8)}
    assert log[0].startswith("CUDA0: gemm_wgmma differs from gemm_bf16 by ")
    assert log[0].endswith(" of the largest result and is not used; please report this")
    driver.launched.clear()
    assert not ways.wgmma_works(driver.device, log.append)
    tried = "gemm_wgmma does not give what gemm_bf16 gives and is not used; wgmma_TYPE agrees with matmul_TYPE"
    assert ways.known(driver.device) == f"not measured (`ikpy cuda tune`); {tried}"
    assert not driver.launched and "did not give what gemm_bf16 gives when it was tried" in log[1]


def test_a_kernel_that_breaks_the_device_is_not_used_from_then_on(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in a kernel stays with the context: nothing works any more, not even giving memory back."""
    kernels = machine(tmp_path)

    def launcher(name: str, *rest: Any) -> None:
        kernels.launch(name, *rest)
        if name == "gemm_wgmma":
            monkeypatch.setattr(driver.device, "release", broken)
            raise fake_pycuda.LogicError("an illegal instruction was encountered")

    def broken(address: int) -> None:
        raise DeviceError("CUDA0: an illegal instruction was encountered")

    fake_pycuda.Function.launcher = staticmethod(launcher)  # type: ignore[assignment]
    log: list[str] = []
    assert not ways.wgmma_works(driver.device, log.append)
    assert record.load(driver.device).wgmma is False


class Killed(BaseException):
    """As if the process ended here."""


def test_a_kernel_that_never_ends_is_not_tried_again(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, seen = machine(tmp_path), []

    def launcher(name: str, *rest: Any) -> None:
        if name == "gemm_wgmma":
            seen.append(record.load(driver.device).wgmma)
            raise Killed
        kernels.launch(name, *rest)

    fake_pycuda.Function.launcher = staticmethod(launcher)  # type: ignore[assignment]
    with pytest.raises(Killed):
        ways.wgmma_works(driver.device, lambda _: None)
    # What another process would find if this one had been ended; one that went on has taken it back.
    assert seen == [False] and record.load(driver.device).wgmma is None


def test_kernels_that_are_not_there_are_not_used(driver: Any, tmp_path: Path) -> None:
    """As where code for another architecture serves the device; they are tried when they have come."""
    run_on(driver, machine(tmp_path))
    plain, log = driver.device._cubins, []

    def cubins(capability: tuple[int, int], names: Collection[str]) -> dict[str, Path]:
        if "gemm_wgmma" in names:
            raise DeviceError("no kernel file holds gemm_wgmma")
        return dict(plain(capability, names))

    driver.device._cubins = cubins
    assert not ways.wgmma_works(driver.device, log.append)
    assert log == ["CUDA0: gemm_wgmma is not there and is not used: no kernel file holds gemm_wgmma"]
    assert record.load(driver.device).wgmma is None


def test_a_kernel_that_does_not_run_is_not_used(driver: Any, tmp_path: Path) -> None:
    kernels = machine(tmp_path)

    def launcher(name: str, *rest: Any) -> None:
        if name == "gemm_wgmma":
            raise fake_pycuda.LogicError("no kernel image is available")
        kernels.launch(name, *rest)

    fake_pycuda.Function.launcher = staticmethod(launcher)  # type: ignore[assignment]
    log: list[str] = []
    assert not ways.wgmma_works(driver.device, log.append)
    assert "gemm_wgmma does not run and is not used: CUDA0: kernel gemm_wgmma" in log[0]


def test_another_driver_or_other_kernels_are_tried_again(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on(driver, machine(tmp_path))
    log: list[str] = []
    assert ways.wgmma_works(driver.device, log.append)
    monkeypatch.setattr(driver.device, "software", lambda: "13010")
    assert record.load(driver.device).wgmma is None
    monkeypatch.undo()
    run_on(driver, machine(tmp_path))
    monkeypatch.setattr("ikpy.backends.cuda.modules.kernels_digest", lambda: "other")
    assert record.load(driver.device).wgmma is None


def s8_machine(folder: Path, right: str = "", wrong: str = "") -> emulator.Emulator:
    """The int8 kernels that are tried, with a mistake in those of sm_90."""
    text = (emulator.KERNELS / "matmul_wgmma.cuh").read_text()
    assert right in text
    (folder / "matmul_wgmma.cuh").write_text(text.replace(right, wrong))
    types = ("q8_0", "Q8_0"), ("q4_1", "Q4_1"), ("q6_k", "Q6_K"), ("q2_k", "Q2_K")
    source = folder / "wgmma_four.cu"
    source.write_text(
        '#include "matmul_wgmma.cuh"\n#include "unpack/kquants.cuh"\n#include "unpack/legacy.cuh"\n'
        + "".join(f"IKPY_WEIGHT_TYPE({name}, Unpack{unpacker});\n" for name, unpacker in types)
    )
    return emulator.build([source, *(emulator.KERNELS / name for name in S8_FILES)])


def test_int8_kernels_that_agree_are_used(driver: Any, tmp_path: Path) -> None:
    run_on(driver, s8_machine(tmp_path))
    set_tried(driver.device, wgmma=False, wgmma_s8=None)
    free, log = driver.device.memory().free, []
    assert ways.large_products([driver.device], 0, log.append) == {"": Large(0, wgmma=S8)}
    assert log == ["CUDA0: wgmma_TYPE gives what matmul_TYPE gives and is used"]
    assert {f"{kind}_{name}" for kind in ("matmul", "wgmma") for name in ways.CHECKED_S8} < set(driver.launched)
    assert driver.device.memory().free == free and record.load(driver.device).wgmma_s8 is True
    driver.launched.clear()
    assert ways.large_products([driver.device], None, log.append)[""] == Large(BF16_TOKENS, ACT_BF16, S8)
    assert ways.large_products([driver.device], None, log.append, wgmma=False)[""] == Large(BF16_TOKENS, ACT_BF16)
    assert not driver.launched


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("row % 8) * 16", "row % 4) * 16"),
        ("x + g * kNextK", "x"),
        ("a[2 - 2 * half] = a[3 - 2 * half] = 0", "a[3 - 2 * half] = 0"),
        ("p.gate ? sum[8]", "p.gate ? sum[0]"),
        ("k <= n_steps", "k < n_steps"),
    ],
)
def test_int8_kernels_that_differ_are_not_used(driver: Any, tmp_path: Path, right: str, wrong: str) -> None:
    run_on(driver, s8_machine(tmp_path, right, wrong))
    set_tried(driver.device, wgmma_s8=None)
    log: list[str] = []
    assert ways.large_products([driver.device], 0, log.append) == {"": Large(0)}
    assert log[0].startswith("CUDA0: wgmma_TYPE differs from matmul_TYPE by ")
    assert record.load(driver.device).wgmma_s8 is False


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"wgmma": "yes", "large": null, "milliseconds": []}', "\0"])
def test_a_damaged_record_counts_as_none(content: str) -> None:
    device = emulated()
    path = record.load(device).path
    path.parent.mkdir(parents=True)
    path.write_text(content)
    found = record.load(device)
    assert (found.wgmma, found.large, found.milliseconds) == (None, None, [])


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]


def test_a_record_that_cannot_be_read_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    device = emulated()
    path = record.load(device).path
    assert not caplog.records  # that there is none is as it should be
    path.mkdir(parents=True)
    for _ in range(3):
        assert record.load(device).wgmma is None
    (line,) = warnings_in(caplog)
    assert str(path) in line and line.endswith("cannot be read: Is a directory; nothing counts as known of the device")


def test_a_damaged_record_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    device = emulated()
    path = record.load(device).path
    path.parent.mkdir(parents=True)
    path.write_text("{")
    for _ in range(2):
        record.load(device)
    (line,) = warnings_in(caplog)
    assert "cannot be read: it is damaged" in line


def test_a_record_that_does_not_fit_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = record.load(emulated())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    found.keep()
    (line,) = warnings_in(caplog)
    assert "cannot be written: No space left on device" in line
    assert not list(found.path.parent.iterdir())


def test_a_record_that_cannot_be_kept_is_told_once(
    driver: Any, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_on(driver, machine(tmp_path))
    monkeypatch.setattr("ikpy.backends.cuda.modules.cache_dir", lambda: cache / "file" / "cubin")
    (cache / "file").write_text("no folder")
    log: list[str] = []
    for _ in range(2):
        assert ways.wgmma_works(driver.device, log.append)
    # It is tried each time, and why is told once.
    assert log == ["CUDA0: gemm_wgmma gives what gemm_bf16 gives and is used"] * 2
    (line,) = [line for line in warnings_in(caplog) if "cannot be written" in line]
    assert "Not a directory; its kernels are tried again at every start" in line


def test_older_devices_and_users_who_want_none_are_not_tried() -> None:
    def no_launch(launch: LaunchLike) -> None:
        raise AssertionError(launch.kernel)

    old, new = emulated((7, 5), no_launch), emulated((9, 0), no_launch)
    assert ways.large_products([old, new], None, print) == {"": Large(0)}
    assert ways.large_products([new], 0, print, wgmma=False) == {"": Large(0)}
    assert ways.large_products([new], None, print, wgmma=False) == {"": Large(BF16_TOKENS, ACT_BF16)}
    assert ways.large_products([emulated((8, 6), no_launch)], None, print) == {"": Large(BF16_TOKENS, ACT_BF16)}


# measuring


def n_tokens(step: LaunchLike) -> int:
    """Of a product, from its packed arguments (launch/product.py)."""
    (tokens,) = struct.unpack_from("<i", step.args[0], 8 * 8 + 6 * 8 + 2 * 4)
    return int(tokens)


def clock(step: LaunchLike) -> float:
    """A device on which decoding costs as much as multiplying 100 tokens, k-quants twice that and trellis for ever."""
    if step.kernel.startswith("matmul_"):
        return 0.010 * n_tokens(step)
    if step.kernel.startswith("wgmma_"):  # as much as mma for 40 tokens, whatever their number is
        return max(0.4, 0.008 * n_tokens(step))
    if step.kernel.startswith("matvec"):
        return 0.001
    if step.kernel.startswith("rows_"):
        return {"weights_kquants": 1.0, "weights_trellis": 100.0}.get(kernel_file(step.kernel), 0.5)
    return {"gemm_bf16": 0.005, "gemm_wgmma": 0.004}.get(step.kernel, 0.0) * (
        n_tokens(step) if step.kernel.startswith("gemm") else 0
    )


def emulated(capability: tuple[int, int] = (8, 0), launcher: Any = lambda step: None) -> EmulatedDevice:
    return EmulatedDevice(0, 512 * MIB, launcher, compute_capability=capability, clock=clock)


@pytest.mark.parametrize(
    ("capability", "fmt", "first", "s8"),
    [((8, 6), ACT_BF16, 128, 0), ((9, 0), ACT_TILES, 128, 64), ((7, 5), ACT_BF16, 0, 0)],
)
def test_the_fastest_way_is_found_and_used(
    capability: tuple[int, int], fmt: int, first: int, s8: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "N_IN", 256)
    monkeypatch.setattr(tune, "N_OUT", 256)
    device, log = emulated(capability), []
    set_tried(device, wgmma=True, wgmma_s8=True)
    found = tune.tune(device, log.append)
    large = record.load(device).large
    assert large is not None and large == found.large and set(large) == set(launch.family_types())
    assert large["weights_legacy"] == Large(first, fmt, s8)
    assert large["weights_trellis"] == Large(0, large["weights_trellis"].format, s8)
    way = f"wgmma from {s8} tokens on" if s8 else "matmul always"
    assert any(f"weights_trellis (iq3_kt): {way}" in line for line in log)
    if not first:
        return
    assert large["weights_kquants"] == Large(2 * first, fmt, s8) and large["float"].wgmma == 0
    kept = [row for row in found.milliseconds if row["file"] == "weights_legacy" and row["tokens"] == 256]
    assert kept[0]["matmul"] == 2.56 and kept[0]["gemm_bf16"] == pytest.approx(0.5 + 256 * 0.005)
    ways_now = ways.large_products([device], None, print)
    assert ways_now["weights_legacy"] == Large(first, fmt, s8)
    many, few = many_and_few(Program())
    kernels = CudaKernels([capability], ways_now)
    assert [kernels.activation_format(node) for node in (many, few)] == [fmt, fmt]
    # What the user asks for is not overruled.
    default_s8 = S8 if s8 else 0
    assert ways.large_products([device], 300, print) == {"": Large(300, fmt, default_s8)}


def test_a_way_counts_from_where_it_is_always_faster() -> None:
    plain = {16: 1.0, 32: 2.0, 64: 3.0, 128: 4.0, 256: 8.0}
    bf16 = {16: 0.5, 32: 2.5, 64: 2.9, 128: 3.0, 256: 4.0}
    wgmma = {16: 3.0, 32: 3.0, 64: 3.0, 128: 3.1, 256: 3.2}
    times = {n: {"matmul": plain[n], "gemm_bf16": bf16[n], "gemm_wgmma": wgmma[n]} for n in plain}
    assert tune.choose(times, [ACT_BF16]) == Large(64, ACT_BF16)
    assert tune.choose(times, [ACT_BF16, ACT_TILES]) == Large(128, ACT_TILES)
    assert tune.choose({n: {**t, "gemm_bf16": 9.0} for n, t in times.items()}, [ACT_BF16]) == Large(0, ACT_BF16)
    s8 = {n: {**t, "wgmma": {16: 0.5, 32: 2.1, 64: 2.5, 128: 2.9, 256: 7.0}[n]} for n, t in times.items()}
    assert tune.choose(s8, [ACT_BF16, ACT_TILES]) == Large(256, ACT_TILES, 64)
    assert tune.choose(s8, []) == Large(0, wgmma=64)


def test_devices_that_differ_share_what_is_good_on_all() -> None:
    one = {"weights_legacy": Large(64, ACT_TILES), "float": Large(32, ACT_TILES), "weights_trellis": Large(0)}
    other = {"weights_legacy": Large(256, ACT_BF16), "float": Large(16, ACT_TILES), "weights_trellis": Large(32)}
    assert ways._common([one, other], Large(256, ACT_TILES)) == {
        "weights_legacy": Large(256, ACT_BF16),
        "float": Large(32, ACT_TILES),
        "weights_trellis": Large(0, ACT_BF16),
    }
    assert ways._common([one], Large(256, ACT_BF16))["float"] == Large(32, ACT_BF16)
    s8 = [{"weights_legacy": Large(0, wgmma=n), "float": Large(0, wgmma=n // 48)} for n in (32, 64)]
    assert ways._common(s8, Large(wgmma=32)) == {"weights_legacy": Large(0, wgmma=64), "float": Large(0)}
    assert ways._common(s8, Large())["weights_legacy"] == Large(0)


def test_tune_from_the_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune, "family_types", lambda: {"weights_legacy": "q4_0"})
    monkeypatch.setattr(tune, "TOKENS", (64, 256))
    monkeypatch.setattr(tune, "N_OUT", 128)
    device = emulated((8, 6))
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: ([device], ""))
    assert main(["cuda", "info"]) == 0
    assert "  prompts: not measured (`ikpy cuda tune`)\n" in capsys.readouterr().out
    assert main(["cuda", "tune"]) == 0
    out = capsys.readouterr().out
    assert "CUDA0: weights_legacy (q4_0): gemm_bf16 from 256 tokens on" in out
    assert f"kept in {record.load(device).path}" in out and record.load(device).path.exists()
    assert main(["cuda", "info"]) == 0
    assert "  prompts: measured by `ikpy cuda tune`\n" in capsys.readouterr().out
    assert main(["cuda", "tune", "twice"]) == 1
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: ([], "there is no CUDA GPU"))
    assert main(["cuda", "tune"]) == 1
    assert "ikpy cuda tune: no devices: there is no CUDA GPU" in capsys.readouterr().err


# models


def test_a_prompt_on_sm_90(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same activations in bf16, both kinds of tensor-core kernels give the same logits."""
    kernels, launched = emulator.library(), []

    def launcher(step: LaunchLike) -> None:
        launched.append(step.kernel)
        kernels.launch(step.kernel, step.grid, step.block, step.shared_bytes, step.args)

    model = tmp_path / "q8_0.gguf"
    assert main(["quantize", str(zoo("qwen3")), str(model), "Q8_0"]) == 0
    tokens = np.random.default_rng(5).integers(5, 150, 20).astype(np.int32)
    found = []
    for capability in ((9, 0), (8, 0)):
        device = EmulatedDevice(0, 512 * MIB, launcher, compute_capability=capability)
        set_tried(device, wgmma=True, wgmma_s8=True)
        monkeypatch.setattr(cuda_devices, "_open", lambda *_, device=device: ([device], ""))
        launched.clear()
        found.append(logits_of(model, tokens, 20, placement=PlacementParams(), devices=DeviceParams(bf16_batch=16)))
        assert ("gemm_wgmma" in launched) == (capability == (9, 0))
        assert ("gemm_bf16" in launched) == (capability == (8, 0))
    assert np.abs(found[0] - found[1]).max() < 1e-3 * np.abs(found[1]).max()


def test_a_prompt_in_int8_on_sm_90(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense and by experts, bit for bit the logits of the kernels for all devices; an option forbids the newer ones."""
    kernels, launched = emulator.library(), set()

    def launcher(step: LaunchLike) -> None:
        launched.add((step.kernel, step.grid[2] > 1))
        kernels.launch(step.kernel, step.grid, step.block, step.shared_bytes, step.args)

    monkeypatch.setattr(ways, "WGMMA_S8_TOKENS", 1)
    model = tmp_path / "q8_0.gguf"
    assert main(["quantize", str(zoo("qwen3moe")), str(model), "Q8_0"]) == 0
    device = EmulatedDevice(0, 512 * MIB, launcher, compute_capability=(9, 0))
    set_tried(device, wgmma=True, wgmma_s8=True)
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: ([device], ""))
    tokens, found = np.random.default_rng(5).integers(5, 150, 24).astype(np.int32), []
    for wgmma in (True, False):
        launched.clear()
        params = DeviceParams(bf16_batch=0, wgmma=wgmma)
        found.append(logits_of(model, tokens, 24, placement=PlacementParams(), devices=params))
        for by_expert in (False, True):
            assert (("wgmma_q8_0", by_expert) in launched) == wgmma
            assert (("matmul_q8_0", by_expert) in launched) != wgmma
    assert found[0].tobytes() == found[1].tobytes()
