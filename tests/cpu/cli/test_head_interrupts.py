"""Ctrl-C while a prediction head catches up with the text."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.context import Context
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from tests.cpu.models.reference_models import N_VOCAB
from tests.cpu.models.test_prediction_head import D, entries, glm4moe, params, wanted_draft


@pytest.mark.parametrize("late", [False, True], ids=["before", "behind"])
def test_ctrl_c_while_entries_are_made(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an evaluation or behind it: no entry is made twice or left out."""
    model = glm4moe(own_matrices=True)
    context = Context(
        Model.load(model.write(tmp_path / "model.gguf")).prediction_head(), params(embeddings=True, n_batch=16)
    )
    drafter = HeadDraft(context, p_min=0.0, n_ctx=128)
    states = np.random.default_rng(2).normal(size=(60, D)).astype(np.float32)
    text = np.random.default_rng(3).integers(0, N_VOCAB, 60).tolist()
    drafter.observe(text[:12], states[:12])
    decode = context.decode

    def interrupted(*args: object, **more: object) -> np.ndarray:
        monkeypatch.undo()
        if not late:
            signal.raise_signal(signal.SIGINT)
        found = decode(*args, **more)
        if late:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(context, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        drafter.draft(text[:13], 3)
    drafter.observe(text[:20], states[12:20])
    assert drafter.draft(text[:21], 1) == [wanted_draft(model, text[:21], states)]
    assert entries(drafter) == list(range(20))
