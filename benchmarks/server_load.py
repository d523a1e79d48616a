"""Puts a server under load on the loopback interface and reports what it did.

python -m benchmarks.server_load [--clients 64] [--seconds 300] [--slots 8] [--model model.gguf] [--peer]

Every client sends one request after another: streamed greedy completions, of which some are cancelled after a random
number of pieces and 1 % are malformed. Reported: answers that differ from those computed alone, server errors, the
resident memory over the run, times to the first token and between tokens, and (with --throughput) tokens per second
with one slot and with all slots, beside xllamacpp's server (--peer).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import psutil

PROMPTS = [
    f"{opening} {place} {thing}"
    for opening in ("The old man looked at", "A girl of seven ran to", "Nobody had ever seen", "They spoke of")
    for place in ("the house by the sea,", "the long road,", "a room without windows,", "the last carriage,")
    for thing in ("where", "and the letter", "when suddenly")
]
N_PREDICT = 48
CANCELLED, MALFORMED = 0.2, 0.01
BROKEN_BODIES = (b"{", b'{"prompt": [[]]}', b'{"prompt": "x", "grammar": "root ::= root"}', b"\xff", b"null", b"{}")
SAMPLE_SECONDS = 0.5


@dataclass
class Report:
    """What happened; times are seconds (``cpu_seconds`` those of the server process), memory is bytes."""

    completed: int = 0
    cancelled: int = 0
    malformed: int = 0
    different: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    def memory_fifths(self) -> list[float]:
        """Median memory of every fifth of the run; the first is the warm-up."""
        return [float(np.median(part)) for part in np.array_split(self.memory, 5) if len(part)]

    @property
    def memory_growth(self) -> float:
        """Memory of the last fifth relative to that of the second fifth."""
        fifths = self.memory_fifths()
        return fifths[-1] / fifths[1] - 1 if len(fifths) == 5 else 0.0

    def lines(self) -> list[str]:
        """The report as text."""
        first, between = (np.quantile(v or [0], (0.5, 0.99)) * 1e3 for v in (self.first_token, self.between_tokens))
        last = self.memory[-1] >> 20
        return [
            f"{self.seconds:.0f} s: {self.completed} completed, {self.cancelled} cancelled, {self.malformed} malformed",
            f"{len(self.different)} answers differ from those computed alone; {len(self.failures)} failures",
            f"{self.tokens / max(self.seconds, 1e-9):.0f} tokens/s, "
            f"{self.tokens / max(self.cpu_seconds, 1e-9):.0f} per second of processor time of the server",
            f"time to first token: p50 {first[0]:.0f} ms, p99 {first[1]:.0f} ms",
            f"time between tokens: p50 {between[0]:.1f} ms, p99 {between[1]:.1f} ms",
            f"resident memory: {last} MiB, {100 * self.memory_growth:+.1f} % from the second to the last fifth; "
            f"medians of the fifths: {', '.join(f'{m / 2**20:.1f}' for m in self.memory_fifths())} MiB",
        ]


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(
    model: str, slots: int, threads: int, *, peer: bool = False, cache_ram: int = 8
) -> Iterator[tuple[str, psutil.Process]]:
    """A server process with 512 tokens per slot and ``cache_ram`` MiB for saved texts: address and process."""
    port = free_port()
    n_slots, n_threads, n_ctx = str(slots), str(threads), str(512 * slots)
    options = ["-m", model, "-np", n_slots, "-c", n_ctx, "-t", n_threads, "-tb", n_threads, "--port", str(port)]
    line = [sys.executable, "-m", "ikpy", "server", *options, "--cache-ram", str(cache_ram), "--log-disable"]
    if peer:
        line = [sys.executable, "-m", "benchmarks.server_load", "--serve-peer", model, n_slots, n_threads, str(port)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            time.sleep(0.1)
        yield address, psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def serve_peer(model: str, slots: int, threads: int, port: int) -> None:
    """Runs xllamacpp's server until the process is ended."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_parallel, params.n_ctx = slots, 512 * slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.hostnames, params.port = ["127.0.0.1"], port
    running = xllamacpp.Server(params)
    assert running.listening_address
    while True:
        time.sleep(3600)


async def stream_text(client: httpx.AsyncClient, prompt: str, report: Report, pieces: int) -> str | None:
    """Text of a streamed answer; None if it was given up after so many pieces (below 0: never)."""
    body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "stream": True}
    began = last = time.perf_counter()
    text, n = "", 0
    async with client.stream("POST", "/completion", json=body) as response:
        if response.status_code != 200:
            report.failures.append(f"{response.status_code}: {(await response.aread())[:200]!r}")
            return None
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line[6:])
            now = time.perf_counter()
            (report.between_tokens if n else report.first_token).append(now - (last if n else began))
            last, n = now, n + 1
            if "error" in event:
                report.failures.append(str(event)[:200])
                return None
            text += event["content"]
            report.tokens += event.get("tokens_predicted", 0) if event.get("stop") else 0
            if n == pieces:
                return None
    return text


