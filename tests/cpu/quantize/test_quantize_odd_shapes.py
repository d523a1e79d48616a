"""`ikpy quantize` on tensors that types do not fit, files that tell little, and options that decide nothing."""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest

from ikpy.cli.quantize import run
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import dequantize, registry
from ikpy.tools import tensor_convert
from tests.cpu.quantize.quantize_models import types_of

F32, F16, BF16 = 0, 1, 30


def write(path, shapes, *, type_id=F16, meta=(), arch="llama"):
    """Random tensors by name (shapes in numpy order); returns the values."""
    rng = np.random.default_rng(7)
    values = {name: (rng.standard_normal(shape) * 0.1).astype(np.float16) for name, shape in shapes.items()}
    with GGUFWriter(str(path)) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, arch)
        writer.add(f"{arch}.block_count", GGUFValueType.UINT32, 2)
        for key, number in meta:
            writer.add(key, GGUFValueType.UINT32, number)
        for name, array in values.items():
            writer.add_tensor(name, array.shape[::-1], type_id)
        for name, array in values.items():
            floats = array.astype(np.float32)
            stored = {F32: floats, F16: array, BF16: (floats.view(np.uint32) >> 16).astype(np.uint16)}
            writer.write(name, stored[type_id])
    return values


def importances(tmp_path, name):
    """Path of an importance matrix of ones for 256 columns of a tensor."""
    key, path = name.encode(), tmp_path / "im.dat"
    ones = np.ones(256, "<f4").tobytes()
    path.write_bytes(struct.pack("<ii", 1, len(key)) + key + struct.pack("<ii", 1, 256) + ones)
    return str(path)


def quantized(tmp_path, capfd, *arguments):
    """Runs the tool from in.gguf to out.gguf; returns the types of the output and what was printed."""
    status = run([*arguments[:-1], str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), arguments[-1]])
    text = "".join(capfd.readouterr())
    assert status == 0, text
    return types_of(tmp_path / "out.gguf"), text


def dry_run(tmp_path, capfd, *arguments):
    """What a dry run prints."""
    assert run(["--dry-run", *arguments[:-1], str(tmp_path / "in.gguf"), arguments[-1]]) == 0
    return "".join(capfd.readouterr())


# types that do not fit


@pytest.mark.parametrize(
    ("n_vocab", "n_embd", "wanted", "made"),
    [
        (64, 256, "q4_k_r4", "q4_k_r4"),
        (66, 256, "q4_k_r4", "q4_K"),
        (66, 96, "q4_k_r4", "q5_0"),
        (64, 96, "iq3_k", "iq4_nl"),
        (66, 256, "q8_k_r16", "q8_0"),
    ],
)
def test_second_output_matrix_gets_a_type_that_fits(tmp_path, capfd, n_vocab, n_embd, wanted, made):
    values = write(tmp_path / "in.gguf", {"output.weight": (n_vocab, n_embd), "blk.0.attn_q.weight": (32, 256)})
    types, _ = quantized(tmp_path, capfd, "--extra-output-tensor", wanted, "Q8_0")
    assert types["output_extra.weight"] == made
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        info = file.tensors["output_extra.weight"]
        decoded = dequantize(file.data(info), made, info.shape).reshape(n_vocab, n_embd)
    error = float(np.abs(decoded - values["output.weight"].astype(np.float32)).max())
    assert error < 0.1, f"worst value is {error:.3f} off"


def test_second_output_matrix_has_the_importances_of_the_first(tmp_path, capfd):
    write(tmp_path / "in.gguf", {"output.weight": (64, 256)})
    options = ["--imatrix", importances(tmp_path, "output.weight"), "--extra-output-tensor", "iq2_xs"]
    types, text = quantized(tmp_path, capfd, *options, "Q8_0")
    assert types["output_extra.weight"] == "iq2_xs"
    assert "importance values for 2 of 2 converted tensors" in text


@pytest.mark.parametrize(
    ("option", "wanted", "made"),
    [("--token-embedding-type", "iq4_k_r4", "iq4_k"), ("--output-tensor-type", "q8_k_r8", "q8_0")],
)
def test_embeddings_are_never_interleaved(tmp_path, capfd, option, wanted, made):
    """Not even where an option asks for it: their rows are looked up one by one. The model is tied."""
    write(tmp_path / "in.gguf", {"token_embd.weight": (64, 256)})
    types, text = quantized(tmp_path, capfd, option, wanted, "Q4_K_S")
    assert types == {"token_embd.weight": made}
    assert f"---> Changed {wanted} to {made}" in text


