"""Running a server for long: keys by name and their reload, configuration, slots over a restart, killed processes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import os
import secrets
import signal
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from ikpy.cli.parser import parse
from ikpy.cli.server import origins
from ikpy.errors import UsageError
from ikpy.server.app import is_allowed
from ikpy.server.keys import KeyRing, key_end, read_keys
from ikpy.server.log import ServerLog
from ikpy.server.serve import KEEP_ALIVE_SECONDS, HttpServer
from tests.server.harness import running
from tests.server.live import PATIENCE, wait_for
from tests.server.test_command import failed_start, process

ENDLESS = {"prompt": "x", "n_predict": 10**9, "temperature": 0, "logit_bias": [[449, 100]], "stream": True}
TEXT = {"prompt": "The old man looked at the sea.", "n_predict": 8, "temperature": 0, "logit_bias": [[449, 100]]}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_keys_have_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\nalice abc-1\n\nxyz-2\n")
    names = read_keys(["first-0"], [str(file)])
    assert names == {"first-0": "key-1", "abc-1": "alice", "xyz-2": "key-3"}
    ring = KeyRing(names)
    assert ring.name_of({"authorization": "Bearer abc-1"}) == "alice"
    assert ring.name_of({"x-api-key": "xyz-2"}) == "key-3"
    assert ring.name_of({"authorization": "Bearer abc-12"}) is None
    both = {"authorization": "Bearer of-another-server", "x-api-key": "xyz-2"}
    assert ring.name_of(both) == "key-3", "one of the headers is enough"
    ring.replace({"schlüssel": "umlaut"})
    assert ring.name_of({"x-api-key": "schlüssel".encode().decode("latin-1")}) == "umlaut"
    with pytest.raises(UsageError, match="nofile"):
        read_keys([], ["/nofile"])
    file.write_text("# alice abc-1\n\n")
    with pytest.raises(UsageError, match="no key in it"):
        read_keys([], [str(file)])
    assert read_keys(["first-0"], [str(file)]) == {"first-0": "key-1"}


def test_comments_are_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbfabc-1 # the first\r\n  # of the others\r\nalice  xyz#2 # hers\r\n\r\n")
    assert read_keys([], [str(file)]) == {"abc-1": "key-1", "xyz#2": "alice"}
    file.write_text("abc-1\nmy secret words\n")
    with pytest.raises(UsageError, match="line 2 is neither KEY nor NAME KEY"):
        read_keys([], [str(file)])


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="this system has no paths of open files")
def test_keys_of_a_pipe_can_be_asked_for_again() -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, b"abc-1\n")
        os.close(writer)
        for _ in range(2):
            assert read_keys(["first-0"], [f"/dev/fd/{reader}"]) == {"first-0": "key-1", "abc-1": "key-2"}
    finally:
        os.close(reader)


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = secrets.compare_digest
    monkeypatch.setattr(secrets, "compare_digest", lambda a, b: compared.append(b) or compare(a, b))
    ring = KeyRing({"first-0": "a", "second-0": "b", "third-0": "c"})
    for given, name in (("first-0", "a"), ("third-0", "c"), ("first-1", None), ("", None)):
        compared.clear()
        assert ring.name_of({"x-api-key": given}) == name
        assert compared == [b"first-0", b"second-0", b"third-0"] * 2, "no key may be skipped, for neither header"


@pytest.mark.parametrize(
    ("key", "shown"), [("secret-key-1", "****ey-1"), ("12345678", "****"), ("k2", "****"), ("", "****")]
)
def test_logs_show_little_of_a_key(key: str, shown: str) -> None:
    assert key_end(key) == shown


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
@pytest.mark.parametrize("more", [(), ("--sleep-idle-seconds", "600")], ids=["one process", "router"])
def test_hangup_reloads_keys(more: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice old-key-1\n")
    with process("-c", "256", "--api-key-file", str(file), *more) as (server, address):

        def status(key: str) -> int:
            return httpx.get(f"{address}/props", headers=bearer(key), timeout=PATIENCE).status_code

        assert (status("old-key-1"), status("new-key-2")) == (200, 401)
        file.write_text("bob new-key-2\n")
        server.send_signal(signal.SIGHUP)
        assert wait_for(lambda: status("new-key-2") == 200)
        assert status("old-key-1") == 401
        file.write_text("")
        server.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert status("new-key-2") == 200, "a file without keys must not open the server"
        server.terminate()
        out, err = server.communicate(timeout=PATIENCE)
    assert 'key="alice"' in out and 'key="bob"' in out
    assert "old-key" not in (out + err).replace("****ey-1", "") and "new-key" not in out + err
    assert "keys not reloaded" in out


class Interrupted(io.StringIO):
    """A log during whose first line a hangup arrives."""

    def write(self, text: str) -> int:
        if not self.tell():
            super().write("-")
            signal.raise_signal(signal.SIGHUP)
        return super().write(text)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_hangup_in_the_middle_of_a_line_of_the_log_waits_for_its_end() -> None:
    stream = Interrupted()
    log = ServerLog(out=stream)

    async def app(scope: object, receive: object, send: object) -> None:
        """Nothing is asked for."""

    async def play() -> None:
        config = uvicorn.Config(app, log_level="error", lifespan="off")
        http = HttpServer(config, lambda: log.event("reload", "second"), 0.0, lambda: None)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.ensure_future(http.serve(sockets=[listener]))
            while not http.started:
                await asyncio.sleep(0.01)
            log.event("test", "first")
            while "second" not in stream.getvalue():
                await asyncio.sleep(0.01)
            http.should_exit = True
            await serving

    def late(*_: object) -> None:
        raise AssertionError("the reload waits for the line that it has interrupted")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(int(PATIENCE))
    try:
        asyncio.run(play())
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    first, second = stream.getvalue().splitlines()
    assert "] first |" in first and "] second |" in second


CONFIG = """
threads = 1
[server]
ctx-size = 512
parallel = 2
alias = "from-file"
metrics = true
api-key = ["a-1", "b-2"]
cont-batching = true
context-shift = false
no-mmap = true
no-webui = true
[perplexity]
ctx-size = 64
"""


def test_configuration_from_file_environment_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(CONFIG)
    params = parse(["--config", str(file), "-a", "from-line"], "server", {})
    assert (params.context.n_ctx, params.context.n_parallel, params.context.n_threads) == (512, 2, 1)
    assert params.server.metrics and not params.server.context_shift
    assert not params.model.use_mmap and params.server.webui == "none"
    assert params.server.api_keys == ["a-1", "b-2"]
    assert params.model.alias == "from-line"
    environment = {"IKPY_CONFIG": str(file), "LLAMA_ARG_QUEUE_LIMIT": "7", "LLAMA_ARG_CTX_SIZE": "1024"}
    params = parse([], "server", environment)
    assert (params.model.alias, params.server.queue_limit, params.context.n_ctx) == ("from-file", 7, 1024)
    assert parse(["--config", str(file)], "perplexity", {}).context.n_ctx == 64
    with process("--config", str(file)) as (_, address), httpx.Client(base_url=address, timeout=PATIENCE) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "from-file"
        assert len(client.get("/slots", headers=bearer("b-2")).json()) == 2


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("nonsense = 1", "unknown option nonsense"),
        ("[nonsense]\nport = 1", "no tool is called [nonsense]"),
        ("port = ", "Invalid value"),
        ("metrics = false", "leave the key out"),
        ("no-mmap = false", "leave the key out"),
        ("port = 99999999", "invalid parameter for argument: --port"),
        ("[server]\nalias = {a = 1}", "alias must be a number"),
    ],
)
def test_wrong_configuration(tmp_path: Path, text: str, wanted: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse(["--config", str(file)], "server", {})
    assert wanted in str(caught.value)
    assert "nofile" in failed_start("--config", "/nofile")


def ask(address: str) -> dict:
    return httpx.post(f"{address}/completion", json=TEXT, timeout=PATIENCE).json()


def test_idle_connections_outlast_those_of_clients() -> None:
    """A client that sends a request while the server closes its connection gets an error, and httpx keeps them for 5
    seconds, as uvicorn does by itself. They do not keep the server from ending."""
    with process("-c", "512", "-np", "1") as (server, address):
        connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=PATIENCE)
        connection.connect()
        connection.auto_open = False
        for pause in (5.5, 0.0):
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            time.sleep(pause)
        server.terminate()
        began = time.monotonic()
        server.communicate(timeout=PATIENCE)
        assert time.monotonic() - began < KEEP_ALIVE_SECONDS / 3
        assert connection.sock.recv(1) == b""
        connection.close()


def test_slots_survive_a_restart(tmp_path: Path) -> None:
    options = ("-c", "512", "-np", "2", "--slot-save-path", str(tmp_path), "--slot-autosave")
    with process(*options) as (server, address):
        first = ask(address)
        server.terminate()
        out, _ = server.communicate(timeout=PATIENCE)
        assert "slot saved" in out
    with process(*options) as (server, address):
        again = ask(address)
        assert again["content"] == first["content"]
        assert again["timings"]["prompt_n"] == 1
    for path in tmp_path.glob("autosave-?-????????"):
        path.write_bytes(path.read_bytes()[:-5])
    with process(*options) as (server, address):
        assert ask(address)["content"] == first["content"], "a damaged file is left alone"
        server.terminate()
        assert "slot not restored" in server.communicate(timeout=PATIENCE)[0]
    assert failed_start("--slot-autosave", "--port", "0").endswith("--slot-autosave needs --slot-save-path")


def test_servers_of_several_names_keep_their_slots_in_one_folder(tmp_path: Path) -> None:
    options = ("-c", "512", "--slot-save-path", str(tmp_path), "--slot-autosave", "--alias")
    reused = []
    for name, prompt in (("a", TEXT["prompt"]), ("b", "Nobody had ever seen"), ("a", TEXT["prompt"])):
        with process(*options, name) as (server, address):
            answer = httpx.post(f"{address}/completion", json=TEXT | {"prompt": prompt}, timeout=PATIENCE).json()
            reused.append(answer["timings"]["prompt_n"] == 1)
            server.terminate()
            assert "slot saved" in server.communicate(timeout=PATIENCE)[0]
    assert reused == [False, False, True]


def test_saved_slots_restore_after_a_kill_under_load(tmp_path: Path) -> None:
    """The process is killed while three slots generate and the fourth is being written again and again."""
    options = ("-c", "1024", "-np", "4", "--slot-save-path", str(tmp_path))
    with process(*options) as (server, address), httpx.Client(base_url=address, timeout=PATIENCE) as client:
        first = client.post("/completion", json=TEXT | {"id_slot": 0}).json()
        n_read, n_saved = [0, 0, 0], [0]

        def load(number: int) -> None:
            with (
                contextlib.suppress(httpx.TransportError),
                client.stream("POST", "/completion", json=ENDLESS | {"id_slot": number + 1}) as response,
            ):
                for line in response.iter_lines():
                    n_read[number] += bool(line)

        def save() -> None:
            with contextlib.suppress(httpx.TransportError):
                while client.post("/slots/0?action=save", json={"filename": "kept"}).is_success:
                    n_saved[0] += 1

        threads = [threading.Thread(target=load, args=(i,)) for i in range(3)] + [threading.Thread(target=save)]
        for thread in threads:
            thread.start()
        assert wait_for(lambda: min(n_read) > 20 and n_saved[0] > 3)
        assert all(thread.is_alive() for thread in threads), "the load ended before the kill"
        server.kill()
        for thread in threads:
            thread.join(PATIENCE)
    with process(*options) as (_, address), httpx.Client(base_url=address, timeout=PATIENCE) as client:
        restored = client.post("/slots/1?action=restore", json={"filename": "kept"})
        assert restored.status_code == 200, restored.text
        tokens = json.loads((tmp_path / "kept.tokens.json").read_text())["tokens"]
        assert restored.json()["n_restored"] == len(tokens)
        again = client.post("/completion", json=TEXT | {"id_slot": 1}).json()
        assert again["content"] == first["content"]
        assert again["timings"]["prompt_n"] == 1
        leftovers = [path.name for path in tmp_path.iterdir() if not path.name.startswith(("kept", ".kept"))]
        assert leftovers == []


ORIGIN = "https://a.example"


@pytest.mark.parametrize(
    ("origin", "may"),
    [
        ("http://localhost:5173", True),
        ("https://localhost", True),
        ("http://127.0.0.1:8080", True),
        ("http://[::1]:3000", True),
        ("https://localhost.example", False),
        ("http://192.168.1.2", False),
        ("http://[::1", False),
        ("null", False),
        ("", False),
        ("https://b.example", True),
    ],
)
def test_localhost_stands_for_pages_of_this_machine(origin: str, may: bool) -> None:
    assert is_allowed(origin, origins("localhost,https://b.example") or ()) == may


@pytest.mark.parametrize(
    ("options", "allowed", "others"),
    [
        ("", True, True),
        ("--api-key k", False, False),
        (f"--api-key k --cors {ORIGIN}", True, False),
        (f"--api-key k --cors https://b.example,{ORIGIN}", True, False),
        ("--api-key k --cors *", True, True),
        (f"--cors {ORIGIN}", True, False),
        ("--cors https://b.example", False, False),
    ],
)
def test_pages_of_other_origins(options: str, allowed: bool, others: bool) -> None:
    with running(f"llama-server -m PUPPET -t 1 -c 256 {options}") as client:
        for origin, may in ((ORIGIN, allowed), ("https://c.example", others)):
            headers = {"Origin": origin, "X-Api-Key": "k"}
            for answer in (
                client.options("/v1/chat/completions", headers=headers),
                client.get("/props", headers=headers),
                client.post("/tokenize", headers=headers | {"X-Api-Key": "wrong"}, json={"content": "a"}),
            ):
                assert answer.headers.get("access-control-allow-origin") == (origin if may else None)
                assert answer.headers["server"] == "ikpy"
