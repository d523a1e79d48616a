"""Which entries the caches of prediction layers have: missing ones, dropped ones, and those of other sequences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.context import Context
from ikpy.engine.entry_numbers import EntryNumbers
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.model import Model
from tests.cpu.models import prediction_models as models
from tests.cpu.models.definition_checks import LONG
from tests.cpu.models.prediction_models import Predicting
from tests.cpu.models.test_prediction_layers import random_states, settings


@pytest.fixture(params=models.MODELS)
def made(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Predicting, Model]:
    predicting = models.MODELS[request.param]()
    return predicting, Model.load(predicting.model.write(tmp_path / "model.gguf"))


def test_entries_that_are_missing(made: tuple[Predicting, Model]) -> None:
    """At the seam of a text that goes on otherwise, where a text was restored, and behind a full cache."""
    predicting, loaded = made
    heads = [Context(head, settings(embeddings=True, n_batch=16)) for head in loaded.prediction_heads()]
    text, states = LONG.tolist(), random_states(loaded, len(LONG))

    def wanted(entries: list[int], tokens: list[int]) -> int:
        inputs = np.array([tokens[i + 1] for i in entries])
        return int(predicting.heads(0, inputs, states[entries].astype(np.float64))[0][-1].argmax())

    drafter = HeadDraft(*heads, p_min=0.0, n_ctx=256)
    drafter.observe(text[:40], states[:40])
    assert drafter.draft(text[:41], 1) == [wanted([*range(40)], text)]
    other = [*text[:20], *text[100:140]]
    drafter.observe(other[:45], states[20:45])
    found = drafter.draft(other[:46], 1)
    if heads[0].kv.stretches:  # the others have positions with a gap
        assert found == [wanted([*range(19), *range(20, 45)], other)]
        drafter.observe(other[:30], states[29:30])
        again = [*other[:30], *text[50:80]]
        drafter.observe(again[:40], states[30:40])
        assert drafter.draft(again[:41], 1) == [wanted([*range(19), *range(20, 40)], again)]
    late = HeadDraft(*heads, p_min=0.0, n_ctx=256, seq_id=0)
    late._forget()
    late.observe(text[:70], states[33:70])
    assert late.draft(text[:71], 1) == [wanted([*range(33, 70)], text)]
    for n in range(80, 170, 10):
        late.observe(text[:n], states[n - 10 : n])
        assert late.draft([*text[:n], 5], 3)


def fed(drafter: HeadDraft, text: list[int], states: np.ndarray, start: int, end: int) -> list[int]:
    """Guesses behind a text whose tokens start .. end - 1 are observed five at a time."""
    for n in range(start, end, 5):
        drafter.observe(text[: n + 5], states[n : n + 5])
    return drafter.draft([*text[:end], 7], 3)


def test_texts_that_go_back_behind_a_full_cache(made: tuple[Predicting, Model]) -> None:
    """To before what the cache has left, or on behind a part that was not seen."""
    _, loaded = made
    small = settings(embeddings=True, n_ctx=64, flash_attn=False)
    contexts = [Context(head, small) for head in loaded.prediction_heads()]
    drafter = HeadDraft(*contexts, p_min=0.0, n_ctx=contexts[0].n_ctx)
    assert contexts[0].n_ctx == 64
    text, states = LONG.tolist(), random_states(loaded, len(LONG))
    other = [*text[:20], *text[60:160]]
    assert fed(drafter, text, states, 0, 100)
    assert fed(drafter, other, states, 20, 120)
    drafter.observe([*other, *text[:40]], np.empty((0, loaded.arch.state_size), np.float32))
    assert fed(drafter, [*other, *text], states, 160, 170)


def test_states_behind_a_full_cache(made: tuple[Predicting, Model], tmp_path: Path) -> None:
    """They are saved, and other sequences begin with what was dropped."""
    _, loaded = made
    contexts = [Context(head, settings(embeddings=True, n_ctx=128, n_seq_max=2)) for head in loaded.prediction_heads()]
    first, second = (HeadDraft(*contexts, p_min=0.0, n_ctx=64, seq_id=i) for i in range(2))
    text, states = LONG.tolist(), random_states(loaded, len(LONG))
    fed(first, text, states, 0, 100)
    first.write_state(tmp_path / "state")
    second.read_state(tmp_path / "state")
    assert fed(first, text, states, 100, 105) == fed(second, text, states, 100, 105) != []
    second.adopt(first, 30)
    found = fed(second, text, states, 30, 60)
    second._forget()
    assert found == fed(second, text, states, 30, 60)


def test_hardly_any_cells(tmp_path: Path) -> None:
    """Too few for drafts, of many sequences: the text is followed all the same."""
    loaded = Model.load(models.mimo2().model.write(tmp_path / "model.gguf"))
    context = Context(loaded.prediction_head(), settings(embeddings=True, n_ctx=32, n_seq_max=16, flash_attn=False))
    drafter = HeadDraft(context, p_min=0.0, n_ctx=context.n_ctx // 16)
    text = LONG.tolist()
    drafter.observe(text[:40], random_states(loaded, 40))
    assert drafter.draft(text[:41], 3) == []
    state = drafter.take_state()
    assert state is not None and state.tokens == text[:40]


def test_numbers_of_entries() -> None:
    numbers = EntryNumbers(gapless=True)
    numbers.add(0, 10)
    numbers.add(10, 5)
    numbers.add(20, 5)
    assert [numbers.position(entry) for entry in (0, 14, 15, 19, 20, 24, 25, 90)] == [0, 14, 15, 15, 15, 19, 20, 20]
    other = EntryNumbers(gapless=True)
    other.adopt(numbers, 22)
    assert (other.end, numbers.end) == (17, 20)
    numbers.cut(18)
    numbers.add(18, 2)
    assert numbers.position(19) == 16 and numbers.end == 17
    numbers.cut(0)
    assert numbers.position(7) == numbers.end == 0
    numbers.follow(4, 30)
    assert [numbers.position(entry) for entry in (2, 26, 29, 30)] == [0, 0, 3, 4]
    plain = EntryNumbers(gapless=False)
    plain.add(7, 3)
    assert plain.position(8) == 8
