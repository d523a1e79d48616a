"""`ikpy convert`: matrices of GPTQ and AWQ become Q4_0 or Q4_1 blocks, or are decoded exactly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.convert import Conversion
from ikpy.convert.grouped import PARTS
from ikpy.convert.weights import Weights
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError
from tests.cpu.convert import checkpoints as made
from tests.cpu.convert.checkpoints import convert
from tests.cpu.convert.grouped_checkpoints import Codes, awq_config, checkpoint, gptq_config, words
from tests.cpu.convert.integer_checkpoints import plain
from tests.cpu.convert.test_convert import types
from tests.cpu.convert.test_convert_integers import values

UP, UP_OUT = "model.layers.1.mlp.up_proj", "blk.1.ffn_up.weight"
DOWN, DOWN_OUT = "model.layers.0.mlp.down_proj", "blk.0.ffn_down.weight"
ROWS, COLUMNS = 96, 64

SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "4 bits": ({"bits": 4}, {}, "q4_0"),
    "4 bits, 64": ({"bits": 4, "group_size": 64}, {}, "q4_0"),
    "4 bits, a row": ({"bits": 4, "group_size": 64}, {"group_size": -1}, "q4_0"),
    "4 bits, 16": ({"bits": 4, "group_size": 16}, {}, "f32"),
    "4 bits, asymmetric": ({"bits": 4, "symmetric": False}, {}, "f32"),
    "4 bits, order of activations": ({"bits": 4, "shuffled": True}, {"desc_act": True}, "f32"),
    "both": ({"bits": 4, "symmetric": False, "shuffled": True, "group_size": 8}, {"desc_act": True}, "f32"),
    "2 bits": ({"bits": 2}, {}, "q4_0"),
    "2 bits, asymmetric": ({"bits": 2, "symmetric": False}, {}, "q4_0"),
    "3 bits": ({"bits": 3}, {}, "q4_0"),
    "3 bits, asymmetric": ({"bits": 3, "symmetric": False}, {}, "q4_0"),
    "3 bits, 8": ({"bits": 3, "symmetric": False, "group_size": 8}, {}, "f32"),
    "8 bits": ({"bits": 8}, {}, "f32"),
    "8 bits, asymmetric": ({"bits": 8, "symmetric": False, "group_size": 16}, {}, "f32"),
}


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "unnamed"])
@pytest.mark.parametrize("case", SCHEMES)
def test_gptq(case, form, tmp_path):
    given, changes, kind = SCHEMES[case]
    codes = Codes(ROWS, COLUMNS, **{"group_size": 32, **given}, seed=3)
    config = gptq_config(bits=codes.bits, group_size=codes.group_size) | changes
    if form != "unnamed":
        config["checkpoint_format"] = form
    folder = checkpoint(tmp_path, config, {UP: codes.gptq(v2=form == "gptq_v2")})
    file = convert(folder, tmp_path, outtype="f32")
    assert types(file)[UP_OUT] == kind
    assert np.array_equal(values(file, UP_OUT), codes.values().astype(np.float32))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("order", ["gemm", "gemv"])
def test_awq(order, symmetric, tmp_path):
    for group_size in (8, 32, 64):
        codes = Codes(ROWS, COLUMNS, 4, group_size, symmetric=symmetric, seed=5)
        parts = codes.gemm() if order == "gemm" else codes.gemv()
        folder = checkpoint(tmp_path / str(group_size), awq_config(version=order, group_size=group_size), {UP: parts})
        file = convert(folder, folder, outtype="f32")
        assert types(file)[UP_OUT] == ("q4_0" if symmetric and group_size >= 32 else "f32")
        assert np.array_equal(values(file, UP_OUT), codes.values().astype(np.float32))


@pytest.mark.parametrize("group_size", [32, 64, -1])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "gemm", "gemv"])
def test_zero_points_of_4_bits(form, group_size, tmp_path):
    """Q4_1 has the same codes and scales; with f32 no value may move, with others their products round to f16."""
    codes = Codes(ROWS, COLUMNS, 4, COLUMNS if group_size < 0 else group_size, symmetric=False, seed=7)
    is_awq = form.startswith("gem")
    make = {"gemm": codes.gemm, "gemv": codes.gemv}.get(form, lambda: codes.gptq(v2=form == "gptq_v2"))
    size = {"group_size": group_size}
    config = awq_config(version=form, **size) if is_awq else gptq_config(bits=4, checkpoint_format=form, **size)
    folder = checkpoint(tmp_path, config, {UP: make()})
    conversion = Conversion(folder)
    assert any("1 tensors of integers are written as q4_1, which rounds" in note for note in conversion.notes)
    file = convert(folder, tmp_path)
    assert types(file)[UP_OUT] == "q4_1"
    error = np.abs(values(file, UP_OUT) - codes.values()) / codes.scales[:, codes.groups]
    assert 0 < error.max() <= 15 / 2048, f"off by {error.max():.5f} steps"
    (tmp_path / "f32").mkdir()
    assert np.array_equal(values(convert(folder, tmp_path / "f32", outtype="f32"), UP_OUT), codes.values())


def test_zero_points_whose_products_f16_holds(tmp_path):
    """Scales of few bits: Q4_1 has all values, whatever the output type."""
    codes = Codes(ROWS, COLUMNS, 4, 32, symmetric=False, seed=8)
    codes.scales = (np.round(codes.scales.astype(np.float64) * 1024) / 1024).astype(np.float16)
    folder = checkpoint(tmp_path, awq_config(), {UP: codes.gemm()})
    assert not any("rounds" in note for note in Conversion(folder).notes)
    file = convert(folder, tmp_path, outtype="f32")
    assert types(file)[UP_OUT] == "q4_1" and np.array_equal(values(file, UP_OUT), codes.values())


def test_orders_of_columns_and_rows_differ(tmp_path):
    """Down projections have more columns than rows: none of the layouts is read as another one."""
    codes = Codes(64, 96, 4, 32, symmetric=False, seed=6)
    for name, config, parts in (
        ("gptq", gptq_config(), codes.gptq(g_idx=False)),
        ("gemm", awq_config(), codes.gemm()),
        ("gemv", awq_config(version="GEMV"), codes.gemv()),
    ):
        folder = checkpoint(tmp_path / name, config, {DOWN: parts})
        file = convert(folder, folder, outtype="f32")
        assert np.array_equal(values(file, DOWN_OUT), codes.values().astype(np.float32)), name


def test_modules_with_other_bits(tmp_path):
    """The first pattern that matches the beginning of a module's name counts."""
    up, down, gate = (Codes(*shape, seed=7) for shape in ((96, 64, 8, 16), (64, 96, 2, 32), (96, 64, 4, 32)))
    dynamic = {
        r"-:lm_head": {},
        r"+:model\.layers\.1\..*up": {"bits": 8, "group_size": 16, "desc_act": False},
        r"model\.layers\.\d\.mlp\.(up|down)": {"bits": 2},
    }
    folder = checkpoint(
        tmp_path,
        gptq_config(dynamic=dynamic),
        {UP: up.gptq(), DOWN: down.gptq(), "model.layers.1.mlp.gate_proj": gate.gptq()},
    )
    file = convert(folder, tmp_path, outtype="f32")
    for name, codes in ((UP_OUT, up), (DOWN_OUT, down), ("blk.1.ffn_gate.weight", gate)):
        assert np.array_equal(values(file, name), codes.values().astype(np.float32)), name


