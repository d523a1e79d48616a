"""Compute memory that cannot be had when a plan needs more: sizes stay those of what is there."""

from __future__ import annotations

import numpy as np
import pytest

import ikpy
from ikpy.engine import plans
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams


def test_a_growth_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(Model.load(ikpy.default_model_path()), ContextParams(n_ctx=256, n_ubatch=16, n_threads=1))
    tokens = list(range(20, 36))
    expected = context.decode(Batch.single(tokens, logits="all"))
    held = context._plans
    sizes = held.arena_bytes, held.work_bytes, held.arena.nbytes

    def refuse(_: int) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(plans, "aligned_bytes", refuse)
    with pytest.raises(MemoryError):
        held._allocate(2 * held.arena_bytes, held.work_bytes)
    assert (held.arena_bytes, held.work_bytes, held.arena.nbytes) == sizes
    context.kv.clear()
    np.testing.assert_array_equal(context.decode(Batch.single(tokens, logits="all")), expected)
