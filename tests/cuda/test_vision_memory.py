"""Encoders of pictures beside text models: which device, memory, what a device lacks, texts with pictures."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ikpy import LLM
from ikpy.backends.cuda import devices as cuda_devices
from ikpy.backends.cuda.api import DeviceMemoryError
from ikpy.backends.cuda.devices import available, encoder_device
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.backends.cuda.state import DeviceState
from ikpy.cli import main
from ikpy.cli.parser import parse
from ikpy.cli.session import load
from ikpy.errors import FileFormatError, UsageError
from ikpy.graph.ir import Node
from ikpy.graph.placement import DeviceParams, PlacementParams
from ikpy.vision.projector import Projector, open_projector
from tests.cpu.media.tower_kinds import TOWERS
from tests.cpu.media.vision_towers import Tower
from tests.cuda.models import MIB, emulated
from tests.picture_models import png, write_grid_projector, write_grid_text, write_projector, write_text

pytestmark = pytest.mark.usefixtures("emulation")
TOWER = TOWERS["qwen3vl"]
ROUNDED = 1024
"""Bytes by which pieces of memory are larger than what is asked for."""
ALL = PlacementParams(split_mode="none")
PLACES = {
    "whole": {},
    "no text on it": {"n_gpu_layers": 0},
    "some layers": {"n_gpu_layers": 2},
    "two devices": {"tensor_split": (1.0, 1.0)},
    "divided": {"tensor_split": (1.0, 1.0), "split_mode": "graph"},
    "rules": {"rules": (("ffn", "CPU"), ("attn_k", "CUDA1"))},
    "the second one": {"split_mode": "none", "main_gpu": 1},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two text models with their projectors, and a picture."""
    folder = tmp_path_factory.mktemp("pictures")
    write_text(folder / "text.gguf")
    write_projector(folder / "mmproj.gguf")
    write_grid_text(folder / "grid.gguf")
    write_grid_projector(folder / "mmproj-grid.gguf")
    (folder / "1.png").write_bytes(png(1))
    return folder


def opened(path: Path, log: list[str], device: EncoderRuntime | None = None, **options: int) -> Projector:
    return open_projector(str(path), n_embd=TOWER.text, n_threads=1, log=log.append, device=device, **options)


def tower_file(folder: Path) -> Path:
    return TOWER.write(folder / "mmproj.gguf", TOWER.weights())


def rows_of(projector: Projector, rows: int, columns: int, tower: Tower = TOWER) -> np.ndarray:
    return projector.rows(tower.picture(rows, columns)).values


# one device


def test_nothing_but_the_kernels_differs(tmp_path: Path) -> None:
    """With the CPU's kernels rows are those of the CPU bit for bit, of sizes in turn and beyond the largest one."""
    path, lines = tower_file(tmp_path), list[str]()
    here = opened(path, lines)
    with emulated(1) as kernels:
        there = opened(path, lines, EncoderRuntime(available()[0], DeviceParams(), lines.append), max_tokens=20)
        for rows, columns in ((8, 8), (4, 6), (8, 8), (12, 14), (4, 6)):
            assert np.array_equal(rows_of(there, rows, columns), rows_of(here, rows, columns))
        assert {"attention", "mul_mat", "layer_norm"} <= {node.kind for node in kernels.launched}
    assert "clip_ctx: CLIP using CUDA0 backend" in lines and "clip_ctx: CLIP using CPU backend" in lines


@pytest.mark.parametrize("lacking", ["layer_norm", "attention", "rope", "get_rows", "mul_mat", "unary"])
def test_what_a_device_lacks_runs_on_the_cpu(lacking: str, tmp_path: Path) -> None:
    """By plan, and the log says so."""
    tower = TOWERS["qwen25vl" if lacking in ("get_rows", "rope") else "qwen3vl"]
    path, lines = tower.write(tmp_path / "mmproj.gguf", tower.weights()), list[str]()

    def unsupported(node: Node) -> str | None:
        return "it is forbidden" if node.kind == lacking else None

    with emulated(1, unsupported=unsupported) as kernels:
        device = EncoderRuntime(available()[0], DeviceParams(), lines.append)
        here, there = opened(path, lines), opened(path, lines, device)
        for size in ((4, 6), (8, 8), (4, 6)):
            assert np.array_equal(rows_of(there, *size, tower), rows_of(here, *size, tower))
        assert kernels.launched and lacking not in {node.kind for node in kernels.launched}
    assert any(
        line.endswith(f"{lacking} nodes of layers on a device run on the CPU: it is forbidden") for line in lines
    )


