"""Models from URLs: downloaded once into a cache, resumed where an interrupted download stopped, never seen half."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO

from ikpy.errors import ResourceError, UsageError
from ikpy.file_locks import lock_file
from ikpy.gguf.splits import paths_from_first

if TYPE_CHECKING:
    import httpx

Log = Callable[[str], None]
HUB = "huggingface.co"
MAGIC = b"GGUF"
ATTEMPTS = 5
PAUSE_SECONDS = 1.0
"""Pause before the first repetition; each further one is twice as long."""
PROGRESS_SECONDS = 5.0
TIMEOUT_SECONDS = 60.0


def cache_folder() -> Path:
    """Where downloads are kept: $LLAMA_CACHE, else $XDG_CACHE_HOME/ikpy/models."""
    own = os.environ.get("LLAMA_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ikpy" / "models"


def fetch_url(text: str, token: str | None, log: Log, *, offline: bool = False, to: str | None = None) -> str:
    """Path of the (first) file of the model at a URL, downloaded if it is not in the cache, with all parts of a split
    model. ``token`` is sent to the Hugging Face hub (or HF_ENDPOINT) only. ``offline``: nothing is downloaded.
    ``to``: path that the file is to have instead of one in the cache; the parts of a split model keep their names.

    Raises UsageError for a URL that cannot be used or that the server refuses, ResourceError when it cannot be reached.
    """
    import httpx

    url = parse_url(text)
    name = PurePosixPath(url.path).name
    names = paths_from_first(name, "--model-url")
    # By the place, not by the name, so that all parts of a split model lie beside each other.
    place = f"{url.scheme}://{url.netloc.decode()}{PurePosixPath(url.path).parent}"
    folder = cache_folder() / hashlib.sha256(place.encode()).hexdigest()[:16]
    targets = [folder / item for item in names]
    if to is not None:
        if len(names) > 1 and Path(to).name != name:
            raise UsageError(f"-m {to}: the parts of a split model keep their names: -m {Path(to).with_name(name)}")
        targets = [Path(to), *(Path(to).with_name(item) for item in names[1:])]
    missing = next((target for target in targets if not target.exists()), None)
    if offline and missing is not None:
        raise ResourceError(f"--model-url {text}: not in the cache ({missing}) and --offline forbids the download")
    headers = {"Accept-Encoding": "identity"}
    if token and is_hub(url):
        headers["Authorization"] = f"Bearer {token}"
    with httpx.Client(headers=headers, timeout=TIMEOUT_SECONDS, follow_redirects=True) as client:
        for item, target in zip(names, targets, strict=True):
            path = str(PurePosixPath(url.path).parent / item)
            fetch_file(client, url.copy_with(path=path), target, log)
    return str(targets[0])


def parse_url(text: str) -> httpx.URL:
    """The URL of a file; a page of the hub about a file stands for the file. Raises UsageError."""
    import httpx

    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise UsageError(f"--model-url {text}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host or PurePosixPath(url.path).name in ("", ".", ".."):
        raise UsageError(f"--model-url {text}: expected http://... or https://... with the name of a file")
    return url.copy_with(path=url.path.replace("/blob/", "/resolve/", 1)) if url.host == HUB else url


def is_hub(url: httpx.URL) -> bool:
    """Whether a URL is one of the Hugging Face hub, or of what HF_ENDPOINT names in its place."""
    import httpx
    from huggingface_hub import constants

    hub = httpx.URL(constants.ENDPOINT)
    return url.host == HUB or (url.scheme, url.netloc) == (hub.scheme, hub.netloc)


def fetch_file(client: httpx.Client, url: httpx.URL, target: Path, log: Log) -> None:
    """Downloads one file unless it is there already."""
    if target.exists():
        return
    download = Download(client, url, target, log)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with download.locked():
            if not target.exists():  # another process may have been faster
                download.run()
    except OSError as error:
        raise ResourceError(
            f"--model-url: cannot write {target}: {error.strerror}; -m PATH or LLAMA_CACHE names another place"
        ) from None


@dataclass
class Download:
    """One file on its way: ``target`` with the ending .part, and beside it the version that the server named."""

    client: httpx.Client
    url: httpx.URL
    target: Path
    log: Log

    @property
    def part(self) -> Path:
        """The beginning of the file."""
        return self.target.with_name(f"{self.target.name}.part")

    @property
    def version(self) -> Path:
        """What the server called the version of the beginning."""
        return self.target.with_name(f"{self.target.name}.version")

    @property
    def shown(self) -> str:
        """The URL without what may be secret."""
        return str(self.url.copy_with(query=None, username=None, password=None))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from the same download; they wait. A beginning without a byte is not left."""
        while True:
            with self.part.open("ab") as file:
                lock_file(file.fileno(), fcntl.LOCK_EX)
                if not os.fstat(file.fileno()).st_nlink:  # of a process that had no success: begin with a file in sight
                    continue
                try:
                    yield
                finally:
                    if self.target.exists() or not self.part.stat().st_size:
                        self.part.unlink(missing_ok=True)
                        self.version.unlink(missing_ok=True)
                return

    def run(self) -> None:
        """Downloads the rest, in several attempts if the connection breaks."""
        import httpx

        self.log(f"download: {self.shown}")
        for attempt in range(ATTEMPTS):
            try:
                self._transfer()
                break
            except httpx.HTTPError as error:
                if attempt == ATTEMPTS - 1 or (isinstance(error, httpx.ConnectError) and attempt):
                    kept = "; its beginning is kept for the next try" if self.part.stat().st_size else ""
                    reason = str(error) or type(error).__name__
                    raise ResourceError(
                        f"--model-url {self.shown}: cannot be downloaded ({reason}) and is not in the cache "
                        f"{self.target.parent}{kept}; or give a local file with -m"
                    ) from None
                time.sleep(PAUSE_SECONDS * 2**attempt)
        with self.part.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                self._forget()
                raise UsageError(f"--model-url {self.shown}: this is not a GGUF file")
            os.fsync(file.fileno())
        os.replace(self.part, self.target)
        self.version.unlink(missing_ok=True)

    def _forget(self) -> None:
        with self.part.open("r+b") as file:
            file.truncate(0)
        self.version.unlink(missing_ok=True)

    def _transfer(self) -> None:
        """One request for the part that is missing. Raises httpx.HTTPError when it breaks off."""
        have, headers = self.part.stat().st_size, {}
        if have and self.version.exists():
            headers = {"Range": f"bytes={have}-", "If-Range": self.version.read_text()}
        with self.client.stream("GET", self.url, headers=headers) as response:
            if response.status_code in (206, 416) and not self._goes_on(response, have):
                self._forget()
                raise_broken("the file has changed")
            if response.status_code == 416:
                return  # nothing is missing
            if response.status_code >= 500:
                raise_broken(f"the server answered {response.status_code}")
            if response.status_code >= 400:
                raise UsageError(f"--model-url {self.shown}: the server answered {response.status_code}")
            if response.status_code != 206:
                self._forget()
                have = 0
                version = response.headers.get("ETag") or response.headers.get("Last-Modified")
                if version and not version.startswith("W/"):
                    self.version.write_text(version)
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
            with self.part.open("ab") as file:
                self._write(response.iter_raw(), file, have, total)

    def _goes_on(self, response: httpx.Response, have: int) -> bool:
        """Whether a part of a file, or the answer that there is none, belongs to the beginning of ``have`` bytes: many
        servers send parts of a newer file in spite of If-Range."""
        version = self.version.read_text() if self.version.exists() else ""
        named = response.headers.get("ETag" if version.startswith('"') else "Last-Modified", version)
        place = f"bytes */{have}" if response.status_code == 416 else f"bytes {have}-"
        return named == version and response.headers.get("Content-Range", "").startswith(place)

    def _write(self, pieces: Iterator[bytes], file: BinaryIO, have: int, total: int | None) -> None:
        shown = time.monotonic()
        for piece in pieces:
            file.write(piece)
            have += len(piece)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                self.log(f"download: {have >> 20} MiB" + (f" of {total >> 20} MiB" if total else ""))
        if total is not None and have < total:
            raise_broken(f"{have} of {total} bytes")


def raise_broken(reason: str) -> None:
    """Raises the error of a transfer that has to be repeated."""
    import httpx

    raise httpx.ReadError(reason)
