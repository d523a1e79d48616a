"""A server whose model takes pictures, requests with pictures and what they are answered."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from starlette.testclient import TestClient

from ikpy.cli.parser import parse
from ikpy.cli.server import make_server
from ikpy.cli.session import load
from ikpy.server.build import Server
from ikpy.server.log import ServerLog
from ikpy.server.media import NO_MEDIA
from ikpy.tools.media_marks import MARKER
from tests.picture_models import (
    data_uri,
    png,
    write_projector,
    write_text,
)

HINT = NO_MEDIA.format("image")


LENGTH = {"max_tokens": 6, "temperature": 0}


Json = dict[str, Any]


def write_files(folder: Path) -> Path:
    """A model and its projector in a folder."""
    write_text(folder / "text.gguf")
    write_projector(folder / "mmproj.gguf")
    return folder


def start(files: Path, *more: str, mmproj: bool = True) -> Server:
    """A server with F32 caches, started."""
    line = ["-m", str(files / "text.gguf"), "-t", "1", "-c", "512", "-ctk", "f32", "-ctv", "f32", "--log-disable"]
    line += ["--mmproj", str(files / "mmproj.gguf")] if mmproj else []
    server = make_server(load(parse([*line, *more], "server")), ServerLog())
    server.engine.start()
    return server


@contextlib.contextmanager
def client_of(server: Server) -> Iterator[TestClient]:
    try:
        yield TestClient(server.app, raise_server_exceptions=False)
    finally:
        server.engine.stop(10)


def text(words: str) -> Json:
    return {"type": "text", "text": words}


def picture(seed: int, **size: int) -> Json:
    return {"type": "image_url", "image_url": {"url": data_uri(png(seed, **size))}}


def asked(*parts: Json, **more: Any) -> Json:
    return {"messages": [{"role": "user", "content": list(parts)}], **LENGTH, **more}


def chat(client: TestClient, *parts: Json, **more: Any) -> Json:
    """The answer to a chat request."""
    response = client.post("/v1/chat/completions", json=asked(*parts, **more))
    assert response.status_code == 200, response.text
    return response.json()


def said(answer: Json) -> str:
    return answer["choices"][0]["message"]["content"]


def logprobs(answer: Json) -> np.ndarray:
    """Of the tokens of an answer."""
    return np.array([entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]])


def refused(response: Any) -> str:
    """The message of an error of one line."""
    assert response.status_code == 400, response.text
    body = response.json()["error"]
    message = body if isinstance(body, str) else body["message"]
    assert "\n" not in message
    return message


QUESTION = text("whatis"), picture(1), text("this")


PROMPT = f"<start_of_turn>user\nwhatis{MARKER}this<end_of_turn>\n<start_of_turn>model\n"


def base64_of(seed: int) -> str:
    return base64.b64encode(png(seed)).decode()
