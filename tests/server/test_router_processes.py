"""Starts and ends of the router's processes, which are played by stubs: unloading, stops during a start, failures."""

from __future__ import annotations

import asyncio
import calendar
import errno
import gc
import gzip
import io
import json
import os
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ikpy.server.errors import engine_ended
from ikpy.server.keys import KeyRing
from ikpy.server.log import ServerLog
from ikpy.server.router.app import make_router
from ikpy.server.router.catalog import ModelFile
from ikpy.server.router.pool import GRACE_SECONDS, Limits, Pool
from ikpy.server.router.worker import Worker
from ikpy.server.settings import ServerSettings
from tests.server.live import PATIENCE

STUB = Path(__file__).parent / "model_stub.py"
FAILURE = json.dumps(engine_ended("OSError: the device is gone").body())


class Router:
    """A router in this process over the models a, b and c, whose processes are stubs with a folder each."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self.folder = folder
        self.lines = io.StringIO()
        log = ServerLog("json", self.lines)
        models = {name: ModelFile(name, None, 1, 1) for name in "abc"}

        def make_worker(model: ModelFile) -> Worker:
            (folder / model.name).mkdir(exist_ok=True)
            worker = Worker(model, [], dict(os.environ), log, PATIENCE)
            worker._arguments = [sys.executable, str(STUB), str(folder / model.name), FAILURE]
            return worker

        self.pool = Pool(lambda: models, limits, make_worker)
        app = make_router(self.pool, ServerSettings(), KeyRing({}), log)
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=PATIENCE)

    async def post(self, path: str, model: str) -> httpx.Response:
        """The answer to a request about a model."""
        return await asyncio.wait_for(self.client.post(path, json={"model": model}), PATIENCE)

    async def pid(self, model: str) -> int:
        """The id of the process that answers."""
        answer = await self.post("/echo", model)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["pid"])

    def errors(self) -> list[str]:
        """Messages of the log about failures."""
        found = [json.loads(line) for line in self.lines.getvalue().splitlines() if line.startswith("{")]
        return [line["msg"] for line in found if line["level"] == "ERR"]

    def states(self) -> dict[str, str]:
        """States of the models that were used."""
        return {name: worker.state.value for name, worker in self.pool.workers.items()}

    async def file(self, model: str, name: str) -> None:
        """Waits for a file of a stub."""
        await until((self.folder / model / name).exists)


async def until(condition: Callable[[], object]) -> None:
    async def look() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    await asyncio.wait_for(look(), PATIENCE)


@asynccontextmanager
async def routing(folder: Path, limits: Limits) -> AsyncIterator[Router]:
    router = Router(folder, limits)
    try:
        yield router
    finally:
        for name in "abc":
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "release").touch()
        await router.pool.stop()


Scene = Callable[[Router], Awaitable[None]]


@pytest.fixture(name="play")
def player(tmp_path: Path) -> Callable[..., None]:
    """Plays a scene with a router, which loads ``n_models`` at a time."""

    async def run(scene: Scene, n_models: int) -> None:
        async with routing(tmp_path, Limits(n_models)) as router:
            await scene(router)

    return lambda scene, n_models=4: asyncio.run(run(scene, n_models))


def test_a_model_answers_while_another_one_is_unloaded(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        first, other = await router.pid("a"), await router.pid("b")
        slow = asyncio.ensure_future(router.post("/wait", "a"))
        await router.file("a", "waiting")
        unloads = [asyncio.ensure_future(router.post("/models/unload", "a")) for _ in range(2)]
        await router.file("a", "ending")
        again = asyncio.ensure_future(router.pid("a"))
        beside = asyncio.ensure_future(router.pid("b"))
        await asyncio.wait({slow, *unloads, again, beside}, return_when=asyncio.FIRST_COMPLETED)
        assert beside.done(), "b waits for the end of a"
        assert beside.result() == other
        refused = await router.post("/echo?autoload=false", "a")
        assert refused.status_code == 400, "a model that ends is not loaded"
        third = await router.pid("c")
        assert not any(task.done() for task in (slow, *unloads, again)), "a ended before its request"
        (router.folder / "a" / "release").touch()
        assert (await slow).json()["pid"] == first
        assert [(await unload).json() for unload in unloads] == [{"success": True}] * 2
        assert await again not in (first, other, third), "a request meanwhile loads the model again"
        assert router.errors() == []

    play(scene)


def test_a_model_that_ends_takes_its_place(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        await router.pid("a")
        slow = asyncio.ensure_future(router.post("/wait", "a"))
        await router.file("a", "waiting")
        unload = asyncio.ensure_future(router.post("/models/unload", "a"))
        await router.file("a", "ending")
        waiting = asyncio.ensure_future(router.pid("b"))
        await asyncio.sleep(2 * GRACE_SECONDS)
        assert not waiting.done(), "b must wait for the place of a, and is not refused"
        assert [worker.model.name for worker in router.pool.loaded()] == ["a"]
        (router.folder / "a" / "release").touch()
        assert (await slow).status_code == (await unload).status_code == 200
        assert await waiting == router.pool.workers["b"].pid
        assert router.states() == {"a": "unloaded", "b": "loaded"}

    play(scene, 1)


def test_a_start_that_fails_in_an_unexpected_way(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(router: Router) -> None:
        clients = []

        async def fail(worker: Worker) -> None:
            clients.append(worker.client)
            raise ValueError("not remembered")

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "_remember", fail)
            with pytest.raises(ValueError, match="not remembered"):  # which is answered with 500
                await router.post("/echo", "a")
        await until(lambda: router.pool.workers["a"].pid is None)
        assert router.states() == {"a": "failed"}
        assert [client is not None and client.is_closed for client in clients] == [True]
        await router.pid("a")
        await router.post("/models/unload", "a")
        arguments = router.pool.workers["a"]._arguments
        router.pool.workers["a"]._arguments = [*arguments, "\0"]  # as a file of presets may have it
        answer = await router.post("/echo", "a")
        assert (answer.status_code, router.states()) == (500, {"a": "failed"})
        assert answer.json()["error"]["message"].endswith("its process cannot be started: embedded null byte")
        router.pool.workers["a"]._arguments = arguments
        await router.pid("a")

    play(scene)


@pytest.mark.parametrize("closes", [False, True])
def test_a_process_that_is_being_created_is_stopped(
    closes: bool, play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = asyncio.create_subprocess_exec
    processes: list[asyncio.subprocess.Process] = []

    async def scene(router: Router) -> None:
        go_on = asyncio.Event()

        async def slow(*args: Any, **more: Any) -> asyncio.subprocess.Process:
            processes.append(await create(*args, **more))
            await go_on.wait()
            return processes[-1]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", slow)
        request = asyncio.ensure_future(router.post("/echo", "a"))
        await until(lambda: processes)
        stopping: asyncio.Future[Any] = asyncio.ensure_future(router.pool.stop() if closes else router.pool.unload("a"))
        await asyncio.sleep(0.05)
        assert not stopping.done(), "the process is not there yet, and cannot have ended"
        go_on.set()
        await asyncio.wait_for(stopping, PATIENCE)
        assert processes[0].returncode is not None, "the process outlives the stop"
        answer = await request
        said = "the server is shutting down" if closes else "unloaded before it could answer"
        assert answer.status_code == 503 and said in answer.text, answer.text
        assert router.states() == {"a": "unloaded"} and router.errors() == []
        again = await router.post("/echo", "a")
        assert (again.status_code, len(processes)) == ((503, 1) if closes else (200, 2)), again.text

    play(scene)


def test_a_start_that_nobody_waits_for_any_more(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        lost: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        request = asyncio.ensure_future(router.post("/echo", "a"))
        await until(lambda: "a" in router.pool.workers and router.pool.workers["a"].pid)
        request.cancel()
        await asyncio.wait({request})
        await router.pool.unload("a")
        await router.pid("a")  # another start takes the place of the first
        gc.collect()
        assert lost == []

    play(scene)


def refuse_processes(monkeypatch: pytest.MonkeyPatch, number: int) -> list[None]:
    """The system starts no processes until this is undone; one entry for every refusal."""
    refusals: list[None] = []

    async def refuse(*_: Any, **__: Any) -> None:
        refusals.append(None)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    return refusals


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM])
def test_a_process_that_the_system_does_not_start(
    number: int, play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(router: Router) -> None:
        refuse_processes(monkeypatch, number)
        answer = await router.post("/echo", "a")
        assert answer.status_code == 500, answer.text
        wanted = f"the model a cannot be loaded: its process cannot be started: {os.strerror(number)}"
        assert answer.json()["error"]["message"] == wanted
        assert router.states() == {"a": "failed"} and router.errors() == ["model not loaded"]
        monkeypatch.undo()
        await router.pid("a")

    play(scene)


def test_a_restart_that_the_system_refuses(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(router: Router) -> None:
        first = await router.pid("a")
        refusals = refuse_processes(monkeypatch, errno.EAGAIN)
        os.kill(first, 9)
        await until(lambda: refusals)
        await until(lambda: router.states() == {"a": "failed"})
        assert router.errors() == ["model process ended", "model not loaded"]
        monkeypatch.undo()
        assert await router.pid("a") != first

    play(scene)


def test_an_idle_model_makes_room_for_a_process(play: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(router: Router) -> None:
        await router.pid("a")
        refusals = refuse_processes(monkeypatch, errno.ENOMEM)
        request = asyncio.ensure_future(router.pid("b"))
        await until(lambda: refusals)
        monkeypatch.undo()
        await request
        assert router.states() == {"a": "unloaded", "b": "loaded"}

    play(scene)


def test_a_process_whose_engine_has_ended_is_started_again(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        first = await router.pid("a")
        for path in ("/busy", "/refuse"):
            assert (await router.post(path, "a")).status_code == 503
        assert await router.pid("a") == first, "these have nothing to do with the engine"
        await router.post("/fail", "a")
        answer = await router.post("/echo", "a")
        assert answer.status_code == 503 and "it is started again" in answer.json()["error"]["message"], answer.text
        assert answer.headers["retry-after"].isdigit()
        assert await router.pid("a") != first
        assert router.pool.workers["a"].n_crashes == 1
        assert router.errors() == ["the engine has ended", "model process ended"]

    play(scene)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_bodies_are_passed_on_unpacked(encoding: str, play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        data = b'{"model": "a", "n": 1}'
        packed = gzip.compress(data) if encoding == "gzip" else zlib.compress(data)
        answer = await router.client.post("/echo", content=packed, headers={"Content-Encoding": encoding})
        seen = answer.json()
        assert seen["body"].encode() == data
        assert "content-encoding" not in seen["headers"], "the body is plain"
        assert int(seen["headers"]["content-length"]) == len(data)

    play(scene)


def test_an_answer_may_take_longer_than_the_timeout(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        make_worker = router.pool._make_worker

        def hasty(model: ModelFile) -> Worker:
            worker = make_worker(model)
            worker._timeout = 0.5
            return worker

        router.pool._make_worker = hasty
        slow = asyncio.ensure_future(router.post("/wait", "a"))
        await router.file("a", "waiting")
        await asyncio.sleep(1.0)
        (router.folder / "a" / "release").touch()
        answer = await slow
        assert answer.status_code == 200, answer.text
        assert router.errors() == []

    play(scene)


@pytest.mark.parametrize(
    ("path", "kind", "begins"),
    [
        ("/v1/completions", "text/event-stream; charset=utf-8", 'data: {"error":{"code":503,'),
        ("/v1/messages", "text/event-stream; charset=utf-8", 'event: error\ndata: {"type":"error","error":{'),
        ("/api/chat", "application/x-ndjson", '{"error":"the process of the model a ended'),
    ],
)
def test_a_stream_tells_of_the_end_of_its_process(path: str, kind: str, begins: str, play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        answer = await router.client.post(path, json={"model": "a", "dies": kind})
        assert answer.status_code == 200
        start, _, rest = answer.text.partition("\n\n")
        assert start == "{}"
        assert rest.startswith(begins), answer.text
        assert rest.endswith("\n") and "it is started again" in rest

    play(scene)


async def turns_beside(router: Router, body: bytes) -> int:
    """How often another task of the event loop had its turn while a request was answered."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    answer = await router.client.post("/busy", content=body)
    counting.cancel()
    assert answer.status_code == 503, answer.text
    return turns


