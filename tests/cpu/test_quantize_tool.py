"""`ikpy quantize` end to end: recorded console lines and files, splits, interrupted and wrong use."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import struct

import numpy as np
import pytest

from ikpy.cli.quantize import run
from ikpy.errors import FileFormatError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import dequantize
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
    assert run(["--keep-split", first, str(tmp_path / "new" / "out"), "Q8_0"]) == 0
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
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        info = file.tensors["token_embd.weight"]
        blocks = file.data(info).reshape(-1, 18)
    levels = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1)
    assert levels.min() == 1
    assert levels.max() == 15


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
        (["--imatrix", "none.dat", "in.gguf", "Q8_0"], "load_imatrix: failed to open none.dat"),
        (["--leave-output-tensor", "--pure", "in.gguf", "out.gguf", "IQ1_BN"], ""),
    ],
)
def test_wrong_use(tmp_path, tensors, monkeypatch, capfd, arguments, message):
    write_model(tmp_path / "in.gguf", tensors)
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == (1 if message else 0)
    assert message in capfd.readouterr().err


def test_recipe_file_and_late_options(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    (tmp_path / "recipe.txt").write_text("# experts\nffn_.*_exps=iq3_k_r4\nffn_up=Q8_0\nabsent=q4_0\n")
    recipe = str(tmp_path / "recipe.txt")
    assert run([str(tmp_path / "in.gguf"), str(tmp_path / "out.gguf"), "Q4_K_S", "--custom-q", recipe]) == 0
    err = capfd.readouterr().err
    assert "custom rule absent=q4_0 has no effect: it matches no tensor that is converted" in err
    with GGUFFile.open(tmp_path / "out.gguf") as file:
        assert file.tensors["blk.1.ffn_up_exps.weight"].type_id == 338
        assert file.tensors["blk.0.ffn_up.weight"].type_id == 8


def test_truncated_input_is_refused(tmp_path, tensors, capfd):
    write_model(tmp_path / "in.gguf", tensors)
    whole = (tmp_path / "in.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    assert run([str(tmp_path / "cut.gguf"), str(tmp_path / "out.gguf"), "Q8_0"]) == 1
    assert "failed to quantize" in capfd.readouterr().err
    with pytest.raises(FileFormatError):
        GGUFFile.open(tmp_path / "cut.gguf")
