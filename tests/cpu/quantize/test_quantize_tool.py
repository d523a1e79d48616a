"""`ikpy quantize` end to end: recorded console lines and files, splits, interrupted and wrong use."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import struct
import subprocess
import sys

import numpy as np
import pytest

from ikpy._native import core
from ikpy.cli.quantize import run
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.quants import dequantize, registry
from ikpy.tools.quantize_progress import PlainDisplay, display_for
from tests.cpu.quantize.imatrices import write_gguf
from tests.cpu.quantize.quantize_models import MODEL, small_tensors, write_model
from tests.shared import DATA

CASES = json.loads((DATA / "quantize" / "cases.json").read_text())
RECORDED = json.loads((DATA / "quantize" / "dry-run.json").read_text())
# Files that later cases read, and the cases that make them.
MADE_BY = {"Q4KM.gguf": "q4_k_m", "Q80.gguf": "q8_0", "IQ4K.gguf": "iq4_k", "OUT3.gguf": "repack"}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with the model, an importance matrix, and outputs of earlier cases."""
    folder = tmp_path_factory.mktemp("quantize")
    (folder / "MODEL").symlink_to(MODEL)
    rng = np.random.default_rng(5)
    data = struct.pack("<i", len(RECORDED["imatrix"]))
    for name, n in RECORDED["imatrix"].items():
        values = rng.gamma(1.0, 1.0, n).astype("<f4")
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, n) + values.tobytes()
    (folder / "IMATRIX.dat").write_bytes(data + struct.pack("<ii", 4, 4) + b"WIKI")
    return folder


def run_case(name, folder, monkeypatch, capfd):
    """Run a recorded command, making the files it reads first; returns status, out and err."""
    monkeypatch.chdir(folder)
    arguments = shlex.split(CASES[name]["args"])[1:]
    for needed, maker in MADE_BY.items():
        if needed in arguments and CASES[name]["file"].get("name") != needed and not (folder / needed).exists():
            run_case(maker, folder, monkeypatch, capfd)
    capfd.readouterr()
    status = run(arguments)
    out, err = capfd.readouterr()
    return status, out, err


def without_noise(lines):
    """Lines without build, metadata dump and times."""
    skipped = ("main: build", "main: built", "llama_model_loader: - kv")
    return [re.sub(r"time = .*", "time", line) for line in lines if not line.startswith(skipped)]


def subset_in_order(expected, actual):
    """First expected line that is missing from `actual` (in order), or None."""
    remaining = iter(actual)
    return next((line for line in expected if not any(line == other for other in remaining)), None)


@pytest.mark.parametrize("name", CASES)
def test_recorded_cases(name, workplace, monkeypatch, capfd):
    case = CASES[name]
    status, out, err = run_case(name, workplace, monkeypatch, capfd)
    assert status == int(case["exit"].split()[1]), err
    expected = [line.split(" is disabled")[0] for line in case["err"]]
    missing = subset_in_order(expected, [line.split(" is disabled")[0] for line in without_noise(err.splitlines())])
    assert missing is None, f"line not printed: {missing}"
    missing = subset_in_order(without_noise(case["out"]), without_noise(out.splitlines()))
    assert missing is None, f"line not printed: {missing}"
    if case["file"]:
        check_file(workplace / case["file"]["name"], case["file"])


def check_file(path, recorded):
    with GGUFFile.open(path) as file:
        for key, kind, value in recorded["kv"]:
            # As overridden there, in i32, no reader takes the file.
            kinds = [GGUFValueType(kind)] + [GGUFValueType.UINT32] * (key == "deepseek2.expert_used_count")
            assert file.value_type(key) == kinds[-1], key
            assert file.metadata[key] == pytest.approx(value), key
        assert [key for key, _, _ in recorded["kv"]] == [k for k in file.metadata if file.element_type(k) is None]
        assert len(file.tensors) == len(recorded["tensors"])
        start = min(info.offset for info in file.tensors.values())
        for name, shape, type_id, offset, digest in recorded["tensors"]:
            info = file.tensors[name]
            assert (list(info.shape), info.type_id, info.offset - start) == (shape, type_id, offset), name
            if digest:
                padding = -info.nbytes % file.alignment
                data = file.data(info).tobytes() + bytes(padding)
                assert hashlib.sha256(data).hexdigest() == digest, f"{name}: other bytes than recorded"