def test_large_bodies_are_read_beside_other_requests(play: Callable[..., None]) -> None:
    """Parsed in the event loop, many values would leave no more turns than one string of their length."""

    async def scene(router: Router) -> None:
        await router.pid("a")
        values = b"[" + b"[]," * 400_000 + b"[]]"
        found = []
        for _ in range(3):  # on a busy machine the string may wait as well
            many = await turns_beside(router, b'{"model": "a", "x": ' + values + b"}")
            one = await turns_beside(router, b'{"model": "a", "x": "' + b"x" * len(values) + b'"}')
            found.append((many, one))
            if many > 10 * one:
                return
        raise AssertionError(found)

    play(scene)


def test_a_single_model_is_loading_until_it_was_there_once(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        router.pool.is_single = True
        answer = await router.client.get("/health")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Loading model")
        await router.pid("a")
        for _ in range(2):
            assert (await router.client.get("/health")).status_code == 200
            await router.pool.unload("a")

    play(scene)


@pytest.mark.parametrize(
    ("path", "more", "is_single"),
    [
        ("/api/generate", {"keep_alive": 0}, False),
        ("/api/generate", {"prompt": "", "keep_alive": "0s"}, True),
        ("/api/chat", {"messages": [], "keep_alive": "0h0m"}, False),
    ],
)
def test_ollama_requests_for_no_time_unload(
    path: str, more: dict[str, Any], is_single: bool, play: Callable[..., None]
) -> None:
    async def scene(router: Router) -> None:
        router.pool.is_single = is_single
        await router.pid("a")
        worker = router.pool.workers["a"]
        for kept in ({}, {"keep_alive": "10m"}, {"keep_alive": -1}, {"keep_alive": False}):
            answer = (await router.client.post(path, json={"model": "a", **kept})).json()
            assert "pid" in answer and worker.pid is not None, "the request is the model's"
        answer = (await router.client.post(path, json={"model": "a", **more})).json()
        assert (answer["model"], answer["done"], answer["done_reason"]) == ("a", True, "unload")
        assert worker.pid is None and router.states()["a"] == ("sleeping" if is_single else "unloaded")
        assert (await router.client.get("/api/ps")).json() == {"models": []}
        again = (await router.client.post(path, json={"model": "a", **more})).json()
        assert again["done_reason"] == "unload" and worker.pid is None, "what is not loaded is not loaded for that"

    play(scene)


def test_lists_of_models_show_when_one_is_unloaded(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        await router.pid("a")
        listed = {item["name"]: item for item in (await router.client.get("/api/tags")).json()["models"]}
        assert all(len(item["digest"]) == 64 for item in listed.values())
        (entry,) = (await router.client.get("/api/ps")).json()["models"]
        assert entry["digest"] == listed["a"]["digest"] and entry["expires_at"] > "2400"
        router.pool.limits = replace(router.pool.limits, idle_seconds=3600.0)
        (entry,) = (await router.client.get("/api/ps")).json()["models"]
        assert 3000 < calendar.timegm(time.strptime(entry["expires_at"], "%Y-%m-%dT%H:%M:%SZ")) - time.time() < 3700
        found = (await router.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()
        assert [item["slug"] for item in found["models"]] == [item["id"] for item in found["data"]]
        assert found["has_more"] is False and found["first_id"] == found["data"][0]["id"]

    play(scene)


def test_questions_about_a_model_leave_its_idle_time_alone(play: Callable[..., None]) -> None:
    async def scene(router: Router) -> None:
        before = time.monotonic()
        async with router.pool.use("a", counts=False) as worker:
            loaded = worker.last_used
            assert loaded > before
            async with router.pool.use("a"):
                pass
            used = worker.last_used
        assert worker.last_used == used > loaded, "another request has used it meanwhile"
        async with router.pool.use("a", counts=False):
            assert worker.last_used == used
        assert worker.last_used == used
        await router.pool.unload("a")
        async with router.pool.use("a", counts=False) as worker:
            pass
        assert worker.last_used > used, "it has just been loaded"

    play(scene)
