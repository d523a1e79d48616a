"""The host: listens, and starts a process for its client."""

from __future__ import annotations

import json
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ikpy.backends.remote.worker import refuse
from ikpy.errors import ResourceError

POLL_SECONDS = 0.2
END_SECONDS = 5.0
LEAVE_SECONDS = 2.0


@dataclass(frozen=True)
class HostParams:
    """What is lent. limit: bytes; cache: folder of weights, None for none."""

    address: str
    port: int
    limit: int
    n_threads: int
    cache: Path | None = None


class Host:
    """One client at a time, so that what it was told of free memory holds."""

    def __init__(self, params: HostParams, log: Callable[[str], None]) -> None:
        self._params, self._log = params, log
        self._worker: subprocess.Popen[bytes] | None = None
        self._client = ""
        family = socket.AF_INET6 if ":" in params.address else socket.AF_INET
        try:
            self._listener = socket.create_server((params.address, params.port), family=family, backlog=8)
        except OSError as error:
            where = f"{params.address}:{params.port}"
            raise ResourceError(f"cannot listen at {where}: {error.strerror or error}") from None

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def serve(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Serves clients until it is told to stop."""
        try:
            while not stopped():
                self._reap()
                if select.select([self._listener], [], [], POLL_SECONDS)[0]:
                    with suppress(OSError):  # a client that is gone already
                        self._accept()
        finally:
            self._end()

    def _accept(self) -> None:
        connection, (address, port, *_) = self._listener.accept()
        client = f"{address}:{port}"
        if self._worker is not None:
            with suppress(subprocess.TimeoutExpired):  # of a client that has just left
                self._worker.wait(LEAVE_SECONDS)
            self._reap()
        if self._worker is not None:
            self._log(f"rpc-server: {client}: refused, {self._client} is served")
            threading.Thread(target=refuse, args=(connection, "the host serves another program"), daemon=True).start()
            return
        params = self._params
        settings = {
            "limit": params.limit,
            "threads": params.n_threads,
            "cache": str(params.cache) if params.cache else None,
            "client": client,
        }
        with connection:
            command = [sys.executable, "-m", "ikpy.backends.remote.worker", str(connection.fileno())]
            self._worker = subprocess.Popen(
                [*command, json.dumps(settings)], pass_fds=[connection.fileno()], stdin=subprocess.DEVNULL
            )
        self._client = client
        self._log(f"rpc-server: {client}: connected")

    def _reap(self) -> None:
        if self._worker is None or (status := self._worker.poll()) is None:
            return
        self._worker = None
        if status < 0:
            name = signal.Signals(-status).name
            self._log(
                f"rpc-server: {self._client}: its process ended by {name}: what it sent was damaged, or memory ran out"
            )
        else:
            self._log(f"rpc-server: {self._client}: disconnected")

    def _end(self) -> None:
        self._listener.close()
        if self._worker is None:
            return
        self._worker.terminate()
        try:
            self._worker.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._worker.kill()
