"""Values that are not finite never get into an output: encoded, copied, repacked, for every type."""

from __future__ import annotations

import numpy as np
import pytest

from ikpy._native import core
from ikpy.cli.quantize import run
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import dequantize, registry
from ikpy.quants.codec import codec_of
from ikpy.quants.finite import surely_finite
from ikpy.tools import tensor_convert
from ikpy.tools.tensor_convert import can_encode, convert_rows
from tests.cpu.quantize.quantize_models import write_model

NE0, ROWS = 512, 32
NAME = "blk.0.attn_output.weight"
WRITABLE = [row.name for row in registry.all_types() if can_encode(row.name)]
# Every scale of nvfp4 is a finite number.
SCALED = [row.name for row in registry.all_types() if row.is_quantized and row.name in WRITABLE and row.name != "nvfp4"]


def encoded(values, name):
    """A tensor of this type, rows of NE0 values."""
    values = np.ascontiguousarray(values, np.float32)
    if name == "f32":
        return values.view(np.uint8).reshape(-1)
    return np.asarray(core.quantize(values, registry.by_name(name).id))


def normal(scale=1.0):
    with np.errstate(over="ignore"):
        values = np.random.default_rng(0).standard_normal((ROWS, NE0)) * scale
    return np.clip(values, -3.4e38, 3.4e38).astype(np.float32)


def converted(data, source, target, **options):
    return np.concatenate(list(convert_rows(data, source, target, (NE0, ROWS), name=NAME, n_threads=1, **options)))


