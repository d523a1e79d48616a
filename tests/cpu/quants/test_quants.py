"""Tensor types: table, numpy decoders against recorded floats and self-check data, repacking."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import gguf
import numpy as np
import pytest

from benchmarks.random_weights import random_tensor
from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.quants import dequantize, registry
from ikpy.quants.codec import codec_of
from ikpy.quants.repack import PERMUTATIONS, repack
from ikpy.quants.tables import table
from ikpy.quants.trellis import generate
from tests.cpu.quants.quant_data import (
    GOLDEN_SHAPE,
    GOLDEN_TYPES,
    assert_same_bits,
    check_bytes,
    format_checks,
    golden,
    golden_variants,
)
from tests.shared import ROOT

# Recorded with a decoder that skips the row header (BN) or evaluates a polynomial (IQ6_K):
# quant-formats.md#where-the-reference-differs.
OTHER_FORMULA = {"iq1_bn", "iq2_bn", "iq6_k"}
BLOCK_TYPES = [t for t in registry.all_types() if t.is_quantized and t.name != "i2_s" and not t.activation_only]
MAINLINE = (
    "q4_0 q4_1 q5_0 q5_1 q8_0 q2_K q3_K q4_K q5_K q6_K iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s iq1_s iq1_m iq4_nl "
    "iq4_xs mxfp4 nvfp4 tq1_0 tq2_0"
)
PACKINGS = sorted((a, b) for a, b in PERMUTATIONS if registry.by_name(b).interleave > 1)


def recorded(plain, packed):
    """Whether bytes of both types were recorded from the same floats (bf16_r16 was truncated from f32)."""
    return {plain.lower(), packed.lower()} <= set(GOLDEN_TYPES) and packed != "bf16_r16"


def test_numbers_and_names_belong_to_one_type():
    rows, file_types = registry.all_types(), registry.all_ftypes()
    for keys in ([r.id for r in rows], [r.name.lower() for r in rows], [f.name.lower() for f in file_types]):
        assert not [key for key, n in Counter(keys).items() if n > 1]
    assert [row.id for row in rows] == sorted(row.id for row in rows)
    assert [row.id for row in file_types] == sorted(row.id for row in file_types)
    assert {row.base_type for row in file_types} <= {row.name for row in rows}


def test_table_matches_format_description():
    exceptions = {"i2_s", "bf16_r16"}  # counted in 128s and in column pairs
    for known in format_checks()["types"]:
        row = registry.by_id(known["id"])
        assert row.name == known["name"]
        assert row.row_extra_bytes == known["row_extra_bytes"]
        assert row.interleave == known["rows_interleaved"]
        if row.name not in exceptions:
            assert (row.block_elements, row.block_bytes) == (known["block_elems"], known["block_bytes"])


def test_file_types_match_format_description():
    enum_names = {known["enum"]: known["name"] for known in format_checks()["types"]}
    known_types = format_checks()["file_types"]
    for known in known_types:
        row = registry.ftype_by_name(known["cli"])
        assert row.id == known["id"]
        assert row.base_type == enum_names[known["base_type"]]
    selectable = {row.name for row in registry.all_ftypes() if row.selectable}
    assert selectable == {known["cli"] for known in known_types}
    for known in format_checks()["file_type_after_repack"]:
        assert registry.ftype_by_id(known["from_id"]).after_repack == known["to_id"]


def test_run_time_repack_map():
    enum_names = {known["enum"]: known["name"] for known in format_checks()["types"]}
    for known in format_checks()["run_time_repack"]:
        source, target = enum_names[known["plain"]], enum_names[known["repacked"]]
        assert registry.repack_target(source) == target
        assert (source, target) in PERMUTATIONS


def test_golden_row_sizes():
    for name in GOLDEN_TYPES:
        for variant in golden_variants(name):
            assert registry.by_name(name).row_nbytes(GOLDEN_SHAPE[0]) == golden(name)[f"q_{variant}"].shape[1]


@pytest.mark.parametrize(
    ("ftype", "shown"),
    [
        (0, "all F32"),
        (1, "F16"),
        (12, "Q3_K - Medium"),
        (15, "Q4_K - Medium"),
        (27, "IQ3_S mix - 3.66 bpw"),
        (136, "IQ1_BN - 1.625 bpw Bitnet"),
        (138, "IQ2_K - 2.375 bpw"),
        (214, "Q4_K_R4"),
        (219, "IQ2_XXS_R4 - 2.0625 bpw"),
        (9999, "unknown, may not work"),
    ],
)
def test_displayed_names(ftype, shown):
    assert registry.ftype_display_name(ftype) == shown
    assert registry.ftype_display_name(ftype, guessed=True) == f"{shown} (guessed)"


def test_lookups_and_errors():
    assert registry.by_name("Q4_K") is registry.by_name("q4_k") is registry.by_id(12)
    assert registry.by_name("Q4_0_4_8").id == 32
    assert registry.ftype_by_name("15").name == "Q4_K_M"
    with pytest.raises(UsageError, match="did you mean q4_K"):
        registry.by_name("q4_kk")
    with pytest.raises(UsageError, match="unknown file type 'Q1_0_G128'"):
        registry.ftype_by_name("Q1_0_G128")
    with pytest.raises(FileFormatError, match="unknown tensor type 4711"):
        registry.by_id(4711)
    with pytest.raises(FileFormatError, match="not a multiple of 256"):
        registry.by_name("q4_K").row_nbytes(255)
    with pytest.raises(FileFormatError, match="row group of type q4_k_r4"):
        registry.by_name("q4_k_r4").tensor_nbytes((256, 6, 2))
    with pytest.raises(FileFormatError, match="not a multiple of 2,"):
        registry.by_name("bf16_r16").row_nbytes(3)
    with pytest.raises(FileFormatError, match="takes 144 bytes, not 143"):
        dequantize(np.zeros(143, np.uint8), "q4_K", (256, 1))
    with pytest.raises(UnsupportedError, match="q8_1"):
        dequantize(np.zeros(36, np.uint8), "q8_1", (32, 1))


def test_i2_s_is_one_piece():
    row = registry.by_name("i2_s")
    assert row.tensor_nbytes((192, 2, 3)) == 192 * 6 // 4 + 32
    codes = np.arange(128, dtype=np.uint8) % 3
    quarters = codes.reshape(4, 32)
    packed = quarters[0] << 6 | quarters[1] << 4 | quarters[2] << 2 | quarters[3]
    tail = np.concatenate([np.array([0.5], "<f4").view(np.uint8), np.zeros(28, np.uint8)])
    values = dequantize(np.concatenate([packed, tail]), "i2_s", (64, 2))
    np.testing.assert_array_equal(values.reshape(-1), np.float32(0.5) * (codes.astype(np.float32) - 1))


@pytest.mark.parametrize("name", [n for n in GOLDEN_TYPES if n.lower() not in OTHER_FORMULA])
def test_dequantize_matches_recorded_floats(name):
    block = registry.by_name(name).block_elements
    for variant in golden_variants(name):
        actual = dequantize(golden(name)[f"q_{variant}"], name, GOLDEN_SHAPE)
        assert_same_bits(actual, golden(name)[f"dq_{variant}"], block, f"{name} {variant}")


@pytest.mark.parametrize("name", ["iq1_bn", "iq2_bn"])
def test_ternary_row_scale_is_applied(name):
    """The recorded floats ignore the header; the values must be -d, 0, d near the ternary input."""
    values = dequantize(golden(name)["q_plain"], name, GOLDEN_SHAPE)
    bytes_per_scale = registry.by_name(name).row_extra_bytes
    scale = golden(name)["q_plain"][:, :bytes_per_scale].copy().view("<f2" if bytes_per_scale == 2 else "<f4")
    assert set(np.unique(values / scale.astype(np.float32)).tolist()) == {-1.0, 0.0, 1.0}
    assert np.abs(values - golden("_inputs")["ternary"]).max() <= 1e-3 * np.abs(values).max()


def test_iq6_k_uses_the_table_not_the_polynomial():
    for variant in golden_variants("iq6_k"):
        raw = golden("iq6_k")[f"q_{variant}"]
        values = dequantize(raw, "iq6_k", GOLDEN_SHAPE)
        blocks = raw.reshape(16, 4, 212)
        d = blocks[..., :2].copy().view("<f2").astype(np.float32)
        unit = np.repeat(np.abs(d * blocks[..., 4:20].view(np.int8)), 16, axis=-1).reshape(16, 1024)
        assert (np.abs(values - golden("iq6_k")[f"dq_{variant}"]) <= 0.488 * unit + 1e-7).all()


@pytest.mark.parametrize("enum_name", sorted(format_checks()["decode_check"]))
def test_decode_self_check(enum_name):
    entry = format_checks()["decode_check"][enum_name]
    columns, rows = entry["cols"], entry["rows"]
    values = dequantize(check_bytes(entry), entry["id"], (columns, rows)).astype(np.float64)
    r, c = np.mgrid[0:rows, 0:columns]
    checksum = (values * ((131 * r + 7 * c + 3) % 251 - 125)).sum()
    for row, column, value in entry["samples"]:
        assert values[row, column] == pytest.approx(value, rel=1e-6), f"{enum_name} row {row} column {column}"
    assert abs(checksum - entry["checksum"]) <= 1e-6 * entry["abs_sum"]


@pytest.mark.parametrize("name", MAINLINE.split())
def test_mainline_types_match_the_gguf_package(name):
    row = registry.by_name(name)
    shape = (512, 8)
    data = random_tensor(row, shape, seed=row.id)
    expected = gguf.quants.dequantize(data.reshape(8, -1), gguf.GGMLQuantizationType(row.id))
    assert_same_bits(dequantize(data, name, shape), expected.astype(np.float32), row.block_elements, name)


@pytest.mark.parametrize("row", BLOCK_TYPES, ids=lambda t: t.name)
def test_every_bit_belongs_to_one_field(row):
    codec = codec_of(row.name)
    for layout in (codec.header, codec.block):
        used = np.zeros(8 * layout.nbytes, int)
        for field in layout.fields.values():
            for part in field.segments:
                for bit in range(part.width):
                    np.add.at(used, 8 * part.byte + part.shift + bit, 1)
        assert (used == 1).all(), f"{row.name}: bits {np.flatnonzero(used != 1)} used {used[used != 1]} times"


def test_three_dimensional_tensors_and_chunks():
    """Many matrices at once give the same rows as one at a time, in numpy order."""
    row = registry.by_name("iq4_ks_r4")
    shape = (2048, 8, 40)
    data = random_tensor(row, (2048, 320), seed=3)
    values = dequantize(data, row, shape)
    assert values.shape == (40, 8, 2048)
    per_matrix = len(data) // 40
    for matrix in (0, 17, 39):
        single = dequantize(data[matrix * per_matrix : (matrix + 1) * per_matrix], row, shape[:2])
        np.testing.assert_array_equal(values[matrix], single)


def test_empty_tensor():
    assert dequantize(np.zeros(0, np.uint8), "q4_K", (256, 0)).shape == (0, 256)


def test_trellis_generator_check_vectors():
    for seed, expected in format_checks()["kt_check_vectors"].items():
        assert generate(np.array([int(seed)]), len(expected)).tolist() == expected


@pytest.mark.parametrize(("name", "factor"), [("iq2_kt", 1.05), ("iq3_kt", 1.01), ("iq4_kt", 1.0)])
def test_compute_scale_factor(name, factor):
    assert registry.by_name(name).compute_scale_factor == factor
    raw = golden(name)["q_plain"]
    stored = dequantize(raw, name, GOLDEN_SHAPE)
    computed = dequantize(raw, name, GOLDEN_SHAPE, compute_scale=True)
    np.testing.assert_allclose(computed, stored * np.float32(factor), rtol=5e-7)


def test_ternary_byte_codes_round_trip():
    """Every base-3 code decodes to its own five digits."""
    codes = table("iq1bn_encode")[:, None]
    trits = (3 * ((codes * table("iq1bn_mult")) & 255)) >> 8
    np.testing.assert_array_equal((trits * 3 ** np.arange(5)).sum(axis=1), np.arange(243))


@pytest.mark.parametrize(("plain", "packed"), PACKINGS)
def test_repack_round_trip(plain, packed):
    source, target = registry.by_name(plain), registry.by_name(packed)
    shape = (512, 32)
    if plain in ("f16", "bf16"):
        halves = np.random.default_rng(1).normal(size=512 * 32).astype(np.float32)
        data = halves.astype("<f2").view(np.uint8) if plain == "f16" else halves.view("<u2")[1::2].copy()
        data = data.view(np.uint8)
    else:
        data = random_tensor(source, shape, seed=target.id)
        if plain == "q8_KV":  # the header's sum of the row is recomputed
            rows = data.reshape(32, -1)
            sums = rows[:, 8:].view(np.int8).sum(axis=1, dtype=np.int32)
            rows[:, 4:8] = sums.view(np.uint8).reshape(32, 4)
    there = repack(data, plain, packed, shape)
    values, expected = dequantize(there, packed, shape), dequantize(data, plain, shape)
    if plain == "q8_K":
        np.testing.assert_allclose(values, expected, rtol=1e-3, atol=2e-5)
    elif plain == "f16":
        truncated = (expected.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        np.testing.assert_array_equal(values, truncated)
    else:
        assert_same_bits(values, expected, target.block_elements, f"{plain} as {packed}")
        np.testing.assert_array_equal(repack(there, packed, plain, shape), data)


@pytest.mark.parametrize(("plain", "packed"), [p for p in PACKINGS if recorded(*p)])
def test_repack_matches_recorded_bytes(plain, packed):
    for variant in set(golden_variants(packed)) & set(golden_variants(plain)):
        actual = repack(golden(plain)[f"q_{variant}"], plain, packed, GOLDEN_SHAPE)
        expected = golden(packed)[f"q_{variant}"].reshape(-1)
        different = np.flatnonzero(actual != expected)
        assert not len(different), f"{plain} to {packed} {variant}: {len(different)} bytes, first {different[:8]}"


def test_bf16_r16_truncates():
    inputs = golden("_inputs")["base"]
    truncated = (inputs.view(np.uint32) >> 16).astype("<u2").view(np.uint8)
    actual = repack(truncated, "bf16", "bf16_r16", GOLDEN_SHAPE)
    np.testing.assert_array_equal(actual, golden("bf16_r16")["q_plain"].reshape(-1))


@pytest.mark.parametrize("enum_name", [n for n, e in format_checks()["decode_check"].items() if "plain_data" in e])
def test_repack_self_check(enum_name):
    entry = format_checks()["decode_check"][enum_name]
    target = registry.by_id(entry["id"])
    plain = "bf16" if target.name == "bf16_r16" else target.plain_partner
    shape = (entry["cols"], entry["rows"])
    packed, rows = check_bytes(entry), check_bytes(entry, "plain_data")
    np.testing.assert_array_equal(repack(rows, plain, target, shape), packed)
    np.testing.assert_array_equal(repack(packed, target, plain, shape), rows)


def test_repack_refuses_types_that_are_no_permutation():
    with pytest.raises(UsageError, match="iq1_s cannot be repacked to iq1_s_r4"):
        repack(np.zeros(200, np.uint8), "iq1_s", "iq1_s_r4", (256, 4))
    with pytest.raises(FileFormatError, match="6 rows"):
        repack(np.zeros(6 * 144, np.uint8), "q4_K", "q4_k_r4", (256, 6))


def test_arm_layouts_invert_the_nibble_sign():
    data = random_tensor(registry.by_name("q4_0"), (32, 8), seed=5)
    packed = repack(data, "q4_0", "q4_0_8x8", (32, 8))
    np.testing.assert_array_equal(packed[16:24], data.reshape(8, 18)[0, 2:10] ^ 0x88)
    np.testing.assert_array_equal(packed[24:32], data.reshape(8, 18)[1, 2:10] ^ 0x88)


def test_page_of_types_is_current():
    command = [sys.executable, "scripts/make_type_tables.py", "--check"]
    result = subprocess.run(command, check=False, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert result.returncode == 0, "run: python scripts/make_type_tables.py"
