"""Models and options of an INI file (`--models-preset`), and models that sleep when they are idle."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from ikpy.cli.router import Models, request_tokens, shared_uses
from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.server.router.catalog import ModelFile
from ikpy.server.router.worker import worker_environment
from tests.server.harness import MODELS
from tests.server.live import PATIENCE, address_of, wait_for
from tests.server.test_router import HELLO, ROOT, router

PRESETS = """\ufeffversion = 1
; options of all models
[*]
c = 1024
n-gpu-layers = 3
mlock = true
    jinja = true

[small/tiny]
# of a model of the folder
ctx-size = 512
no-cont-batching = true
slots = false
host = 0.0.0.0
lora = a.gguf
stop-timeout = 5

[odd one]
model = {path}
model = {path}
LLAMA_ARG_N_PARALLEL = 2
context-shift = true
temp = 0.5
load-on-startup = true
dedup-cache-models = 1

[hub]
hf-repo = user/repository:Q4_0
control-vector-layer-range = 1 3
"""


@contextlib.contextmanager
def started(*arguments: str, folder: Path) -> Iterator[httpx.Client]:
    """A server in a process of its own."""
    line = [sys.executable, "-m", "ikpy", "server", "--port", "0", "-t", "1", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(line, env=environment, text=True, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=address_of(process), timeout=PATIENCE) as client:
                yield client
        finally:
            process.terminate()
            process.wait(PATIENCE)


def write(folder: Path, text: str) -> str:
    file = folder / "models.ini"
    file.write_text(text, encoding="utf-8")
    return str(file)


def arguments_of(models: Models, name: str) -> list[str]:
    return list(models.catalog()[name].arguments)


def test_options_of_sections(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    for name in ("small/tiny", "other"):
        (tmp_path / f"{name}.gguf").symlink_to(MODELS["PUPPET"])
    file = write(tmp_path, PRESETS.replace("{path}", MODELS["PUPPET"]))
    shared, _ = shared_uses(["--models-preset", file, "-ngl", "0", "--lora", "b.gguf", "--port", "1"])
    models = Models(str(tmp_path), file, shared)
    catalog = models.catalog()
    assert sorted(catalog) == ["hub", "odd one", "other", "small/tiny"] and models.at_start == ["odd one"]
    assert arguments_of(models, "other") == ["-c", "1024", "--mlock", "--jinja"]
    tiny = arguments_of(models, "small/tiny")
    assert tiny == ["--ctx-size", "512", "--mlock", "--jinja", "--no-cont-batching", "--no-slots"]
    assert (catalog["small/tiny"].stop_seconds, catalog["other"].stop_seconds) == (5, 35)
    odd = arguments_of(models, "odd one")
    assert odd[-6:] == ["--parallel", "2", "--context-shift", "true", "--temp", "0.5"]
    assert catalog["odd one"].size == Path(MODELS["PUPPET"]).stat().st_size and catalog["hub"].path is None
    hub = arguments_of(models, "hub")
    assert hub[-5:] == ["--hf-repo", "user/repository:Q4_0", "--control-vector-layer-range", "1", "3"]


def test_tokens_of_a_request_by_options_and_header(tmp_path: Path) -> None:
    path = Path(MODELS["PUPPET"])
    model = ModelFile("puppet", path, 1, 1)
    with GGUFFile.open(str(path), header_only=True) as file:
        key = f"{file.get('general.architecture')}.context_length"
        trained = file.get(key)
    assert request_tokens(model, [], {}) == -(-trained // 256) * 256
    assert request_tokens(model, ["-c", "1025", "-np", "4"], {}) == 320
    assert request_tokens(model, ["-np", "2", "-fa", "off"], {"LLAMA_ARG_CTX_SIZE": "100"}) == 64
    assert request_tokens(model, ["--override-kv", f"{key}=int:768"], {}) == 768
    assert request_tokens(model, ["--unknown"], {}) is None
    assert request_tokens(replace(model, path=None), ["-c", "512"], {}) is None
    assert request_tokens(replace(model, path=tmp_path / "gone.gguf"), ["-c", "512"], {}) is None


def test_processes_do_not_repeat_warnings_of_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTXSIZE", "512")
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "512")
    environment = worker_environment(shared_uses([])[1])
    assert "LLAMA_ARG_CTX_SIZE" in environment and "LLAMA_ARG_CTXSIZE" not in environment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nmodel = x.gguf\nctx-sise = 1", r"\[a\]: unknown option ctx-sise \(did you mean --ctx-size\?\)"),
        ("[a]\nmodel = x.gguf\nc = many", r"\[a\]: invalid parameter for argument: -c"),
        ("[a]\nc = 1", r"\[a\]: no model, hf-repo or model-url"),
        ("[a]\nmodel = x.gguf\nhf-repo = u/r", r"\[a\]: -m and -hf exclude each other"),
        ("[a]\nmodel = x.gguf\nmlock = perhaps", r"mlock = perhaps: expected true or false"),
        ("[a]\nmodel = x.gguf\nvideo = y", r"\[a\]: --video: video is not supported"),
        ("[a]\nmodel = x.gguf\nstop-timeout = soon", r"stop-timeout = soon: expected 0 to 86400 seconds"),
        ("[a]\nmodel = x.gguf\nstop-timeout = inf", r"stop-timeout = inf: expected 0 to 86400 seconds"),
        ("[a]\nmodel = x.gguf\nstop-timeout = nan", r"stop-timeout = nan: expected 0 to 86400 seconds"),
        ("[a]\nmodel = x.gguf\nstop-timeout = -1", r"stop-timeout = -1: expected 0 to 86400 seconds"),
        ("version = 2\n[a]\nmodel = x.gguf", r"only version 1 is known"),
        ("[a\nmodel = x.gguf", r"models\.ini"),
        ("[a]\nmodel", r"models\.ini"),
    ],
)
def test_presets_that_cannot_be_used(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Models(None, write(tmp_path, text), [])
    with pytest.raises(UsageError, match="No such file"):
        Models(None, str(tmp_path / "none.ini"), [])


def test_presets_are_served(tmp_path: Path) -> None:
    text = f"[*]\nc = 512\n[a model]\nmodel = {MODELS['PUPPET']}\nnp = 2\nload-on-startup = 1\n"
    text += f"[b]\nmodel = {MODELS['PUPPET']}\nc = 256\n"
    file = write(tmp_path, text)
    with started("--models-preset", file, "--no-models-autoload", folder=tmp_path) as client:

        def states() -> dict[str, str]:
            return {item["id"]: item["status"]["value"] for item in client.get("/models").json()["data"]}

        assert wait_for(lambda: states() == {"a model": "loaded", "b": "unloaded"})
        assert client.get("/props", params={"model": "a model"}).json()["total_slots"] == 2
        answer = client.post("/v1/chat/completions", json=HELLO | {"model": "a model"})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
        answer = client.post("/v1/chat/completions", json=HELLO | {"model": "b"})
        assert answer.status_code == 400 and "/models/load" in answer.json()["error"]["message"]
        answer = client.get("/props", params={"model": "b", "autoload": "true"})
        assert answer.json()["n_ctx"] == 256


def test_a_single_model_sleeps(tmp_path: Path) -> None:
    """Its memory is free meanwhile; status routes do not wake it, any other request does."""
    with started("-m", MODELS["PUPPET"], "-c", "256", "--sleep-idle-seconds", "2", folder=tmp_path) as client:
        assert wait_for(lambda: "model sleeps" in (tmp_path / "log").read_text())
        props = client.get("/props").json()
        assert props["is_sleeping"] is True and props["n_ctx"] == 256
        assert client.get("/v1/models").json()["data"][0]["id"] == MODELS["PUPPET"]
        assert [client.request(method, "/metrics").status_code for method in ("GET", "HEAD")] == [503, 503]
        assert client.get("/api/ps").json() == {"models": []} and len(client.get("/api/tags").json()["models"]) == 1
        assert client.get("/props").json()["is_sleeping"] is True
        answer = client.post("/v1/chat/completions", json=HELLO | {"model": "whatever"})
        assert answer.status_code == 200
        assert client.post("/api/chat", json={"model": "m", "keep_alive": 0}).json()["done_reason"] == "unload"
        assert client.get("/props").json()["is_sleeping"] is True
        assert client.post("/v1/chat/completions", json=HELLO).status_code == 200
        assert (tmp_path / "log").read_text().count("model loaded") >= 2
        end = time.monotonic() + PATIENCE
        while "is_sleeping" not in client.get("/props").json():  # asking does not keep it awake
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_single_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "ikpy", "server", "-m", str(tmp_path / "no.gguf"), "--sleep-idle-seconds", "5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*line, "--port", "0"], check=False, env=environment, text=True, capture_output=True, timeout=PATIENCE
    )
    assert ended.returncode == 1 and "no.gguf" in ended.stderr.splitlines()[-1], ended.stderr


def test_models_of_the_folder_sleep_too(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(MODELS["PUPPET"])
    with router(tmp_path, "--sleep-idle-seconds", "1", "--api-prefix", "/many") as (client, _):
        assert client.post("/many/v1/chat/completions", json=HELLO | {"model": "m"}).status_code == 200
        assert client.post("/v1/chat/completions", json=HELLO | {"model": "m"}).status_code == 404
        assert client.get("/many/api/tags").json()["models"][0]["name"] == "m"

        def state() -> str:
            return client.get("/many/models").json()["data"][0]["status"]["value"]

        assert wait_for(lambda: state() == "sleeping")
        assert client.get("/many/v1/models/m").json()["status"]["value"] == "sleeping"
