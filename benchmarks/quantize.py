"""Compares the encoders with the reference's and writes the table of docs/quants.md.

    python -m benchmarks.quantize --model A.gguf --model B.gguf --calibration calibration.txt --text text.txt \\
        [--types iq2_k,iq4_kt] [--parts encode,models] [--json results.json] [--write docs/quants.md]

    python -m benchmarks.quantize --parts speed [--types iq2_k,iq4_kt]        (rows/s alone, printed as a table)

The models are F16 files; an importance matrix of each is made first. Results are added to the JSON file, so that a
part can be measured again alone. Needs the package ik-llama-cpp-python, whose library is called for single rows and
whose llama-quantize makes the other model files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks import reference_quantizer as reference
from benchmarks.quantized_models import MAKERS, ModelScorer
from benchmarks.quants_page import write_page
from ikpy import GGUFFile
from ikpy._native import core
from ikpy.machine.threads import physical_cores
from ikpy.quants import dequantize, registry
from ikpy.quants.registry import TensorType
from ikpy.quants.repack import PERMUTATIONS
from ikpy.tools.imatrix_file import read_imatrix

GAUSSIAN_SHAPE = (16, 2048)  # rows, ne0
SECONDS = 0.05  # of thread time per timing
LOOSE = 0.5  # a relative error above it says that the reference's library writes something else

Sample = tuple[np.ndarray, np.ndarray | None]  # rows, importance of the columns


def encoded_types() -> list[TensorType]:
    """Every type that is encoded by itself, in order of its id; interleaved ones of others hold the same numbers."""
    encoded = {row.name: row for row in registry.all_types() if core.can_quantize(row.id)}
    interleaved = {packed for plain, packed in PERMUTATIONS if plain in encoded and encoded[plain].interleave == 1}
    return [row for row in encoded.values() if row.interleave == 1 or row.name not in interleaved]


def gaussian_sample() -> Sample:
    """Normal values, importances of a gamma distribution."""
    rng = np.random.default_rng(5)
    values = (rng.standard_normal(GAUSSIAN_SHAPE) * 0.03).astype(np.float32)
    return values, rng.gamma(1.0, 1.0, GAUSSIAN_SHAPE[1]).astype(np.float32)


def model_samples(path: Path, imatrix_path: Path, n_rows: int) -> Iterator[Sample]:
    """The first rows of every matrix of the layers, with their importance."""
    imatrix = read_imatrix(imatrix_path)
    with GGUFFile.open(path) as file:
        for info in file.tensors.values():
            weights = imatrix.find(info.name)
            if info.type_id != registry.by_name("f16").id or weights is None or info.shape[0] % 256:
                continue
            if info.name in ("token_embd.weight", "output.weight"):
                continue
            rows = file.data(info).view(np.float16).reshape(-1, info.shape[0])[:n_rows]
            yield rows.astype(np.float32), np.asarray(weights, np.float32)[: info.shape[0]]


def relative_square(sample: Sample, decoded: np.ndarray, weighted: bool) -> float:
    """Weighted squared error in units of the weighted square of the values."""
    values, importance = sample
    weights = importance if weighted and importance is not None else np.ones(values.shape[1])
    return float((weights * (values.astype(np.float64) - decoded) ** 2).sum() / (weights * values**2).sum())


def errors(row: TensorType, samples: list[Sample], weighted: bool) -> tuple[float, float]:
    """Relative RMS error over the samples, ours and the reference's; NaN where it cannot encode without importance."""
    ours, theirs = [], []
    for sample in samples:
        values, importance = sample
        shape = (values.shape[1], values.shape[0])
        weights = importance if weighted else None
        ours.append(
            relative_square(sample, dequantize(core.quantize(values, row.id, weights, 1), row.name, shape), weighted)
        )
        if weights is None and row.requires_imatrix in ("E", "P"):
            theirs.append(float("nan"))
            continue
        theirs.append(
            relative_square(
                sample, dequantize(reference.quantize(values, row.name, weights), row.name, shape), weighted
            )
        )
    return float(np.sqrt(np.mean(ours))), float(np.sqrt(np.mean(theirs)))


def thread_seconds(work: Callable[[], object], repeats: int) -> float:
    """CPU time of this thread per call."""
    started = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - started) / repeats


