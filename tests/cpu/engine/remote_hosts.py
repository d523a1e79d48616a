"""Hosts in processes of their own, and what models make of them."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ikpy.backends.remote import hosts
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.graph.placement import PlacementParams


class RunningHost:
    """`ikpy rpc-server` at a free port of this machine. log: its lines so far."""

    def __init__(self, *arguments: str, threads: int = 1) -> None:
        command = [sys.executable, "-m", "ikpy", "rpc-server", "-p", "0", "-t", str(threads), *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.port = 0
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := re.search(r"listening at .*:(\d+)$", line.rstrip()):
                self.port = int(found[1])
                break
        assert self.port, self.log
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log += (line.rstrip() for line in self.process.stderr)

    @property
    def endpoint(self) -> str:
        """What --rpc takes."""
        return f"127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        """As a device."""
        return f"RPC[{self.endpoint}]"

    def stop(self) -> None:
        """Ends it and whom it serves."""
        self.process.kill()
        self.process.wait(30)
        self._reader.join(30)


@contextmanager
def running(*arguments: str, threads: int = 1) -> Iterator[RunningHost]:
    """A host for a while; afterwards this process has none."""
    host = RunningHost(*arguments, threads=threads)
    try:
        yield host
    finally:
        hosts.use(())
        host.stop()


def context_on(path: Path, placement: PlacementParams, log: list[str] | None = None, **settings: Any) -> Context:
    """A model on the hosts in use."""
    lines = [] if log is None else log
    model = Model.load(path, ModelParams(placement=placement), log=lines.append)
    params = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 16, "n_threads": 1, **settings}
    return Context(model, ContextParams(**params), log=lines.append)


def tokens_for(context: Context, n: int, seed: int = 1) -> np.ndarray:
    """Random tokens."""
    return np.random.default_rng(seed).integers(3, context.model.hparams.n_vocab, n)


def evaluated(context: Context, tokens: np.ndarray, n_prompt: int, first: int = 0) -> np.ndarray:
    """Logits [n, V] of a prompt and of single tokens behind it."""
    parts = [context.decode(Batch.single(tokens[:n_prompt], first, logits="all"))]
    parts += [context.decode(Batch.single(tokens[i : i + 1], first + i)) for i in range(n_prompt, len(tokens))]
    return np.concatenate(parts)


ON_CPU = PlacementParams(n_gpu_layers=0)