def test_memory_is_measured_before_it_is_taken_and_given_back(tmp_path: Path) -> None:
    """All of it for the largest picture; no picture takes more."""
    path, lines = tower_file(tmp_path), list[str]()
    with emulated(1):
        (device,) = available()
        before = device.memory().free
        planned = opened(path, lines, EncoderRuntime(device, DeviceParams(), lines.append, plan_only=True))
        projector = opened(path, lines, EncoderRuntime(device, DeviceParams(), lines.append))
        assert planned.device_bytes == projector.device_bytes and device.memory().free == before
        projector.take_memory(lines.append)
        taken = before - device.memory().free
        assert 0 <= taken - projector.device_bytes["CUDA0"] < ROUNDED
        assert [line.partition(" =")[0] for line in lines[-2:]] == [
            "vision:      CUDA0 buffer size",
            "vision:      CUDA0 compute buffer size",
        ]
        for rows, columns in ((8, 8), (128, 128), (2, 30)):
            rows_of(projector, rows, columns)
            assert before - device.memory().free == taken
        del projector
        gc.collect()
        assert device.memory().free == before


def test_fewer_tokens_take_less_memory(tmp_path: Path) -> None:
    path, lines = tower_file(tmp_path), list[str]()
    with emulated(1):
        few, many = (
            opened(path, lines, EncoderRuntime(available()[0], DeviceParams(), lines.append), max_tokens=n)
            for n in (100, 400)
        )
        assert 2 * few.device_bytes["CUDA0"] < many.device_bytes["CUDA0"]


def test_too_little_memory(tmp_path: Path) -> None:
    """One line that says what helps, before and while pictures are encoded; smaller ones go on being encoded."""
    path, lines = tower_file(tmp_path), list[str]()
    with emulated(1, mib=8):
        projector = opened(path, lines, EncoderRuntime(available()[0], DeviceParams(), lines.append))
        with pytest.raises(DeviceMemoryError, match=r"^CUDA0: failed.* MiB are needed.*--no-mmproj-offload") as caught:
            projector.take_memory(lines.append)
        assert "\n" not in str(caught.value)
    with emulated(1, mib=8):
        path = tower_file(tmp_path)
        projector = opened(path, lines, EncoderRuntime(available()[0], DeviceParams(), lines.append), max_tokens=50)
        projector.take_memory(lines.append)
        expected = rows_of(projector, 8, 8)
        with pytest.raises(DeviceMemoryError, match=r"^CUDA0: failed to allocate.*--no-mmproj-offload"):
            rows_of(projector, 128, 128)
        assert np.array_equal(rows_of(projector, 8, 8), expected)


def test_threads_take_turns(tmp_path: Path) -> None:
    path, lines = tower_file(tmp_path), list[str]()
    with emulated(1):
        projector = opened(path, lines, EncoderRuntime(available()[0], DeviceParams(), lines.append), max_tokens=40)
        pictures = [TOWER.picture(n, 12, seed=n) for n in (8, 10, 12)]
        alone = [projector.rows(each).values for each in pictures]

        def encode(i: int) -> bool:
            return all(np.array_equal(projector.rows(pictures[i]).values, alone[i]) for _ in range(10))

        with ThreadPoolExecutor(len(pictures)) as threads:
            assert all(threads.map(encode, range(len(pictures))))


# which device


def test_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(placement: PlacementParams = ALL, names: tuple[str, ...] | None = None, **more: object) -> str | None:
        device = encoder_device(placement, DeviceParams(names=names), **more)  # type: ignore[arg-type]
        return device.name if device else None

    none, last = PlacementParams(n_gpu_layers=0), PlacementParams(main_gpu=1)
    with emulated(2):
        assert chosen() == "CUDA0" and chosen(last) == "CUDA1" and chosen(PlacementParams(main_gpu=7)) == "CUDA0"
        assert chosen(names=("CUDA1", "CUDA0")) == "CUDA1" and chosen(names=()) is None
        assert chosen(none) is None and chosen(none, offload=True) == "CUDA0" and chosen(offload=False) is None
        assert chosen(name="cuda1") == "CUDA1" and chosen(name="none") is None
        assert chosen(name="CUDA1", offload=False) is None
        with pytest.raises(UsageError, match="CUDA7: no such device"):
            chosen(name="CUDA7")
        monkeypatch.setenv(cuda_devices.ENCODER_DEVICE, "CUDA1")
        assert chosen() == "CUDA1" and chosen(name="CUDA0") == "CUDA0" and chosen(offload=False) is None
        monkeypatch.setenv(cuda_devices.ENCODER_DEVICE, "CPU")
        assert chosen() is None
        monkeypatch.setenv(cuda_devices.ENCODER_DEVICE, "Vulkan0")
        lines: list[str] = []
        assert chosen(log=lines.append) == "CUDA0" and "MTMD_BACKEND_DEVICE=Vulkan0" in lines[0]
    monkeypatch.setattr(cuda_devices, "_open", lambda *_: ([], "there is no CUDA GPU"))
    monkeypatch.delenv(cuda_devices.ENCODER_DEVICE)
    assert chosen() is None and chosen(offload=True) is None


