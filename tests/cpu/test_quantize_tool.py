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
import tracemalloc

import numpy as np
import pytest

from ikpy._native import core
from ikpy.cli.quantize import run
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import dequantize, registry
from ikpy.tools import tensor_convert
from ikpy.tools.quantize_progress import PlainDisplay, display_for
from ikpy.tools.tensor_convert import convert_rows
from tests.shared import DATA, ROOT

CASES = json.loads((DATA / "quantize" / "cases.json").read_text())
RECORDED = json.loads((DATA / "quantize" / "dry-run.json").read_text())
MODEL = ROOT / "ikpy" / "assets" / "tiny-mla-moe-f16.gguf"
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
            assert file.value_type(key) == GGUFValueType(kind), key
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


def write_model(path, tensors, *, limit=None):
    with GGUFWriter(path, split_max_tensors=limit) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, 2)
        for name, values in tensors.items():
            writer.add_tensor(name, values.shape[::-1], 0)
        for name, values in tensors.items():
            writer.write(name, values)


@pytest.fixture
def tensors():
    rng = np.random.default_rng(2)
    shapes = {
        "token_embd.weight": (64, 256),
        "blk.0.ffn_up.weight": (96, 256),
        "blk.1.ffn_up_exps.weight": (3, 32, 256),
    }
    return {name: (rng.standard_normal(s) * 0.1).astype(np.float32) for name, s in shapes.items()}


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
        (["--output-tensor-type", "zzz", "in.gguf", "out.gguf", "Q4_0"], "unknown tensor type 'zzz'"),
        (["--override-kv", "general.name", "in.gguf", "Q8_0"], "malformed KV override 'general.name'"),
        (["--include-weights", "a", "--exclude-weights", "b", "in.gguf", "Q8_0"], "cannot be given together"),
        (["in.gguf", "out.gguf", "IQ2_XXS"], "Please do not use IQ1_S"),
        (["none.gguf", "out.gguf", "Q8_0"], "failed to load model from none.gguf"),
        (["in.gguf", "in.gguf", "Q8_0"], "is the input"),
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
    ("arguments", "message"),
    [
        (["in.gguf", "out.gguf", "q4km"], "main: invalid ftype 'q4km' (did you mean Q4_K_M, "),
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


def test_infinite_values_in_experts_and_copied_tensors(tmp_path, tensors, capfd):
    tensors["blk.1.ffn_up_exps.weight"][2, 5, 0] = np.inf
    write_model(tmp_path / "in.gguf", tensors)
    for ftype in ("Q4_K_S", "COPY"):
        assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), ftype]) == 1
        err = capfd.readouterr().err
        assert "row 69 of tensor blk.1.ffn_up_exps.weight contains infinite values; the input is damaged" in err
    assert [p.name for p in tmp_path.iterdir()] == ["in.gguf"]


# --- rules and recipes --------------------------------------------------------------------------------------------


def types_of(path):
    with GGUFFile.open(path) as file:
        return {name: registry.by_id(info.type_id).name for name, info in file.tensors.items()}


def test_recipe_file_and_late_options(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "recipe.txt").write_text("# experts\nffn_.*_exps=iq3_k_r4\nffn_up=Q8_0  # dense\nabsent=q4_0\n")
    recipe = str(tmp_path / "recipe.txt")
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S", "--custom-q", recipe]) == 0
    err = capfd.readouterr().err
    assert "custom rule absent=q4_0 has no effect: it matches no tensor that is converted" in err
    types = types_of(tmp_path / "out.gguf")
    assert types["blk.1.ffn_up_exps.weight"] == "iq3_k_r4"
    assert types["blk.0.ffn_up.weight"] == "q8_0"


