"""Plans run with as many threads as OpenMP grants, which may be fewer than were asked for; what happens without any."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import ROOT

CHILD = """
import numpy as np
from ikpy import Batch, Context, ContextParams, Model, default_model_path

model = Model.load(default_model_path())

def logits(n_threads):
    context = Context(model, ContextParams(n_ctx=128, n_threads=n_threads, n_threads_batch=n_threads))
    prompt = context.decode(Batch.single(list(range(3, 43)), logits="all"))
    return np.concatenate([prompt, context.decode(Batch.single([5], 40))])

alone, many = logits(1), logits(3)
assert np.abs(alone - many).max() < 5e-3, np.abs(alone - many).max()
print("done")
"""

LIMITED = """
import sys, threading
from ikpy import default_model_path
from ikpy.cli import main

start, left = threading.Thread.start, [int(sys.argv[1])]

def limited(thread):
    if not left[0]:
        raise RuntimeError("can't start new thread")
    left[0] -= 1
    start(thread)

threading.Thread.start = limited
sys.exit(main(["quantize", str(default_model_path()), "out.gguf", "Q4_0", "2"]))
"""
"""Makes a model where the system starts so many threads and no more."""


@pytest.mark.parametrize("variable", ["OMP_THREAD_LIMIT=1", "OMP_THREAD_LIMIT=2", "OMP_DYNAMIC=true"])
def test_fewer_threads_than_asked_for(variable: str) -> None:
    """A barrier that waits for the threads asked for would never open."""
    name, value = variable.split("=")
    env = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout == "done\n"


def test_a_system_that_starts_no_more_threads(tmp_path: Path) -> None:
    """One line, no traceback, and nothing that a later run does not go on with."""
    command = [sys.executable, "-c", LIMITED]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for n, status, left in ((0, 1, []), (2, 1, [".out.gguf.journal", ".out.gguf.part"]), (1000, 0, ["out.gguf"])):
        line = [*command, str(n)]
        done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == status, done.stderr[-800:]
        assert sorted(path.name for path in tmp_path.iterdir()) == left
        lines = done.stderr.splitlines()
        assert status == 0 or lines[-1].endswith(
            "error: the system starts no more threads: use fewer, or raise its limit (ulimit -u, that of a container)"
        )
    assert any("going on with the unfinished" in line for line in lines)
