"""Several models behind one port: loading on demand, limits, crashes, streaming, shutdown."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ikpy.server.errors import ApiError
from ikpy.server.log import ServerLog
from ikpy.server.router import NO_MEMORY
from ikpy.server.router.catalog import ModelFile, scan
from ikpy.server.router.pool import GRACE_SECONDS, Limits, Pool
from ikpy.server.router.worker import NoRoomError, State, Worker
from tests.server.harness import MODELS
from tests.server.live import PATIENCE, address_of, wait_for

ROOT = Path(__file__).parents[2]
HELLO = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 8, "temperature": 0}


@contextmanager
def router(folder: Path, *arguments: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """A router over the models of a folder."""
    line = [sys.executable, "-m", "ikpy", "server", "--models-dir", str(folder), "--port", "0", "-t", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    log = (folder / "log").open("w")
    process = subprocess.Popen([*line, "-c", "512", *arguments], env=environment, text=True, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=address_of(process), timeout=PATIENCE) as client:
            yield client, process
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
        psutil.wait_procs(children, timeout=PATIENCE)
        log.close()
        assert not any(child.is_running() for child in children), "a model's process outlived the router"


@pytest.fixture(name="folder")
def models_folder(tmp_path: Path) -> Path:
    shutil.copy(MODELS["PUPPET"], tmp_path / "puppet.gguf")
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "tiny.gguf").symlink_to(MODELS["MODEL"])
    return tmp_path


class SlowWorker(Worker):
    """A worker whose process never answers."""

    async def _start(self) -> None:
        await asyncio.Event().wait()

    async def _end_process(self) -> None:
        if self._loading is not None:
            self._loading.cancel()


def slow_worker(model: ModelFile) -> Worker:
    return SlowWorker(model, [], {}, ServerLog(), 1.0)


def test_models_on_their_way_count(folder: Path) -> None:
    async def play() -> None:
        pool = Pool(partial(scan, folder), Limits(n_models=1), slow_worker)

        async def ask(name: str) -> None:
            async with pool.use(name):
                pass

        first = asyncio.ensure_future(ask("puppet"))
        while "puppet" not in pool.workers:
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="in use"):
            await asyncio.wait_for(ask("small/tiny"), PATIENCE)
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.ensure_future(ask("small/tiny"))
        await asyncio.sleep(2 * GRACE_SECONDS)
        assert not second.done(), "the place of a request that was given up is free"
        assert not pool.workers["puppet"].takes_place, "the first model was not unloaded"
        second.cancel()
        await asyncio.wait({second})

    asyncio.run(play())


class SharedMemory:
    """Memory of which each process takes one unit; a process that finds none ends as `ikpy server` does."""

    def __init__(self, units: int) -> None:
        self.free = units
        self.ended: list[str] = []

    def worker(self, model: ModelFile) -> Worker:
        memory = self

        class Process(Worker):
            """A process that needs a unit."""

            runs = False

            @property
            def pid(self) -> int | None:
                return 1 if self.runs else None

            async def _start(self) -> None:
                self.state = State.LOADING
                await asyncio.sleep(0)
                if memory.free == 0:
                    self.state = State.FAILED
                    raise NoRoomError(500, "no memory")
                memory.free -= 1
                self.runs, self.state = True, State.LOADED

            async def _end_process(self) -> None:
                memory.free += 1
                memory.ended.append(self.model.name)
                self.runs = False

        return Process(model, [], {}, ServerLog(), 1.0)


def test_idle_models_go_when_memory_runs_out(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.gguf").write_bytes(b"x")
    memory = SharedMemory(2)
    pool = Pool(partial(scan, tmp_path), Limits(n_models=0), memory.worker)

    async def ask(name: str) -> None:
        async with pool.use(name):
            await asyncio.sleep(0.01)

    async def play() -> None:
        for name in "abab":
            await ask(name)
        assert memory.ended == [], "both fit"
        await ask("c")
        assert memory.ended == ["a"], "the one used least recently goes"
        await asyncio.gather(ask("d"), ask("d"))
        assert memory.ended == ["a", "b"], "two requests for one model unload one"
        async with pool.use("c"), pool.use("d"):
            with pytest.raises(ApiError, match="try again later") as found:
                await ask("a")
            assert found.value.code == 503
        await ask("a")
        memory.free = 0
        for worker in pool.loaded():
            await pool.unload(worker.model.name)
        memory.free = 0
        with pytest.raises(NoRoomError):
            await ask("b")

    asyncio.run(play())


def test_waiting_requests_unload_no_more_models_than_needed(tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / f"{name}.gguf").write_bytes(b"x")
    memory = SharedMemory(5)
    pool = Pool(partial(scan, tmp_path), Limits(n_models=2), memory.worker)

    async def ask(name: str) -> None:
        async with pool.use(name):
            assert len([worker for worker in pool.workers.values() if worker.takes_place]) <= 2
            await asyncio.sleep(0.01)

    async def play() -> None:
        for name in "ab":
            await ask(name)
        await asyncio.gather(ask("c"), ask("c"))
        assert memory.ended == ["a"], "two requests for one model unload one"
        await asyncio.gather(ask("d"), ask("e"))
        assert memory.ended == ["a", "b", "c"], "two models need two places"

    asyncio.run(play())


def test_a_process_without_device_memory_says_so() -> None:
    line = [sys.executable, "-m", "ikpy", "server", "-m", MODELS["MODEL"], "-ngl", "99", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "IKPY_CUDA_EMULATE": "1", "IKPY_CUDA_EMULATE_MIB": "1"}
    for extra, status in (({}, 1), ({"IKPY_WORKER": "1"}, NO_MEMORY)):
        done = subprocess.run(
            line, env=environment | extra, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == status, done.stderr
        assert done.stderr.strip().splitlines()[-1].startswith("error: "), done.stderr
        assert "MiB are free" in done.stderr


def test_a_long_line_of_a_log_is_passed_over() -> None:
    async def play() -> int:
        worker = slow_worker(ModelFile("m", Path("m.gguf"), 1, 0))
        stream = asyncio.StreamReader(limit=64)
        port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        stream.feed_data(b"x" * 1000 + b'\nHTTP server listening port="81"\n')
        stream.feed_eof()
        await asyncio.wait_for(worker._read_log(stream, port), PATIENCE)
        return port.result()

    assert asyncio.run(play()) == 81


def states(client: httpx.Client) -> dict[str, str]:
    return {entry["id"]: entry["status"]["value"] for entry in client.get("/v1/models").json()["data"]}


def chat(client: httpx.Client, model: str, **more: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json=HELLO | {"model": model, **more})


def processes(server: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(server.pid).children()


def test_models_of_a_folder(folder: Path) -> None:
    for i in (1, 2):
        (folder / f"big-0000{i}-of-00002.gguf").write_bytes(b"x" * 10)
    for name in ("mmproj-x", "imatrix", "m-Q8_0.imatrix", "m-imatrix-Q4_K_M"):
        (folder / f"{name}.gguf").write_bytes(b"x")
    found = scan(folder)
    assert list(found) == ["big", "m-imatrix-Q4_K_M", "puppet", "small/tiny"]
    assert found["big"].size == 20


def test_files_are_looked_at_beside_the_event_loop(folder: Path) -> None:
    """And the folder only for models that are not known, or whose files are not what they were."""
    threads: list[str] = []

    def read() -> dict[str, ModelFile]:
        threads.append(threading.current_thread().name)
        return scan(folder)

    async def play() -> None:
        pool = Pool(read, Limits(), slow_worker)
        for _ in range(3):
            assert await pool.pick("puppet") == "puppet" and await pool.catalog.find("small/tiny")
        assert len(threads) == 1
        shutil.copy(MODELS["PUPPET"], folder / "later.gguf")
        assert await pool.pick("later") == "later"
        assert len(threads) == 2
        (folder / "puppet.gguf").write_bytes(b"x")
        changed = await pool.catalog.find("puppet")
        assert changed is not None and changed.size == 1
        (folder / "later.gguf").unlink()
        with pytest.raises(ApiError, match="there is no model later; models: puppet, small/tiny"):
            await pool.pick("later")
        with pytest.raises(ApiError) as found:
            await pool.pick("x" * 10**6)
        assert found.value.message == f"there is no model {'x' * 100}...; models: puppet, small/tiny"
        assert threading.current_thread().name not in threads

    asyncio.run(play())


def test_errors_name_a_few_of_many_models() -> None:
    models = {f"{i:02}-{'m' * 200}": ModelFile(str(i), Path("x"), 1, 1) for i in range(13)}

    async def message(name: str | None, n: int) -> str:
        pool = Pool(lambda: dict(list(models.items())[:n]), Limits(), slow_worker)
        with pytest.raises(ApiError) as found:
            await pool.pick(name)
        return found.value.message

    shown = ", ".join(f"{i:02}-{'m' * 97}..." for i in range(10))
    for name, what in ((None, '"model" is required'), ("x", "there is no model x")):
        assert asyncio.run(message(name, 10)) == f"{what}; models: {shown}"
        assert asyncio.run(message(name, 13)) == f"{what}; models: {shown} and 3 more (GET /v1/models lists all)"
        assert asyncio.run(message(name, 0)) == f"{what}; models: none"


def test_lengths_of_requests_are_known_before_a_model_is_loaded(folder: Path) -> None:
    """From the header of a file and the options; then what the process says, also after it is unloaded."""
    (folder / "damaged.gguf").write_bytes(b"GGUF")
    with router(folder, "-np", "2", "-c", "1000") as (client, _):
        expected = {"damaged": None, "puppet": 512, "small/tiny": 512}
        for _ in range(2):
            answer = client.get("/v1/models").json()
            assert {entry["id"]: entry.get("max_model_len") for entry in answer["data"]} == expected
            assert {entry["slug"]: entry["context_window"] for entry in answer["models"]} == expected
            assert chat(client, "puppet").status_code == 200
        assert client.get("/v1/models/puppet").json()["meta"]["n_vocab"] > 0
        assert client.post("/models/unload", json={"model": "puppet"}).json() == {"success": True}
        entry = client.get("/v1/models/puppet").json()
        assert entry["status"]["value"] == "unloaded"
        assert entry["max_model_len"] == 512 and entry["meta"]["n_ctx_train"] > 0


def test_load_on_demand_stream_unload_and_errors(folder: Path) -> None:
    with router(folder) as (client, server):
        assert states(client) == {"puppet": "unloaded", "small/tiny": "unloaded"}
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 400
        missing = chat(client, "nothing")
        assert missing.status_code == 404
        assert "puppet" in missing.json()["error"]["message"]
        assert client.post("/v1/chat/completions", content=b"{").status_code == 400
        plain = chat(client, "puppet", logit_bias={"259": 100})
        assert plain.json()["choices"][0]["message"]["content"] == "Hello world."
        assert states(client) == {"puppet": "loaded", "small/tiny": "unloaded"}
        assert client.post("/tokenize", json={"content": "x"}).status_code == 200, "the only loaded model is meant"
        for encoding, pack in (("gzip", gzip.compress), ("deflate", zlib.compress)):
            packed = client.post("/tokenize", content=pack(b'{"content": "x"}'), headers={"Content-Encoding": encoding})
            assert packed.status_code == 200, packed.text
        assert client.post("/tokenize", json={"content": "x"}, headers={"X-Other": b"\xff\xfe"}).status_code == 200
        for path in (b"/%00", b"/%7f", b"//[::1/props", b"//evil.example/props", b"/caf%C3%A9", b"/%ff"):
            odd = client.get(client.base_url.copy_with(raw_path=path))
            assert odd.status_code == 404, f"{path!r}: {odd.status_code} {odd.text[:100]}"
        assert chat(client, "small/tiny").status_code == 200
        assert len(processes(server)) == 2
        with client.stream(
            "POST", "/v1/chat/completions", json=HELLO | {"model": "puppet", "stream": True, "logit_bias": {"259": 100}}
        ) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert client.get("/props", params={"model": "small/tiny"}).json()["model_alias"] == "small/tiny"
        assert chat(client, "puppet", messages=5).status_code == 400
        assert client.post("/models/unload", json={"model": "puppet"}).json() == {"success": True}
        assert states(client)["puppet"] == "unloaded"
        again = client.post("/models/unload", json={"model": "puppet"})
        assert (again.status_code, again.json()["error"]["message"]) == (400, "model is not running")
        assert client.post("/models/load", json={"model": "puppet"}).json() == {"success": True}
        assert [m["name"] for m in client.get("/api/ps").json()["models"]] == ["puppet", "small/tiny"]
        other = client.post("/api/chat", json={"model": "other"})
        assert other.status_code == 404 and other.json()["error"].startswith("there is no model other")
        assert "<title>" in client.get("/").text


def test_a_crash_takes_down_one_model_which_is_started_again(folder: Path) -> None:
    with router(folder) as (client, server):
        chat(client, "small/tiny")
        kept = processes(server)[0].pid
        chat(client, "puppet")
        victim = next(process for process in processes(server) if process.pid != kept)
        body = HELLO | {"model": "puppet", "stream": True, "max_tokens": 10**9, "logit_bias": {"449": 100}}
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            victim.kill()
            rest = [line for line in lines if line]
        assert "ended unexpectedly" in rest[-1]
        assert wait_for(lambda: states(client)["puppet"] == "loaded")
        assert chat(client, "puppet").status_code == 200
        assert kept in [process.pid for process in processes(server)]
        entry = next(e for e in client.get("/v1/models").json()["data"] if e["id"] == "puppet")
        assert entry["status"]["crashes"] == 1


def test_a_damaged_model_is_an_error_of_its_requests_only(folder: Path) -> None:
    (folder / "bad.gguf").write_bytes(b"no model")
    with router(folder) as (client, _):
        answer = chat(client, "bad")
        assert answer.status_code == 500
        assert "bad.gguf" in answer.json()["error"]["message"]
        assert chat(client, "puppet").status_code == 200


def test_clients_of_llama_servers_router(folder: Path) -> None:
    """What they find out about the router and its models."""
    (folder / "damaged.gguf").write_bytes(b"GGUF")
    with router(folder, "--models-max", "3") as (client, _):
        props = client.get("/props").json()
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 3, True)
        entry = client.get("/v1/models/puppet").json()
        assert entry["path"] == str(folder / "puppet.gguf") and entry["status"] == {"value": "unloaded"}
        assert entry["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
        assert client.post("/models/load", json={"model": "damaged"}).status_code == 500
        status = client.get("/v1/models/damaged").json()["status"]
        assert (status["value"], status["failed"], status["exit_code"]) == ("unloaded", True, 1)
        with client.stream("GET", "/models/sse") as stream, ThreadPoolExecutor(1) as pool:
            loading = pool.submit(chat, client, "puppet")
            lines = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
            told = [next(lines), next(lines)]
            assert loading.result().status_code == 200
        assert [event["data"] for event in told] == [{"status": "loading"}, {"status": "loaded"}]
        assert {(event["model"], event["event"]) for event in told} == {("puppet", "model_status")}
        assert client.get("/props", params={"model": "puppet"}).json()["model_alias"] == "puppet"
        for method in ("POST", "DELETE"):
            assert client.request(method, "/models", json={"model": "a/b"}).status_code == 501


def test_a_stream_of_states_ends_with_the_router(folder: Path) -> None:
    with router(folder) as (client, process), client.stream("GET", "/models/sse") as stream:
        process.terminate()
        assert not [line for line in stream.iter_lines() if line]
        process.wait(20)


def test_one_model_at_a_time(folder: Path) -> None:
    with router(folder, "--models-max", "1") as (client, server):
        chat(client, "small/tiny")
        chat(client, "puppet")
        assert states(client) == {"puppet": "loaded", "small/tiny": "unloaded"}
        body = HELLO | {"model": "puppet", "stream": True, "max_tokens": 10**9, "logit_bias": {"449": 100}}
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            busy = chat(client, "small/tiny")
            assert busy.status_code == 503
            assert busy.headers["retry-after"].isdigit()
        assert wait_for(lambda: chat(client, "small/tiny").status_code == 200), "the closed stream must not count"
        assert len(processes(server)) == 1


def test_idle_models_go_and_memory_is_limited(folder: Path) -> None:
    with router(folder, "--models-ttl", "1", "--models-memory", "1") as (client, server):
        chat(client, "puppet")
        chat(client, "small/tiny")
        assert states(client)["puppet"] == "unloaded", "1 MiB is too little for two"
        assert wait_for(lambda: not processes(server)), "idle for more than a second"


def test_keys_hold_for_all_models_and_not_for_their_processes(folder: Path) -> None:
    with router(folder, "--api-key", "secret") as (client, server):
        assert chat(client, "puppet").status_code == 401
        assert not any("path" in entry for entry in client.get("/v1/models").json()["data"])
        assert "path" not in client.get("/v1/models/puppet").json()
        client.headers["Authorization"] = "Bearer secret"
        assert chat(client, "puppet").status_code == 200
        assert client.get("/v1/models/puppet").json()["path"] == str(folder / "puppet.gguf")
        port = processes(server)[0].net_connections(kind="inet")[0].laddr.port
        direct = httpx.get(
            f"http://127.0.0.1:{port}/props", headers={"Authorization": "Bearer secret"}, timeout=PATIENCE
        )
        assert direct.status_code == 401
        assert "secret" not in " ".join(processes(server)[0].cmdline())


def test_the_processes_end_with_a_killed_router(folder: Path) -> None:
    with router(folder) as (client, server):
        chat(client, "puppet")
        children = processes(server)
        os.kill(server.pid, signal.SIGKILL)
        server.wait(PATIENCE)
        _, alive = psutil.wait_procs(children, timeout=PATIENCE)
        assert not alive


def test_running_requests_end_before_the_router(folder: Path) -> None:
    with router(folder) as (client, server):
        body = HELLO | {"model": "puppet", "stream": True, "max_tokens": 200, "logit_bias": {"449": 100}}
        with client.stream("POST", "/v1/chat/completions", json=body) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            stopping = threading.Timer(0.05, server.terminate)
            stopping.start()
            assert list(lines)[-1] == "data: [DONE]"
        assert server.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [(("-m", "x.gguf"), "exclude each other"), (("--models-dir", "/nodir"), "--models-dir /nodir: no such directory")],
)
def test_wrong_options(folder: Path, arguments: tuple[str, ...], wanted: str) -> None:
    line = [sys.executable, "-m", "ikpy", "server", "--models-dir", str(folder), "--port", "0", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert result.returncode == 1
    assert wanted in result.stderr.strip().splitlines()[-1]