def test_a_rule_for_a_tied_embedding_beats_the_type_of_the_output_matrix(tmp_path, capfd):
    """As in llama-quantize (ik-llama-cpp-python 0.1.5); the embedding's own option beats both."""
    write(tmp_path / "in.gguf", {"token_embd.weight": (64, 256)})
    options = ["--output-tensor-type", "q4_0", "--custom-q", "token_embd=q5_K"]
    types, text = quantized(tmp_path, capfd, *options, "Q8_0")
    assert types == {"token_embd.weight": "q5_K"}
    assert "--output-tensor-type has no effect" in text
    types, _ = quantized(tmp_path, capfd, *options, "--token-embedding-type", "q6_K", "Q8_0")
    assert types == {"token_embd.weight": "q6_K"}


@pytest.fixture
def native_bf16(monkeypatch):
    """As on a CPU that multiplies bf16: there F16 and BF16 are repacked."""
    monkeypatch.setattr(tensor_convert, "repack_target", registry.repack_target)
    monkeypatch.setattr("ikpy.tools.quantize_plan.repack_target", registry.repack_target)


def test_repacking_leaves_what_does_not_fit(tmp_path, capfd, native_bf16):
    shapes = {"odd.weight": (32, 33), "few.weight": (30, 64), "vector.weight": (64,), "fits.weight": (2, 32, 34)}
    shapes["blk.0.attn_compressor_ape.weight"] = (32, 34)  # read row by row
    values = write(tmp_path / "in.gguf", shapes, type_id=BF16)
    types, _ = quantized(tmp_path, capfd, "--repack", "COPY")
    assert types == {
        "odd.weight": "bf16",
        "few.weight": "bf16",
        "vector.weight": "bf16",
        "fits.weight": "bf16_r16",
        "blk.0.attn_compressor_ape.weight": "bf16",
    }
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        for name, info in file.tensors.items():
            decoded = dequantize(file.data(info), types[name], info.shape).reshape(shapes[name])
            assert np.abs(decoded - values[name].astype(np.float32)).max() < 2e-3, name


def test_bf16_r16_needs_pairs_of_columns(tmp_path, capfd):
    write(tmp_path / "in.gguf", {"odd.weight": (32, 33), "fits.weight": (32, 34), "few.weight": (30, 34)}, type_id=F32)
    types, _ = quantized(tmp_path, capfd, "BF16_R16")
    assert types == {"odd.weight": "bf16", "fits.weight": "bf16_r16", "few.weight": "bf16"}


def test_what_helps_where_no_type_fits_is_said(tmp_path, capfd):
    write(tmp_path / "in.gguf", {"blk.0.conv.weight": (32, 16, 4), "blk.0.attn_q.weight": (32, 256)})
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 1
    err = capfd.readouterr().err
    assert "Unsupported tensor size encountered: rows of blk.0.conv.weight have 4 values" in err
    assert "such as f16, for it with --tensor-type" in err
    types, _ = quantized(tmp_path, capfd, "--tensor-type", "conv=f16", "Q4_K_S")
    assert types == {"blk.0.conv.weight": "f16", "blk.0.attn_q.weight": "q4_K"}


BY_RULE = "leave it out and name another type, such as f16, for it with --tensor-type"


