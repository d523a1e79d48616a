"""What is run on a GPU, in sections that are worth something each: tests (real) and measurements (bench)."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.results import Results
from benchmarks.shapes import SHAPES
from ikpy import default_model_path

PYTHON = (sys.executable, "-m")
IKPY = (*PYTHON, "ikpy")
# racecheck does not follow copies and products of the async proxy, of which wgmma and a part of large are made.
RACE_TESTS = [f"tests/cuda/test_kernels_{name}.py" for name in ("ops", "recurrent", "indexer", "weights", "attention")]
KERNEL_TESTS = [*RACE_TESTS, *(f"tests/cuda/test_kernels_{name}.py" for name in ("large", "wgmma"))]
MODEL_TESTS = [f"tests/cuda/test_{name}.py" for name in ("models", "recurrent_models", "sparse_models", "adapters")]
PICTURE_TESTS = ["tests/cuda/test_vision.py"]
# A launch returns when the kernel is done: an error is that of the launch that says so. Not for models, whose copies
# and waits between streams are to be as they are in use.
BLOCKING = ("env", "CUDA_LAUNCH_BLOCKING=1")
# Of a kernel that does not end: everything else prints more often.
SILENCE = 90.0
TYPE = "q4_K"
QUANTIZED = ("Q8_0", "Q4_K_M", "IQ4_KS")


@dataclass(frozen=True)
class Step:
    """A command. keeps: where it keeps what it has done; it is given again when the GPU or a kernel ended it.

    silence: seconds without a line after which it counts as hung. makes: a file; where it exists, nothing is run.
    """

    command: Sequence[str]
    keeps: Path | None = None
    silence: float | None = None
    makes: Path | None = None


@dataclass(frozen=True)
class Section:
    """Steps that belong together. seconds: how long they take on a fast GPU, roughly."""

    name: str
    seconds: int
    steps: Sequence[Step]


@dataclass(frozen=True)
class Choice:
    """What the sections are made of. models: GGUF files or names of shapes; folder: where models are written.

    small: sizes for an emulated device.
    """

    results: Results
    models: Sequence[str]
    folder: Path
    small: bool = False


def _ikpy(*arguments: str) -> Step:
    return Step((*IKPY, *arguments))


def _tests(choice: Choice, files: Sequence[str], *more: str, before: Sequence[str] = ()) -> Step:
    options = ("--device", "real", "-vv", "--tb=short", "-p", "no:cacheprovider")
    path = choice.results.tests
    return Step((*before, *PYTHON, "pytest", *files, *options, "--results", str(path), *more), path, SILENCE)


def _sanitized(tool: str, *command: str) -> Step:
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    return Step((found, "--tool", tool, "--error-exitcode", "1", "--print-limit", "20", *command))


def _checks(choice: Choice) -> list[Step]:
    """Node by node: the bundled model as it is, and quantized."""
    found = [_ikpy("cuda", "check")]
    for name in QUANTIZED:
        path = choice.folder / f"bundled-{name}.gguf"
        quantize = (*IKPY, "quantize", str(default_model_path()), str(path), name)
        found += [Step(quantize, makes=path), _ikpy("cuda", "check", "-m", str(path))]
    return found


def _pictures(choice: Choice) -> list[Step]:
    """Encoders: tests of every family, and a picture of usual size by usual shapes, compared and timed."""
    tests = _tests(choice, PICTURE_TESTS, *(("-k", "llava or heads") if choice.small else ()))
    shapes = ("pixtral", "--small") if choice.small else ()
    return [tests, Step((*PYTHON, "benchmarks.pictures", *shapes))]


def real(choice: Choice) -> list[Section]:
    """Sections that show whether everything is right."""
    small = ("-k", "norm or rope or head_sizes") if choice.small else ()
    prompt = ("cli", "-p", "Once upon a time", "-ngl", "99", "--temp", "0", "-n")
    # Not -x: a wrong result is not what is looked for here, and after a wild access the other tests fail at once.
    device = ("--device", "real", "-q", "--maxfail=40", "-k")
    memory_tests = (*PYTHON, "pytest", *KERNEL_TESTS, *device, "experts or head_sizes or latent or up_and_gate")
    race_tests = (*PYTHON, "pytest", *RACE_TESTS, *device, "experts or latent or norm or product")
    return [
        Section("info", 10, [Step(("nvidia-smi",)), _ikpy("info"), _ikpy("cuda", "info")]),
        Section("text", 20, [_ikpy(*prompt, "16"), _ikpy(*prompt, "16", "-ngl", "0")]),
        Section("check", 40, _checks(choice)),
        Section("kernels", 150, [_tests(choice, KERNEL_TESTS, *small, before=BLOCKING)]),
        Section("models", 120, [_tests(choice, MODEL_TESTS, *(("-k", "qwen3-") if choice.small else ()))]),
        Section("pictures", 60, _pictures(choice)),
        Section("memcheck", 240, [_sanitized("memcheck", *IKPY, *prompt, "8"), _sanitized("memcheck", *memory_tests)]),
        Section("racecheck", 180, [_sanitized("racecheck", *race_tests)]),
    ]


def bench(choice: Choice) -> list[Section]:
    """Sections that measure."""
    table = choice.results.folder / "kernels.json"
    rows = ("--small", "--rows", "q8_0|q4_K|gqa 32/8 x 64 f16") if choice.small else ()
    command = (*PYTHON, "benchmarks.gpu.kernels", "--out", str(table), *rows)
    sections = [
        Section("table", 150, [Step(command, table, SILENCE)]),
        Section("tune", 60, [_ikpy("cuda", "tune")]),
    ]
    for model in choice.models:
        sections += _model(choice, model)
    return sections


def _model(choice: Choice, model: str) -> list[Section]:
    """Speed of a model, given as a file or as the name of a shape, which is written first."""
    is_file = model not in SHAPES
    path = model if is_file else str(choice.folder / f"{model}-{TYPE}.gguf")
    name = Path(model).stem if is_file else model
    written = [] if is_file else [Step((*PYTHON, "benchmarks.synthetic", model, TYPE, path), makes=Path(path))]
    gpu = ("-m", path, "-ngl", "99", "-fa", "1")
    pp, tg, depth, n = ("16", "4", "64", "1") if choice.small else ("512", "128", "32768", "3")
    sections = [Section(f"speed-{name}", 90, [*written, _ikpy("bench", *gpu, "-p", pp, "-n", tg, "-r", n)])]
    shape = SHAPES.get(model)
    if is_file or (shape is not None and shape.experts):
        large = "32" if choice.small else "2048"
        hybrid = _ikpy("bench", *gpu, "-ot", "exps=CPU", "-p", f"{pp},{large}", "-ub", large, "-n", tg, "-r", n)
        sections.append(Section(f"experts-{name}", 120, [*written, hybrid]))
    if is_file or (shape is not None and shape.kv_lora_rank):
        ub = "16" if choice.small else "2048"
        options = ("-c", depth, "-ub", ub, "-b", ub, "-fa", "-mla", "3", "-fmoe", "-ctk", "q8_0")
        sections.append(Section(f"sweep-{name}", 150, [*written, _ikpy("sweep-bench", *gpu[:4], *options)]))
    return sections


MODES: dict[str, Callable[[Choice], list[Section]]] = {"real": real, "bench": bench}
