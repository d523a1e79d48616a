"""`ikpy gguf`: dump, split, merge, set."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ikpy.cli.gguf import app
from ikpy.errors import FileFormatError, IkpyError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType as T
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry
from ikpy.tools import sizes
from tests.cpu.gguf import gguf_files as made


def run(*arguments: object) -> tuple[str, str]:
    """Standard output and standard error of a command; its error, if it fails with one."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, IkpyError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(made.sample())
    return path


def test_dump_text(model):
    out, _ = run("dump", model)
    lines = [line.split() for line in out.splitlines()]
    assert ["general.architecture", "str", '"llama"'] in lines
    assert ["f64", "f64", "0.1"] in lines
    assert ["numbers", "arr[i32]", "[3]", "1,", "-2,", "3"] in lines
    assert any(line[:3] == ["words", "arr[str]", "[7]"] and line[-1] == "..." for line in lines)
    assert any(line[:6] == ["second", "q8_0", "32", "x", "2", "68"] for line in lines)
    assert "second" not in run("dump", model, "--no-tensors")[0]
    assert '"nul\\u0000inside", ""' in run("dump", model, "--full")[0]


def test_names_of_other_programs_without_their_beginning(model, tmp_path, capfd):
    """As in scripts in which `llama-` was replaced by `ikpy `."""
    from ikpy.cli import main

    assert main(["gguf-split", "--split", "--split-max-tensors", "1", str(model), str(tmp_path / "part")]) == 0
    first = min(tmp_path.glob("part-00001-of-*.gguf"))
    assert main(["gguf-split", "--merge", str(first), str(tmp_path / "merged.gguf")]) == 0
    assert main(["gguf-hash", str(tmp_path / "merged.gguf")]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith("merged.gguf")
    assert main(["gguf-slit", "x"]) == 1
    assert capfd.readouterr().err.startswith("error: no such command: gguf-slit")


def test_a_question_that_is_not_asked_needs_no_answer(model):
    """gguf_set_metadata.py asks before it writes, unless --force is given."""
    assert run("set", model, "general.architecture", "falcon", "--force")[0].startswith(str(model))
    with GGUFFile.open(str(model), header_only=True) as file:
        assert file.get("general.architecture") == "falcon"


def test_the_two_modes_of_gguf_split_exclude_each_other(model, capfd, monkeypatch):
    from ikpy.cli import main

    for words in (["--merge", "--split"], ["--split", "--merge"]):
        monkeypatch.setattr("sys.argv", ["llama-gguf-split", *words, str(model), "x"])
        assert main() == 1
        assert capfd.readouterr().err == "error: --merge and --split exclude each other\n"


def test_the_ikpy_command_reaches_it(model, capfd):
    from ikpy.cli import main

    assert main(["gguf", "dump", "--no-tensors", str(model)]) == 0
    assert "general.architecture" in capfd.readouterr().out
    assert main(["gguf"]) == 0
    assert "Usage: ikpy gguf" in capfd.readouterr().out
    for arguments, message in (
        (["gguf", "set", str(model), "u8", "256"], "error: value 256 does not fit type u8\n"),
        (["gguf", "dump", "none.gguf"], "error: none.gguf: cannot open model: does not exist; give the path"),
    ):
        assert main(arguments) == 1
        out, err = capfd.readouterr()
        assert out == "" and err.startswith(message) and len(err.splitlines()) == 1, err


@pytest.mark.parametrize(
    ("line", "message", "usage"),
    [
        ("gguf dump model.gguf --jsn", "No such option: --jsn", "gguf dump [OPTIONS] {FILE}"),
        ("gguf dump", "Missing argument 'FILE'.", "gguf dump [OPTIONS] {FILE}"),
        ("gguf nope", "No such command 'nope'.", "gguf [OPTIONS] COMMAND [ARGS]..."),
        ("convert --outtyp f16", "No such option: --outtyp", "convert [OPTIONS] {FOLDER}"),
        ("cuda build --archs sm_86", "unknown argument: --archs (of ikpy cuda build)", "cuda [options]"),
        ("cuda build --jobs ²", "--jobs ²: expected a number", ""),
    ],
)
def test_a_wrong_option_brings_a_line_on_usage(line, message, usage, capfd):
    from ikpy.cli import main

    assert main(line.split()) == 1
    out, err = capfd.readouterr()
    first, *more = err.splitlines()
    assert out == "" and first.startswith(f"error: {message}"), err
    program = usage.partition(" [")[0]
    assert more == ([f"usage: ikpy {usage}; all options: ikpy {program} --help"] if usage else [])


def test_dump_json(model):
    content = json.loads(run("dump", "--json", model)[0])
    assert content["version"] == 3 and content["tensor_count"] == 2
    assert content["metadata"]["u64"] == {"type": "u64", "value": 2**63 + 1}
    words = content["metadata"]["words"]
    assert (words["count"], len(words["value"]), words["complete"]) == (7, 6, False)
    assert content["tensors"][1] == {
        "name": "second",
        "type": "q8_0",
        "type_id": 8,
        "shape": [32, 2],
        "offset": GGUFFile.open(model).tensors["second"].offset,
        "nbytes": 68,
        "shard": 0,
    }
    assert "tensors" not in json.loads(run("dump", "--json", "--no-tensors", model)[0])
    full = json.loads(run("dump", "--json", "--full", model)[0])["metadata"]["words"]
    assert len(full["value"]) == 7 and full["complete"]


def test_dump_knows_every_type_and_lists_unknown_ones(tmp_path):
    types = registry.all_types()
    tensors = [made.tensor(f"tensor.{t.name}", (256, 16), t.id, i * 2**20) for i, t in enumerate(types)]
    tensors.append(made.tensor("tensor.odd", (256, 16), 12345, len(types) * 2**20))
    path = tmp_path / "header.gguf"
    path.write_bytes(made.build([], tensors))
    rows = {row["name"]: row for row in json.loads(run("dump", "--json", path)[0])["tensors"]}
    for tensor_type in types:
        row = rows[f"tensor.{tensor_type.name}"]
        assert (row["type"], row["nbytes"]) == (tensor_type.name, tensor_type.tensor_nbytes((256, 16)))
    assert (rows["tensor.odd"]["type"], rows["tensor.odd"]["nbytes"]) == ("unknown(12345)", None)
    assert "unknown(12345)" in run("dump", path)[0]
    os.truncate(path, (len(types) + 1) * 2**20 + len(path.read_bytes()))
    with pytest.raises(UnsupportedError, match="unknown type id 12345"):
        run("split", path, tmp_path / "part")


@pytest.mark.parametrize("limit", [("--split-max-tensors", 1), ("--split", "--split-max-size", "64")])
def test_split_and_merge_give_back_the_same_file(model, tmp_path, limit):
    parts = tmp_path / "new" / "folder"
    out, err = run("split", model, parts / "part", *limit)
    assert out.count("[written]") == 2 and "100 %" in err
    first = parts / "part-00001-of-00002.gguf"
    merged = tmp_path / "merged.gguf"
    run("merge", "--merge", first, merged)
    assert merged.read_bytes() == model.read_bytes()
    run("split", first, tmp_path / "again", "--split-max-tensors", 1)
    for i in (1, 2):
        again, part = (
            folder / f"{name}-0000{i}-of-00002.gguf" for folder, name in ((tmp_path, "again"), (parts, "part"))
        )
        assert again.read_bytes() == part.read_bytes()


def test_a_first_part_without_tensors(model, tmp_path):
    run("split", "--no-tensor-first-split", "--split-max-tensors", 1, model, tmp_path / "part")
    with GGUFFile.open(tmp_path / "part-00001-of-00003.gguf", follow_splits=False) as first:
        assert not first.tensors
    with GGUFFile.open(tmp_path / "part-00001-of-00003.gguf") as file:
        assert len(file.tensors) == 2
    run("merge", tmp_path / "part-00001-of-00003.gguf", tmp_path / "merged.gguf")
    assert (tmp_path / "merged.gguf").read_bytes() == model.read_bytes()


def test_split_and_merge_of_a_real_model(tmp_path):
    source = made.shared_folder() / "models" / "tiny-llama-f16.gguf"
    if not source.is_file():
        pytest.skip(f"no {source}")
    out, _ = run("split", source, tmp_path / "t", "--split-max-size", "3M")
    count = out.count("[written]")
    assert count >= 4
    for shard in tmp_path.iterdir():
        with GGUFFile.open(shard, follow_splits=False) as file:
            size = sum(info.nbytes for info in file.tensors.values())
            assert size <= 3_000_000 or len(file.tensors) == 1, shard
    run("merge", tmp_path / f"t-00001-of-{count:05d}.gguf", tmp_path / "merged.gguf")
    assert (tmp_path / "merged.gguf").read_bytes() == source.read_bytes()


def test_dry_runs_write_nothing(model, tmp_path):
    before = model.read_bytes()
    out, _ = run("split", model, tmp_path / "part", "--split-max-tensors", 1, "--dry-run")
    assert "part-00002-of-00002.gguf: 1 tensors" in out
    run("set", model, "u8", 1, "--dry-run")
    run("set", model, "new", 1, "--type", "u8", "--dry-run")
    assert os.listdir(tmp_path) == ["model.gguf"]
    assert model.read_bytes() == before


def test_outputs_are_not_replaced_unasked(model, tmp_path):
    run("split", model, tmp_path / "part")
    first = tmp_path / "part-00001-of-00001.gguf"
    for command in (
        ("split", model, tmp_path / "part"),
        ("merge", first, model),
        ("set", model, "u8", 1, "-o", first),
    ):
        with pytest.raises(UsageError, match="output file exists already; remove it or add --overwrite"):
            run(*command)
    run("split", model, tmp_path / "part", "--overwrite")
    with pytest.raises(UsageError, match="not a split model"):
        run("merge", model, tmp_path / "merged.gguf")


def test_set_in_place_and_rewritten(model):
    before = model.read_bytes()
    inode = model.stat().st_ino
    out, _ = run("set", model, "u32", "0x10")
    assert "u32 (u32): 4000000000 -> 16 [in place]" in out
    assert model.stat().st_ino == inode
    assert sum(a != b for a, b in zip(before, model.read_bytes(), strict=True)) <= 4
    run("set", model, "general.architecture", "qwen3")
    assert model.stat().st_ino == inode, "a string of the same length stays in place"
    out, _ = run("set", model, "general.architecture", "deepseek2")
    assert "[rewritten]" in out
    out, _ = run("set", model, "new.key", "--type", "bool", "true")
    assert "(new key) -> true" in out
    with GGUFFile.open(model) as file, GGUFFile.open(_put(model, before)) as old:
        assert file.get("general.architecture") == "deepseek2"
        assert file.get("u32") == 16 and file.get("new.key") is True
        assert list(file.metadata) == [*old.metadata, "new.key"]
        for key in set(old.metadata) - {"general.architecture", "u32"}:
            assert file.stored_metadata.stored(key).tobytes() == old.stored_metadata.stored(key).tobytes()
        for name, info in old.tensors.items():
            assert file.data(file.tensors[name]).tobytes() == old.data(info).tobytes()


@pytest.mark.parametrize(("value", "how"), [("qwen3", "in place"), ("deepseek2", "rewritten")])
def test_a_link_stays_and_its_file_changes(model, tmp_path, value, how):
    """The output names the file that changed: folders of downloads are full of links to it."""
    folder = tmp_path / "links"
    folder.mkdir()
    link = folder / "link.gguf"
    link.symlink_to(model)
    out, _ = run("set", link, "general.architecture", value)
    assert out == f'{link} -> {model}: general.architecture (str): "llama" -> "{value}" [{how}]\n'
    assert link.is_symlink() and os.listdir(folder) == ["link.gguf"]
    with GGUFFile.open(model) as file:
        assert file.get("general.architecture") == value
    out, _ = run("rename", link, "u32", "u32.old")
    assert out == f"{link} -> {model}: u32 -> u32.old [rewritten]\n" and link.is_symlink()
    out, _ = run("set", link, "-o", tmp_path / "other.gguf", "general.architecture", "llama")
    assert out.startswith(f"{tmp_path / 'other.gguf'}: ")
    with GGUFFile.open(model) as file:
        assert file.get("general.architecture") == value and "u32.old" in file.metadata


def _put(model: Path, content: bytes) -> Path:
    path = model.with_name("old.gguf")
    path.write_bytes(content)
    return path


def test_set_every_type(model):
    texts = {"f32": "0.1", "f64": "-1e300", "bool": "no", "str": "a b"}
    for value_type in T:
        if value_type is T.ARRAY:
            continue
        label = value_type.label
        run("set", model, "--type", label, "--", f"new.{label}", texts.get(label, "7"))
        with GGUFFile.open(model) as file:
            assert file.value_type(f"new.{label}") is value_type
            if value_type.holds_integers:
                assert file.get(f"new.{label}") == 7
    with GGUFFile.open(model) as file:
        assert file.get("new.f64") == -1e300 and file.get("new.bool") is False


def test_set_alignment_moves_the_data(model):
    run("set", model, "general.alignment", 256, "--type", "u32")
    run("set", model, "general.alignment", 64)
    with GGUFFile.open(model) as file:
        assert file.alignment == 64
        assert file.data(file.tensors["second"]).tobytes() == bytes(range(100, 168))
    with pytest.raises(UsageError, match="alignment 48 is not a power of two"):
        run("set", model, "general.alignment", 48)


def test_set_on_a_split_model(model, tmp_path):
    run("split", model, tmp_path / "part", "--split-max-tensors", 1)
    first, second = (tmp_path / f"part-0000{i}-of-00002.gguf" for i in (1, 2))
    run("set", first, "general.name", "split", "--type", "str")
    with GGUFFile.open(first) as file:
        assert file.get("general.name") == "split" and len(file.tensors) == 2
    with pytest.raises(UsageError, match="first shard only"):
        run("set", second, "general.name", "x", "--type", "str")
    with pytest.raises(FileFormatError, match="must be loaded with the first split"):
        run("merge", second, tmp_path / "whole.gguf")


def test_a_single_part_is_shown_as_one(model, tmp_path):
    run("split", model, tmp_path / "part", "--split-max-tensors", 1)
    first, second = (tmp_path / f"part-0000{i}-of-00002.gguf" for i in (1, 2))
    assert " of a split model" not in run("dump", first)[0]
    assert "part" not in json.loads(run("dump", first, "--json")[0])
    for number, part in enumerate((first, second), start=1):
        line = f"part {number} of 2 of a split model: 1 of 2 tensors, and this part's keys"
        assert run("dump", part, "--this-file")[0].splitlines()[1] == line
    second.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"part-00002-of-00002\.gguf: this part .* does not exist; --this-file shows"):
        run("dump", first)
    (tmp_path / "elsewhere").rename(second)
    first.unlink()
    assert run("dump", second)[0] == run("dump", second, "--this-file")[0]
    shown = json.loads(run("dump", second, "--json")[0])
    assert shown["part"] == {"number": 2, "count": 2}
    assert [tensor["name"] for tensor in shown["tensors"]] == ["second"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("u8", "256"), "value 256 does not fit type u8"),
        (("u8", "x"), "'x' is not a value of type u8"),
        (("u8", "1.5"), "'1.5' is not a value of type u8"),
        (("bool", "maybe"), "'maybe' is not a value of type bool"),
        (("u8", "1", "--type", "u16"), "key u8 has type u8, not u16; leave out --type or add --change-type"),
        (("new", "1"), "there is no key new; give --type to add it"),
        (("general.alignment", "64", "--type", "u64"), "general.alignment must be of type u32, not u64"),
        (("new", "1", "--type", "u128"), "unknown value type 'u128'; one of u8, i8"),
        (("words", "1"), "key words is an array"),
        (("split.count", "1"), "describes how the model is split"),
        (("", "1", "--type", "u8"), "the metadata key is empty"),
    ],
)
def test_set_errors(model, arguments, message):
    before = model.read_bytes()
    with pytest.raises(UsageError) as caught:
        run("set", model, *arguments)
    assert message in str(caught.value)
    assert model.read_bytes() == before