def speeds(row: TensorType, rounds: int) -> tuple[float, float]:
    """Rows of 2048 values per second of one thread, ours and the reference's, measured in alternation."""
    values, weights = gaussian_sample()
    ours: Callable[[], object] = lambda: core.quantize(values, row.id, weights, 1)  # noqa: E731
    theirs: Callable[[], object] = lambda: reference.quantize(values, row.name, weights)  # noqa: E731
    ours(), theirs()  # tables are built by the first call
    slower = max(thread_seconds(ours, 1), thread_seconds(theirs, 1))
    repeats = max(1, int(SECONDS / max(slower, 1e-6)))
    samples = [(thread_seconds(ours, repeats), thread_seconds(theirs, repeats)) for _ in range(rounds)]
    return tuple(len(values) / statistics.median(side) for side in zip(*samples, strict=True))  # type: ignore[return-value]


def whole_groups(samples: list[Sample], row: TensorType, n_rows: int) -> list[Sample]:
    """The first n_rows rows of every sample, or as many more as fill whole groups of the type's interleaved rows."""
    group = row.interleave
    wanted = -(-n_rows // group) * group
    sizes = [min(wanted, len(values) // group * group) for values, _ in samples]
    return [(values[:size], weights) for (values, weights), size in zip(samples, sizes, strict=True) if size]


def measure_encoder(row: TensorType, real: list[Sample], rounds: int) -> dict[str, list[float] | None]:
    """Errors and speeds of a type; None in place of what the reference's library does not do."""
    result: dict[str, list[float] | None] = {}
    for key, samples, weighted in (
        ("gaussian imatrix", [gaussian_sample()], True),
        ("gaussian", [gaussian_sample()], False),
        ("real imatrix", real, True),
        ("real", real, False),
    ):
        pair = errors(row, samples, weighted)
        comparable = pair[1] == pair[1] and not (pair[1] > LOOSE and pair[0] < LOOSE)
        result[key] = [*pair] if comparable else [pair[0]]
    result["rows/s"] = [*speeds(row, rounds)]
    return result


def print_speeds(rows: list[TensorType], rounds: int) -> None:
    """Rows of 2048 values per second of one thread, a line per type as soon as it is measured."""
    print("| type | rows/s | reference | ours/ref |\n|---|---:|---:|---:|")
    for row in rows:
        ours, theirs = speeds(row, rounds)
        print(f"| `{row.name}` | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |", flush=True)


def make_imatrix(model: Path, calibration: Path, folder: Path) -> Path:
    """Importance matrix of a model over 40 chunks."""
    out = folder / f"{model.stem}.imatrix.dat"
    command = [sys.executable, "-m", "ikpy", "imatrix", "-m", model, "-f", calibration, "-o", out, "--chunks", "40"]
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return out


def measure(a: argparse.Namespace, rows: list[TensorType], results: dict, folder: Path) -> None:
    """Measures the chosen parts of the chosen types into results, saving after each type."""
    imatrices = {model: make_imatrix(model, a.calibration, folder) for model in a.model}
    most = a.rows + max(row.interleave for row in rows)
    real = [sample for model, imatrix in imatrices.items() for sample in model_samples(model, imatrix, most)]
    scorers = []
    if "models" in a.parts:
        scorers = [
            ModelScorer(model, imatrix, a.text, a.chunks, folder, a.threads) for model, imatrix in imatrices.items()
        ]
        results["base"] = {scorer.name: scorer.base_ppl for scorer in scorers}
    for row in rows:
        entry = results["types"].setdefault(row.name, {})
        if "encode" in a.parts:
            entry["encode"] = measure_encoder(row, whole_groups(real, row, a.rows), a.rounds)
        for scorer in scorers:
            if scores := scorer.compare(row, a.makers.split(",")):
                entry.setdefault("models", {}).setdefault(scorer.name, {}).update(scores)
        print(row.name, json.dumps(entry), flush=True)
        a.json.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--types")
    parser.add_argument("--parts", default="encode,models", help="encode, models (with commas), or speed")
    parser.add_argument("--makers", default=",".join(MAKERS), help="whose model files are measured (again)")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--threads", type=int, default=physical_cores(), help="for the models")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=32, help="of every matrix, for the errors on real values")
    parser.add_argument("--json", type=Path, default=Path("quantize-results.json"))
    parser.add_argument("--write", type=Path)
    a = parser.parse_args()
    rows = [registry.by_name(name) for name in a.types.split(",")] if a.types else encoded_types()
    if a.parts == "speed":
        print_speeds(rows, a.rounds)
        return
    results = json.loads(a.json.read_text()) if a.json.exists() else {"types": {}}
    if a.model:
        with tempfile.TemporaryDirectory() as folder:
            measure(a, rows, results, Path(folder))
    if a.write:
        write_page(results, a.write)


if __name__ == "__main__":
    main()
