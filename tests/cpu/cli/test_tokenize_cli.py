"""Tokenizer tool: output forms and errors against golden captures of the bundled model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from tests.shared import DATA, ROOT

GOLDEN = DATA / "cli"


def run(*arguments: str, text: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "ikpy", "tokenize", *arguments]
    return subprocess.run(command, input=text, capture_output=True, check=False, cwd=ROOT)


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("default", ["-p", "Hello, world!\n <|user|>hi<|end|> naïve 🦙"], None),
        ("empty", ["--ids", "-p", ""], None),
        ("ids", ["--ids", "-p", "Hello <|end|>"], None),
        ("ids-no-bos-no-special", ["--ids", "--no-bos", "--no-parse-special", "-p", "Hello <|end|>"], None),
        ("show-count", ["--ids", "--show-count", "-p", "Hello"], None),
        ("stdin", ["--ids", "--stdin"], b"Hello\r\nthere\n"),
    ],
)
def test_output_equals_the_golden_capture(name, arguments, text):
    result = run("--log-disable", *arguments, text=text)
    assert result.stdout == (GOLDEN / f"llama-tokenize-{name}.out").read_bytes()
    assert result.returncode == 0


def test_backslashes_stand_for_themselves():
    without, given = (run("--log-disable", "--ids", "-p", r"a\nb", *more) for more in ((), ("--no-escape",)))
    assert (given.returncode, given.stdout) == (0, without.stdout)
    assert given.stdout.count(b",") == 4, "BOS, a, backslash, n, b"


def test_file_with_bytes_that_are_not_utf8(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"a\xff\xfeb")
    result = run("-m", str(ROOT / "ikpy/assets/tiny-mla-moe-f16.gguf"), "--log-disable", "-f", str(file))
    assert (result.returncode, result.stderr) == (0, b"")
    pieces = b"".join(line.split(b" -> '", 1)[1][:-1] for line in result.stdout.splitlines()[1:])
    assert pieces.startswith(b"a") and pieces.endswith(b"b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nope"], b"error: unknown option '--nope'"),
        (["--idz", "-p", "x"], b"error: unknown option '--idz' (did you mean --ids?)"),
        ([], b"error: must specify one of: --stdin, --file or --prompt."),
        (["-p", "a", "--stdin"], b"error: --stdin, --file and --prompt are mutually exclusive."),
        (["-f", "NOFILE.txt"], b"error: could not open file 'NOFILE.txt' for reading: No such file or directory"),
        (["-m", "NOFILE.gguf", "-p", "x"], b"error: NOFILE.gguf"),
        (["-p"], b"error: -p: a value is missing"),
    ],
)
def test_errors(arguments, message):
    result = run(*arguments, text=b"")
    assert result.returncode == 1
    assert result.stdout == b""
    assert result.stderr.startswith(message), result.stderr


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("imatrix", "this is no model but an importance matrix: ikpy quantize takes it with --imatrix"),
        ("model", "cannot find tokenizer model: key tokenizer.ggml.model is missing"),
    ],
)
def test_a_file_without_vocabulary_is_named(tmp_path, kind, message):
    path = tmp_path / "im.gguf"
    with GGUFWriter(path) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("general.type", GGUFValueType.STRING, kind)
    result = run("-m", str(path), "-p", "x")
    assert (result.returncode, result.stdout) == (1, b"")
    assert result.stderr.decode() == f"error: {path}: {message}\n"
