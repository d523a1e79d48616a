"""Quantization and importance matrices of DeepSeek V4: tables, residual streams, output projections in groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.writer import GGUFWriter
from ikpy.graph.activations import ActivationCollector
from tests.cpu.convert import deepseek4_checkpoints as tiny
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.test_convert import types
from tests.cpu.quantize.imatrices import write_gguf

GROUPED = "blk.1.attn_output_a.weight"
GROUP_INPUTS = tiny.HEADS * tiny.SIZE // tiny.GROUPS


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> GGUFFile:
    """The converted checkpoint."""
    folder = tmp_path_factory.mktemp("deepseek4")
    return convert(tiny.write(folder / "checkpoint"), folder, outtype="f16")


def by_groups(model: GGUFFile, path: Path) -> Path:
    """The same model with a matrix per group of heads."""
    with GGUFWriter(path) as writer:
        writer.copy_metadata(model)
        for name, info in model.tensors.items():
            grouped = (GROUP_INPUTS, tiny.OUT_RANK, tiny.GROUPS)
            writer.add_tensor(name, grouped if "attn_output_a" in name else info.shape, info.type_id)
        for name, info in model.tensors.items():
            writer.write(name, model.data(info))
    return path


def test_what_is_quantized(model, tmp_path):
    """The table is copied, and what mixes the residual streams stays as it is."""
    target = tmp_path / "q8_0.gguf"
    assert quantize([model.path, str(target), "Q8_0"]) == 0
    with GGUFFile.open(target) as file:
        same = {name for name, kind in types(model).items() if kind in ("f32", "i32")}
        assert {name for name, kind in types(file).items() if kind == "q8_0"} == set(model.tensors) - same
        for name in same:
            np.testing.assert_array_equal(file.data(file.tensors[name]), model.data(model.tensors[name]), name)


def collect(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Sums of squares [matrices, inputs] and rows [matrices] of GROUPED over 32 tokens."""
    loaded = Model.load(path)
    stored = {name: (*info.shape, 1, 1)[2] for name, info in loaded.gguf.tensors.items()}
    collector = ActivationCollector(stored)
    context = Context(loaded, ContextParams(n_ctx=64, n_threads=2, collector=collector))
    context.decode(Batch.single(tiny.tokens()[:32], 0, logits="all"))
    entry = collector.entries[GROUPED]
    return entry.sums.copy(), entry.rows.copy()


def test_importance_of_groups_of_heads(model, tmp_path):
    """One row of sums where the file has one matrix, a row per group where it has one for each."""
    one, rows = collect(Path(model.path))
    each, rows_each = collect(by_groups(model, tmp_path / "groups.gguf"))
    assert one.shape == (1, GROUP_INPUTS) and each.shape == (tiny.GROUPS, GROUP_INPUTS)
    assert rows.tolist() == [32 * tiny.GROUPS] and rows_each.tolist() == [32] * tiny.GROUPS
    np.testing.assert_allclose(one[0], each.sum(axis=0), rtol=1e-12)
    assert each.min() > 0 and not np.allclose(each[0], each[1], rtol=0.1)


@pytest.mark.parametrize("matrices", [1, tiny.GROUPS])
def test_importance_fits_files_of_both_kinds(matrices, model, tmp_path):
    values = np.random.default_rng(4).gamma(0.3, 1.0, (matrices, GROUP_INPUTS))
    write_gguf(tmp_path / "i.gguf", {GROUPED: (values, np.ones(matrices))})
    for source in (Path(model.path), by_groups(model, tmp_path / "groups.gguf")):
        arguments = ["--imatrix", str(tmp_path / "i.gguf"), str(source), str(tmp_path / "out.gguf"), "IQ4_NL"]
        assert quantize(arguments) == 0
        with GGUFFile.open(tmp_path / "out.gguf") as file:
            assert types(file)[GROUPED] == "iq4_nl"
