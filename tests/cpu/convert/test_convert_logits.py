"""Converted tiny checkpoints give the logits and token ids that transformers recorded for them.

scripts/make_convert_golden.py wrote the checkpoints; their weights are bf16, the recorded logits float32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion, ConvertOptions
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import dequantize, registry
from ikpy.vocab import Vocab
from tests.cpu.convert.checkpoints import CHECKPOINTS, NAMES, amend, copy

# Measured: at most 1e-4 of logits between -20 and 20 (float32 sums in another order).
F32_TOLERANCE = 5e-4
# Root mean square error of a token's logits over that of the logits, median over the tokens: single tokens of
# mixtures may take another expert. Measured: bf16 at most 0.036, q8_0 0.099 (8-bit activations).
ROUNDING = {"bf16": 0.06, "q8_0": 0.2}


# Error of a value over the largest one of its row; the scale of q8_0 is rounded to f16 as well. MXFP4 is kept, in
# the f32 file too.
PRECISION = {"f32": 0.0, "mxfp4": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11, "q8_0": 0.57 / 127}


def convert(name: str, outtype: str, folder: Path) -> Path:
    """The GGUF file of a tiny checkpoint."""
    path = folder / f"{name}-{outtype}.gguf"
    Conversion(CHECKPOINTS / name, ConvertOptions(outtype=outtype, outfile=str(path))).write()
    return path


def decoded(path: Path) -> Path:
    """A copy with every tensor in f32: quantized ones would be multiplied with 8-bit activations."""
    target = path.with_suffix(".f32.gguf")
    with GGUFFile.open(str(path)) as file, GGUFWriter(target) as writer:
        writer.copy_metadata(file)
        for info in file.tensors.values():
            writer.add_tensor(info.name, info.shape, 0)
        for info in file.tensors.values():
            values = dequantize(file.data(info), info.type_id, info.shape)
            writer.write(info.name, np.ascontiguousarray(values, np.float32))
    return target


def logits(path: Path, tokens: np.ndarray, mla: int = 0, **values: Any) -> np.ndarray:
    """Logits of one batch as golden() has them, with an f32 cache; values: further parameters of the context."""
    model = Model.load(path, ModelParams(mla=mla))
    values = {**dict.fromkeys(("type_k", "type_v", "type_indexer"), "f32"), **values}
    params = ContextParams(n_ctx=64, n_threads=1, flash_attn=False, mla=mla, **values)  # type: ignore[arg-type]
    return Context(model, params).decode(Batch.single(tokens.astype(np.int32), 0, logits="all"))[:, ::2]


def golden(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens i64 [T] and transformers' logits f32 [T, V / 2], of every second token of the vocabulary."""
    data = np.load(CHECKPOINTS / name / "golden.npz")
    return data["tokens"], data["logits"]


def assert_close(ours: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    difference = np.abs(ours - expected).max(axis=1)
    worst = int(difference.argmax())
    assert difference[worst] <= tolerance, f"token {worst} differs by {difference[worst]:.6f}, allowed {tolerance}"


@pytest.mark.parametrize("name", NAMES)
def test_logits(name, tmp_path):
    tokens, expected = golden(name)
    path = convert(name, "f32", tmp_path)
    if name == "gpt-oss":
        path = decoded(path)
    assert_close(logits(path, tokens), expected, F32_TOLERANCE)


@pytest.mark.parametrize("mla", [1, 2, 3])
@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "deepseek-v32", "glm-dsa", "glm4-moe-lite"])
def test_logits_of_the_absorbed_form(name, mla, tmp_path):
    tokens, expected = golden(name)
    assert_close(logits(convert(name, "f32", tmp_path), tokens, mla), expected, F32_TOLERANCE)


def test_yarn_corners_of_kimi_k2(tmp_path):
    tokens, _ = golden("deepseek-v3")
    usual = convert("deepseek-v3", "f32", tmp_path)
    expected = logits(usual, tokens, yarn_beta_fast=1.0, yarn_beta_slow=1.0)
    assert np.abs(expected - logits(usual, tokens)).max() > 0.1
    folder = copy("deepseek-v3", tmp_path)
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    amend(folder, rope_parameters={**rope, "beta_fast": 1.0, "beta_slow": 1.0})
    path = tmp_path / "kimi.gguf"
    Conversion(folder, ConvertOptions(outtype="f32", outfile=str(path))).write()
    assert np.array_equal(logits(path, tokens), expected)


@pytest.mark.parametrize("outtype", ["bf16", "q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_within_rounding(name, outtype, tmp_path):
    tokens, expected = golden(name)
    ours = logits(convert(name, outtype, tmp_path), tokens)
    error = np.sqrt(((ours - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1))
    worst = int(error.argmax())
    message = f"median error {np.median(error):.4f}, worst token {worst} {error[worst]:.4f}"
    assert np.median(error) <= ROUNDING[outtype], message


@pytest.mark.parametrize("outtype", ["bf16", "f16", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3", "deepseek-v3", "gpt-oss"])
def test_values_within_the_precision_of_the_type(name, outtype, tmp_path):
    exact = GGUFFile.open(str(convert(name, "f32", tmp_path)))
    file = GGUFFile.open(str(convert(name, outtype, tmp_path)))
    assert list(file.tensors) == list(exact.tensors)
    for info in file.tensors.values():
        reference = exact.tensors[info.name]
        expected = dequantize(exact.data(reference), reference.type_id, reference.shape).reshape(-1, info.shape[0])
        values = dequantize(file.data(info), info.type_id, info.shape).reshape(expected.shape)
        difference = np.abs(values - expected).max(axis=1)
        allowed = PRECISION[registry.by_id(info.type_id).name] * np.abs(expected).max(axis=1) + 1e-7
        worst = int((difference - allowed).argmax())
        assert difference[worst] <= allowed[worst], f"{info.name}: row {worst} off by {difference[worst]:.3e}"


@pytest.mark.parametrize("name", NAMES)
def test_tokens(name, tmp_path):
    with GGUFFile.open(str(convert(name, "bf16", tmp_path))) as file:
        vocab = Vocab.from_metadata(file.metadata)
    expected = json.loads((CHECKPOINTS / name / "tokens.json").read_text(encoding="utf-8"))
    assert {text: vocab.tokenize(text, parse_special=True) for text in expected} == expected