def test_change_type(model):
    run("set", model, "u8", "70000", "--type", "u32", "--change-type")
    with GGUFFile.open(model) as file:
        assert file.require("u8", T.UINT32) == 70000
    run("set", model, "u8", "7", "--type", "u8", "--change-type")
    with GGUFFile.open(model) as file:
        assert file.require("u8", T.UINT8) == 7


def test_version_2_is_rewritten_as_version_3(tmp_path):
    path = tmp_path / "v2.gguf"
    path.write_bytes(made.sample(version=2))
    run("set", path, "new", 1, "--type", "u8")
    assert path.read_bytes()[4] == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500M", 500_000_000),
        ("2G", 2_000_000_000),
        ("1.5k", 1500),
        ("123", 123),
        ("1 GB", 10**9),
        ("1T", 10**12),
    ],
)
def test_sizes(text, size):
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "G", "-1G", "1X", "1e3", "9" * 400])
def test_sizes_that_are_none(text):
    with pytest.raises(UsageError, match="is not a number of bytes"):
        sizes.parse_size(text)


# keys and digests


def contents(path):
    """Metadata and tensor bytes of a file."""
    with GGUFFile.open(path) as file:
        metadata = {key: file.stored_metadata.stored(key).tobytes() for key in file.metadata}
        return metadata, {name: file.data(info).tobytes() for name, info in file.tensors.items()}


