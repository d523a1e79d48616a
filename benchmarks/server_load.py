"""Puts a server under load on the loopback interface and reports what it did.

python -m benchmarks.server_load [--clients 64] [--seconds 300] [--slots 8] [--model model.gguf]

Every client sends one request after another: streamed greedy completions, a third of them held to a regular expression,
of which some are cancelled after a random number of pieces and 1 % are malformed. Reported: answers that differ from
those computed alone, server errors, the resident memory over the run, times to the first token and between tokens. The
exit status is 1 if an answer differs, a request fails, or memory grows by more than 5 %. `benchmarks.server_throughput`
compares speeds.
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
CONSTRAINED, EXPRESSION = "and the letter", r"([A-Z][a-z]{1,9} ){4,40}[0-9]{3}\."
"""End of the prompts whose answers are held to an expression, which the model does not follow by itself."""
BROKEN_BODIES = (b"{", b'{"prompt": [[]]}', b'{"prompt": "x", "grammar": "root ::= root"}', b"\xff", b"null", b"{}")
SAMPLE_SECONDS = 0.5
MOST_GROWTH = 0.05
"""Resident memory of the last fifth of the run relative to the second one, less 1."""


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

    def complaints(self) -> list[str]:
        """What a server must not do under load; empty if all went well."""
        found = [f"failure: {text}" for text in self.failures] + [f"another answer: {text}" for text in self.different]
        if self.memory_growth > MOST_GROWTH:
            found.append(f"memory grew by {100 * self.memory_growth:.1f} %")
        if not self.completed:
            found.append("no answer was completed")
        return found

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
    model: str, slots: int, threads: int, *, cache_ram: int = 8, n_ctx: int = 512
) -> Iterator[tuple[str, psutil.Process]]:
    """`ikpy server` with ``n_ctx`` tokens per slot and ``cache_ram`` MiB for saved texts: address and process."""
    port = free_port()
    sizes = {"-np": slots, "-c": n_ctx * slots, "-t": threads, "-tb": threads, "--cache-ram": cache_ram, "--port": port}
    options = [str(word) for pair in sizes.items() for word in pair]
    with process([sys.executable, "-m", "ikpy", "server", "-m", model, *options, "--log-disable"], port) as running:
        yield running


@contextlib.contextmanager
def process(line: list[str], port: int) -> Iterator[tuple[str, psutil.Process]]:
    """A server that a command line starts on this port: address and process."""
    running = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{address}/health").status_code == 200:
                    break
            if running.poll() is not None:
                raise SystemExit(f"the server ended with status {running.returncode}")
            time.sleep(0.1)
        yield address, psutil.Process(running.pid)
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


async def stream_text(client: httpx.AsyncClient, prompt: str, report: Report, pieces: int) -> str | None:
    """Text of a streamed answer; None if it was given up after so many pieces (below 0: never)."""
    body = {"prompt": prompt, "n_predict": N_PREDICT, "temperature": 0, "stream": True}
    if prompt.endswith(CONSTRAINED):
        body["regex"] = EXPRESSION
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


def main() -> None:
    import ikpy

    parser = argparse.ArgumentParser(description="load test of `ikpy server`")
    parser.add_argument("--model", default=str(ikpy.default_model_path()))
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    report = run(args.model, args.slots, args.clients, args.seconds, args.threads)
    print(f"{Path(args.model).name}, {args.clients} clients, {args.slots} slots, {args.threads} threads")
    print(*report.lines(), *report.complaints()[:6], sep="\n", flush=True)
    raise SystemExit(1 if report.complaints() else 0)


if __name__ == "__main__":
    main()