# beside text models


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("model", ["text", "grid"])
def test_texts_with_pictures(model: str, where: str, files: Path) -> None:
    """The answers of the CPU, which placement the text model ever has; the encoder is on the main device."""
    path, projector = files / f"{model}.gguf", files / {"text": "mmproj.gguf", "grid": "mmproj-grid.gguf"}[model]
    settings = {"n_ctx": 512, "n_threads": 1, "n_ubatch": 64}
    prompt, images = "a<__media__>b", [files / "1.png"]
    truth = LLM(path, mmproj=projector, **settings).generate(prompt, 8, images=images, temperature=0)
    with emulated(2, mib=512) as kernels:
        lines: list[str] = []
        placement = PlacementParams(**PLACES[where])  # type: ignore[arg-type]
        llm = LLM(path, mmproj=projector, placement=placement, mmproj_offload=True, log=lines.append, **settings)
        taken = dict(llm.model.params.placement.taken)
        assert list(taken) == ["CUDA1" if where == "the second one" else "CUDA0"]
        kernels.launched.clear()
        assert llm.generate(prompt, 8, images=images, temperature=0) == truth
        assert any(node.kind == "attention" for node in kernels.launched)


def test_memory_beside_a_text_model(files: Path) -> None:
    """Layers leave room for the projector; it goes with the model."""
    settings = {"n_ctx": 512, "n_threads": 1, "mmproj": files / "mmproj.gguf"}
    with emulated(2, mib=64):
        first = available()[0]
        before = [device.memory().free for device in available()]
        llm = LLM(files / "text.gguf", **settings)
        needs = {name: need.total for name, need in llm.context.devices.needs.items()}
        ((name, taken),) = llm.model.params.placement.taken
        assert name == "CUDA0" and 0 <= before[0] - first.memory().free - taken - needs["CUDA0"] < ROUNDED
        llm = LLM(files / "text.gguf", mmproj_offload=False, **settings)
        assert not llm.model.params.placement.taken
        del llm
        gc.collect()
        assert [device.memory().free for device in available()] == before


def test_a_small_device_gets_fewer_layers(files: Path) -> None:
    """Where free memory decides how layers are divided."""
    with emulated(2, mib=4):
        counts = []
        for offload in (False, True):
            llm = LLM(files / "text.gguf", n_ctx=64, n_threads=1, mmproj=files / "mmproj.gguf", mmproj_offload=offload)
            counts.append(llm.model.placement.layers.count("CUDA0"))
            del llm
            gc.collect()
        assert counts[1] < counts[0]


def test_text_models_say_what_the_projector_has(files: Path) -> None:
    with emulated(1, mib=4):
        with pytest.raises(DeviceMemoryError, match=r"MiB are free.*projector has \d+ MiB there \(--no-mmproj-off"):
            LLM(files / "text.gguf", n_ctx=8192, n_threads=1, mmproj=files / "mmproj.gguf")
        with pytest.raises(DeviceMemoryError, match=r"MiB are free.*choose$"):
            LLM(files / "text.gguf", n_ctx=8192, n_threads=1, mmproj=files / "mmproj.gguf", mmproj_offload=False)


def test_rows_that_are_no_numbers(tmp_path: Path) -> None:
    weights, lines = TOWER.weights(), list[str]()
    weights["mm.2.bias"][:] = np.nan
    path = TOWER.write(tmp_path / "mmproj.gguf", weights)
    with emulated(1):
        projector = opened(path, lines, EncoderRuntime(available()[0], DeviceParams(), lines.append), max_tokens=20)
        with pytest.raises(FileFormatError, match=r"damaged, or a kernel of CUDA0 is wrong \(--no-mmproj-offload\)"):
            rows_of(projector, 4, 4)


# the command line


