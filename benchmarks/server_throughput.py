"""Tokens per second of a server with one slot and with several, beside xllamacpp's server.

python -m benchmarks.server_throughput [--model model.gguf] [--slots 4,16] [--threads 1] [--seconds 8] [--rounds 3]
    [--modes streamed,whole] [--peer]

As many clients as slots send greedy completions over loopback, one after another, whose answers are streamed or come
whole. Servers run in alternation, a round being one run of each. The clients share one thread that only looks for the
end of answers, so that they take little of the processor. Reported are tokens per second of wall time and per second of
the server's processor time, the processor time a token takes in the HTTP thread (of ikpy: in all threads but the
engine's, the busiest), and the time to the first part of a streamed answer and between two parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.server_load import PROMPTS, free_port, process, server

N_CTX = 512
TIMEOUT = 60.0
COUNT = re.compile(rb'"tokens_predicted":\s*(\d+)')


@dataclass
class Speed:
    """Tokens per second of wall time, and per second of the server's processor time; processor time of all threads but
    the busiest in microseconds per token; milliseconds to the first part of answers and between parts, 50th and 99th
    percentile."""

    wall: float
    processor: float
    others: float = 0.0
    first: tuple[float, float] = (0.0, 0.0)
    gaps: tuple[float, float] = (0.0, 0.0)


class Client:
    """Sends one request after another, each over a connection of its own."""

    def __init__(self, address: str, n_predict: int, prompts: Iterator[str], *, stream: bool = True) -> None:
        self.n_tokens = 0
        self.first: list[float] = []
        """Seconds from requests to the first parts of their answers."""
        self.gaps: list[float] = []
        """Seconds between parts of answers."""
        self._stream = stream
        self._last = 0.0
        self._host = urlsplit(address).netloc
        self._n_predict = n_predict
        self._prompts = prompts
        self._answer = bytearray()

    def ask(self) -> socket.socket:
        """Sends the next request; the connection on which the answer comes."""
        body = {"prompt": next(self._prompts), "n_predict": self._n_predict, "temperature": 0}
        body["stream"] = self._stream
        data = json.dumps(body).encode()
        head = f"POST /completion HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        host, port = self._host.split(":")
        self._last = time.perf_counter()
        connection = socket.create_connection((host, int(port)), TIMEOUT)
        connection.sendall(head.encode() + data)
        return connection

    def read(self, connection: socket.socket) -> bool:
        """Takes what has come; whether the answer has ended. Raises SystemExit for anything but a whole answer."""
        data = connection.recv(65536)
        now = time.perf_counter()
        if data:
            (self.gaps if self._answer else self.first).append(now - self._last)
        self._last = now
        self._answer += data
        if data:
            return False
        found = COUNT.findall(self._answer)
        if not found or not self._answer.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"unexpected answer: {bytes(self._answer[:300])!r}")
        self.n_tokens += int(found[-1])
        self._answer.clear()
        return True


def thread_seconds(running: psutil.Process) -> dict[int, float]:
    """Processor time of a process's threads."""
    return {thread.id: thread.user_time + thread.system_time for thread in running.threads()}


def measure(
    address: str, running: psutil.Process, clients: int, seconds: float, n_predict: int, *, stream: bool = True
) -> Speed:
    """Loads a server with so many clients. Requests that are running at the end are waited for and count."""
    prompts = itertools.cycle(PROMPTS)
    everyone = [Client(address, n_predict, prompts, stream=stream) for _ in range(clients)]
    began, cpu, before = time.perf_counter(), sum(running.cpu_times()[:2]), thread_seconds(running)
    with selectors.DefaultSelector() as selector:
        for client in everyone:
            selector.register(client.ask(), selectors.EVENT_READ, client)
        while selector.get_map():
            ready = selector.select(TIMEOUT)
            if not ready:
                raise SystemExit(f"no answer within {TIMEOUT:g} seconds")
            for key, _ in ready:
                connection, client = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                if client.read(connection):
                    selector.unregister(connection)
                    connection.close()
                    if time.perf_counter() - began < seconds:
                        selector.register(client.ask(), selectors.EVENT_READ, client)
    n_tokens = sum(client.n_tokens for client in everyone)
    wall, cpu = time.perf_counter() - began, sum(running.cpu_times()[:2]) - cpu
    spent = sorted(seconds - before.get(thread, 0.0) for thread, seconds in thread_seconds(running).items())
    first = percentiles([seconds for client in everyone for seconds in client.first if stream])
    gaps = percentiles([seconds for client in everyone for seconds in client.gaps if stream])
    return Speed(n_tokens / wall, n_tokens / cpu, 1e6 * sum(spent[:-1]) / n_tokens, first, gaps)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """50th and 99th percentile in milliseconds, zeros of nothing."""
    middle, high = np.quantile(seconds or [0.0], (0.5, 0.99)) * 1e3
    return float(middle), float(high)


