"""The command `ikpy server` as a process: start, log, keys, signals, errors at the start."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.server.harness import MODELS
from tests.server.live import PATIENCE, address_of

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ikpy", "server", "-m", MODELS["PUPPET"], "-t", "1", *arguments]


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    line = command("--port", "0", *arguments)
    server = subprocess.Popen(line, env=environment, text=True, stdout=pipe, stderr=pipe)
    try:
        yield server, address_of(server)
    finally:
        if server.poll() is None:
            server.kill()
        server.communicate()


def failed_start(*arguments: str) -> str:
    """Last line on standard error of a start that fails, without a terminal."""
    alone = {"stdin": subprocess.DEVNULL, "start_new_session": True, "cwd": ROOT}
    result = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=PATIENCE, check=False, **alone)
    assert result.returncode == 1
    return result.stderr.strip().splitlines()[-1]


def test_log_and_orderly_end() -> None:
    with process("-c", "512", "-np", "2", "--api-key", "secret-1234") as (server, address):
        body = {"prompt": "x", "n_predict": 2}
        answer = httpx.post(f"{address}/completion", json=body, headers={"X-Api-Key": "no"}, timeout=PATIENCE)
        assert answer.status_code == 401
        headers = {"Authorization": "Bearer secret-1234"}
        answer = httpx.post(f"{address}/completion", json=body, headers=headers, timeout=PATIENCE)
        assert answer.json()["tokens_predicted"] == 2
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=PATIENCE)
    assert server.returncode == 0
    for wanted in (
        "build info",
        "new slot",
        "model loaded",
        "HTTP server listening",
        "all slots are idle",
        "slot released",
    ):
        assert wanted in out
    assert 'api_key="api_key: ****1234"' in out
    assert "secret" not in out + err
    assert "prompt eval time =" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(("options", "shown"), [((), 4294967295), (("-s", "7"), 7)])
def test_requests_without_a_seed_are_random_unless_the_server_has_one(options: tuple[str, ...], shown: int) -> None:
    body = {"prompt": "The old man", "n_predict": 24, "temperature": 1.5, "top_k": 0, "cache_prompt": False}
    with process("-m", MODELS["MODEL"], "-c", "256", "--log-disable", *options) as (_, address):
        answers = [httpx.post(f"{address}/completion", json=body, timeout=PATIENCE).json() for _ in range(2)]
    assert [answer["generation_settings"]["seed"] for answer in answers] == [shown, shown]
    assert (answers[0]["content"] == answers[1]["content"]) == bool(options)


def test_termination_lets_a_request_end() -> None:
    with process("-c", "512", "--log-disable") as (server, address):
        body = {"prompt": "x", "n_predict": 400, "stream": True, "logit_bias": [[449, 100]]}
        with httpx.stream("POST", f"{address}/completion", json=body, timeout=PATIENCE) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert '"tokens_predicted":400' in list(lines)[-1]
        assert server.wait(PATIENCE) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_requests_that_do_not_end_are_given_up(number: signal.Signals) -> None:
    """A stream, a plain request and one that waits for a slot; each gets an answer, and the log stays clean."""
    with process("-c", "4096", "-np", "2", "--metrics", "--drain-seconds", "0.5") as (server, address):
        endless = {"prompt": "x", "n_predict": 10**9, "logit_bias": [[449, 100]], "ignore_eos": True}
        found: dict[str, httpx.Response] = {}

        def ask(name: str) -> None:
            found[name] = httpx.post(f"{address}/completion", json=endless, timeout=PATIENCE)

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("plain", "waiting")]
        with httpx.stream("POST", f"{address}/completion", json=endless | {"stream": True}, timeout=PATIENCE) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            for thread in threads:
                thread.start()
            while "requests_deferred 1" not in httpx.get(f"{address}/metrics", timeout=PATIENCE).text:
                time.sleep(0.2)  # every request is a line in a pipe that nobody reads yet
            server.send_signal(number)
            assert "the server is shutting down" in list(lines)[-1]
        for thread in threads:
            thread.join(PATIENCE)
        assert [found[name].status_code for name in sorted(found)] == [503, 503]
        out, err = server.communicate(timeout=PATIENCE)
        assert server.returncode == 0
        assert "Traceback" not in out + err and "Cancel" not in out + err
        assert "main: running requests: 3; they have 0.5 s to end, a second interrupt ends the server at once" in err


def test_json_log() -> None:
    with process("-c", "256", "--log-format", "json") as (server, _):
        server.send_signal(signal.SIGTERM)
        out, _err = server.communicate(timeout=PATIENCE)
    assert all(line.startswith('{"tid":') for line in out.splitlines())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl that makes a certificate")
def test_https(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name]
    subprocess.run([*line, "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=True)
    files = ["--ssl-key-file", str(key), "--ssl-cert-file", str(certificate)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = command("--port", "0", "-c", "256", "--host", "localhost", *files)
    with subprocess.Popen(
        line, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        try:
            assert server.stdout is not None
            found = next(filter(None, (re.search(r'url="(https://localhost:\d+/)"', text) for text in server.stdout)))
            trusted = ssl.create_default_context(cafile=str(certificate))
            with httpx.Client(base_url=found[1], verify=trusted, timeout=PATIENCE) as client:
                end = time.monotonic() + PATIENCE
                while client.get("/health").status_code == 503 and time.monotonic() < end:  # the model is being loaded
                    time.sleep(0.05)
                assert client.get("/health").json()["status"] == "ok"
                assert client.post("/completion", json={"prompt": "x", "n_predict": 2}).json()["tokens_predicted"] == 2
        finally:
            server.kill()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl that makes a certificate")
def test_a_key_with_a_passphrase_is_named(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-passout", "pass:secret", "-subj", "/CN=localhost"]
    subprocess.run([*line, "-keyout", key, "-out", certificate], capture_output=True, check=True)
    message = failed_start("--port", "0", "--ssl-key-file", key, "--ssl-cert-file", certificate)
    assert "the key needs a passphrase, which was not given" in message


def test_a_used_port_is_reported() -> None:
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        port = used.getsockname()[1]
        message = failed_start("--port", str(port))
    assert message.startswith(f"error: couldn't bind to server socket: hostname=127.0.0.1 port={port}")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--chat-template", "zzz"), "the supplied chat template is not supported: zzz"),
        (("--chat-template", "{% if %}"), "chat template, line 1"),
        (("--chat-template-file", "/nofile"), "failed to open file '/nofile'"),
        (("--slot-save-path", "/proc"), "--slot-save-path /proc: "),
        (("--path", "/nodir"), "--path /nodir: no such directory"),
        (("--ssl-key-file", "x.pem"), "HTTPS needs both"),
        (("--ssl-key-file", "README.md", "--ssl-cert-file", "README.md"), "--ssl-key-file README.md, "),
        (("-c", "256", "-np", "64"), "too small for 64 slots"),
        (("-np", "65"), "64"),
    ],
)
def test_wrong_options_end_the_start_with_one_line(arguments: tuple[str, ...], wanted: str) -> None:
    assert wanted in failed_start("--port", "0", *arguments)
