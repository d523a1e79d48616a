"""-mu URL against a server on the loopback interface: resumption, changed files, parts, errors, several processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import ikpy
from ikpy.errors import ResourceError, UsageError
from ikpy.tools import download
from ikpy.tools.download import fetch_url, parse_url

ROOT = Path(__file__).parents[3]
BUNDLED = Path(ikpy.default_model_path())
DATA = b"GGUF" + bytes(range(256)) * 1000


class Files(ThreadingHTTPServer):
    """Files by path; ``cuts`` are numbers of bytes after which the next transfers break off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.requests: list[tuple[str, str | None]] = []
        self.tokens: set[str | None] = set()
        self.version = '"1"'
        self.status = 200
        self.knows_if_range = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Files

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, wanted = self.path.partition("?")[0], self.headers.get("Range")
        self.server.requests.append((path, wanted))
        self.server.tokens.add(self.headers.get("Authorization"))
        data = self.server.files.get(path)
        if data is None or self.server.status != 200:
            self.answer(404 if data is None else self.server.status, b"", {})
            return
        version = {"ETag": self.server.version} if self.server.version else {}
        is_new = self.server.version and self.headers.get("If-Range") != self.server.version
        if wanted is None or (is_new and self.server.knows_if_range):
            self.answer(200, data, version)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(data):
            self.answer(416, b"", {"Content-Range": f"bytes */{len(data)}", **version})
        else:
            self.answer(206, data[start:], {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}", **version})

    def answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        cut = self.server.cuts.pop(0) if self.server.cuts and data else len(data)
        self.wfile.write(data[:cut])
        self.wfile.flush()
        self.close_connection = cut < len(data)


@pytest.fixture(name="server")
def start_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Files]:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.001)
    server = Files()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def get(server: Files, path: str = "/m/model.gguf", **more: str) -> Path:
    return Path(fetch_url(server.address + path, more.get("token"), lambda line: None))


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_interrupted_download_goes_on(server: Files) -> None:
    server.files["/m/model.gguf"] = DATA
    server.cuts = [1000, 5000]
    path = get(server, token="secret")
    assert path.read_bytes() == DATA
    assert [wanted for _, wanted in server.requests] == [None, "bytes=1000-", "bytes=6000-"]
    assert files_of(path.parent) == ["model.gguf"]
    assert server.tokens == {None}, "the token is for the hub only"
    assert get(server) == path and len(server.requests) == 3, "what is there is not asked for again"


def test_the_next_start_goes_on_too(server: Files) -> None:
    server.files["/m/model.gguf"] = DATA
    server.cuts = [1000] * download.ATTEMPTS
    with pytest.raises(ResourceError, match="its beginning is kept for the next try"):
        get(server)
    kept = 1000 * download.ATTEMPTS
    path = get(server)
    assert path.read_bytes() == DATA
    assert server.requests[-1][1] == f"bytes={kept}-"


@pytest.mark.parametrize("size", [7000, 1000 * download.ATTEMPTS, 3000])
@pytest.mark.parametrize("knows_if_range", [True, False])
def test_a_changed_file_is_fetched_as_a_whole(server: Files, knows_if_range: bool, size: int) -> None:
    """Servers that do not know If-Range send a part of the new file, or say that it has no more bytes."""
    server.files["/m/model.gguf"] = DATA
    server.cuts = [1000] * download.ATTEMPTS
    server.knows_if_range = knows_if_range
    with pytest.raises(ResourceError):
        get(server)
    new = b"GGUF" + b"x" * (size - 4)
    server.version, server.files["/m/model.gguf"] = '"2"', new
    assert get(server).read_bytes() == new


@pytest.mark.parametrize("version", ["", 'W/"1"'])
def test_without_a_version_it_begins_anew(server: Files, version: str) -> None:
    server.version, server.files["/m/model.gguf"], server.cuts = version, DATA, [1000]
    assert get(server).read_bytes() == DATA
    assert [wanted for _, wanted in server.requests] == [None, None]


