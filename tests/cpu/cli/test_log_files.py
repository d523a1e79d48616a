"""Files of the log, marks of its lines, and lines of times, as options ask for them."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from ikpy.cli import log_streams, main
from ikpy.cli.log_options import LogOptions
from ikpy.cli.log_streams import LogStream
from ikpy.cli.parser import parse
from ikpy.cli.router import shared_uses
from ikpy.cli.server import standard_log
from tests.cpu.gguf import gguf_files as made

RUN = ["cli", "-p", "The sea", "-n", "2", "-c", "64", "-t", "1", "-s", "1", "--no-warmup"]
TIMES = "eval time ="


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_file_gets_what_standard_error_gets(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.log"
    file.write_text("text of an earlier run\n")
    before = sys.stderr
    assert main([*RUN, "--log-file", str(file)]) == 0
    out, err = capfd.readouterr()
    assert err == file.read_text() and "Log start" in err and TIMES in err and "earlier run" not in err
    assert "The sea" in out and sys.stderr is before


def test_names_of_the_files_of_several_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.log"
    line = ["cli", "-m", "no.gguf", "--log-file", str(file)]
    for options in (["--log-append"], ["--log-append"], ["--log-new"], ["--log-new"], ["--log-new"]):
        assert main([*line, *options]) == 1
    texts = {path.name: path.read_text().count("error: ") for path in tmp_path.iterdir()}
    assert texts == {"run.log": 2, "run.1.log": 1, "run.2.log": 1, "run.3.log": 1}, capfd.readouterr().err


def test_files_that_cannot_be_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(made.sample())
    for path, reason in ((model, "a GGUF file is not overwritten"), (tmp_path / "no" / "f", "No such file")):
        assert main(["cli", "--log-file", str(path)]) == 1
        assert f"error: --log-file {path}: {reason}" in capfd.readouterr().err
    assert model.read_bytes() == made.sample()


def test_log_enable_takes_log_disable_back(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, "--log-disable"]) == 0
    quiet = capfd.readouterr().err
    assert main([*RUN, "--log-disable", "--log-enable"]) == 0
    loud = capfd.readouterr().err
    assert "Log start" not in quiet and "Log start" in loud


@pytest.mark.parametrize("option", ["--no-perf", "--no-show-timings"])
def test_no_times(option: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, option]) == 0
    err = capfd.readouterr().err
    assert TIMES not in err and "Log end" in err


def test_lines_are_marked_where_they_begin() -> None:
    log = LogStream(stream := io.StringIO(), LogOptions(prefix=True), None)
    for part in ("start\n\nwarn", "ing: w\n", "main: warning: v\nerror: e\n", "WARN [x] y\n", ".", ".\n"):
        log.write(part)
    assert stream.getvalue() == "I start\n\nI warning: w\nW main: warning: v\nE error: e\nW WARN [x] y\nI ..\n"
    log = LogStream(stream := io.StringIO(), LogOptions(prefix=True, timestamps=True), None)
    log.write("a\nb\n")
    times = re.findall(r"^(\d+)\.(\d\d)\.(\d{3})\.(\d{3}) I [ab]$", stream.getvalue(), re.MULTILINE)
    assert len(times) == 2 and times[0] <= times[1], stream.getvalue()


def test_colors_are_for_the_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\nwarning: w\nerror: e\n"
    colored = "a\n\x1b[35mwarning: w\n\x1b[0m\x1b[31merror: e\n\x1b[0m"
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, choice, expected in (
        (io.StringIO(), True, colored),
        (io.StringIO(), None, text),
        (Terminal(), None, colored),
        (Terminal(), False, text),
    ):
        file = io.StringIO()
        LogStream(stream, LogOptions(colors=choice), file).write(text)
        assert (stream.getvalue(), file.getvalue()) == (expected, text), choice
    monkeypatch.setenv("NO_COLOR", "1")
    LogStream(stream := Terminal(), LogOptions(colors=None), None).write(text)
    assert stream.getvalue() == text


def test_a_full_disk_ends_no_run(capfd: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    assert main([*RUN, "--log-file", "/dev/full"]) == 0
    assert "Log end" in capfd.readouterr().err


@pytest.mark.parametrize("style", ["text", "json"])
def test_lines_of_the_server_are_in_the_file(style: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "server.log"
    params = parse(["--log-file", str(file), "--log-prefix", "--log-format", style], "server", {})
    log_streams.install(params.log)
    try:
        log = standard_log(params)
        log.event("main", "model loaded")
        log.finish()
    finally:
        log_streams.remove()
    out = capfd.readouterr().out
    assert out == file.read_text() and "model loaded" in out
    assert out.startswith("I INFO [" if style == "text" else "{")


def test_processes_of_models_write_no_files() -> None:
    line = ["--log-file", "f", "--log-new", "--log-prefix", "--log-timestamps", "--log-colors", "on", "--no-perf"]
    kept, removed = shared_uses(line)
    assert [words for _, words in kept] == [["--no-perf"]]
    assert {"LLAMA_LOG_FILE", "LLAMA_ARG_LOG_FILE", "LLAMA_LOG_PREFIX"} <= removed
