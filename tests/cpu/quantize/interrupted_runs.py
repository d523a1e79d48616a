"""`ikpy quantize` in processes of their own that are stopped, and what they leave."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli.quantize import run
from ikpy.gguf.types import GGUFValueType
from ikpy.gguf.writer import GGUFWriter
from ikpy.tools import resumable, tensor_convert
from ikpy.tools.resumable import ResumableOutput

OLD = b"an older file"


def write_model(path: Path, *, shards: int = 1, n_tensors: int = 6) -> str:
    """A model of random matrices in so many files; returns the path of the first."""
    rng = np.random.default_rng(4)
    limit = None if shards == 1 else -(-n_tensors // shards)
    with GGUFWriter(path, split_max_tensors=limit) as writer:
        writer.add("general.architecture", GGUFValueType.STRING, "llama")
        writer.add("llama.block_count", GGUFValueType.UINT32, n_tensors)
        names = [f"blk.{i}.ffn_up.weight" for i in range(n_tensors)]
        for name in names:
            writer.add_tensor(name, (256, 192), 0)
        for name in names:
            writer.write(name, rng.standard_normal((192, 256)).astype(np.float32))
    return str(path) if shards == 1 else f"{path}-00001-of-{shards:05d}.gguf"


def child(arguments: list[str], log: str, file_limit: int = 0) -> None:
    """The program in a process of its own, with small pieces; standard error goes to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tensor_convert.PIECE_ELEMENTS = 256 * 48
    resumable.SYNC_SHARE = 1e9  # after every piece
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    os._exit(run(arguments))


def start(processes, arguments: list[str], log: Path, file_limit: int = 0):
    process = processes.Process(target=child, args=(arguments, str(log), file_limit))
    process.start()
    return process


def wait_for_data(process, folder: Path) -> None:
    """Until the process writes a file with a temporary name in the folder, or is over."""
    before = part_times(folder)
    while process.exitcode is None and before == part_times(folder):
        process.join(0.005)


def part_times(folder: Path) -> list[tuple[str, int]]:
    """Temporary files and when they were written."""
    found = []
    for path in folder.glob(".*.part"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.name, path.stat().st_mtime_ns))
    return sorted(found)


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


def stopped_run(source: str, target: Path, options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizes and is interrupted after three tensors."""
    calls: list[int] = []

    def interrupt(self, index, position, real=ResumableOutput.pad):
        real(self, index, position)
        calls.append(position)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResumableOutput, "pad", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run([*options, source, str(target), "Q4_K"])