def peer(model: str, slots: int, threads: int) -> AbstractContextManager[tuple[str, psutil.Process]]:
    """xllamacpp's server in a process of its own."""
    port = free_port()
    line = [sys.executable, "-m", "benchmarks.server_throughput", "--serve-peer"]
    return process([*line, model, str(slots), str(threads), str(port)], port)


def serve_peer(model: str, slots: int, threads: int, port: int) -> None:
    """Runs xllamacpp's server until the process is ended."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = slots, N_CTX * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.hostnames, params.port = ["127.0.0.1"], port
    running = xllamacpp.Server(params)
    assert running.listening_address
    while True:
        time.sleep(3600)


def ours(model: str, slots: int, threads: int) -> AbstractContextManager[tuple[str, psutil.Process]]:
    """`ikpy server`."""
    return server(model, slots, threads, n_ctx=N_CTX)


def line(name: str, speeds: list[Speed], single: list[Speed]) -> str:
    """Medians over the rounds with their range, and the ratio to one slot of the same round."""
    parts = []
    for what, of in (("wall", "second"), ("processor", "second of processor time")):
        values = [getattr(speed, what) for speed in speeds]
        ratios = [a / getattr(b, what) for a, b in zip(values, single, strict=True)]
        parts.append(
            f"{np.median(values):.0f} tokens per {of} ({min(values):.0f} to {max(values):.0f}), "
            f"{np.median(ratios):.2f} times one slot"
        )
    if name.startswith("ikpy"):
        parts.append(f"HTTP thread {np.median([speed.others for speed in speeds]):.0f} us per token")
    for what, pairs in (("first part", [s.first for s in speeds]), ("between parts", [s.gaps for s in speeds])):
        middle, high = np.median(pairs, axis=0)
        parts += [f"{what} {middle:.2f} ms, 99 % below {high:.2f} ms"] if high else []
    return f"{name}: {'; '.join(parts)}"


def main() -> None:
    import ikpy

    parser = argparse.ArgumentParser(description="throughput of `ikpy server` with one slot and with several")
    parser.add_argument("--model", default=str(ikpy.default_model_path()))
    parser.add_argument("--slots", default="8", help="beside one; several with commas between")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--n-predict", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=8, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="streamed", help="streamed, whole, or both with a comma between")
    parser.add_argument("--peer", action="store_true", help="also measure xllamacpp's server")
    parser.add_argument("--serve-peer", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_peer:
        model, *numbers = args.serve_peer
        serve_peer(model, *map(int, numbers))
    makers: dict[str, Callable[..., AbstractContextManager[tuple[str, psutil.Process]]]] = {"ikpy": ours}
    if args.peer:
        makers["xllamacpp"] = peer
    modes = args.modes.split(",")
    if not set(modes) <= {"streamed", "whole"}:
        parser.error(f"unknown mode in {args.modes}")
    found: dict[tuple[str, str, int], list[Speed]] = {}
    for _ in range(args.rounds):
        for name, maker in makers.items():
            for slots in (1, *map(int, args.slots.split(","))):
                with maker(args.model, slots, args.threads) as (address, running):
                    measure(address, running, slots, 0, args.n_predict)
                    for mode in modes:
                        stream = mode == "streamed"
                        speed = measure(address, running, slots, args.seconds, args.n_predict, stream=stream)
                        found.setdefault((name, mode, slots), []).append(speed)
    print(f"{Path(args.model).name}, {args.threads} threads, {args.n_predict} tokens per answer, {args.rounds} rounds")
    for (name, mode, slots), speeds in found.items():
        print(line(f"{name}, {mode}, {slots} slots", speeds, found[name, mode, 1]))


if __name__ == "__main__":
    main()
