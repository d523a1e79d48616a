"""Draft models and drafters that read layers: where they go on devices, what they take, what is said and guessed."""

from __future__ import annotations

import gc
import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ikpy import LLM
from ikpy.backends.cuda.devices import available
from ikpy.backends.cuda.emulated import EmulatedDevice
from ikpy.cli import main
from ikpy.cli.drafters import changes_for_drafts
from ikpy.cli.parser import parse
from ikpy.cli.server import make_server
from ikpy.cli.session import load
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.draft_placement import DraftPlacement, draft_model_params
from ikpy.engine.memory import memory_report
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.reading_layer import reading_layer
from ikpy.engine.speculative import SpeculativeParams
from ikpy.errors import OutOfMemoryError, UsageError
from ikpy.graph.placement import DeviceParams, PlacementParams
from ikpy.server.log import ServerLog
from ikpy.tools.speculation import DraftFiles, make_speculation, prepare_model
from ikpy.vocab import Vocab
from tests.cpu.models import dflash_model as dflash
from tests.cpu.models import eagle3_model as eagle3
from tests.cpu.models.definition_checks import TOKENS
from tests.cpu.models.reference_models import N_VOCAB
from tests.cuda.models import MIB, emulated

pytestmark = pytest.mark.usefixtures("emulation")
ON_CPU = PlacementParams(n_gpu_layers=0)
TARGETS = {
    "CPU": ON_CPU,
    "CUDA0": PlacementParams(split_mode="none"),
    "both": PlacementParams(tensor_split=(1.0, 1.0)),
    "divided": PlacementParams(split_mode="graph", tensor_split=(1.0, 1.0)),
}
DRAFTERS = {
    "CPU": ON_CPU,
    "CUDA0": PlacementParams(split_mode="none"),
    "CUDA1": PlacementParams(split_mode="none", main_gpu=1),
    "layer only": PlacementParams(n_gpu_layers=1),
    "rules": PlacementParams(rules=(("ffn_up|attn_norm", "CPU"), ("output", "CUDA1"), ("attn_k", "CUDA1"))),
    "cache in host memory": PlacementParams(split_mode="none", kv_offload=False),
}
ROUNDED = 2048
"""Bytes by which the pieces of memory of a context are larger than what is asked for."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a drafter with an embedding and an output matrix of its own, and one without."""
    folder = tmp_path_factory.mktemp("drafters")
    eagle3.target().write(folder / "model.gguf")
    eagle3.drafter(own=True).write(folder / "own.gguf")
    eagle3.drafter(own=False).write(folder / "shared.gguf")
    return folder


def settings(**more: object) -> ContextParams:
    return ContextParams(**{"n_ctx": 256, "n_threads": 1, "n_ubatch": 32, **more})  # type: ignore[arg-type]


def evaluated(folder: Path, name: str, target: PlacementParams, drafter: PlacementParams) -> list[np.ndarray]:
    """States, logits and the drafter's own states of 17 tokens, for which devices round up, and of one more."""
    model = Model.load(folder / "model.gguf", ModelParams(placement=target))
    head = reading_layer(model, folder / f"{name}.gguf", ModelParams(placement=drafter))
    main_context = Context(model, settings(token_states=True))
    main_context.decode(Batch.single(TOKENS[:18], logits="last"))
    context, states = Context(head, settings(embeddings=True)), main_context.token_states
    assert states is not None
    found = [states, context.decode(Batch.single(TOKENS[1:18], logits="all"), states[:-1])]
    assert context.embeddings is not None
    found += [context.embeddings, context.decode(Batch.single(TOKENS[18:19], 17), states[-1:])]
    assert context.embeddings is not None
    return [*found, context.embeddings]


@pytest.mark.parametrize("name", ["own", "shared"])
def test_guesses_are_those_of_the_cpu(name: str, files: Path) -> None:
    """With the CPU's kernels; sums of divided matrices are rounded in another order."""
    truth = evaluated(files, name, ON_CPU, ON_CPU)
    for (target, placed), (drafter, own) in product(TARGETS.items(), DRAFTERS.items()):
        with emulated(2) as kernels:
            found = evaluated(files, name, placed, own)
            assert kernels.launched or (target, drafter) == ("CPU", "CPU")
        for what, ours, wanted in zip(
            ("states", "logits", "own states", "one", "its state"), found, truth, strict=True
        ):
            error = np.abs(ours - wanted).max() / np.abs(wanted).max()
            assert error < 1e-4, f"model on {target}, drafter on {drafter}: {what} are off by {error:.1e}"