def test_a_complete_part_only_gets_its_name(server: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the process had been killed just before."""
    server.files["/m/model.gguf"] = DATA

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        get(server)
    path = get(server)
    assert path.read_bytes() == DATA
    assert server.requests[-1][1] == f"bytes={len(DATA)}-"


def test_all_parts_of_a_split_model(server: Files) -> None:
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    server.files = {f"/a/{name}": b"GGUF" + name.encode() for name in names}
    path = get(server, f"/a/{names[0]}?download=true")
    assert path.name == names[0] and files_of(path.parent) == names
    with pytest.raises(UsageError, match=r"give the first part of the split model, m-00001-of-00003\.gguf"):
        get(server, f"/a/{names[1]}")


def test_a_place_of_ones_own(server: Files, tmp_path: Path) -> None:
    """Parts of a split model keep their names."""
    server.files["/m/model.gguf"] = DATA
    server.files |= {f"/m/big-{i:05}-of-00002.gguf": DATA[: 100 * i] for i in (1, 2)}

    def get_to(name: str, to: str) -> str:
        return fetch_url(f"{server.address}/m/{name}", None, lambda line: None, to=str(tmp_path / to))

    assert Path(get_to("model.gguf", "x/own.gguf")).read_bytes() == DATA
    assert files_of(tmp_path / "x") == ["own.gguf"]
    get_to("big-00001-of-00002.gguf", "y/big-00001-of-00002.gguf")
    assert files_of(tmp_path / "y") == ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
    with pytest.raises(UsageError, match=r"the parts of a split model keep their names: -m .*big-00001-of-00002"):
        get_to("big-00001-of-00002.gguf", "y/other.gguf")


def test_several_processes_download_once(server: Files) -> None:
    server.files["/m/model.gguf"] = DATA
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: get(server), range(4)))
    assert {path.read_bytes() for path in paths} == {DATA}
    assert len(server.requests) == 1 and files_of(paths[0].parent) == ["model.gguf"]


def test_what_cannot_be_downloaded(server: Files, tmp_path: Path) -> None:
    server.files["/m/page.gguf"] = b"<html>sign in</html>"
    for path, wanted in (("/m/none.gguf", "the server answered 404"), ("/m/page.gguf", "this is not a GGUF file")):
        with pytest.raises(UsageError, match=wanted):
            get(server, path)
    server.files["/m/model.gguf"], server.status = DATA, 503
    with pytest.raises(ResourceError, match="the server answered 503"):
        get(server)
    server.status = 200
    assert get(server).read_bytes() == DATA
    for text in ("ftp://x/y.gguf", "x.gguf", "http://x/", "http://x/a/.."):
        with pytest.raises(UsageError, match="--model-url"):
            fetch_url(text, None, lambda line: None)
    n_requests = len(server.requests)
    url = f"http://127.0.0.1:{server.server_address[1]}/m/"
    with pytest.raises(ResourceError, match="--offline forbids the download"):
        fetch_url(f"{url}new.gguf", None, lambda line: None, offline=True)
    assert Path(fetch_url(f"{url}model.gguf", None, lambda line: None, offline=True)).read_bytes() == DATA
    assert len(server.requests) == n_requests
    page = parse_url("https://huggingface.co/a/b/blob/main/c.gguf")
    assert str(page) == "https://huggingface.co/a/b/resolve/main/c.gguf"


def test_what_never_began_leaves_no_file(server: Files, tmp_path: Path) -> None:
    """Neither in the cache nor beside the file that -m names; the next try works."""
    target = tmp_path / "own" / "model.gguf"
    url = f"{server.address}/m/model.gguf"
    for data in (None, b"<html>no model</html>"):
        server.files = {"/m/model.gguf": data} if data else {}
        with pytest.raises(UsageError):
            fetch_url(url, None, lambda line: None, to=str(target))
        assert files_of(target.parent) == []
    server.files["/m/model.gguf"] = DATA
    assert Path(fetch_url(url, None, lambda line: None, to=str(target))).read_bytes() == DATA
    assert files_of(target.parent) == ["model.gguf"]


def test_a_program_with_a_url(server: Files, tmp_path: Path) -> None:
    server.files["/m/tiny.gguf"] = BUNDLED.read_bytes()

    def run(url: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "ikpy", "cli", "-mu", url, "-p", "x", "-n", "1", "-t", "1", "--temp", "0"]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)

    first = run(f"{server.address}/m/tiny.gguf?token=secret")
    assert first.returncode == 0, first.stderr[-800:]
    assert f"download: {server.address}/m/tiny.gguf\n" in first.stderr and "secret" not in first.stderr
    address = server.address
    server.shutdown()
    server.server_close()
    assert run(f"{address}/m/tiny.gguf").returncode == 0, "offline"
    offline = run(f"{address}/m/other.gguf")
    last = offline.stderr.strip().splitlines()[-1]
    assert offline.returncode == 1 and "Traceback" not in offline.stderr
    assert last.startswith(f"error: --model-url {address}/m/other.gguf: cannot be downloaded (")
    assert "is not in the cache" in last and "give a local file with -m" in last


def test_a_cache_that_cannot_be_written_names_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ResourceError, match=r"Not a directory; -m PATH or LLAMA_CACHE names another place$"):
        fetch_url("http://127.0.0.1:9/model.gguf", None, print)