def run(files: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    line = ["cli", "-m", str(files / "text.gguf"), "--mmproj", str(files / "mmproj.gguf"), "-c", "512", "-t", "1"]
    picture = ["--image", str(files / "1.png"), "-p", "describe", "-n", "4", "--temp", "0"]
    status = main([*line, *picture, *arguments])
    captured = capfd.readouterr()
    return status, captured.out, captured.err


def test_command_line(files: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, truth, said = run(files, capfd, "-ngl", "0")
    assert "CLIP using CPU backend" in said
    with emulated(2):
        for arguments, backend in (
            ((), "CUDA0"),
            (("--no-mmproj-offload",), "CPU"),
            (("-ngl", "0"), "CPU"),
            (("-ngl", "0", "--mmproj-offload"), "CUDA0"),
            (("-dev", "none"), "CPU"),
            (("-dev", "CUDA1"), "CUDA1"),
            (("-mg", "1"), "CUDA1"),
            (("-mmdev", "CUDA1"), "CUDA1"),
            (("-mmdev", "none"), "CPU"),
            (("-ngl", "2", "-ot", "attn=CPU"), "CUDA0"),
        ):
            status, out, said = run(files, capfd, *arguments)
            assert (status, out) == (0, truth), arguments
            assert f"CLIP using {backend} backend" in said, arguments
            assert (f"vision: {backend:>10} compute buffer size" in said) == (backend != "CPU")
        monkeypatch.setenv("LLAMA_ARG_MMPROJ_OFFLOAD", "0")
        assert "CLIP using CPU backend" in run(files, capfd)[2]
        monkeypatch.delenv("LLAMA_ARG_MMPROJ_OFFLOAD")
        status, _, said = run(files, capfd, "-mmdev", "CUDA9")
        assert status == 1 and "--mmproj-device CUDA9: no such device" in said


def test_plans_and_fit_count_the_projector(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with emulated(1, mib=64):
        projector = LLM(files / "text.gguf", n_ctx=64, mmproj=files / "mmproj.gguf").model.params.placement.taken[0][1]
        gc.collect()
        capfd.readouterr()
        heads, *rows = plan_of(files, capfd)
        assert heads[-2:] == ["projector", "total"]
        assert [float(row[-2]) for row in rows] == [0, pytest.approx(projector / MIB, abs=0.006)]
        assert "projector" not in plan_of(files, capfd, "--no-mmproj-offload")[0]
    rooms = []
    for more in ((), ("--no-mmproj-offload",)):
        with emulated(1, mib=64):
            said = run(files, capfd, "-fit", "on", "--fit-margin", "8", *more)[2]
            (line,) = (line for line in said.splitlines() if line.startswith("fit: CUDA0"))
            rooms.append(float(line.split()[-2]))
    assert rooms == [pytest.approx(56 - projector / MIB, abs=0.006), 56]


@pytest.mark.parametrize("arguments", [(), ("-ngl", "0", "--mmproj-offload"), ("-sm", "none", "-mmdev", "CUDA1")])
def test_plans_warn_of_devices_that_only_the_projector_uses(
    arguments: tuple[str, ...], files: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    grids = "-m", str(files / "grid.gguf"), "--mmproj", str(files / "mmproj-grid.gguf")
    with emulated(2, mib=16):
        with pytest.raises(SystemExit):
            run(files, capfd, *grids, "--dry-run", *arguments)
        device = "CUDA1" if "CUDA1" in arguments else "CUDA0"
        assert f"warning: {device}: " in capfd.readouterr().err


def plan_of(files: Path, capfd: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The table of --dry-run."""
    with pytest.raises(SystemExit):
        run(files, capfd, "--dry-run", *arguments)
    lines = capfd.readouterr().err.splitlines()
    return [line.split(":", 1)[1].split() for line in lines if line.startswith("memory plan")]


def test_no_room_for_the_projector(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with emulated(1, mib=1):
        status, _, said = run(files, capfd)
        assert status == 1
        assert "CUDA0: failed to allocate buffer" in said and "--no-mmproj-offload" in said


def test_a_projector_that_is_not_used_is_let_go_of(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where memory is gone while weights are brought to the device, and the command line names no projector."""
    for name in ("text", "mmproj"):
        (tmp_path / f"{name}.gguf").write_bytes((files / f"{name}.gguf").read_bytes())

    def upload(*arguments: object) -> None:
        raise DeviceMemoryError("CUDA0: failed to allocate buffer")

    with emulated(1):
        free = available()[0].memory().free
        session = load(parse(["-m", str(tmp_path / "text.gguf"), "--mmproj-auto", "--log-disable"], "cli"))
        assert session.projector is not None
        monkeypatch.setattr(DeviceState, "upload_weights", upload)
        assert session.media is None and "warning: no pictures and sounds: CUDA0: failed" in capfd.readouterr().err
        gc.collect()
        assert available()[0].memory().free == free