def test_keys_are_renamed_and_removed(model, tmp_path):
    metadata, tensors = contents(model)
    out, _ = run("rename", model, "words", "other.words", "-o", tmp_path / "renamed.gguf")
    assert out == f"{tmp_path / 'renamed.gguf'}: words -> other.words [rewritten]\n"
    expected = {key: value for key, value in metadata.items() if key != "words"} | {"other.words": metadata["words"]}
    assert contents(tmp_path / "renamed.gguf") == (expected, tensors)
    assert contents(model) == (metadata, tensors)
    assert "(removed) [dry run, would be rewritten]" in run("remove", model, "words", "--dry-run")[0]
    assert contents(model) == (metadata, tensors)
    run("remove", model, "words", "numbers")
    assert contents(model) == ({k: v for k, v in metadata.items() if k not in ("words", "numbers")}, tensors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["remove", "no.such"], "there is no key no.such"),
        (["rename", "no.such", "x"], "there is no key no.such"),
        (["rename", "words", "numbers"], "there is a key numbers already"),
        (["rename", "words", ""], "the metadata key is empty"),
        (["rename", "words", "\udcff"], "the metadata key is not valid UTF-8"),
        (["set", "general.name", "\udcff", "--type", "str"], "the value is not valid UTF-8"),
        (["rename", "words", "split.no"], "describes how the model is split"),
        (["remove", "general.architecture"], "general.architecture is needed to read the file"),
        (["rename", "words", "general.alignment"], "general.alignment is needed to read the file"),
    ],
)
def test_wrong_keys(model, arguments, message):
    before = model.read_bytes()
    with pytest.raises(UsageError, match=message):
        run(arguments[0], model, *arguments[1:])
    assert model.read_bytes() == before