@pytest.mark.parametrize("name", ["own", "shared"])
def test_memory_is_what_was_planned(name: str, files: Path) -> None:
    """Of the model with the matrix that joins its states, and of the drafter; weights of both are on a device once."""
    params = SpeculativeParams(types=("eagle3",))
    for (target, placed), (drafter, own) in product(TARGETS.items(), DRAFTERS.items()):
        plans = []
        for header_only in (True, False):
            with emulated(2):
                model = Model.load(files / "model.gguf", ModelParams(placement=placed, header_only=header_only))
                read = DraftFiles(files / f"{name}.gguf", model_params=ModelParams(placement=own))
                if header_only:
                    read.model_params = ModelParams(placement=own, header_only=True)
                prepare_model(params.types, read, model)
                context = Context(model, settings(token_states=True))
                vocab = Vocab.from_metadata(model.gguf.metadata)
                drafts = make_speculation(params, vocab, read, draft_params=settings(), model=model)
                assert drafts is not None
                report = memory_report(context, drafts)
                plans.append(report.devices)
                for device in available() if not header_only else ():
                    used = device.memory().total - device.memory().free
                    planned = sum(report.devices.get(device.name, {}).values())
                    assert 0 <= used - planned < 2 * ROUNDED, f"{target}, {drafter}, {device.name}: {planned} of {used}"
                    for n in (5, 18, 27):  # sizes that were not planned for take what the plan has
                        context.kv.clear()
                        context.decode(Batch.single(TOKENS[:n], logits="all"))
                    assert device.memory().total - device.memory().free == used
                del context, drafts, model
                gc.collect()
                assert all(device.memory().free == device.memory().total for device in available())
        assert plans[0] == plans[1], f"{target}, {drafter}"


def test_joining_matrix_is_counted_where_the_model_is(files: Path) -> None:
    """fc.weight belongs to the drafter's file and is read by the model."""
    nbytes = eagle3.D * 3 * eagle3.D * 4
    for placed, own in product(TARGETS.values(), (ON_CPU, DRAFTERS["CUDA1"])):
        with emulated(2):
            model = Model.load(files / "model.gguf", ModelParams(placement=placed, header_only=True))
            with_it = ModelParams(placement=own, header_only=True)
            layer = reading_layer(model, files / "shared.gguf", with_it)
            where = model.placement.device_of("fc.weight")
            assert layer.placement.tensors["fc.weight"] == where
            needs = Context(model, settings(token_states=True)).devices
            if where == "CPU":
                assert layer.mapped_bytes["CPU"] >= nbytes
            else:
                assert needs is not None and needs.needs[where].weights["fc.weight"].nbytes == nbytes
            assert reading_layer(model, files / "shared.gguf", with_it) is layer


# what is asked for


def placed_as(n: int, model: PlacementParams, names: tuple[str, ...] | None = None, **wanted: object) -> ModelParams:
    with emulated(n):
        asked = DraftPlacement(**wanted)  # type: ignore[arg-type]
        params = ModelParams(placement=model, devices=DeviceParams(names=names))
        return draft_model_params(params, asked, undivided=bool(n % 2))


def test_where_draft_models_go() -> None:
    """Three devices: an EAGLE-3 drafter, which is not divided; two: a model."""
    rest = {"rules": (("ffn", "CPU"),), "n_cpu_moe": 3}
    found = placed_as(2, PlacementParams(tensor_split=(3.0, 1.0)), **rest)
    assert found.placement == PlacementParams(tensor_split=(3.0, 1.0), **rest)  # type: ignore[arg-type]
    assert placed_as(2, ON_CPU).placement == ON_CPU
    assert placed_as(2, ON_CPU, n_gpu_layers=5).placement.n_gpu_layers == 5
    assert placed_as(2, PlacementParams(), n_gpu_layers=0).placement == ON_CPU
    assert placed_as(2, PlacementParams(), names=()).devices.names == ()
    found = placed_as(2, PlacementParams(n_gpu_layers=0, tensor_split=(3.0, 1.0)), devices=("CUDA1",))
    assert found.devices.names == ("CUDA1",) and found.placement == PlacementParams()
    assert placed_as(2, PlacementParams()).placement.tensor_split == (512 * MIB, 512 * MIB)
    assert placed_as(2, PlacementParams(split_mode="graph")).placement.split_mode == "layer"
    found = placed_as(2, PlacementParams(split_mode="none", main_gpu=1, kv_offload=False))
    assert (found.placement.split_mode, found.placement.main_gpu, found.placement.kv_offload) == ("none", 1, False)
    for model, main_gpu in (
        (PlacementParams(), 0),
        (PlacementParams(main_gpu=2), 2),
        (PlacementParams(tensor_split=(0.0, 1.0, 1.0)), 1),
        (PlacementParams(tensor_split=(1.0,), main_gpu=2), 0),
        (PlacementParams(split_mode="none", main_gpu=2, tensor_split=(1.0,)), 2),
    ):
        found = placed_as(3, model)
        assert (found.placement.split_mode, found.placement.main_gpu) == ("none", main_gpu)
    with pytest.raises(UsageError, match="--device-draft CUDA5: no such device"):
        placed_as(2, PlacementParams(), devices=("CUDA5",))
    with pytest.raises(UsageError, match="available buffer types: CPU, CUDA0, CUDA1"):
        placed_as(2, PlacementParams(), rules=(("ffn", "CUDA5"),))


