"""KL divergence of ikpy's and the reference's encoders over many draws, for differences below the noise of one file.

    python -m benchmarks.encoder_draws --model A.gguf --imatrix A.imatrix.dat --text text.txt --types q4_K --draws 8

One quantization is one draw of rounding errors; files of equally good encoders differ by several per cent. Columns of
a matrix have no order that an encoder could know, so a random permutation of them (undone after decoding) gives
another, equally valid draw; both programs get the same ones. The F16 model is patched with the decoded values.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import reference_quantizer as reference
from benchmarks.quantized_models import ModelScorer
from ikpy import GGUFFile
from ikpy._native import core
from ikpy.quants import dequantize, registry
from ikpy.quants.registry import TensorType
from ikpy.tools.imatrix_file import read_imatrix

Encode = Callable[[np.ndarray, TensorType, np.ndarray], np.ndarray]


def by_ikpy(values: np.ndarray, row: TensorType, weights: np.ndarray) -> np.ndarray:
    """Bytes (uint8) of float32 rows [n, ne0] with importances float32 [ne0]."""
    return core.quantize(values, row.id, weights, 1)


def by_reference(values: np.ndarray, row: TensorType, weights: np.ndarray) -> np.ndarray:
    """The same by the reference's library."""
    return reference.quantize(values, row.name, weights)


@dataclass
class Matrix:
    """One tensor: float32 values [experts, rows, ne0], importances [experts, ne0], byte position in the file."""

    values: np.ndarray
    weights: np.ndarray
    offset: int


def matrices(model: Path, imatrix: Path) -> Iterator[Matrix]:
    """Every F16 matrix of the layers that has importances and rows of whole 256-element blocks."""
    importances = read_imatrix(imatrix)
    with GGUFFile.open(model) as file:
        for info in file.tensors.values():
            weights = importances.find(info.name)
            n = info.shape[0]
            if info.type_id != registry.by_name("f16").id or weights is None or n % 256:
                continue
            if info.name in ("token_embd.weight", "output.weight"):
                continue
            by_expert = np.asarray(weights, np.float32).reshape(-1, n)
            values = file.data(info).view(np.float16).reshape(len(by_expert), -1, n).astype(np.float32)
            yield Matrix(values, by_expert, info.offset)


def decoded(matrix: Matrix, row: TensorType, encode: Encode, order: np.ndarray) -> np.ndarray:
    """Values float16 [experts, rows, ne0] after encoding with the columns in that order."""
    out = np.empty(matrix.values.shape, np.float16)
    for i, (values, weights) in enumerate(zip(matrix.values, matrix.weights, strict=True)):
        data = encode(np.ascontiguousarray(values[:, order]), row, np.ascontiguousarray(weights[order]))
        out[i][:, order] = dequantize(data, row.name, (values.shape[1], values.shape[0]))
    return out


class Draws:
    """Divergences of one model under both encoders."""

    def __init__(self, model: Path, imatrix: Path, text: Path, n_chunks: int, folder: Path) -> None:
        self.scorer = ModelScorer(model, imatrix, text, n_chunks, folder, 1)
        self.matrices = list(matrices(model, imatrix))
        self.file = np.fromfile(model, np.uint8)
        self.patched = folder / "patched.gguf"

    def divergence(self, row: TensorType, encode: Encode, seed: int) -> float:
        """Mean KL divergence from the F16 model with the permutations of a seed."""
        rng = np.random.default_rng(seed)
        content = self.file.copy()
        for matrix in self.matrices:
            values = decoded(matrix, row, encode, rng.permutation(matrix.values.shape[2]))
            content[matrix.offset : matrix.offset + values.nbytes] = values.reshape(-1).view(np.uint8)
        content.tofile(self.patched)
        return self.scorer.score(self.patched)["kld"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--imatrix", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--types", required=True)
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=16)
    a = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draws = Draws(a.model, a.imatrix, a.text, a.chunks, Path(folder))
        for name in a.types.split(","):
            row, logs = registry.by_name(name), []
            for seed in range(a.draws):
                ours, theirs = (draws.divergence(row, encode, seed) for encode in (by_ikpy, by_reference))
                logs.append(np.log(ours / theirs))
                print(f"{name} draw {seed}: {ours:.5f} / {theirs:.5f} = {ours / theirs:.3f}", flush=True)
            error = np.std(logs, ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else float("nan")
            print(f"{name}: {np.exp(np.mean(logs)):.3f} ± {error:.3f} over {len(logs)} draws", flush=True)


if __name__ == "__main__":
    main()
