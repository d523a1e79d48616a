"""-hf user/repository:QUANT against a hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import ikpy
from ikpy.cli.model_files import check_not_repository
from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.tools.hub import choose, split_spec

ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40
BUNDLED = Path(ikpy.default_model_path())


class FakeHub(ThreadingHTTPServer):
    """Repositories as dictionaries of files; ``cut`` names files whose first transfer breaks off in the middle."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.cut: set[str] = set()
        self.ranges: list[str] = []
        self.sent: list[str] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        hub = self.server
        assert isinstance(hub, FakeHub)
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            repo = "/".join(path.split("/")[3:5])
            if repo not in hub.files:
                self.respond(401 if "private" in repo else 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body)
                return
            names = hub.files[repo]
            if "/tree/" in path:
                tree = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in names.items()]
                self.respond(200, json.dumps(tree).encode(), {}, body)
                return
            info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
            self.respond(200, json.dumps(info).encode(), {}, body)
            return
        _, user, name, _, _, *rest = path.split("/")
        data = hub.files.get(f"{user}/{name}", {}).get("/".join(rest))
        if data is None:
            self.respond(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        self.send_file("/".join(rest), data, body)

    def send_file(self, name: str, data: bytes, body: bool) -> None:
        hub = self.server
        assert isinstance(hub, FakeHub)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        start = 0
        wanted = self.headers.get("Range")
        if wanted and body:
            hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        part = data[start:]
        if body:
            hub.sent.append(name)
        if body and name in hub.cut:
            hub.cut.discard(name)
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.respond(206 if start else 200, part, headers, body)

    def respond(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


@pytest.fixture(name="hub")
def fake_hub() -> Iterator[FakeHub]:
    hub = FakeHub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    yield hub
    hub.shutdown()
    hub.server_close()


def tokenize(tmp_path: Path, address: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """`ikpy cli` on a model of the hub, which ends after one token."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **more,
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in more else None
    line = [sys.executable, "-m", "ikpy", "cli", *arguments, "-p", "x", "-n", "1", "-t", "1", "--temp", "0"]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


def address_of(hub: FakeHub) -> str:
    return f"http://127.0.0.1:{hub.server_address[1]}"


def test_a_quantization_is_downloaded_once_and_resumed(tmp_path: Path, hub: FakeHub) -> None:
    hub.files["me/tiny"] = {"README.md": b"x", "tiny-Q8_0.gguf": b"no", "tiny-F16.gguf": BUNDLED.read_bytes()}
    hub.cut.add("tiny-F16.gguf")
    result = tokenize(tmp_path, address_of(hub), "-hf", "me/tiny:f16")
    assert result.returncode == 0, result.stderr[-800:]
    assert len(hub.ranges) == 1, "the second transfer must go on where the first broke off"
    assert 0 < int(hub.ranges[0].removeprefix("bytes=").rstrip("-")) <= BUNDLED.stat().st_size // 2
    assert set(hub.sent) == {"tiny-F16.gguf"}
    hub.sent.clear()
    assert tokenize(tmp_path, address_of(hub), "-hf", "me/tiny:F16").returncode == 0
    assert hub.sent == []
    hub.shutdown()
    hub.server_close()
    offline = tokenize(tmp_path, address_of(hub), "-hf", "me/tiny:F16")
    assert offline.returncode == 0, offline.stderr[-800:]
    assert tokenize(tmp_path, "http://127.0.0.1:9", "-hf", "me/tiny:F16", HF_HUB_OFFLINE="1").returncode == 0


def test_a_split_model_is_fetched_with_all_parts(tmp_path: Path, hub: FakeHub) -> None:
    line = [
        sys.executable,
        "-m",
        "ikpy",
        "gguf",
        "split",
        "--split-max-tensors",
        "20",
        str(BUNDLED),
        str(tmp_path / "m"),
    ]
    subprocess.run(line, check=True, capture_output=True, cwd=ROOT)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    hub.files["me/split"] = {f"F16/{part.name}": part.read_bytes() for part in parts}
    result = tokenize(tmp_path, address_of(hub), "-hf", "me/split")
    assert result.returncode == 0, result.stderr[-800:]
    assert sorted(set(hub.sent)) == sorted(hub.files["me/split"])
    cached = next((tmp_path / "hf").rglob(parts[0].name))
    with GGUFFile.open(cached) as file, GGUFFile.open(BUNDLED) as whole:
        assert len(file.tensors) == len(whole.tensors)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_errors_are_one_line(tmp_path: Path, hub: FakeHub) -> None:
    hub.files["me/tiny"] = {"tiny-F16.gguf": b"x", "tiny-Q8_0.gguf": b"x"}
    hub.files["me/empty"] = {"README.md": b"x"}
    address = address_of(hub)
    for spec, wanted in (
        ("me/tiny:Q4_K_M", "no such quantization; there are: tiny-F16, tiny-Q8_0"),
        ("me/none", "no such repository"),
        ("me/empty", "the repository has no GGUF files"),
        ("tiny", "expected user/repository"),
        ("me/tiny.", "error: -hf me/tiny.: Repo id must"),
    ):
        assert wanted in last_line(tokenize(tmp_path, address, "-hf", spec)), spec
    missing = tokenize(tmp_path, address, "-hf", "me/tiny", "-hff", "other.gguf")
    assert "the repository has no file other.gguf" in last_line(missing)
    offline = last_line(tokenize(tmp_path, "http://127.0.0.1:9", "-hf", "me/tiny"))
    assert "the hub at http://127.0.0.1:9 cannot be reached and me/tiny is not in the cache" in offline
    refused = last_line(tokenize(tmp_path, address, "-hf", "me/tiny", "--offline"))
    assert f"the hub at {address} is not asked (--offline) and me/tiny is not in the cache" in refused
    drafter = last_line(tokenize(tmp_path, address, "-hfd", "me/none"))
    assert "-hf me/none: no such repository" in drafter


@pytest.mark.parametrize(
    ("files", "quant", "wanted"),
    [
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], None, ["a-Q4_K_M.gguf"]),
        (["a-Q8_0.gguf", "a-F16.gguf"], None, ["a-Q8_0.gguf"]),
        (["a-BF16.gguf"], None, ["a-BF16.gguf"]),
        (["a-UD-Q2_K_XL.gguf", "a-Q2_K.gguf"], "q2_k", ["a-Q2_K.gguf"]),
        (["a.Q6_K.gguf"], "Q6_K", ["a.Q6_K.gguf"]),
        (["Q4_0/m-00002-of-00002.gguf", "Q4_0/m-00001-of-00002.gguf"], "Q4_0",
         ["Q4_0/m-00001-of-00002.gguf", "Q4_0/m-00002-of-00002.gguf"]),
        (["mmproj-F16.gguf", "a-F16.gguf"], "F16", ["a-F16.gguf"]),
    ],
)  # fmt: skip
def test_choice_of_files(files: list[str], quant: str | None, wanted: list[str]) -> None:
    assert choose(files, quant, "me/a") == wanted


def test_a_missing_part_is_named() -> None:
    with pytest.raises(UsageError, match=r"m-00002-of-00002\.gguf of the split model is missing"):
        choose(["m-00001-of-00002.gguf"], None, "me/a")


@pytest.mark.parametrize("address", ["", "hf.co/", "https://huggingface.co/", "http://hf.co/", "huggingface.co/"])
def test_repositories_are_named_with_or_without_the_address(address: str) -> None:
    assert split_spec(f"{address}me/a.b-c:Q4_0") == ("me/a.b-c", "Q4_0")
    assert split_spec(f"{address}me/a") == split_spec(f"{address}me/a/") == ("me/a", None)
    with pytest.raises(UsageError, match="expected user/repository"):
        split_spec(f"{address}me")


def test_a_repository_given_as_a_path_is_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("me/a", "me/a-GGUF:Q4_K_M"):
        with pytest.raises(UsageError, match=f"-m {name}: .* hub is given as -hf {name}"):
            check_not_repository(name)
    Path("me").mkdir()
    for name in ("me/a", "you/a.gguf", "a", "/me/a", "./me/a", "you/b/a"):
        check_not_repository(name)