def spoiled(data, name, field_name, number):
    """The data with one float number of the middle row group replaced."""
    row, codec = registry.by_name(name), codec_of(name)
    groups = data.copy().reshape(ROWS // row.interleave, -1)
    field = {**codec.header.fields, **codec.block.fields}[field_name]
    start = 0 if field_name in codec.header.fields else codec.header.nbytes
    for at, segment in enumerate(field.segments):
        byte, shift = start + int(segment.byte[-1, -1]), int(segment.shift[-1, -1])
        place = sum(before.width for before in field.segments[:at])
        mask = (1 << segment.width) - 1
        kept = int(groups[len(groups) // 2, byte]) & ~(mask << shift)
        groups[len(groups) // 2, byte] = kept | ((number >> place & mask) << shift)
    return groups.reshape(-1)


def float_fields(name):
    codec = codec_of(name)
    fields = {**codec.header.fields, **codec.block.fields}
    return {key: field.kind for key, field in fields.items() if field.kind in ("f16", "f32", "e8m0")}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("magnitude", [3e4, 1e9, 1e30, 3e38])
@pytest.mark.parametrize("name", WRITABLE)
def test_encoded_values_are_finite_or_refused(name, magnitude):
    data = encoded(normal(magnitude), "f32")
    try:
        coded = converted(data, "f32", name)
    except UnsupportedError as error:
        assert f"quantized data validation failed: row 0 of tensor {NAME} has values beyond" in str(error)
        assert f"range of {name}; choose another type for it, such as " in str(error)
        return
    assert np.isfinite(dequantize(coded, name, (NE0, ROWS))).all()


@pytest.mark.parametrize("name", ["f16", "q8_0", "q8_0_r8", "q8_k_r8", "q8_k_r16", "q1_0_g128", "iq1_bn"])
def test_refused_types_name_the_first_bad_row(name):
    values = normal()
    values[19] *= 1e9
    with pytest.raises(UnsupportedError, match=f"row 19 of tensor {NAME} has values beyond the range of {name};"):
        converted(encoded(values, "f32"), "f32", name)


@pytest.mark.filterwarnings("error")
def test_symmetric_q4_0_is_checked():
    with pytest.raises(UnsupportedError, match="beyond the range of q4_0"):
        converted(encoded(normal(1e9), "f32"), "f32", "q4_0", symmetric_q4_0=True)


def test_values_that_even_bf16_rounds_to_infinity():
    values = normal()
    values[5, 5] = np.finfo(np.float32).max
    with pytest.raises(UnsupportedError, match=r"row 5 .* range of bf16; choose another type for it, such as f32"):
        converted(encoded(values, "f32"), "f32", "bf16")


@pytest.mark.parametrize("name", SCALED)
def test_every_scale_of_a_type_is_looked_at(name):
    row = registry.by_name(name)
    data = encoded(normal(), name)
    assert surely_finite(data, row, NE0)
    assert float_fields(name)
    for field, kind in float_fields(name).items():
        for number in {"f16": (0x7C00, 0xFC00, 0x7E00), "f32": (0x7F800000, 0xFFC00000), "e8m0": (255,)}[kind]:
            bad = spoiled(data, name, field, number)
            assert not surely_finite(bad, row, NE0)
            middle = ROWS // row.interleave // 2 * row.interleave
            with pytest.raises(FileFormatError, match=f"of tensor {NAME} contains") as error:
                converted(bad, name, name)
            assert middle <= int(str(error.value).split()[1]) < middle + row.interleave


@pytest.mark.parametrize(("name", "dtype"), [("f16", "<f2"), ("f32", "<f4"), ("f64", "<f8")])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
def test_copied_floats_are_checked(name, dtype, value):
    values = normal().astype(dtype)
    assert len(converted(values.view(np.uint8).reshape(-1), name, name)) == values.nbytes
    values[17, 3] = value
    kind = "NaN" if np.isnan(value) else "infinite"
    with pytest.raises(FileFormatError, match=f"row 17 of tensor {NAME} contains {kind} values"):
        converted(values.view(np.uint8).reshape(-1), name, name)


def test_copied_numbers_of_64_bits_may_be_beyond_f32():
    values = normal().astype(np.float64)
    values[3, 3] = 1e300
    data = values.view(np.uint8).reshape(-1)
    assert np.array_equal(converted(data, "f64", "f64"), data)


def test_copied_tensors_with_one_scale_are_checked():
    data = np.zeros(registry.by_name("i2_s").tensor_nbytes((NE0, ROWS)), np.uint8)
    assert np.array_equal(converted(data, "i2_s", "i2_s"), data)
    data[-32:-28] = np.array([np.inf], "<f4").view(np.uint8)
    with pytest.raises(FileFormatError, match="row 0 of tensor"):
        converted(data, "i2_s", "i2_s")


@pytest.mark.parametrize(("source", "target"), [("f16", "bf16_r16"), ("bf16", "bf16_r16"), ("q8_0", "q8_0_r8")])
def test_repacked_tensors_are_checked(source, target):
    data = encoded(normal(), source)
    assert len(converted(data, source, target)) == len(data)
    groups = data.reshape(ROWS, -1)
    groups[21, :2] = (0x80, 0x7F) if source == "bf16" else (0x00, 0x7C)
    with pytest.raises(FileFormatError, match=f"row 21 of tensor {NAME} contains"):
        converted(data, source, target)


def test_copies_continue_at_any_piece(monkeypatch):
    monkeypatch.setattr(tensor_convert, "PIECE_ELEMENTS", 12 * NE0)
    data = encoded(normal(), "q4_0_r8")
    pieces = list(convert_rows(data, "q4_0_r8", "q4_0_r8", (NE0, ROWS)))
    assert len(pieces) == 4
    later = list(convert_rows(data, "q4_0_r8", "q4_0_r8", (NE0, ROWS), skip=2 * len(pieces[0])))
    assert np.array_equal(np.concatenate(pieces[2:]), np.concatenate(later))


def model_of(path, data, name):
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, 1)
        writer.add_tensor(NAME, (NE0, ROWS), registry.by_name(name).id)
        writer.write(NAME, data)


@pytest.mark.parametrize("ftype", ["F16", "Q8_0", "IQ1_BN", "Q8_0_R8"])
def test_overflow_ends_the_run_and_leaves_nothing(tmp_path, capfd, ftype):
    write_model(tmp_path / "in.gguf", {NAME: normal(1e9)})
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), ftype]) == 1
    err = capfd.readouterr().err
    assert f"failed to quantize: quantized data validation failed: row 0 of tensor {NAME}" in err
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_a_target_refuses_types_that_overflow(tmp_path, capfd):
    values = normal()
    values[11] *= 1e9
    write_model(tmp_path / "in.gguf", {NAME: values})
    assert run(["--target-bpw", "9", str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")]) == 1
    assert f"row 11 of tensor {NAME} has values beyond the range of q8_0" in capfd.readouterr().err


@pytest.mark.parametrize("arguments", [["COPY"], ["--repack", "Q8_0_R8"]])
def test_damaged_scales_end_copies_and_repacking(tmp_path, capfd, arguments):
    data = encoded(normal(), "q8_0")
    data.reshape(ROWS, -1)[6, :2] = (0x00, 0xFE)
    model_of(tmp_path / "in.gguf", data, "q8_0")
    flags, kind = arguments[:-1], arguments[-1]
    assert run([*flags, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), kind]) == 1
    assert f"row 6 of tensor {NAME} contains NaN values; the input is damaged" in capfd.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


def test_bf16_r16_of_a_half_is_checked(tmp_path, capfd):
    data = encoded(normal(), "f16")
    data.view("<f2")[NE0 * 9 + 1] = np.inf
    model_of(tmp_path / "in.gguf", data, "f16")
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "BF16_R16"]) == 1
    assert f"row 9 of tensor {NAME} contains infinite values" in capfd.readouterr().err