def test_types_of_tensors_one_by_one(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "types.txt").write_text("ffn_.*_exps=iq3_k_r4 ffn_up=Q8_0\n")
    options = ["--tensor-type", r"\.\d{1,2}\.attn_q=q6_k", "--tensor-type-file", str(tmp_path / "types.txt")]
    assert run([*options, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 0
    types = types_of(tmp_path / "out.gguf")
    assert types["blk.1.ffn_up_exps.weight"] == "iq3_k_r4"
    assert types["blk.0.ffn_up.weight"] == "q8_0"
    assert "Adding custom rule \\.\\d{1,2}\\.attn_q -> q6_K" in capfd.readouterr().out


def test_rules_are_announced_before_the_work(tmp_path, tensors, capfd):
    """Count and size of every rule, partly and wholly shadowed ones, and the predicted size."""
    write_model(tmp_path / "in.gguf", tensors)
    rules = "ffn_up_exps=q8_0,ffn_up=q4_0,blk.0=q5_0,token_embd=q6_0"
    options = ["--custom-q", rules, "--token-embedding-type", "q8_0"]
    assert run([*options, str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S"]) == 0
    err = capfd.readouterr().err
    announced = err[: err.index("[   1/   3]")]
    assert "custom rule ffn_up_exps -> q8_0: 1 tensors, 0.02 MiB\n" in announced
    assert (
        "custom rule ffn_up -> q4_0: 1 tensors, 0.01 MiB; 1 more match earlier rules (first ffn_up_exps=q8_0)\n"
        in announced
    )
    assert "custom rule blk.0=q5_0 has no effect: its 1 tensors match earlier rules (first ffn_up=q4_0)\n" in announced
    assert "custom rule token_embd=q6_0 has no effect: options for single tensors decide its 1 tensors\n" in announced
    size = (tmp_path / "out.gguf").stat().st_size
    assert f"needs {size / 2**20:.3f} MiB, " in announced
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        nbytes = sum(info.nbytes for info in file.tensors.values())
    n_weights = sum(values.size for values in tensors.values())
    assert f"output size = {nbytes / 2**20:.3f} MiB (0.000 GiB), {nbytes * 8 / n_weights:.3f} BPW\n" in announced


@pytest.mark.parametrize(
    ("options", "what"), [(["--pure"], "--pure"), (["--repack"], "--repack"), ([], "type F16"), ([], "type COPY")]
)
def test_rules_that_cannot_be_used_are_reported(tmp_path, tensors, capfd, options, what):
    write_model(tmp_path / "in.gguf", tensors)
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "q.gguf"), "--pure", "Q8_0"]) == 0
    source = "q.gguf" if what == "--repack" else "in.gguf"
    ftype = what.split()[1] if what.startswith("type") else "Q8_0"
    rules = ["--custom-q", "ffn=q4_0", *options]
    assert run([*rules, str(tmp_path / source), str(tmp_path / "out.gguf"), ftype]) == 0
    assert f"WARNING: custom rules have no effect with {what}\n" in capfd.readouterr().err


YAML_RECIPE = r"""
# comments are free
token_embedding_type: q6_0
output-tensor-type: q8_0
rules:
  - 'ffn_up_exps': IQ3_K
  - 'blk\.\d{1,2}\.ffn_up\.weight': q5_K
  - "absent=q4_0  # text rules work as well"
"""


def test_yaml_recipe(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "recipe.yaml").write_text(YAML_RECIPE)
    arguments = ["--custom-q", str(tmp_path / "recipe.yaml"), str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")]
    assert run([*arguments, "Q4_K_S"]) == 0
    out, err = capfd.readouterr()
    assert "Adding custom rule blk\\.\\d{1,2}\\.ffn_up\\.weight -> q5_K\n" in out
    assert "custom rule absent=q4_0 has no effect" in err
    expected = {"token_embd.weight": "q6_0", "blk.0.ffn_up.weight": "q5_K", "blk.1.ffn_up_exps.weight": "iq3_k"}
    assert types_of(tmp_path / "out.gguf") == expected
    assert run(["--token-embedding-type", "q8_0", *arguments, "Q4_K_S"]) == 0
    assert types_of(tmp_path / "out.gguf")["token_embd.weight"] == "q8_0", "the command line wins"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("rules: [", "recipe.yaml: line 1: not valid YAML"),
        ("- a\n- b\n", "a YAML recipe is a mapping with the key 'rules'"),
        ("rules:\n  ffn: q9_9\n", "Invalid quantization type 'q9_9' in custom quantization input ffn=q9_9"),
        ("rules:\n  'ffn(': q4_0\n", "regular expression of custom rule ffn(=q4_0 is invalid"),
        ("rules:\n  - 3\n", "rule 3 is no 'regex: type'"),
        ("rules:\n  ffn: 4\n", "rule 'ffn': 4 is no 'regex: type'"),
        ("rulez: 3\n", "unknown key 'rulez'; a recipe may have 'rules' and output-tensor-type"),
        ("token_embedding_type: q9\n", "recipe.yaml: token-embedding-type: unknown tensor type 'q9'"),
        ("token_embedding_type: [q8_0]\n", "needs a single value"),
    ],
)
def test_wrong_yaml_recipes(tmp_path, tensors, capfd, content, message):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "recipe.yaml").write_text(content)
    arguments = ["--custom-q", str(tmp_path / "recipe.yaml"), str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf")]
    assert run([*arguments, "Q4_K_S"]) == 1
    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1, "one line"


# --- progress -----------------------------------------------------------------------------------------------------


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


# --- layout -------------------------------------------------------------------------------------------------------


def test_repack_keeps_every_value(tmp_path, monkeypatch, capfd):
    """The bundled model in IQ4_K: types change, decoded values do not; a pattern limits it; splits stay split."""
    plain, packed, some = (str(tmp_path / f"{name}.gguf") for name in ("plain", "packed", "some"))
    assert run([str(MODEL), plain, "IQ4_K"]) == 0
    assert run(["--repack", plain, packed, "IQ4_K_R4"]) == 0
    assert run(["--repack", "--repack-pattern", "attn_q,ffn_down_exps", plain, some, "IQ4_K_R4"]) == 0
    changed = {name for name, kind in types_of(some).items() if kind.endswith("_r4")}
    assert changed == {
        name for name in types_of(plain) if "attn_q_a.w" in name or "attn_q_b.w" in name or "ffn_down_exps" in name
    }
    with GGUFFile.open(plain) as a, GGUFFile.open(packed) as b:
        assert sum(registry.by_id(info.type_id).interleave > 1 for info in b.tensors.values()) > 30
        for name, info in a.tensors.items():
            other = b.tensors[name]
            first = dequantize(a.data(info), info.type_id, info.shape)
            second = dequantize(b.data(other), other.type_id, other.shape)
            assert np.array_equal(first, second), name


def test_partial_requant_of_shards(tmp_path, tensors, capfd):
    """Shards that exist stay; the missing one is made."""
    write_model(tmp_path / "in", tensors, limit=1)
    options = ["--keep-split", str(tmp_path / "in-00001-of-00003.gguf"), str(tmp_path / "out"), "Q8_0"]
    assert run(options) == 0
    whole = (tmp_path / "out-00002-of-00003.gguf").read_bytes()
    (tmp_path / "out-00002-of-00003.gguf").unlink()
    (tmp_path / "out-00003-of-00003.gguf").write_bytes(b"made before")
    capfd.readouterr()
    assert run(["--partial-requant", *options]) == 0
    err = capfd.readouterr().err
    assert f"split file {tmp_path}/out-00001-of-00003.gguf exists, skipping" in err
    assert (tmp_path / "out-00002-of-00003.gguf").read_bytes() == whole
    assert (tmp_path / "out-00003-of-00003.gguf").read_bytes() == b"made before"
    assert run(["--keep-split", options[1], str(tmp_path / "in"), "Q8_0"]) == 1
    assert "is the input" in capfd.readouterr().err


MEMORY_SCRIPT = """
import resource, sys
from ikpy.cli.quantize import run
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small, big, out, *options = sys.argv[1:]
assert run([*options, small, out, "Q8_0", "2"]) == 0
before = peak()
assert run([*options, big, out, "Q8_0", "2"]) == 0
print("peak", before, peak())
"""


@pytest.mark.parametrize("options", [["--pure"], ["--repack"]])
def test_memory_does_not_grow_with_the_model(tmp_path, options):
    """512 MiB in BF16, 408 MiB in Q8_0 to repack: memory grows by less than one tensor and 64 MiB."""
    kind = "q8_0" if options == ["--repack"] else "bf16"
    nbytes = registry.by_name(kind).tensor_nbytes((4096, 4096))
    for name, count in (("small", 1), ("big", 16 if kind == "bf16" else 24)):
        writer = GGUFWriter(tmp_path / f"{name}.gguf")
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, count)
        for i in range(count):
            shape = (4096, 4096) if name == "big" else (4096, 64)
            writer.add_tensor(f"blk.{i}.ffn_up.weight", shape, registry.by_name(kind).id)
        (layout,) = writer.plan()
        with open(layout.path, "wb") as file:
            file.write(layout.header)
            file.truncate(layout.nbytes)  # zeros that take no disk space
    paths = [str(tmp_path / name) for name in ("small.gguf", "big.gguf", "out.gguf")]
    command = [sys.executable, "-c", MEMORY_SCRIPT, *paths, *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-800:]
    before, after = map(int, done.stdout.split("peak ")[1].split())
    print(f"{options}: {after - before >> 10} MiB above the start, largest tensor {nbytes >> 20} MiB")
    assert (after - before) << 10 < nbytes + (64 << 20)