async def one_client(
    number: int, address: str, end: float, expected: dict[str, str], report: Report, malformed: float, cancelled: float
) -> None:
    """Requests one after another until the end."""
    rng = random.Random(number)
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        while time.perf_counter() < end:
            chance = rng.random()
            prompt = rng.choice(PROMPTS)
            try:
                if chance < malformed:
                    answer = await client.post("/completion", content=rng.choice(BROKEN_BODIES))
                    report.malformed += 1
                    if not 400 <= answer.status_code < 500:
                        report.failures.append(f"malformed request: {answer.status_code}")
                elif chance < malformed + cancelled:
                    await stream_text(client, prompt, report, rng.randrange(1, N_PREDICT))
                    report.cancelled += 1
                else:
                    text = await stream_text(client, prompt, report, -1)
                    if text is not None:
                        report.completed += 1
                        if expected and text != expected[prompt]:
                            report.different.append(f"{prompt!r}: {text!r} instead of {expected[prompt]!r}")
            except httpx.HTTPError as error:
                report.failures.append(repr(error))


@contextlib.asynccontextmanager
async def memory_of(process: psutil.Process, report: Report) -> AsyncIterator[None]:
    """Samples the resident memory meanwhile."""

    async def sample() -> None:
        while True:
            report.memory.append(process.memory_info().rss)
            await asyncio.sleep(SAMPLE_SECONDS)

    sampling = asyncio.ensure_future(sample())
    yield
    sampling.cancel()


async def load(
    address: str,
    process: psutil.Process,
    clients: int,
    seconds: float,
    *,
    malformed: float = MALFORMED,
    cancelled: float = CANCELLED,
    check: bool = True,
) -> Report:
    """Loads a server with shares of cancelled and malformed requests; ``check``: compare with answers alone."""
    expected = {}
    async with httpx.AsyncClient(base_url=address, timeout=120) as client:
        for prompt in PROMPTS if check else ():
            text = await stream_text(client, prompt, Report(), -1)
            assert text is not None
            expected[prompt] = text
    report = Report()
    began, cpu = time.perf_counter(), sum(process.cpu_times()[:2])
    async with memory_of(process, report):
        await asyncio.gather(
            *(one_client(i, address, began + seconds, expected, report, malformed, cancelled) for i in range(clients))
        )
    report.seconds = time.perf_counter() - began
    report.cpu_seconds = sum(process.cpu_times()[:2]) - cpu
    return report


def run(model: str, slots: int, clients: int, seconds: float, threads: int, **more: float) -> Report:
    """Starts a server, loads it, ends it; ``more`` goes to `load` (and ``cache_ram`` to `server`)."""
    with server(model, slots, threads, cache_ram=int(more.pop("cache_ram", 8))) as (address, process):
        return asyncio.run(load(address, process, clients, seconds, **more))  # type: ignore[arg-type]


def throughput(model: str, slots: int, seconds: float, threads: int, *, peer: bool) -> tuple[float, float]:
    """Tokens per second, and per second of the server's processor time, for as many clients as slots."""
    with server(model, slots, threads, peer=peer) as (address, process):
        report = asyncio.run(load(address, process, slots, seconds, malformed=0, cancelled=0, check=False))
    return report.tokens / report.seconds, report.tokens / report.cpu_seconds


def main() -> None:
    import ikpy

    parser = argparse.ArgumentParser(description="load test of `ikpy server`")
    parser.add_argument("--model", default=str(ikpy.default_model_path()))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--throughput", type=float, default=0, metavar="SECONDS", help="compare 1 slot with all slots")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of the comparison")
    parser.add_argument("--peer", action="store_true", help="also measure xllamacpp's server")
    parser.add_argument("--serve-peer", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_peer:
        model, *numbers = args.serve_peer
        serve_peer(model, *map(int, numbers))
    if args.seconds:
        report = run(args.model, args.slots, args.clients, args.seconds, args.threads)
        print(f"{Path(args.model).name}, {args.clients} clients, {args.slots} slots, {args.threads} threads")
        print(*report.lines(), *report.different[:3], *report.failures[:3], sep="\n", flush=True)
    if args.throughput:
        kinds = [("ikpy", 1, False), ("ikpy", args.slots, False)]
        kinds += [("xllamacpp", args.slots, True)] if args.peer else []
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            for name, slots, peer in kinds:
                speed = throughput(args.model, slots, args.throughput, args.threads, peer=peer)
                found.setdefault((name, slots), []).append(speed)
        for (name, slots), speeds in found.items():
            wall, cpu = (sorted(values) for values in zip(*speeds, strict=True))
            print(
                f"{name}, {slots} slots: {np.median(wall):.0f} tokens/s ({wall[0]:.0f} to {wall[-1]:.0f}), "
                f"{np.median(cpu):.0f} per second of processor time ({cpu[0]:.0f} to {cpu[-1]:.0f})"
            )


if __name__ == "__main__":
    main()