def test_output_of_long_arrays_is_bounded(tmp_path):
    """A vocabulary of a million tokens and merges."""
    path = tmp_path / "long.gguf"
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", T.STRING, "llama")
        writer.add_array("numbers", T.INT32, np.arange(1_000_000, dtype=np.int32))
        writer.add_array("words", T.STRING, [f"word {i}" for i in range(200_000)])
    for arguments in (["--json"], []):
        assert len(run("dump", path, *arguments)[0]) < 4000
    whole = json.loads(run("dump", path, "--json", "--full")[0])["metadata"]
    assert (whole["numbers"]["value"][-1], whole["words"]["value"][-1]) == (999_999, "word 199999")


def test_names_from_files_steer_no_terminal(tmp_path):
    """Control characters of keys, values and tensor names are shown as escapes, in manifests too."""
    path, evil = tmp_path / "x.gguf", "a\x1b[31m\n\x7f\x9b"
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", T.STRING, evil)
        writer.add(evil, T.UINT32, 1)
        writer.add_tensor(evil, (8,), 0)
        writer.write(evil, np.zeros(8, np.float32))
    shown = r"a\x1b[31m\n\x7f\x9b"
    text = run("dump", path)[0]
    assert f"  {shown} " in text and text.count(shown) == 2
    json_text = run("dump", path, "--json")[0]
    assert json.loads(json_text)["tensors"][0]["name"] == evil
    manifest = run("hash", path)[0]
    assert f"{path}:{shown}\n" in manifest
    for output in (text, json_text, manifest):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", output)
    (tmp_path / "manifest").write_text(manifest)
    assert run("hash", path, "-c", tmp_path / "manifest")[0] == f"{path}: 2 of 2 digests agree\n"


def test_errors_about_long_names_stay_short(tmp_path, capfd):
    from ikpy.cli import main

    path = tmp_path / "x.gguf"
    path.write_bytes(made.build([made.string("k" * 60_000) + struct.pack("<I", 77)], [], b""))
    assert main(["gguf", "dump", str(path)]) == 1
    line = capfd.readouterr().err
    assert line.startswith(f"error: {path}: metadata key 'kkk") and line.count("\n") == 1 and len(line) < 1100
    assert line.endswith(
        "kkk' has unknown value type 77; the file is truncated or damaged; download or convert it again\n"
    )
