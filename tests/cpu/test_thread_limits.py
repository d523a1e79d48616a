"""Plans run with as many threads as OpenMP grants, which may be fewer than were asked for."""

from __future__ import annotations

import os
import subprocess
import sys

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


@pytest.mark.parametrize("variable", ["OMP_THREAD_LIMIT=1", "OMP_THREAD_LIMIT=2", "OMP_DYNAMIC=true"])
def test_fewer_threads_than_asked_for(variable: str) -> None:
    """A barrier that waits for the threads asked for would never open."""
    name, value = variable.split("=")
    env = {**os.environ, name: value, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout == "done\n"