def test_rows_that_families_rearrange(tmp_path):
    """Heads of llama's queries are turned to adjacent pairs: blocks move as rows do."""
    module, name = "model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight"
    plain_folder = made.copy("llama", tmp_path / "plain")
    rows, columns = made.read_tensors(plain_folder / "model.safetensors")[f"{module}.weight"][1]
    codes = Codes(rows, columns, 4, 32, seed=8)
    folder = checkpoint(tmp_path, gptq_config(), {module: codes.gptq()})
    matrix = plain(codes.values().astype(np.float32))
    made.change_tensors(plain_folder, lambda tensors: tensors.update({f"{module}.weight": matrix}))
    file, expected = convert(folder, tmp_path, outtype="f32"), convert(plain_folder, plain_folder, outtype="f32")
    assert types(file)[name] == "q4_0"
    assert np.array_equal(values(file, name), values(expected, name))


def test_zero_points_of_zero_survive_the_first_format(tmp_path):
    """One is taken from whole words: where a zero point is 0, the next code is changed, and comes back."""
    codes = Codes(ROWS, COLUMNS, 4, 32, symmetric=False, seed=9)
    codes.zeros[::3] = 0
    parts = codes.gptq(v2=True)
    zeros = np.frombuffer(parts["qzeros"][2], "<u4").reshape(parts["qzeros"][1])
    parts["qzeros"] = words((zeros - np.uint32(0x11111111)).view(np.int32))
    file = convert(checkpoint(tmp_path, gptq_config(), {UP: parts}), tmp_path, outtype="f32")
    assert np.array_equal(values(file, UP_OUT), codes.values().astype(np.float32))


