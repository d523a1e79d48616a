"""-hf user/repository:QUANT against a hub on the loopback interface."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import ikpy
from ikpy.cli.model_files import check_not_repository
from ikpy.errors import UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.tools.hub import choose, split_spec
from tests.picture_models import png, write_projector, write_text

ROOT = Path(__file__).parents[3]
COMMIT = "a" * 40
BUNDLED = Path(ikpy.default_model_path())
NOBODY = "http://127.0.0.1:9"
"""An address that refuses connections."""


class FakeHub(ThreadingHTTPServer):
    """Repositories as dictionaries of files; ``cut`` names files whose first transfer breaks off in the middle,
    ``short`` files of which half is sent as the whole, ``statuses`` has answers in place of those to paths that begin
    so, ``then`` what happens behind the transfer of a file. ``commit`` is the newest one, ``older`` has repositories as
    they were in others."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {}
        self.cut: set[str] = set()
        self.ranges: list[str] = []
        self.sent: list[str] = []
        self.statuses: dict[str, int] = {}
        self.tokens: set[str | None] = set()
        self.then: dict[str, Callable[[], None]] = {}
        self.commit = COMMIT
        self.short: set[str] = set()
        self.older: dict[str, dict[str, dict[str, bytes]]] = {}

    def upload(self, commit: str, repo: str, files: dict[str, bytes]) -> None:
        """A new commit."""
        self.older[self.commit] = dict(self.files)
        self.commit, self.files[repo] = commit, files


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
        hub.tokens.add(self.headers.get("Authorization"))
        for start, status in hub.statuses.items():
            if path.startswith(start):
                self.respond(status, b"{}", {}, body)
                return
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
            info = {"id": repo, "sha": hub.commit, "siblings": [{"rfilename": name} for name in names]}
            self.respond(200, json.dumps(info).encode(), {}, body)
            return
        _, user, name, _, revision, *rest = path.split("/")
        commit = hub.commit if revision == "main" else revision
        files = hub.files if commit == hub.commit else hub.older.get(commit, {})
        data = files.get(f"{user}/{name}", {}).get("/".join(rest))
        if data is None:
            self.respond(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return
        self.send_file("/".join(rest), data, commit, body)
        if body:
            hub.then.pop("/".join(rest), lambda: None)()

    def send_file(self, name: str, data: bytes, commit: str, body: bool) -> None:
        hub = self.server
        assert isinstance(hub, FakeHub)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = 0
        wanted = self.headers.get("Range")
        if wanted and body:
            hub.ranges.append(wanted)
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        part = data[: len(data) // 2] if body and name in hub.short else data[start:]
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


FETCH = """
import json, sys, time
from ikpy.errors import IkpyError
from ikpy.tools.hub import fetch

time.sleep = lambda seconds: print(json.dumps(f"waits for {seconds} s"))
for spec, file, offline in json.loads(sys.argv[1]):
    try:
        print(json.dumps(fetch(spec, file, None, lambda _: None, offline=offline)))
    except IkpyError as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""
"""Paths or errors of models, a line each; pauses between attempts are lines, too, and are not waited for."""


def run(tmp_path: Path, address: str, arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Python with the hub at an address and a cache of its own."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", **more,
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None) if "HF_HUB_OFFLINE" not in more else None
    line = [sys.executable, *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


def write_token(tmp_path: Path, address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ikpy cli` on a model of the hub, which ends after one token."""
    line = ["-m", "ikpy", "cli", *arguments, "-p", "x", "-n", "1", "-t", "1", "--temp", "0"]
    return run(tmp_path, address, line)


def fetched(tmp_path: Path, address: str, *models: tuple[str, str | None, bool], **more: str) -> list[str]:
    """What `fetch` returns or raises for specification, file and offline mode of each model."""
    result = run(tmp_path, address, ["-c", FETCH, json.dumps(models)], **more)
    assert result.returncode == 0, result.stderr[-800:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def address_of(hub: FakeHub) -> str:
    return f"http://127.0.0.1:{hub.server_address[1]}"


def test_a_quantization_is_downloaded_once_and_resumed(tmp_path: Path, hub: FakeHub) -> None:
    hub.files["me/tiny"] = {"README.md": b"x", "tiny-Q8_0.gguf": b"no", "tiny-F16.gguf": BUNDLED.read_bytes()}
    hub.cut.add("tiny-F16.gguf")
    result = write_token(tmp_path, address_of(hub), "-hf", "me/tiny:f16")
    assert result.returncode == 0, result.stderr[-800:]
    assert len(hub.ranges) == 1, "the second transfer must go on where the first broke off"
    assert 0 < int(hub.ranges[0].removeprefix("bytes=").rstrip("-")) <= BUNDLED.stat().st_size // 2
    assert set(hub.sent) == {"tiny-F16.gguf"}
    hub.sent.clear()
    model = "me/tiny:F16", None, False
    paths = fetched(tmp_path, address_of(hub), model)
    assert Path(paths[0]).read_bytes() == BUNDLED.read_bytes()
    assert hub.sent == []
    hub.shutdown()
    hub.server_close()
    assert fetched(tmp_path, address_of(hub), model) == paths, "the cached copy serves, without pauses"
    assert fetched(tmp_path, NOBODY, model, HF_HUB_OFFLINE="1") == paths


def test_the_projector_beside_a_model(tmp_path: Path, hub: FakeHub) -> None:
    """It comes with the model, is found in the cache, and one that cannot be used is no error."""
    model, projector = write_text(tmp_path / "m.gguf"), write_projector(tmp_path / "p.gguf")
    files = {"tiny-F16.gguf": model.read_bytes(), "mmproj-BF16.gguf": b"x", "mmproj-F16.gguf": projector.read_bytes()}
    hub.files["me/seeing"] = files
    picture = tmp_path / "a.png"
    picture.write_bytes(png(1))
    line = "-hf", "me/seeing", "--image", str(picture)
    result = write_token(tmp_path, address_of(hub), *line)
    assert result.returncode == 0, result.stderr[-800:]
    assert sorted(set(hub.sent)) == ["mmproj-F16.gguf", "tiny-F16.gguf"]
    assert write_token(tmp_path, NOBODY, *line).returncode == 0
    assert write_token(tmp_path, NOBODY, *line, "--offline").returncode == 0
    hub.sent.clear()
    files["mmproj-F16.gguf"], hub.commit = b"not any more", "b" * 40
    assert write_token(tmp_path, address_of(hub), "-hf", "me/seeing", "--no-mmproj").returncode == 0
    assert "mmproj-F16.gguf" not in hub.sent
    result = write_token(tmp_path, address_of(hub), "-hf", "me/seeing")
    assert result.returncode == 0 and "warning: no pictures" in result.stderr
    assert "projector" in write_token(tmp_path, address_of(hub), *line[:2], "--no-mmproj", *line[2:]).stderr


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
    result = write_token(tmp_path, address_of(hub), "-hf", "me/split")
    assert result.returncode == 0, result.stderr[-800:]
    assert sorted(set(hub.sent)) == sorted(hub.files["me/split"])
    cached = next((tmp_path / "hf").rglob(parts[0].name))
    with GGUFFile.open(cached) as file, GGUFFile.open(BUNDLED) as whole:
        assert len(file.tensors) == len(whole.tensors)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_a_named_file_brings_its_other_parts(tmp_path: Path, hub: FakeHub) -> None:
    parts = {f"q/big-{i:05}-of-00003.gguf": f"part {i}".encode() for i in (1, 2, 3)}
    hub.files["me/big"] = {**parts, "big-Q8_0.gguf": b"no"}
    model = "me/big", "q/big-00001-of-00003.gguf", False
    paths = fetched(tmp_path, address_of(hub), model, ("me/big", "q/big-00002-of-00003.gguf", False))
    assert hub.sent == list(parts)
    for name, data in parts.items():
        assert (Path(paths[0]).parent / Path(name).name).read_bytes() == data
    assert "give the first part of the split model, q/big-00001-of-00003.gguf" in paths[1]
    assert fetched(tmp_path, NOBODY, model) == paths[:1], "the cached copy serves"


def parts_with(text: str) -> dict[str, bytes]:
    return {f"big-Q4_0-{i:05}-of-00003.gguf": f"part {i} {text}".encode() for i in (1, 2, 3)}


def read_parts(first: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(first).parent.iterdir()}


def test_parts_are_of_one_commit(tmp_path: Path, hub: FakeHub) -> None:
    """The path of the first part was in a folder without the others, where an upload came between them."""
    hub.files["me/big"] = parts_with("old")
    model = "me/big:Q4_0", None, False
    hub.then["big-Q4_0-00001-of-00003.gguf"] = lambda: hub.upload("b" * 40, "me/big", parts_with("new"))
    assert read_parts(fetched(tmp_path, address_of(hub), model)[0]) == parts_with("old")
    assert read_parts(fetched(tmp_path, address_of(hub), model)[0]) == parts_with("new")


def test_files_of_older_commits_serve(tmp_path: Path, hub: FakeHub) -> None:
    """The newest commit known in the cache has only what was asked for since, or is incomplete."""
    hub.files["me/m"] = {"m-Q4_K_M.gguf": b"4", "m-Q8_0.gguf": b"8"}
    hub.files["me/big"] = parts_with("old")
    small, big, medium = ("me/m:Q4_K_M", None, False), ("me/big:Q4_0", None, False), ("me/m:Q8_0", None, False)
    paths = fetched(tmp_path, address_of(hub), small, big)
    hub.upload("b" * 40, "me/big", parts_with("new"))
    hub.statuses["/me/big/resolve/" + hub.commit] = 503  # all but the first part
    paths += fetched(tmp_path, address_of(hub), medium)
    assert fetched(tmp_path, address_of(hub), big)[-1] == paths[1]
    assert fetched(tmp_path, NOBODY, small, big, medium) == paths
    assert fetched(tmp_path, NOBODY, (small[0], None, True), ("me/m", "m-Q4_K_M.gguf", True)) == paths[:1] * 2
    Path(paths[1]).with_name("big-Q4_0-00003-of-00003.gguf").unlink()
    assert "is not in the cache" in fetched(tmp_path, NOBODY, big)[0]


def test_a_model_that_is_not_there_yet_is_put_where_it_is_to_be(tmp_path: Path, hub: FakeHub) -> None:
    hub.files["me/tiny"] = {"tiny-F16.gguf": BUNDLED.read_bytes()}
    path = tmp_path / "models" / "tiny-F16.gguf"
    for named in ((), ("-hff", "tiny-F16.gguf")):
        result = write_token(tmp_path, address_of(hub), "-hfr", "me/tiny", *named, "-m", str(path))
        assert result.returncode == 0, result.stderr[-800:]
        assert path.read_bytes() == BUNDLED.read_bytes()
    assert hub.sent == ["tiny-F16.gguf"], "the second time it is there"
    wrong = write_token(tmp_path, address_of(hub), "-hf", "me/tiny:F16", "-m", str(tmp_path / "other.gguf"))
    assert wrong.returncode == 1 and "leave -m out, or add -hff FILE" in wrong.stderr


def test_errors_name_what_is_wrong(tmp_path: Path, hub: FakeHub) -> None:
    hub.files["me/tiny"] = {"tiny-F16.gguf": b"x", "tiny-Q8_0.gguf": b"x"}
    hub.files["me/empty"] = {"README.md": b"x"}
    hub.files["me/others"] = {"imatrix_a.gguf": b"x", "a.mmproj-F16.gguf": b"x"}
    cases: list[tuple[str, str | None, bool, str]] = [
        ("me/tiny:Q4_K_M", None, False, "no such quantization; there are: tiny-F16, tiny-Q8_0"),
        ("me/none", None, False, "no such repository"),
        ("me/empty", None, False, "the repository has no GGUF files"),
        ("me/others:F16", None, False, "by its name; -hff takes any of a.mmproj-F16.gguf, imatrix_a.gguf"),
        ("tiny", None, False, "expected user/repository"),
        ("me/tiny.", None, False, "-hf me/tiny.: Repo id must"),
        ("me/tiny", "other.gguf", False, "the repository has no file other.gguf"),
        ("me/tiny", None, True, "is not asked (--offline) and me/tiny is not in the cache"),
    ]
    found = fetched(tmp_path, address_of(hub), *(case[:3] for case in cases))
    assert len(found) == len(cases), found
    for case, line in zip(cases, found, strict=True):
        assert case[3] in line, case


def test_without_a_network_nothing_is_tried_again(tmp_path: Path) -> None:
    """huggingface_hub itself pauses five times, for half a minute in all, and for as long again for a named file."""
    found = fetched(tmp_path, NOBODY, ("me/tiny", None, False), ("me/tiny", "tiny-F16.gguf", False))
    assert len(found) == 2, found
    for line, wanted in zip(found, ("me/tiny", "tiny-F16.gguf"), strict=True):
        assert f"the hub at {NOBODY} cannot be reached and {wanted} is not in the cache {tmp_path}" in line
        assert "HF_HOME" in line and "give it with -m" in line


LIST, FILE = "/api/models/me/tiny", "/me/tiny/resolve"
"""What the hub is asked for: the files of a repository, one of them."""


@pytest.mark.parametrize(
    ("place", "status"), [(LIST, 401), (LIST, 404), (LIST, 429), (LIST, 503), (FILE, 403), (FILE, 404), (FILE, 429)]
)
def test_answers_of_the_hub_are_named(tmp_path: Path, hub: FakeHub, place: str, status: int) -> None:
    """Those to the question for a file were said to be none at all."""
    hub.files["me/tiny"] = {"tiny-F16.gguf": b"GGUF"}
    hub.statuses[place] = status
    model = "me/tiny:F16", None, False
    lines = fetched(tmp_path, address_of(hub), model)
    assert lines[-1].endswith(f"Error: -hf me/tiny: the hub answered {status}")
    hub.statuses.clear()
    paths = fetched(tmp_path, address_of(hub), model)
    hub.statuses[LIST] = status
    again = fetched(tmp_path, address_of(hub), model)
    assert (again == paths) == (status in (429, 503)), "a hub that is overloaded or broken leaves the cached copy"


def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path, hub: FakeHub) -> None:
    """It was said that the hub cannot be reached."""
    hub.files["me/tiny"] = {"tiny-F16.gguf": b"GGUF" * 100_000}
    model = "me/tiny:F16", None, False
    (tmp_path / "hf").write_text("a file in place of the cache")
    lines = fetched(tmp_path, address_of(hub), model)
    assert lines[-1].startswith(f"ResourceError: -hf me/tiny: cannot write {tmp_path}/hf"), lines
    assert "HF_HOME names another place" in lines[-1]
    (tmp_path / "hf").unlink()
    limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
    result = run(tmp_path, address_of(hub), ["-c", limited + FETCH, json.dumps([model])])
    assert "cannot write" in result.stdout and "File too large" in result.stdout, result.stdout + result.stderr[-500:]


def test_a_file_of_another_size_is_named(tmp_path: Path, hub: FakeHub) -> None:
    """As of a proxy that sends something else. It was said that the hub cannot be reached."""
    hub.files["me/tiny"] = {"tiny-F16.gguf": bytes(1000)}
    hub.short.add("tiny-F16.gguf")
    model = "me/tiny", None, False
    (error,) = fetched(tmp_path, address_of(hub), model)
    assert error.startswith(
        "ResourceError: -hf me/tiny: the transfer failed: Consistency check failed: file should be "
    )
    hub.short.clear()
    assert Path(fetched(tmp_path, address_of(hub), model)[0]).read_bytes() == bytes(1000)


def test_a_disk_without_room_is_warned_of_in_a_line(tmp_path: Path, hub: FakeHub) -> None:
    hub.files["me/tiny"] = {"tiny-F16.gguf": b"GGUF"}
    full = "import shutil; usage = shutil.disk_usage\nshutil.disk_usage = lambda path: usage(path)._replace(free=1)\n"
    line = ["-c", full + FETCH.replace("lambda _: None", "print"), json.dumps([("me/tiny", None, False)])]
    result = run(tmp_path, address_of(hub), line)
    assert "\nhub: warning: Not enough free disk space" in result.stdout
    assert result.stderr == ""


def test_the_token_is_sent_to_the_hub_of_the_environment(tmp_path: Path, hub: FakeHub) -> None:
    """With -m as well, where the file is asked for without huggingface_hub."""
    hub.files["me/tiny"] = {"tiny-F16.gguf": BUNDLED.read_bytes()}
    line = ["-hf", "me/tiny", "-hff", "tiny-F16.gguf", "-m", str(tmp_path / "tiny.gguf"), "--hf-token", "secret"]
    result = write_token(tmp_path, address_of(hub), *line)
    assert result.returncode == 0, result.stderr[-800:]
    assert hub.tokens == {"Bearer secret"}


def test_errors_are_one_line(tmp_path: Path, hub: FakeHub) -> None:
    unreachable = last_line(write_token(tmp_path, NOBODY, "-hf", "me/tiny"))
    assert f"error: -hf me/tiny: the hub at {NOBODY} cannot be reached" in unreachable
    drafter = last_line(write_token(tmp_path, address_of(hub), "-hfd", "me/none"))
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
        (["a.imatrix.IQ4_XS.gguf", "a.imatrix.gguf", "imatrix.gguf"], "iq4_xs", ["a.imatrix.IQ4_XS.gguf"]),
        (["a-imatrix-Q8_0.gguf", "a-Q8_0.gguf", "imatrix-a-Q4_0.gguf"], None, ["a-Q8_0.gguf"]),
        (["imatrix/a-Q8_0-iMatrix.gguf", "Q8_0/a-Q8_0.gguf"], "Q8_0", ["Q8_0/a-Q8_0.gguf"]),
        (["a-imatrix-UD-IQ2_M-00001-of-00001.gguf"], "IQ2_M", ["a-imatrix-UD-IQ2_M-00001-of-00001.gguf"]),
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
    assert split_spec(f"{address}me/a:latest") == ("me/a", None)
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
