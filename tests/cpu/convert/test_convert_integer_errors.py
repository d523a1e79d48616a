"""`ikpy convert`: integers of compressed-tensors that are incomplete, or stored in ways that are not converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert import Conversion, ConvertOptions
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import integer_checkpoints as integers

UP = "model.layers.1.mlp.experts.2.up_proj.weight"
"""[32, 64] of the tiny Kimi K2."""


def _without(end: str) -> Callable[[made.Tensors], Any]:
    return lambda tensors: tensors.pop(f"{UP}_{end}")


def _with(end: str, values: np.ndarray) -> Callable[[made.Tensors], Any]:
    return lambda tensors: tensors.update({f"{UP}_{end}": integers.plain(values)})


BAD = {
    "packed": (_without("packed"), f"tensor '{UP}_packed' of '{UP}_scale' is missing"),
    "scale": (_without("scale"), f"tensor '{UP}_scale' is missing; '{UP}_packed' needs it"),
    "shape": (_without("shape"), f"tensor '{UP}_shape' is missing; '{UP}_packed' needs it"),
    "other shape": (
        _with("shape", np.array([32, 96])),
        f"'{UP}_packed' [32, 8] does not hold the 32 x 96 integers that '{UP}_shape' and quantization_config promise",
    ),
    "no shape": (_with("shape", np.array([32, 64], np.float32)), f"'{UP}_shape' is F32 [2]; rows and columns"),
    "empty shape": (_with("shape", np.array([0, -64])), f"'{UP}_packed' [32, 8] is no matrix of integers"),
    "rows": (_with("packed", np.zeros((31, 8), np.int32)), "[31, 8] does not hold the 32 x 64 integers"),
    "columns": (_with("packed", np.zeros((32, 7), np.int32)), "[32, 7] does not hold the 32 x 64 integers"),
    "bytes": (_with("packed", np.zeros((32, 8), np.int8)), f"'{UP}_packed' has type I8, which quantization_config"),
    "scales of a row": (
        _with("scale", np.ones((32, 1), np.float32)),
        f"'{UP}_scale' is F32 [32, 1]; the integers of 32 x 64 in '{UP}_packed' need BF16 or F16 or F32 [32, 2]",
    ),
    "integers as scales": (_with("scale", np.ones((32, 2), np.int32)), f"'{UP}_scale' is I32 [32, 2]"),
    "zero points": (
        _with("zero_point", np.ones((32, 2), np.int32)),
        f"'{UP}_zero_point' is I32 [32, 2]; the integers of 32 x 64 in '{UP}_packed' need I32 [4, 2]",
    ),
    "groups": (_with("g_idx", np.zeros(64, np.int32)), f"'{UP}_g_idx' does not give each of 2 groups 32 columns"),
    "unknown groups": (_with("g_idx", np.full(64, 2, np.int32)), "does not give each of 2 groups 32 columns"),
    "columns of groups": (_with("g_idx", np.zeros(32, np.int32)), f"'{UP}_g_idx' is I32 [32]"),
    "twice": (lambda t: t.update({UP: made.bf16(np.ones((32, 64), np.float32))}), "and the same unpacked are both"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_are_missing_or_do_not_fit(case, tmp_path, capsys):
    change, message = BAD[case]
    folder, _ = integers.kimi(tmp_path)
    made.change_tensors(folder, change)
    before = sorted(tmp_path.rglob("*"))
    assert main(["convert", str(folder), "--outfile", str(tmp_path / "out.gguf")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith(f"error: {folder}")
    assert sorted(tmp_path.rglob("*")) == before


def test_the_shard_of_a_wrong_part_is_named(tmp_path):
    folder, _ = integers.kimi(tmp_path)
    made.change_tensors(folder, BAD["scales of a row"][0])
    made.split_into_shards(folder, 3)
    with pytest.raises(
        FileFormatError, match=r"model-0000\d-of-00003\.safetensors: tensor '.*up_proj.weight_scale' is"
    ):
        Conversion(folder)


REFUSED = {
    "2 bits": ({"num_bits": 2}, {}, "weights of 2 bits of compressed-tensors cannot be converted"),
    "blocks": ({"strategy": "block"}, {}, "integer weights with scales by 'block'"),
    "nvfp4": (
        {},
        {"format": "nvfp4-pack-quantized"},
        "has type I32, which quantization_config of config.json does not",
    ),
    "marlin": ({}, {"format": "marlin-24"}, "format 'marlin-24'"),
    "sparse": ({}, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights ('sparse-24-bitmask')"),
    "transforms": ({}, {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transforms of activ"),
    "method": (
        {},
        {"quant_method": "other"},
        "has type I32, which quantization_config of config.json does not explain",
    ),
    "no groups": ({}, {"config_groups": {}}, "has type I32, which quantization_config of config.json does not explain"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_converted(case, tmp_path):
    weights, values, message = REFUSED[case]
    folder, _ = integers.kimi(tmp_path)
    made.amend(folder, quantization_config={**integers.config(**weights), **values})
    with pytest.raises(UnsupportedError) as error:
        Conversion(folder)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"group_size": 0}, "'group_size' is 0, not a number of columns"),
        ({"group_size": "32"}, "'group_size' is '32'"),
        ({"symmetric": False}, "_zero_point' is missing"),
        ({"actorder": "group"}, "_g_idx' is missing"),
        ({"num_bits": 8}, "does not hold the 64 x 32 integers"),
        ({"group_size": 64}, r"need BF16 or F16 or F32 [32, 1]"),
        (5, "holds values that it cannot have"),
    ],
)
def test_configurations_that_do_not_fit(weights, message, tmp_path):
    folder, _ = integers.kimi(tmp_path)
    config = integers.config(**weights) if isinstance(weights, dict) else {**integers.config(), "config_groups": 5}
    made.amend(folder, quantization_config=config)
    with pytest.raises(IkpyError) as error:
        Conversion(folder)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_table_of_groups_that_was_never_filled(tmp_path):
    folder, _ = integers.kimi(tmp_path)
    made.change_tensors(folder, _with("g_idx", np.full(64, -1, np.int32)))
    types = {tensor.output.name: tensor.type for tensor in Conversion(folder).tensors}
    assert types["blk.1.ffn_up_exps.weight"] == "q4_0"


def test_scales_that_are_no_numbers(tmp_path):
    folder, _ = integers.kimi(tmp_path)
    made.change_tensors(folder, _with("scale", np.full((32, 2), np.nan, np.float32)))
    with pytest.raises(FileFormatError, match=r"up_proj\.weight' contains NaN"):
        Conversion(folder, ConvertOptions(outfile=str(tmp_path / "out.gguf"))).write()
    assert not list(tmp_path.glob("*.gguf"))
