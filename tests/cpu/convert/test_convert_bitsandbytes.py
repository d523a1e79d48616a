"""`ikpy convert`: matrices of bitsandbytes in four and eight bits are decoded."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ikpy.convert import Conversion
from ikpy.errors import FileFormatError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.grouped_checkpoints import checkpoint, nf4
from tests.cpu.convert.integer_checkpoints import plain
from tests.cpu.convert.test_convert_integers import values

UP, UP_OUT = "model.layers.1.mlp.up_proj", "blk.1.ffn_up.weight"
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def matrix(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.05, (96, 64))


@pytest.mark.parametrize("block", [64, 32])
@pytest.mark.parametrize("nested", [False, True])
def test_four_bits(nested, block, tmp_path):
    parts, meaning = nf4(matrix(), nested=nested, block=block)
    file = convert(checkpoint(tmp_path, CONFIG, {UP: parts}), tmp_path, outtype="f32")
    np.testing.assert_allclose(values(file, UP_OUT), meaning, rtol=3e-7, atol=1e-9)
    assert not [name for name in file.tensors if "absmax" in name]


def test_eight_bits(tmp_path):
    random = np.random.default_rng(2)
    codes = random.integers(-127, 128, (96, 64)).astype(np.int8)
    scales = random.uniform(0.1, 2, 96).astype(np.float32)
    parts = {"weight": plain(codes), "SCB": plain(scales), "weight_format": ("U8", (), b"\0")}
    folder = checkpoint(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, {UP: parts})
    file = convert(folder, tmp_path, outtype="f32")
    assert np.array_equal(values(file, UP_OUT), (codes * (scales[:, None] / 127.0)).astype(np.float32)) or (
        np.abs(values(file, UP_OUT) - codes * (scales[:, None].astype(np.float64) / 127)).max() < 1e-7
    )
    assert not [name for name in file.tensors if "SCB" in name or "format" in name]


def _state(**changes: Any) -> Any:
    def change(tensors: made.Tensors) -> None:
        name = f"{UP}.weight.quant_state.bitsandbytes__nf4"
        text = json.dumps(json.loads(tensors[name][2]) | changes).encode()
        tensors[name] = ("U8", (len(text),), text)

    return change


def _set(end: str, entry: Any) -> Any:
    return lambda tensors: tensors.update({f"{UP}.{end}": entry}) if entry else tensors.pop(f"{UP}.{end}")


BAD = {
    "no state": (_set("weight.quant_state.bitsandbytes__nf4", None), "bitsandbytes__nf4' is missing"),
    "state": (
        _set("weight.quant_state.bitsandbytes__nf4", ("U8", (3,), b"{]}")),
        "bitsandbytes__nf4' does not say shape and block sizes (JSOND",
    ),
    "levels": (_set("weight.quant_map", None), "quant_map' is missing"),
    "factors": (_set("weight.absmax", plain(np.ones(95, np.float32))), "is F32 [95]; '" + UP + ".weight' needs 96 num"),
    "shape": (_state(shape=[96, 96]), "does not hold [96, 96] in blocks of 64"),
    "dimensions": (_state(shape=[6144]), "does not say shape and block sizes (Value"),
    "no block size": (_state(blocksize=None), "block sizes (ValueError: sizes [96, 64, None, 1]"),
    "shape of no list": (_state(shape={"rows": 96}), "bitsandbytes__nf4' does not say shape"),
    "rows": (_state(shape=[-96, -64]), "sizes [-96, -64, 64, 1]"),
    "blocks": (_state(blocksize=0), "sizes [96, 64, 0, 1]"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_are_missing_or_do_not_fit(case, tmp_path):
    change, message = BAD[case]
    folder = checkpoint(tmp_path, CONFIG, {UP: nf4(matrix(), nested=False)[0]})
    made.change_tensors(folder, change)
    with pytest.raises(FileFormatError) as error:
        Conversion(folder)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_eight_bits_without_scales(tmp_path):
    folder = checkpoint(tmp_path, CONFIG, {UP: {"weight": plain(np.ones((96, 64), np.int8))}})
    with pytest.raises(FileFormatError, match=r"up_proj.SCB' is missing"):
        Conversion(folder)