@pytest.mark.parametrize(
    ("name", "options", "helps"),
    [
        ("blk.0.conv", ["--pure"], f"q4_K nor a substitute; --pure uses no rules: {BY_RULE}"),
        (
            "token_embd",
            ["--pure"],
            "q4_K nor a substitute; name another type, such as f16, with --token-embedding-type",
        ),
        ("output", ["--output-tensor-type", "q6_K"], "name another type, such as f16, with --output-tensor-type"),
        (
            "output",
            ["--output-tensor-type", "f16", "--extra-output-tensor", "q6_K"],
            "name another type, such as f16, with --extra-output-tensor",
        ),
    ],
)
def test_what_helps_is_an_option_that_has_an_effect(tmp_path, capfd, name, options, helps):
    shapes = {"token_embd.weight": (32, 256), "output.weight": (32, 256), f"{name}.weight": (32, 36)}
    write(tmp_path / "in.gguf", shapes)
    assert run([*options, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 1
    assert f"{helps}\n" in capfd.readouterr().err


# files that do not tell their type


@pytest.mark.parametrize(
    ("made_as", "kept", "repacked"),
    [("Q4_K_S", 15, 214), ("Q3_K_S", 12, 211), ("IQ3_S", 26, 226), ("Q8_0", 7, 207), ("F16", 1, 1)],
)
def test_copies_of_files_without_a_type_get_that_of_most_tensors(tmp_path, capfd, made_as, kept, repacked):
    write(tmp_path / "in.gguf", {f"blk.{i}.attn_q.weight": (32, 256) for i in range(2)})
    quantized(tmp_path, capfd, "--pure", made_as)
    with GGUFFile.open(tmp_path / "out.gguf") as file, GGUFWriter(str(tmp_path / "in.gguf")) as writer:
        writer.copy_metadata(file, skip=("general.file_type",))
        for name, info in file.tensors.items():
            writer.add_tensor(name, info.shape, info.type_id)
        for name, info in file.tensors.items():
            writer.write(name, file.data(info))
    quantized(tmp_path, capfd, "COPY")
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert file.metadata["general.file_type"] == kept
    if repacked != kept:
        _, text = quantized(tmp_path, capfd, "--repack", made_as)
        shown = [registry.ftype_display_name(number) for number in (kept, repacked)]
        assert f"===================== Model ftype: {shown[0]} (guessed): Repacked ftype: {shown[1]}" in text
        with GGUFFile.open(tmp_path / "out.gguf") as file:
            assert file.metadata["general.file_type"] == repacked


# options that decide nothing

DENSE = {f"blk.{i}.{kind}.weight": (64, 256) for i in range(2) for kind in ("attn_qkv", "attn_output", "ffn_up")}


def idle(text):
    """Options that a run calls idle."""
    return re.findall(r"WARNING: (--\S+) has no effect", text)


@pytest.mark.parametrize(
    ("options", "ftype", "expected"),
    [
        (["--attn-q-type", "q6_K", "--ffn-up-type", "q5_K"], "Q4_K_S", []),
        (["--attn-k-type", "q6_K"], "Q4_K_S", ["--attn-k-type"]),
        (["--attn-q-type", "q6_K", "--attn-output-type", "q6_K"], "IQ2_XS", ["--attn-q-type"]),
        (["--attn-q-type", "q6_K"], "F32", ["--attn-q-type"]),
        (["--pure", "--ffn-up-type", "q6_K"], "Q4_K_S", ["--ffn-up-type"]),
        (["--ffn-gate-inp-type", "q8_0", "--output-tensor-type", "q6_K"], "Q4_K_S",
         ["--output-tensor-type", "--ffn-gate-inp-type"]),
        (["--custom-q", "ffn_up=q8_0", "--ffn-up-type", "q6_K"], "Q4_K_S", ["--ffn-up-type"]),
        (["--symmetric-q40"], "Q4_0", []),
        (["--symmetric-q40", "--keep-split"], "Q4_0_R8", ["--symmetric-q40", "--keep-split"]),
    ],
)  # fmt: skip
def test_options_for_roles_without_effect_are_named(tmp_path, capfd, options, ftype, expected):
    write(tmp_path / "in.gguf", DENSE)
    text = dry_run(tmp_path, capfd, "--ignore-imatrix-rules", *options, ftype)
    assert idle(text) == expected
    helps = any(option.endswith("-type") for option in expected) and "--pure" not in options and ftype != "F32"
    assert ("--custom-q can name any tensor" in text) == helps


def test_option_of_fused_attention_matrices(tmp_path, capfd):
    write(tmp_path / "in.gguf", DENSE)
    for options, made in (
        (["--attn-qkv-type", "q6_K"], "q6_K"),
        (["--attn-q-type", "q5_K"], "q5_K"),
        (["--attn-qkv-type", "q6_K", "--attn-q-type", "q5_K"], "q6_K"),
    ):
        types, text = quantized(tmp_path, capfd, *options, "Q4_K_S")
        assert types["blk.0.attn_qkv.weight"] == types["blk.1.attn_qkv.weight"] == made
        assert types["blk.0.ffn_up.weight"] == "q4_K"
        assert idle(text) == (["--attn-q-type"] if len(options) > 2 else [])


@pytest.mark.parametrize(
    ("options", "ftype", "expected"),
    [
        (["--output-tensor-type", "q8_0"], "COPY", "--output-tensor-type (COPY keeps every tensor as it is)"),
        (["--repack", "--extra-output-tensor", "q8_0"], "Q8_0",
         "--extra-output-tensor (--repack changes the row layout only)"),
    ],
)  # fmt: skip
def test_options_of_copies(tmp_path, capfd, options, ftype, expected):
    write(tmp_path / "in.gguf", {"output.weight": (64, 256)})
    text = dry_run(tmp_path, capfd, *options, ftype)
    assert f"WARNING: no effect: {expected}\n" in text
    assert "Will duplicate" not in text


def test_filters_that_leave_no_importance_values(tmp_path, capfd):
    write(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": (64, 256)})
    options = ["--imatrix", importances(tmp_path, "blk.0.ffn_up.weight"), "--include-weights", "attn"]
    _, text = quantized(tmp_path, capfd, *options, "IQ4_K")
    assert "WARNING: --include-weights leaves no entry; going on without an importance matrix" in text
    assert "one of another model" not in text
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert not [key for key in file.metadata if key.startswith("quantize.imatrix")]
    assert run([*options, str(tmp_path / "in.gguf"), str(tmp_path / "x.gguf"), "IQ2_XS"]) == 1
    assert "Please do not use IQ1_S" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--custom-q=attn=q8_0", "a", "b", "Q4_0"], "the value is a word of its own: --custom-q attn=q8_0"),
        (["--pure=1", "a", "b", "Q4_0"], "did you mean --pure?"),
        (["--custom-q", "none.txt", "a", "b", "Q4_0"], "expected REGEX=TYPE or the name of a file of rules"),
        (["--custom-q", "attn=q8", "a", "b", "Q4_0"], "did you mean q8_0?"),
    ],
)
def test_mistakes_are_answered_with_what_to_write(arguments, message, capfd):
    assert run(arguments) == 1
    assert capfd.readouterr().err.rstrip().endswith(message)


def test_nothing_to_convert_is_said(tmp_path, capfd):
    write(tmp_path / "in.gguf", {"blk.0.attn_q.weight": (32, 256), "blk.0.attn_norm.weight": (256,)})
    assert "WARNING: no tensor is converted" in dry_run(tmp_path, capfd, "F16")
    assert "WARNING: no tensor is converted" not in dry_run(tmp_path, capfd, "Q8_0")
    assert "WARNING: no tensor is converted" not in dry_run(tmp_path, capfd, "COPY")


def test_an_importance_matrix_is_no_model(tmp_path, capfd):
    with GGUFWriter(str(tmp_path / "in.gguf")) as writer:
        writer.add("general.type", GGUFValueType.STRING, "imatrix")
        writer.add_tensor("blk.0.attn_q.weight.in_sum2", (256, 1), F32)
        writer.write("blk.0.attn_q.weight.in_sum2", np.ones((1, 256), np.float32))
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0"]) == 1
    assert "this is no model but an importance matrix; give it with --imatrix" in capfd.readouterr().err
    assert not (tmp_path / "out.gguf").exists()


def test_no_input_is_overwritten(tmp_path, capfd):
    write(tmp_path / "in.gguf", {"blk.0.ffn_up.weight": (64, 256)})
    name = b"blk.0.ffn_up.weight"
    data = struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii", 1, 256) + np.ones(256, "<f4").tobytes()
    (tmp_path / "im.dat").write_bytes(data)
    (tmp_path / "link.gguf").symlink_to("im.dat")
    before = (tmp_path / "in.gguf").read_bytes()
    source, matrix, link, other = (str(tmp_path / name) for name in ("in.gguf", "im.dat", "link.gguf", "o.gguf"))
    for output, recipe, message in (
        (link, "", "link.gguf is the importance matrix; give another output name"),
        (other, matrix, "im.dat is the importance matrix"),
        (other, source, "in.gguf is the input"),
    ):
        options = ["--imatrix", matrix, *(["--save-recipe", recipe, "--dry-run"] if recipe else [])]
        assert run([*options, source, output, "Q4_0"]) == 1
        assert message in capfd.readouterr().err
    assert (tmp_path / "im.dat").read_bytes() == data and (tmp_path / "in.gguf").read_bytes() == before