COMMON = "-p word9_word10 -n 8 --temp 0 -t 1 -c 128 -no-cnv --draft-p-min 0"


def cli(files: Path, line: str, capsys: pytest.CaptureFixture[str], draft: str = "own", kind: str = "eagle3") -> tuple:
    """Status, text and log of a program with drafts."""
    paths = ["-m", str(files / "model.gguf"), "-md", str(files / f"{draft}.gguf"), "--spec-type", kind]
    status = main(["cli", *paths, *COMMON.split(), *line.split()])
    return status, *capsys.readouterr()


def memory_lines(log: str) -> list[list[str]]:
    return [line.split()[3:] for line in log.splitlines() if line.startswith("memory plan") and "MiB)" in line]


@pytest.mark.parametrize("draft", ["own", "shared", "model"])
def test_options(draft: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind = "draft" if draft == "model" else "eagle3"
    layers = 6 if draft == "model" else 2
    _, truth, _ = cli(files, "-ngl 0", capsys, draft, kind)
    for line, expected, unexpected in (
        ("-ngl 0", [], "offloaded"),
        ("-ngl 0 -ngld 99", [f"offloaded {layers}/{layers} layers to GPU"], "offloaded 6/6 layers to GPU\n0"),
        ("-ngld 1", [f"offloaded 1/{layers} layers", "offloaded 6/6 layers"], "no effect"),
        ("-ngld 0 -sm none", ["offloaded 6/6 layers"], f"offloaded {layers}/{layers} layers to GPU\n0"),
        ("-dev none -devd CUDA1 -sm none", ["CUDA1 KV buffer size", "CUDA1 compute buffer size"], "CUDA0 KV"),
        ("-ngl 0 -devd CUDA0 -otd ffn_up=CPU,ffn_down=CUDA0", ["override ffn_up=CPU: ", "CUDA0 KV buffer"], "CUDA1 KV"),
        ("-dev CUDA1", ["CUDA1 KV buffer size"], "CUDA0 KV"),
        ("-ngl 0 -devd none", [], "offloaded"),
        ("-ngl 0 -devd CUDA1 -nkvo", ["offloaded"], "CUDA1 KV"),
    ):
        with emulated(2) as kernels:
            status, text, log = cli(files, line, capsys, draft, kind)
            assert status == 0 and text == truth, line
            assert bool(kernels.launched) == ("offloaded" in log), line
        for part in expected:
            assert part in log, f"{line}: {part!r} is missing in:\n{log}"
        assert unexpected not in log, f"{line}: {unexpected!r} in:\n{log}"


def test_options_that_are_wrong(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, message in (
        ("-devd CUDA4", "--device-draft CUDA4: no such device (available: CUDA0, CUDA1)"),
        ("-devd CUDA1,CUDA1", "--device-draft CUDA1: the device is named twice"),
        ("-otd ffn=CUDA4", "available buffer types: CPU, CUDA0, CUDA1"),
        ("-otd ffn(=CUDA1", "Invalid tensor buffer type override"),
        ("-ngld some", "-ngld"),
    ):
        with emulated(2):
            status, _, log = cli(files, line, capsys)
        assert status == 1 and message in log and "Traceback" not in log, f"{line}:\n{log}"
    with emulated(2):
        main(["cli", "-m", str(files / "model.gguf"), *COMMON.split(), "-ngld", "3"])
    assert "no effect: -ngld (it needs -md)" in capsys.readouterr().err


@pytest.mark.parametrize("markov", ["", "anchor"], ids=["dflash", "dspark"])
def test_drafters_of_blocks(markov: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They go where options say; a dry run counts what they take there, and a Markov head in host memory."""
    kind = "dspark" if markov else "dflash"
    dflash.drafter(markov=markov).write(tmp_path / "block.gguf")
    (tmp_path / "model.gguf").symlink_to(files / "model.gguf")
    _, truth, _ = cli(tmp_path, "-ngl 0", capsys, "block", kind)
    for line, expected in (
        ("-ngl 0 -devd CUDA1", "CUDA1 KV buffer size"),
        ("-devd CUDA1 -ngld 99", "CUDA1 KV buffer size"),
        ("-ngld 0", "offloaded 6/6 layers"),
        ("", "offloaded 4/4 layers"),
    ):
        with emulated(2) as kernels:
            status, text, log = cli(tmp_path, line, capsys, "block", kind)
            assert kernels.launched
        assert status == 0 and text == truth, line
        assert expected in log and "warning: no effect" not in log, f"{line}:\n{log}"
    arguments = ["-m", str(tmp_path / "model.gguf"), "-md", str(tmp_path / "block.gguf"), "--spec-type", kind]
    least = {}
    for line in ("-ngld 0", "-devd CUDA1"):
        with emulated(2), pytest.raises(SystemExit):
            main(["cli", *arguments, *COMMON.split(), *line.split(), "--dry-run"])
        rows = {row[0]: float(row[-2]) for row in memory_lines(capsys.readouterr().err)[1:]}
        assert (rows["CUDA1"] > 0) == (line != "-ngld 0") and rows["CUDA0"] == 0, rows
        least[line] = rows["CPU"]
    heads = 4 * (2 * N_VOCAB * dflash.RANK + dflash.D + dflash.RANK + 1) / MIB if markov else 0.0
    assert heads <= least["-devd CUDA1"] < least["-ngld 0"], least


@pytest.mark.parametrize("line", ["-ngl 0 -devd CUDA1", "-sm none", "-devd CUDA1", "-ngld 0", "-sm graph -ts 1,1"])
@pytest.mark.parametrize("draft", ["own", "shared", "model"])
def test_dry_runs_count_drafters(line: str, draft: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rows of a dry run are what a server then takes."""
    kind = "draft" if draft == "model" else "eagle3"
    paths = ["-m", str(files / "model.gguf"), "-md", str(files / f"{draft}.gguf"), "--spec-type", kind]
    arguments = [*paths, *"-t 1 -c 512 -np 2 -ub 32".split(), *line.split()]
    with emulated(2), pytest.raises(SystemExit):
        main(["server", *arguments, "--dry-run"])
    rows = memory_lines(capsys.readouterr().err)
    assert rows[0][-2:] == ["drafter", "total"]
    planned = {row[0]: float(row[-1]) for row in rows[1:]}
    assert sum(float(row[-2]) for row in rows[1:]) > 0
    with emulated(2):
        params = parse(arguments, "server")
        server = make_server(load(params, **changes_for_drafts(params)), ServerLog())
        for device in available():
            used = (device.memory().total - device.memory().free) / MIB
            assert used == pytest.approx(planned.get(device.name, 0.0), abs=0.02), device.name
        del server


def least_free(device: EmulatedDevice) -> list[int]:
    """Free bytes behind every allocation from now on."""
    found, alloc = list[int](), device.alloc

    def watched(nbytes: int, purpose: str = "data") -> int:
        address = alloc(nbytes, purpose)
        found.append(device.memory().free)
        return address

    device.alloc = watched  # type: ignore[method-assign]
    return found


def test_fit_leaves_room_for_drafters(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is free stays free; without room a line names the option that helps."""
    line = "--fit --fit-margin 1 -ub 32 -b 32"
    for draft, kind, mib in (("own", "eagle3", 2), ("model", "draft", 3)):
        with emulated(1, mib=mib):
            (device,) = available()
            assert isinstance(device, EmulatedDevice)
            least = least_free(device)
            status, _, log = cli(files, line, capsys, draft, kind)
            assert status == 0 and re.search(r"fit: -ngl [12] ", log), log
            assert min(least) >= 1 * MIB
    with emulated(1, mib=2):
        status, _, log = cli(files, line, capsys, "model", "draft")
        assert status == 1 and "Unable to auto-fit" in log and "-ngld 0" in log


def test_a_drafter_without_room(files: Path) -> None:
    params = SpeculativeParams(types=("eagle3",))
    with emulated(1, mib=1), pytest.raises(OutOfMemoryError, match=r"the drafter: CUDA0: .*; for drafters -ngld"):
        read = DraftFiles(files / "own.gguf", model_params=ModelParams())
        LLM(
            files / "model.gguf",
            speculative=params,
            draft_files=read,
            placement=ON_CPU,
            n_ctx=8192,
            n_threads=1,
        )