@pytest.fixture
def tensors():
    return small_tensors()


def test_values_survive_and_threads_agree(tmp_path, tensors):
    write_model(tmp_path / "in.gguf", tensors)
    for threads in ("1", "2"):
        assert run(["--pure", str(tmp_path / "in.gguf"), str(tmp_path / f"out{threads}.gguf"), "Q6_K", threads]) == 0
    assert (tmp_path / "out1.gguf").read_bytes() == (tmp_path / "out2.gguf").read_bytes()
    with GGUFFile.open(tmp_path / "out1.gguf") as file:
        for name, values in tensors.items():
            info = file.tensors[name]
            decoded = dequantize(file.data(info), info.type_id, info.shape)
            assert decoded.shape == values.shape
            assert np.abs(decoded - values).max() < 0.02, name


def test_split_models(tmp_path, tensors):
    write_model(tmp_path / "in", tensors, limit=1)
    first = str(tmp_path / "in-00001-of-00003.gguf")
    for name in ("out", "out.gguf", "out-00001-of-00003.gguf"):
        assert run(["--keep-split", first, str(tmp_path / "new" / name), "Q8_0"]) == 0
    shards = sorted(p.name for p in (tmp_path / "new").iterdir())
    assert shards == [f"out-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    with GGUFFile.open(tmp_path / "new" / shards[0]) as file:
        assert list(file.tensors) == list(tensors)
        assert file.metadata["split.count"] == 3
        assert file.metadata["general.file_type"] == 7
    assert run([first, str(tmp_path / "one.gguf"), "Q8_0"]) == 0
    with GGUFFile.open(tmp_path / "one.gguf") as file:
        assert "split.count" not in file.metadata
        assert list(file.tensors) == list(tensors)


def test_partial_requant_keeps_existing_files(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    target = tmp_path / "out.gguf"
    target.write_bytes(b"made before")
    assert run(["--partial-requant", str(tmp_path / "in.gguf"), str(target), "Q8_0"]) == 0
    assert target.read_bytes() == b"made before"
    assert f"output file {target} exists, skipping" in capfd.readouterr().err


def test_damaged_values_are_named_and_nothing_is_written(tmp_path, tensors, capfd):
    tensors["blk.0.ffn_up.weight"][41, 7] = np.nan
    write_model(tmp_path / "in.gguf", tensors)
    target = tmp_path / "out.gguf"
    target.write_bytes(b"old")
    assert run([str(tmp_path / "in.gguf"), str(target), "Q4_K_S"]) == 1
    assert "row 41 of tensor blk.0.ffn_up.weight contains NaN" in capfd.readouterr().err
    assert target.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf", "out.gguf"]


def test_what_follows_the_number_of_threads_is_named_and_ignored(tmp_path, tensors, capfd):
    """As in the recorded llama-quantize-trailing-argument."""
    write_model(tmp_path / "in.gguf", tensors)
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0", "2", "extra", "more"]) == 0
    err = capfd.readouterr().err
    assert "WARNING: no effect: extra more (nothing follows NTHREADS)\n" in err
    assert "as Q4_0 using 2 threads\n" in err
    assert (tmp_path / "out.gguf").exists()


def test_symmetric_q4_0_uses_fifteen_levels(tmp_path, tensors):
    write_model(tmp_path / "in.gguf", tensors)
    assert run(["--pure", "--symmetric-q40", str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_0"]) == 0
    assert run(["--pure", str(tmp_path / "in.gguf"), str(tmp_path / "plain.gguf"), "Q4_0"]) == 0
    assert (tmp_path / "out.gguf").stat().st_size == (tmp_path / "plain.gguf").stat().st_size
    checked = 0
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        for name, info in file.tensors.items():
            if registry.by_id(info.type_id).name != "q4_0":
                continue
            blocks = file.data(info).reshape(-1, 18)
            levels = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
            assert (levels.min(), levels.max()) == (1, 15), name
            checked += 1
    assert checked > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in.gguf"], "INPUT and TYPE are needed"),
        (["--nope", "in.gguf", "Q4_0"], "unknown option --nope"),
        (["in.gguf", "out.gguf"], "main: missing ftype"),
        (["in.gguf", "out.gguf", "Q9_Z"], "main: invalid ftype 'Q9_Z'"),
        (["in.gguf", "out.gguf", "Q4_0", "two"], "main: invalid nthread 'two'"),
        (["in.gguf", "out.gguf", "Q4_0", "two", "more"], "main: invalid nthread 'two'"),
        (["in.gguf", "out.gguf", "Q4_0", "-imatrix", "x.dat"], "unknown option -imatrix; options of this tool begin"),
        (["--output-tensor-type", "zzz", "in.gguf", "out.gguf", "Q4_0"], "unknown tensor type 'zzz'"),
        (["--override-kv", "general.name", "in.gguf", "Q8_0"], "malformed KV override 'general.name'"),
        (["--include-weights", "a", "--exclude-weights", "b", "in.gguf", "Q8_0"], "cannot be given together"),
        (["in.gguf", "out.gguf", "IQ2_XXS"], "Please do not use IQ1_S"),
        (["none.gguf", "out.gguf", "Q8_0"], "failed to load model from none.gguf"),
        (["in.gguf", "in.gguf", "Q8_0"], "is the input"),
        (["in.gguf", "new/", "Q8_0"], "new/ is a folder; name a file"),
        (["in.gguf", "/dev/null", "Q8_0"], "/dev/null: this is no regular file"),
        (["--imatrix", "none.dat", "in.gguf", "Q8_0"], "load_imatrix: failed to open none.dat"),
        (["--leave-output-tensor", "--pure", "in.gguf", "out.gguf", "IQ1_BN"], ""),
    ],
)
def test_wrong_use(tmp_path, tensors, monkeypatch, capfd, arguments, message):
    write_model(tmp_path / "in.gguf", tensors)
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == (1 if message else 0)
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "idle"),
    [
        (["--repack-pattern", "ffn"], ["--repack-pattern (it needs --repack)"]),
        (["--repack", "--repack-pattern", "ffn"], []),
        (["--repack", "--attn-q-type", "q8_0"], ["--attn-q-type (--repack changes the row layout only)"]),
        (["--exclude-weights", "a", "--hide-imatrix"], ["--exclude-weights (it needs --imatrix)",
                                                       "--hide-imatrix (it needs --imatrix)"]),
        (["--repack", "--imatrix", "x.dat"], ["--imatrix (--repack changes the row layout only)"]),
        (["--imatrix", "x.dat", "--include-weights", "a", "--hide-imatrix"], []),
        (["--slow-iq2ks"], ["--slow-iq2ks (the IQ2_KS search is always the thorough one)"]),
    ],
)  # fmt: skip
def test_options_without_their_partner_are_named(arguments, idle, capfd):
    run([*arguments, "none.gguf", "Q4_0"])
    lines = capfd.readouterr().err.splitlines()
    assert [line.removeprefix("WARNING: no effect: ") for line in lines if "no effect" in line] == idle


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["in.gguf", "out.gguf", "q4km"], "main: invalid ftype 'q4km' (did you mean Q4_K_M, "),
        (["in.gguf", "out.gguf", "Q1_0_G128"], "main: invalid ftype 'Q1_0_G128' (did you mean Q8_0_R8, "),
        (
            ["--custom-q", "ffn=iq4kss", "in.gguf", "Q4_0"],
            "custom quantization input ffn=iq4kss; did you mean iq4_kss, ",
        ),
        (["--custom-q", "ffn(=q4_K", "in.gguf", "Q4_0"], "regular expression of custom rule ffn(=q4_K is invalid: "),
        (["--dryrun", "in.gguf", "Q4_0"], "unknown option --dryrun; did you mean --dry-run?"),
    ],
)
def test_mistake_is_the_last_of_few_lines(arguments, message):
    command = [sys.executable, "-m", "ikpy", "quantize", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert len(lines) == 3
    assert "ikpy quantize --help" in lines[1]
    assert message in lines[2]


def test_help_lists_file_types_and_tensor_types(capfd):
    assert run(["--help"]) == 0
    file_types, tensor_types = capfd.readouterr().out.split("Tensor types:")
    assert "IQ4_KSS" in file_types
    assert {"f16", "iq4_kss", "q8_k_r16"} <= set(tensor_types.replace(",", " ").split())
    assert "q8_1" not in tensor_types


def imatrix_bytes(name, values):
    data = struct.pack("<ii", 1, len(name)) + name.encode() + struct.pack("<ii", 1, len(values))
    return data + np.array(values, "<f4").tobytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--tensor-type", "ffn", "Q4_K_S"],
            "--tensor-type: expected REGEX=TYPE, got 'ffn'",
        ),
        (["--tensor-type", "ffn(=q4_k", "Q4_K_S"], "--tensor-type: regular expression of custom rule"),
        (["--tensor-type-file", "none.txt", "Q4_K_S"], "--tensor-type-file none.txt: No such file or directory"),
        (
            ["--custom-q", "ffn=q9_k", "Q4_K_S"],
            "Invalid quantization type 'q9_k' in custom quantization input ffn=q9_k",
        ),
        (["--custom-q", "ffn(=q4_K", "Q4_K_S"], "regular expression of custom rule ffn(=q4_K is invalid: "),
        (["--custom-q", "no-such-file.txt", "Q4_K_S"], "Invalid custom quantization input no-such-file.txt"),
        (["--custom-q", "ffn=q8_1", "Q4_K_S"], "cannot be stored in a file"),
        (["--repack-pattern", "a(", "--repack", "Q4_K_S"], "invalid regular expression a( in --repack-pattern"),
        (
            ["--imatrix", "other.dat", "Q4_K_S"],
            "imatrix size 128 is different from tensor size 256 for blk.0.ffn_up.weight",
        ),
        (["--imatrix", "cut.dat", "Q4_K_S"], "load_imatrix: failed reading data for entry 1 from cut.dat"),
        (["--imatrix", "empty.dat", "Q4_K_S"], "load_imatrix: no data in file"),
        (
            ["--imatrix", "nan.dat", "Q4_K_S"],
            "load_imatrix: values of entry blk.0.ffn_up.weight in nan.dat are not finite",
        ),
        (["--imatrix", "in.gguf", "Q4_K_S"], "in.gguf is a GGUF file but not an importance matrix"),
        (["--attn-q-type", "x", "Q4_K_S"], "--attn-q-type: unknown tensor type 'x'"),
    ],
)
def test_bad_inputs_give_one_line(tmp_path, tensors, monkeypatch, capfd, arguments, message):
    """One line says what is wrong; the line after a failed run names the input, as in llama-quantize."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "in.gguf", tensors)
    whole = imatrix_bytes("blk.0.ffn_up.weight", [1.0] * 256)
    (tmp_path / "cut.dat").write_bytes(whole[:-9])
    (tmp_path / "other.dat").write_bytes(imatrix_bytes("blk.0.ffn_up.weight", [1.0] * 128))
    (tmp_path / "nan.dat").write_bytes(imatrix_bytes("blk.0.ffn_up.weight", [np.nan] * 256))
    (tmp_path / "empty.dat").write_bytes(b"")
    *options, ftype = arguments
    assert run([*options, "in.gguf", "out.gguf", ftype]) == 1
    skipped = ("main: build", "main: built", "main: quant", "main: failed", "llama_model_loader", "=====")
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith(skipped)]
    # Tensors decided before the one that cannot be done are listed.
    lines = [line for line in lines if not line.startswith(("[", "converting")) and line]
    assert len(lines) == 1, lines
    assert message in lines[0]
    assert not (tmp_path / "out.gguf").exists()


def test_experts_without_data_are_named_and_refused(tmp_path, tensors, capfd):
    """An entry that saw no tokens does not lift the refusal of types that need one."""
    write_model(tmp_path / "in.gguf", tensors)
    name = "blk.1.ffn_up_exps.weight"
    ones = np.ones((3, 256))
    dense = {"blk.0.ffn_up.weight": (ones[:1], [1])}
    arguments = ["--imatrix", str(tmp_path / "i.gguf"), str(tmp_path / "in.gguf"), str(tmp_path / "o.gguf"), "IQ2_XXS"]
    write_gguf(tmp_path / "i.gguf", {**dense, name: (0 * ones, [0, 0, 0])})
    assert run(arguments) == 1
    out, err = capfd.readouterr()
    assert "prepare_imatrix: have 1 importance matrix entries" in out
    assert f"WARNING: {name} of the importance matrix saw no tokens and counts as without data\n" in err
    assert f"Missing importance matrix for tensor {name} in a very low-bit quantization" in err
    write_gguf(tmp_path / "i.gguf", {**dense, name: (ones, [0, 2, 0])})
    assert run(arguments) == 0
    assert f"WARNING: 2 of 3 experts of {name} have no data in the importance matrix;" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["attn_k_b", "attn_v_b", "attn_kv_b", "attn_output_a"])
@pytest.mark.parametrize(("shape", "n_values"), [((4, 8, 256), 256), ((32, 256), 4 * 256)])
def test_importance_of_latent_attention_fits_both_layouts(tmp_path, capfd, kind, shape, n_values):
    """Values per head for a file with all heads in one matrix are averaged, values of one matrix serve every head."""
    name = f"blk.0.{kind}.weight"
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    write_model(tmp_path / "in.gguf", {name: values})
    weights = np.random.default_rng(2).gamma(0.3, 1.0, n_values).astype(np.float32)
    (tmp_path / "i.dat").write_bytes(imatrix_bytes(name, weights))
    arguments = ["--imatrix", str(tmp_path / "i.dat"), "--pure", str(tmp_path / "in.gguf"), str(tmp_path / "o.gguf")]
    assert run([*arguments, "IQ3_K"]) == 0
    mean = weights.reshape(-1, 256).mean(axis=0)
    expected = core.quantize(values.reshape(-1, 256), registry.by_name("iq3_k").id, mean, 1)
    with GGUFFile.open(tmp_path / "o.gguf") as file:
        assert np.array_equal(file.data(file.tensors[name]), expected)
    # Another number of heads is another model.
    (tmp_path / "i.dat").write_bytes(imatrix_bytes(name, np.ones(257 if len(shape) < 3 else 3 * 256)))
    assert run([*arguments, "IQ3_K"]) == 1
    assert "the importance matrix belongs to another model" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("names", "text", "warned"),
    [
        (["blk.0.ffn_up.weight", "blk.1.ffn_up_exps.weight"], "2 of 3 converted tensors; none for token_embd", 0),
        (["blk.0.ffn_up.weight"], "1 of 3 converted tensors; none for token_embd.weight, blk.1.ffn_up_exps.weight", 0),
        (["blk.7.ffn_up.weight"], "0 of 3 converted tensors; none for token_embd.weight, blk.0.ffn_up.weight, ", 1),
    ],
)
def test_tensors_without_importance_are_counted(tmp_path, tensors, capfd, names, text, warned):
    """One of another model would else go unnoticed but for a line per tensor."""
    write_model(tmp_path / "in.gguf", tensors)
    data = struct.pack("<i", len(names))
    for name in names:
        n = 256 * (3 if "exps" in name else 1)
        data += imatrix_bytes(name, [1.0] * n)[4:]
    (tmp_path / "i.dat").write_bytes(data)
    for dry in ([], ["--dry-run"]):
        arguments = ["--imatrix", str(tmp_path / "i.dat"), *dry, str(tmp_path / "in.gguf"), str(tmp_path / "o.gguf")]
        assert run([*arguments, "Q4_K_S"]) == 0
        err = capfd.readouterr().err
        assert f"importance values for {text}" in err
        assert err.count("WARNING: the importance matrix has values for none of the converted tensors") == warned


def test_order_of_new_header_keys(tmp_path, tensors, capfd):
    """That of the reference: version, overrides, importance matrix, file type."""
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "i.dat").write_bytes(imatrix_bytes("blk.0.ffn_up.weight", [1.0] * 256))
    arguments = ["--imatrix", str(tmp_path / "i.dat"), "--override-kv", "a.b=int:3"]
    assert run([*arguments, str(tmp_path / "in.gguf"), str(tmp_path / "o.gguf"), "Q4_0"]) == 0
    with GGUFFile.open(tmp_path / "o.gguf") as file:
        added = list(file.metadata)[2:]
        assert file.metadata["general.file_type"] == 2
    assert added == [
        "general.quantization_version",
        "a.b",
        "quantize.imatrix.file",
        "quantize.imatrix.entries_count",
        "general.file_type",
    ]


def test_the_need_of_an_importance_matrix_stands_between_lines(capfd):
    assert run(["in.gguf", "out.gguf", "IQ2_XXS"]) == 1
    lines = capfd.readouterr().err.strip().split("\n")
    assert [set(lines[0]), lines[1].split()[:4], set(lines[2])] == [{"="}, ["Please", "do", "not", "use"], {"="}]


def test_names_of_files_may_be_no_text(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    imatrix = os.fsdecode(os.fsencode(tmp_path) + b"/i\xfc.dat")
    with open(imatrix, "wb") as file:
        file.write(imatrix_bytes("blk.0.ffn_up.weight", [1.0] * 256))
    assert run(["--imatrix", imatrix, str(tmp_path / "in.gguf"), str(tmp_path / "o.gguf"), "Q4_0"]) == 0
    with GGUFFile.open(tmp_path / "o.gguf") as file:
        assert file.metadata["quantize.imatrix.file"] == str(tmp_path / "i.dat")


def test_names_of_tensors_steer_no_terminal(tmp_path, tensors, capfd):
    name = "blk.0.\x1b[31mffn\n_up\x9b.weight"
    tensors[name] = tensors.pop("blk.0.ffn_up.weight")
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "i.dat").write_bytes(imatrix_bytes("blk.1.ffn_up_exps.weight", [1.0] * 768))
    arguments = ["--imatrix", str(tmp_path / "i.dat"), "--custom-q", "31mffn=q4_0", str(tmp_path / "in.gguf")]
    for more in ([], ["--target-bpw", "6", "--dry-run"]):
        assert run([*more, *arguments, str(tmp_path / "out.gguf"), "Q4_0"]) == 0
        out, err = capfd.readouterr()
        shown = r"blk.0.\x1b[31mffn\n_up\x9b.weight"
        assert f"] {shown:>36} - [" in err
        assert f"did not find weights for {shown}\n" in err
        assert f"Using custom type q4_0 for tensor {shown}\n" in err
        assert f"none for token_embd.weight, {shown}\n" in err or f"none for {shown}" in err
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out + err)


def test_infinite_values_in_experts_and_copied_tensors(tmp_path, tensors, capfd):
    tensors["blk.1.ffn_up_exps.weight"][2, 5, 0] = np.inf
    write_model(tmp_path / "in.gguf", tensors)
    for ftype in ("Q4_K_S", "COPY"):
        assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), ftype]) == 1
        err = capfd.readouterr().err
        assert "row 69 of tensor blk.1.ffn_up_exps.weight contains infinite values; the input is damaged" in err
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


# progress


def test_plain_progress_has_share_rate_and_time():
    now, lines = [0.0], []
    display = PlainDisplay(lines.append, interval=10, clock=lambda: now[0])
    display.begin("quantizing", 1000 << 20, 200 << 20)
    for seconds in (4, 8, 12, 16, 24):
        now[0] = seconds
        display.advance(20 << 20)
        display.between_lines()
    assert lines == [
        "quantizing: 26.0% done, 5.0 MiB/s, 0:02:28 left\n",
        "quantizing: 30.0% done, 4.2 MiB/s, 0:02:48 left\n",
    ]


def test_terminal_progress_keeps_the_lines_whole():
    """On a terminal a bar is drawn below; the tensor lines come out complete and without colour."""
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        display = display_for(terminal)
        display.begin("quantizing", 100)
        display.write("[   1/   2] blk.0.x[red].weight, converting to q4_0 .. ")
        display.advance(50)
        display.write("size = 1.0 MiB\nnext ")
        display.end()
        display.write("line\n")
    shown = b""
    while chunk := read_terminal(master):
        shown += chunk
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    assert "[   1/   2] blk.0.x[red].weight, converting to q4_0 .. size = 1.0 MiB\r\n" in text
    assert "next line\r\n" in text
    assert "quantizing" in text


def read_terminal(descriptor):
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other side is closed and all is read
        return b""
