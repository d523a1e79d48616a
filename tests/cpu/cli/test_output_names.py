"""Names of outputs: empty ones, such as those of shell variables that are not set, read-only files and hard links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import ikpy
from ikpy.cli import main
from ikpy.gguf.atomic import replacing
from ikpy.tools import resumable
from tests.cpu.gguf import gguf_files as made

EMPTY = "the name of the file is empty"


@pytest.fixture(name="model")
def made_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(made.sample())
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gguf", "set", "model.gguf", "words.new", "x", "--type", "str", "-o", ""], "cannot write to '': name a file"),
        (["gguf", "set", "model.gguf", "u8", "1", "--overwrite", "-o", ""], "cannot write to '': name a file"),
        (["gguf", "rename", "model.gguf", "u8", "v8", "-o", ""], "cannot write to '': name a file"),
        (["gguf", "remove", "model.gguf", "u8", "-o", ""], "cannot write to '': name a file"),
        (["gguf", "split", "model.gguf", ""], "cannot write to '': shards need a prefix"),
        (["gguf", "split", "model.gguf", "folder/"], "cannot write to 'folder/': shards need a prefix"),
        (["quantize", "model.gguf", "", "q8_0"], "OUTPUT, TYPE and NTHREADS must not be empty"),
        (["quantize", "--imatrix", "", "model.gguf", "out.gguf", "q8_0"], f"--imatrix: {EMPTY}"),
        (["imatrix", "-p", "x", "-o", ""], f"-o : {EMPTY}"),
        (["cli", "-m", "", "-p", "x"], f"-m ({EMPTY})"),
    ],
)
def test_empty_names_are_refused_and_nothing_is_written(
    arguments: list[str], message: str, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The original was changed in place, and ggml-model-Q8_0.gguf written beside it."""
    before = model.read_bytes()
    assert main(arguments) == 1
    assert message in "".join(capfd.readouterr())
    assert [path.name for path in model.parent.iterdir()] == ["model.gguf"] and model.read_bytes() == before


def test_a_key_that_no_file_may_have_does_not_spoil_it(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before, key = model.read_bytes(), "k" * 65536
    for change in (["set", "model.gguf", key, "1", "--type", "u8"], ["rename", "model.gguf", "u8", key]):
        assert main(["gguf", *change]) == 1
        assert "the metadata key has 65536 bytes, more than the 65535 allowed" in capfd.readouterr().err
    assert model.read_bytes() == before
    assert main(["gguf", "rename", "model.gguf", "u8", key[1:]]) == main(["gguf", "dump", "model.gguf"]) == 0


def test_nothing_takes_the_place_of_an_empty_name() -> None:
    with pytest.raises(OSError, match=EMPTY), replacing(""):
        pass


@pytest.mark.parametrize(
    "change", [["set", "u8", "1"], ["set", "f32", "1", "--type=f64", "--change-type"], ["remove", "u8"]]
)
def test_read_only_files_stay_as_they_are(change: list[str], model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the length of the value, and whoever asks: the rights of root say nothing about what was meant."""
    before = model.read_bytes()
    model.chmod(0o444)
    assert main(["gguf", change[0], "model.gguf", *change[1:]]) == 1
    assert "model.gguf: the file is read-only; write a changed copy with -o" in capfd.readouterr().err
    assert model.read_bytes() == before
    assert main(["gguf", change[0], "model.gguf", *change[1:], "-o", "copy.gguf"]) == 0


def test_hard_links_are_named(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = model.read_bytes()
    os.link(model, "other.gguf")
    assert main(["gguf", "set", "model.gguf", "u8", "1"]) == 0
    assert "model.gguf (other hard links, 1, change with it): u8" in capfd.readouterr().out
    assert Path("other.gguf").read_bytes() == model.read_bytes() != before
    changed = model.read_bytes()
    assert main(["gguf", "remove", "model.gguf", "u8"]) == 0
    assert "model.gguf (other hard links, 1, keep the old contents): u8" in capfd.readouterr().out
    assert Path("other.gguf").read_bytes() == changed
    assert main(["gguf", "set", "model.gguf", "i8", "1"]) == 0
    assert "hard links" not in capfd.readouterr().out


def test_a_full_disk_keeps_no_journal_without_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resumable.os, "fsync", full)
    assert main(["quantize", str(ikpy.default_model_path()), str(tmp_path / "out.gguf"), "q8_0"]) == 1
    assert "out.gguf: cannot write: No space left on device" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
