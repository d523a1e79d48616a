"""Programs whose model lies on other machines (--rpc): the server with two slots, and the tools' results."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from ikpy.backends.remote import hosts
from ikpy.cli import main
from tests.cpu.engine.remote_hosts import RunningHost, running
from tests.server.live import PATIENCE
from tests.server.test_command import failed_start, process
from tests.shared import DATA

MOE = str(DATA / "zoo" / "qwen3moe.gguf")


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[RunningHost, RunningHost]]:
    with running() as one, running() as other:
        yield one, other


def complete(address: str, prompt: str) -> dict:
    body = {"prompt": prompt, "n_predict": 12, "temperature": 0, "ignore_eos": True, "n_probs": 2}
    return httpx.post(f"{address}/completion", json=body, timeout=PATIENCE).json()


def test_a_server_with_two_slots(two: tuple[RunningHost, RunningHost], tmp_path: Path) -> None:
    prompts = ["a first text", "another text that is longer", "a first text and more"]
    options = ("-c", "512", "-np", "2", "--slot-save-path", str(tmp_path))
    with process(*options) as (_, address):
        wanted = [complete(address, prompt)["content"] for prompt in prompts]
    where = ",".join(host.endpoint for host in two)
    with process(*options, "--rpc", where, "-ts", "1,1") as (_, address):
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda prompt: complete(address, prompt)["content"], prompts)) == wanted
        saved = httpx.post(f"{address}/slots/0?action=save", json={"filename": "s"}, timeout=PATIENCE).json()
        assert saved["n_saved"] > 0
        back = httpx.post(f"{address}/slots/1?action=restore", json={"filename": "s"}, timeout=PATIENCE).json()
        assert back["n_restored"] == saved["n_saved"]


def test_a_server_that_loses_its_host_answers() -> None:
    with running() as host, process("-c", "512", "-np", "2", "--rpc", host.endpoint) as (_, address):
        assert complete(address, "x")["tokens_predicted"] == 12
        host.stop()
        for _ in range(2):
            answer = httpx.post(f"{address}/completion", json={"prompt": "y", "n_predict": 4}, timeout=60)
            assert answer.status_code == 500
            assert host.name in answer.text and "load the model again" in answer.text
        assert httpx.get(f"{address}/v1/models", timeout=60).status_code == 200


def test_no_host_is_one_line() -> None:
    assert re.search(r"error: RPC\[127\.0\.0\.1:9\]: no connection: .*rpc-server", failed_start("--rpc", "127.0.0.1:9"))


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        assert main(arguments) == 0
    finally:
        hosts.use(())
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "line",
    [
        "perplexity -c 48 --chunks 2 -f {text}",
        "perplexity -c 48 --chunks 2 -f {text} -ngl 2 -ts 1,1",
        "perplexity -c 48 --chunks 2 -f {text} -ot exps=RPC[{one}] -ts 0,1",
        "cli -p hello -n 12 --temp 0 -c 128",
        "cli -p hello -n 12 --temp 0 -c 128 -md {model} --draft-max 4",
    ],
)
def test_tools_print_the_same(
    line: str, two: tuple[RunningHost, RunningHost], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    words = line.format(text=text, one=two[0].endpoint, model=MOE).split()
    on_cpu = [word for i, word in enumerate(words) if not {word, words[i - 1]} & {"-ts", "-ot", "-ngl"}]
    wanted = output([*on_cpu, "-m", MOE, "-t", "1"], capsys)
    where = ",".join(host.endpoint for host in two)
    assert output([*words, "-m", MOE, "-t", "1", "--rpc", where], capsys) == wanted


def test_statistics_are_the_same(two: tuple[RunningHost, RunningHost], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    line = ["imatrix", "-m", MOE, "-f", str(text), "-c", "48", "--chunks", "2", "-t", "1", "-o"]
    try:
        assert main([*line, str(tmp_path / "here")]) == 0
        assert main([*line, str(tmp_path / "there"), "--rpc", two[0].endpoint]) == 0
    finally:
        hosts.use(())
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


def test_benchmarks_run(two: tuple[RunningHost, RunningHost], capsys: pytest.CaptureFixture[str]) -> None:
    line = ["bench", "-m", MOE, "-p", "16", "-n", "2", "-r", "1", "-t", "1", "-rpc", two[0].endpoint]
    assert "CPU+RPC" in output(line, capsys)
    line = ["sweep-bench", "-m", MOE, "-c", "64", "-ub", "16", "-t", "1", "--rpc", two[0].endpoint]
    assert "S_TG" in output(line, capsys)


def test_devices_are_listed(two: tuple[RunningHost, RunningHost], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"  {two[0].name}: " in output(["cli", "--list-devices", "--rpc", two[0].endpoint], capsys)


def test_options_for_gpus_mean_something(two: tuple[RunningHost, RunningHost], capsys: pytest.CaptureFixture) -> None:
    line = ["cli", "-m", MOE, "-p", "x", "-n", "1", "-ngl", "1", "-ts", "1", "-c", "64", "--rpc", two[0].endpoint]
    try:
        assert main(line) == 0
    finally:
        hosts.use(())
    said = capsys.readouterr().err
    assert "no effect" not in said and "will be ignored" not in said
    assert f"{two[0].name} buffer size" in said


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ikpy", "rpc-server", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_open_addresses_are_warned_of() -> None:
    with running("-H", "0.0.0.0") as host:
        assert "without a password" in "\n".join(host.log)
        again = started("-p", str(host.port))
        assert again.returncode == 1
        assert again.stderr.splitlines()[-1].startswith("error: cannot listen at 127.0.0.1:")
    with running() as host:
        assert "without a password" not in "\n".join(host.log)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["-p", "x"], "-p x: expected a number from 0 to 65535"),
        (["-m"], "-m: a value is missing"),
        (["-d", "CUDA0"], "a host lends its CPU"),
        (["--prot", "1"], "did you mean --port"),
    ],
)
def test_options_of_a_host(arguments: list[str], wanted: str) -> None:
    result = started(*arguments)
    assert result.returncode == 1 and wanted in result.stderr


def test_help_of_a_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--mem MiB" in output(["rpc-server", "--help"], capsys)
