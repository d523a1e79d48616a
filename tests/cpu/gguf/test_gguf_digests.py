"""`ikpy gguf hash`: digests of files and tensors, and lists of them that are checked."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import uuid
from pathlib import Path

import pytest

from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.gguf.types import GGUFValueType as T
from ikpy.gguf.writer import GGUFWriter
from ikpy.quants import registry
from tests.cpu.gguf import gguf_files as made
from tests.cpu.gguf.test_gguf_tool import contents, run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(made.sample())
    return path


def test_digests(model, tmp_path):
    out, _ = run("hash", model)
    _, tensors = contents(model)
    whole = hashlib.sha256(b"".join(tensors.values())).hexdigest()
    lines = [f"sha256  {hashlib.sha256(data).hexdigest()}  {model}:{name}" for name, data in tensors.items()]
    assert out.splitlines() == [*lines, f"sha256  {whole}  {model}"]
    assert run("hash", model, "--no-layer", "--sha256")[0].splitlines() == [f"sha256  {whole}  {model}"]
    sha1 = hashlib.sha1(b"".join(tensors.values())).hexdigest()
    assert run("hash", model, "--no-layer", "--sha1")[0] == f"sha1    {sha1}  {model}\n"
    digest = hashlib.sha1(uuid.UUID("ef001206-dadc-5f6d-a15f-3359e577d4e5").bytes + b"".join(tensors.values())).digest()
    named = uuid.UUID(bytes=digest[:16], version=5)
    assert run("hash", model, "--uuid")[0] == f"uuid    {named}  {model}\n"
    together = run("hash", model, "--sha1", "--uuid", "--sha256")[0].splitlines()
    assert together[-3:] == [f"sha1    {sha1}  {model}", f"sha256  {whole}  {model}", f"uuid    {named}  {model}"]
    assert together[1:-3:2] == lines
    # Neither metadata nor the division into files count.
    run("set", model, "general.name", "another name", "--type", "str")
    run("split", model, tmp_path / "part", "--split-max-tensors", 1)
    (first,) = tmp_path.glob("part-00001-of-*")
    assert f"{whole}  {first}" in run("hash", first, "--no-layer")[0]


@pytest.mark.parametrize("name", [b"a\nb.gguf", b"b\xff.gguf", b"c d:e.gguf", b"\\e.gguf"])
def test_manifests_of_files_with_any_name(model, tmp_path, name):
    path, manifest = tmp_path / os.fsdecode(name), tmp_path / "manifest"
    model.rename(path)
    manifest.write_text(run("hash", path)[0])
    assert run("hash", path, "-c", manifest)[0].endswith("3 of 3 digests agree\n")


def test_xxh64_digests(model, tmp_path):
    """Of a tensor whose digest is published, and beside the others."""
    path = tmp_path / "abc.gguf"
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", T.STRING, "llama")
        writer.add_tensor("letters", (3,), registry.by_name("i8").id)
        writer.write("letters", b"abc")
    assert run("hash", path, "--xxh64", "--no-layer")[0] == f"xxh64   44bc2cf5ad770999  {path}\n"
    every = run("hash", model, "--all")[0].splitlines()
    names = [*contents(model)[1], ""]
    assert [line.split()[0] for line in every] == ["xxh64", "sha1", "sha256"] * len(names)
    assert [line.partition(":")[2] for line in every[::3]] == names
    manifest = tmp_path / "manifest.txt"
    manifest.write_text("\n".join(every))
    for options, n in (((), len(every)), (("--xxh64",), len(names)), (("--all", "--no-layer"), 3)):
        assert run("hash", model, "-c", manifest, *options)[0] == f"{model}: {n} of {n} digests agree\n"
    with pytest.raises(UsageError, match=r"manifest\.txt: no uuid digest of model\.gguf in it"):
        run("hash", model, "-c", manifest, "--uuid")


def test_digests_are_checked(model, tmp_path):
    manifest = tmp_path / "manifest.txt"
    manifest.write_text("a comment\n" + run("hash", model)[0].replace(str(model), f"C:\\models\\{model.name}"))
    n = len(contents(model)[1]) + 1
    assert run("hash", model, "--check", manifest)[0] == f"{model}: {n} of {n} digests agree\n"
    mixed = "md5     0123456789abcdef  " + str(model) + "\n" + run("hash", model, "--uuid")[0]
    (tmp_path / "mixed.txt").write_text(mixed)
    assert run("hash", model, "--check", tmp_path / "mixed.txt")[0] == f"{model}: 1 of 1 digests agree\n"
    (tmp_path / "marked.txt").write_text(run("hash", model, "--no-layer")[0], encoding="utf-8-sig")
    assert run("hash", model, "--check", tmp_path / "marked.txt")[0] == f"{model}: 1 of 1 digests agree\n"
    data = bytearray(model.read_bytes())
    with GGUFFile.open(model) as file:
        data[list(file.tensors.values())[-1].offset] ^= 1
    model.write_bytes(data)
    from ikpy.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["gguf", "hash", "--check", str(manifest), str(model)]) == 1
    assert f"{n - 2} of {n} digests agree" in out.getvalue()
    assert "all tensors: sha256 is " in out.getvalue()
    (tmp_path / "empty.txt").write_text("")
    for wrong, message in (
        ("empty.txt", "no xxh64, sha1, sha256 or uuid digest of model.gguf"),
        ("none.txt", "No such file"),
    ):
        with pytest.raises(UsageError, match=message):
            run("hash", model, "--check", tmp_path / wrong)