@pytest.mark.parametrize(
    ("file", "config"),
    [
        (
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "model_file_base_name": "m"},
        ),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_configurations_in_files_of_their_own(file, config, tmp_path):
    codes = Codes(ROWS, COLUMNS, 4, 32, symmetric=False, seed=10)
    folder = checkpoint(tmp_path, {}, {UP: codes.gptq() if "bits" in config else codes.gemm()})
    made.amend(folder, drop=("quantization_config",))
    made.amend(folder, file, **config)
    converted = convert(folder, tmp_path, outtype="f32")
    assert np.array_equal(values(converted, UP_OUT), codes.values().astype(np.float32))


def test_biases_of_zeros_are_left_out(tmp_path):
    """Writers of GPTQ give every module one."""
    parts = Codes(ROWS, COLUMNS, 4, 32, seed=11).gptq() | {"bias": plain(np.zeros(ROWS, np.float16))}
    folder = checkpoint(tmp_path, gptq_config(), {UP: parts}, "qwen3")
    assert "blk.1.ffn_up.bias" not in convert(folder, tmp_path).tensors
    made.change_tensors(folder, lambda t: t.update({f"{UP}.bias": plain(np.ones(ROWS, np.float16))}))
    with pytest.raises(UnsupportedError, match="has no bias for"):
        Conversion(folder)


def test_output_type_is_that_of_the_plain_tensors(tmp_path):
    """Decoded matrices are f32 on the way, which says nothing about the file."""
    codes = Codes(ROWS, COLUMNS, 4, 16, symmetric=False, seed=12)
    folder = checkpoint(tmp_path, awq_config(group_size=16), {UP: codes.gemm()})

    def to_f16(tensors: made.Tensors) -> None:
        for name, (dtype, shape, data) in list(tensors.items()):
            if dtype in ("F32", "BF16"):
                bits = np.frombuffer(data, "<u2").astype("<u4") << 16 if dtype == "BF16" else np.frombuffer(data, "<u4")
                tensors[name] = plain(bits.view("<f4").reshape(shape).astype(np.float16))

    made.change_tensors(folder, to_f16)
    conversion = Conversion(folder)
    assert conversion.outtype == "f16"
    assert [note for note in conversion.notes if "decoded" in note] == [
        f"1 tensors of integers are decoded and written as f16 (groups of 16), the first is {UP_OUT}"
    ]


def test_pages_of_all_parts_are_given_back(tmp_path, monkeypatch):
    folder = checkpoint(tmp_path, gptq_config(), {UP: Codes(ROWS, COLUMNS, 4, 32).gptq()})
    conversion, released = Conversion(folder), []
    monkeypatch.setattr(conversion.checkpoint, "release", released.append)
    conversion.weights.release(f"{UP}.weight")
    assert released == [f"{UP}{end}" for end in (".qweight", *PARTS)]


def _without(end: str) -> Any:
    return lambda tensors: tensors.pop(f"{UP}.{end}")


def _with(end: str, array: np.ndarray) -> Any:
    return lambda tensors: tensors.update({f"{UP}.{end}": plain(array)})


BAD = {
    "codes": (_without("qweight"), f"tensor '{UP}.qweight' of '{UP}.qzeros' is missing"),
    "zero points": (_without("qzeros"), f"tensor '{UP}.qzeros' is missing; '{UP}.qweight' needs it"),
    "scales": (_without("scales"), f"tensor '{UP}.scales' is missing"),
    "type of codes": (_with("qweight", np.zeros((8, 96), np.int64)), f"'{UP}.qweight' is I64 [8, 96], no matrix of"),
    "one row": (_with("qweight", np.zeros(96, np.int32)), f"'{UP}.qweight' is I32 [96], no matrix of"),
    "fewer groups": (
        _with("scales", np.ones((1, 96), np.float16)),
        "in groups of 32 need F64 or F32 or F16 or BF16 [2, 96]",
    ),
    "integers as scales": (_with("scales", np.ones((2, 96), np.int32)), f"'{UP}.scales' is I32 [2, 96]"),
    "narrow zero points": (_with("qzeros", np.ones((2, 11), np.int32)), f"'{UP}.qzeros' is I32 [2, 11]"),
    "group that is none": (
        _with("g_idx", np.full(64, 2, np.int32)),
        f"'{UP}.g_idx' names groups from 2 to 2; there are 2",
    ),
    "negative group": (_with("g_idx", np.full(64, -1, np.int32)), "names groups from -1 to -1"),
    "short order": (_with("g_idx", np.zeros(63, np.int32)), f"'{UP}.g_idx' is I32 [63]"),
}


@pytest.mark.parametrize("case", BAD)
def test_parts_that_are_missing_or_do_not_fit(case, tmp_path, capsys):
    change, message = BAD[case]
    folder = checkpoint(tmp_path, gptq_config(), {UP: Codes(ROWS, COLUMNS, 4, 32).gptq()})
    made.change_tensors(folder, change)
    assert main(["convert", str(folder), "--outfile", str(tmp_path / "out.gguf")]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith(f"error: {folder}")
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_scales_that_are_no_numbers(scale, tmp_path, capsys):
    """Zero times infinity is no number either; users see one line, no warning of an array."""
    folder = checkpoint(tmp_path, gptq_config(), {UP: Codes(ROWS, COLUMNS, 4, 32).gptq()})
    made.change_tensors(folder, _with("scales", np.full((2, 96), scale, np.float16)))
    assert main(["convert", str(folder), "--outfile", str(tmp_path / "out.gguf"), "--outtype", "f32"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"error: tensor '{UP}.weight' contains NaN or infinite values; the checkpoint is damaged"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "5 bits": (gptq_config(bits=5), "weights of 5 bits of GPTQ cannot be converted"),
    "no bits": (gptq_config(bits=None), "weights of None bits of GPTQ"),
    "marlin": (gptq_config(checkpoint_format="marlin"), "format 'marlin' of GPTQ"),
    "older marlin": (gptq_config(is_marlin_format=True), "format 'marlin' of GPTQ"),
    "words": (gptq_config(pack_dtype="int16"), "packing in words of int16 of GPTQ"),
    "dynamic bits": (gptq_config(dynamic={".*": {"bits": 7}}), "weights of 7 bits of GPTQ"),
    "dynamic format": (gptq_config(dynamic={".*": {"format": "bitblas"}}), "format 'bitblas' of GPTQ"),
    "8 bits": (awq_config(bits=8), "weights of 8 bits of AWQ"),
    "gemv_fast": (awq_config(version="gemv_fast"), "version 'gemv_fast' of AWQ"),
    "llm-awq": (awq_config(backend="llm-awq"), "packing of llm-awq of AWQ"),
    "size": (gptq_config(group_size=0), "'group_size' is 0, not a number of columns"),
    "text": (gptq_config(group_size="32"), "'group_size' is '32'"),
    "huge size": (awq_config(version="gemv", group_size=1 << 63), "'group_size' is 9223372036854775808, not"),
    "dynamic size": (gptq_config(dynamic={".*": {"group_size": -2}}), "'group_size' is -2"),
    "dynamic list": (gptq_config(dynamic=[1]), "'dynamic' is no table of modules"),
    "pattern": (gptq_config(dynamic={"(": {}}), "'(' of 'dynamic' is no pattern"),
    "other bits": (gptq_config(bits=8), "do not fit"),
    "other method": (
        {"quant_method": "auto-round", "bits": 4},
        "has no place in architecture llama (quantization 'auto-",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_converted(case, tmp_path):
    config, message = REFUSED[case]
    folder = checkpoint(tmp_path, config, {UP: Codes(ROWS, COLUMNS, 4, 32).gptq()})
    with pytest.raises(IkpyError) as error:
        Conversion(folder)
    assert "\n" not in str(error.value)
    if case != "other bits":
        assert message in str(error.value)


def test_tensors_of_no_words_are_no_matrices(tmp_path):
    folder = checkpoint(tmp_path, gptq_config(bits=3), {UP: Codes(ROWS, COLUMNS, 4, 32).gptq()})
    with pytest.raises(FileFormatError, match="has no codes of 3 bits"):
        Conversion(folder)


def test_names_are_those_of_plain_checkpoints(tmp_path):
    folder = checkpoint(tmp_path, gptq_config(), {UP: Codes(ROWS, COLUMNS, 4, 32).gptq()})
    names = list(Weights(Conversion(folder).checkpoint).names())
    assert f"{UP}.weight" in names and not [name for name in names if name.endswith((".qweight", *PARTS))]