def test_truncated_input_is_refused(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    whole = (tmp_path / "in.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    assert run([str(tmp_path / "cut.gguf"), str(tmp_path / "out.gguf"), "Q8_0"]) == 1
    assert "failed to quantize" in capfd.readouterr().err
    with pytest.raises(FileFormatError):
        GGUFFile.open(tmp_path / "cut.gguf")


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0", "q4_0_r8"])
def test_rows_read_by_several_threads(kind, monkeypatch):
    """Same bytes, and the first bad row is named, however the rows are shared out."""
    rng = np.random.default_rng(6)
    row = registry.by_name(kind)
    values = rng.standard_normal((176, 256)).astype(np.float32)
    if kind == "f32":
        data = values.view(np.uint8).reshape(-1)
    elif kind == "f16":
        data = values.astype(np.float16).view(np.uint8).reshape(-1)
    else:
        data = np.asarray(core.quantize(values, row.id, None, 1))
    one = np.concatenate(list(convert_rows(data, kind, "q6_K", (256, 176), n_threads=1)))
    monkeypatch.setattr(tensor_convert, "_PART_ELEMENTS", 1024)
    for n_threads in (2, 5, 16):
        several = np.concatenate(list(convert_rows(data, kind, "q6_K", (256, 176), n_threads=n_threads)))
        assert np.array_equal(one, several), n_threads
    if kind == "f32":
        values[[23, 150], 9] = np.nan
        with pytest.raises(FileFormatError, match="row 23 of tensor x contains NaN"):
            list(convert_rows(values.view(np.uint8).reshape(-1), kind, "q6_K", (256, 176), name="x", n_threads=7))


def test_conversion_holds_one_piece_of_a_tensor():
    """Memory is bounded by a piece of rows, not by the tensor: 128 MiB of F16 would be 256 MiB of floats."""
    rows, ne0 = 65536, 1024
    data = np.zeros((rows, ne0), np.float16).reshape(-1).view(np.uint8)
    tracemalloc.start()
    try:
        nbytes = sum(len(piece) for piece in convert_rows(data, "f16", "q8_0", (ne0, rows), n_threads=1))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert nbytes == rows * ne0 // 32 * 34
    assert peak < 64 << 20, f"{peak >> 20} MiB held at once"
