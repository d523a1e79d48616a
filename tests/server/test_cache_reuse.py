"""Pieces of a slot's text are moved to where a prompt has them (`--cache-reuse`)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.server.log import ServerLog
from ikpy.server.pieces import MOST_PIECES, Piece, find_pieces
from ikpy.server.scheduler import Engine
from ikpy.server.settings import ServerSettings
from ikpy.server.tasks import Finished
from tests.cpu.models.shaped_models import Dims, gemma3, llama
from tests.server import harness
from tests.server.harness import MODELS, loaded

Answer = Callable[..., Finished]
TEXT = np.random.default_rng(3).integers(3, 160, 200).tolist()


@pytest.mark.parametrize(
    ("text", "prompt", "n_same", "n_min", "wanted"),
    [
        ([1, 2, 3, 4, 5, 6], [1, 4, 5, 6], 1, 3, [Piece(3, 3)]),
        ([1, 2, 3, 4, 5, 6], [1, 4, 5, 6], 1, 4, []),
        ([1, 9, 2, 3, 9, 4, 5], [1, 2, 3, 4, 5, 7], 1, 2, [Piece(2, 2), Piece(5, 2)]),
        ([1, 4, 5, 2, 3], [1, 2, 3, 4, 5], 1, 2, [Piece(3, 2)]),  # what comes before cannot follow
        ([7, 2, 3, 8, 2, 3, 4], [2, 3, 4], 0, 2, [Piece(1, 2)]),  # the first one that fits
        ([1, 2], [1, 2, 3, 4], 2, 2, []),
        ([0, 256, 1, 65536, 5], [0, 1, 65536], 1, 2, [Piece(2, 2)]),  # ids, not their bytes, are compared
    ],
)
def test_pieces_follow_each_other(
    text: list[int], prompt: list[int], n_same: int, n_min: int, wanted: list[Piece]
) -> None:
    assert find_pieces(text, prompt, n_same, n_min) == wanted


def test_the_number_of_pieces_is_bounded() -> None:
    prompt = list(range(1, 20_000))
    text = [token for item in prompt for token in (item, 0)]
    assert find_pieces(text, prompt, 1, 1) == [Piece(2 * i, 1) for i in range(1, MOST_PIECES + 1)]


@contextlib.contextmanager
def engine_of(model: Any, path: Path, n_slots: int, **settings: Any) -> Iterator[tuple[Answer, Engine, io.StringIO]]:
    """A function that answers prompts of token ids, its engine, and the log."""
    params = ContextParams(n_ctx=512 * n_slots, n_ubatch=32, n_threads=1, n_seq_max=n_slots, type_k="f32", type_v="f32")
    context = Context(Model.load(model.write(path / "model.gguf")), params)
    out = io.StringIO()
    log = ServerLog(out=out)
    engine = Engine(context, loaded(MODELS["MODEL"]).vocab, ServerSettings(n_slots=n_slots, **settings), log)

    def answer(prompt: list[int], **more: Any) -> Finished:
        more = {"cache_reuse": settings.get("cache_reuse", 0), "n_probs": 3} | more
        return harness.greedy_answer(engine, prompt, 160, limit=8, **more)

    engine.start()
    try:
        yield answer, engine, out
    finally:
        engine.stop(10)


def probabilities(event: Finished) -> np.ndarray:
    return np.array([item.probability for item in event.probabilities])


def test_moved_keys_are_those_of_their_new_places(tmp_path: Path) -> None:
    """In a model of one layer keys and values depend on token and place alone: nothing may differ."""
    prompt = TEXT[:20] + TEXT[70:120] + TEXT[131:190] + [5, 6, 7]
    with engine_of(llama(Dims(layers=1))[0], tmp_path, 1, cache_reuse=10) as (answer, _, out):
        answer(TEXT)
        moved = answer(prompt)
        assert (moved.n_cached, moved.timings.prompt_n) == (129, 3)
        assert "n_pieces=2 n_moved=109" in out.getvalue().replace('"', "")
        fresh = answer(prompt, cache_prompt=False)
        assert fresh.n_cached == 0 and moved.tokens == fresh.tokens
        assert np.abs(probabilities(moved) - probabilities(fresh)).max() < 1e-4
        again = answer([*prompt, *moved.tokens[:-1], 9])
        assert again.n_cached == len(prompt) + 7, "the moved text is a text like others"


def test_short_pieces_stay_where_they_are(tmp_path: Path) -> None:
    prompt = TEXT[:20] + TEXT[70:120]
    with engine_of(llama(Dims())[0], tmp_path, 1, cache_ram=0) as (answer, _, _):
        for n_min, n_cached in ((0, 20), (51, 20), (50, 69)):
            answer(TEXT, cache_prompt=False)
            assert answer(prompt, cache_reuse=n_min).n_cached == n_cached
        answer(TEXT, cache_prompt=False)
        assert answer(prompt, cache_reuse=50, cache_prompt=False).n_cached == 0


def test_the_slot_with_the_pieces_is_taken(tmp_path: Path) -> None:
    """Beginnings alone would say that neither slot has anything of the prompt."""
    with engine_of(llama(Dims())[0], tmp_path, 2, cache_reuse=16) as (answer, engine, _):
        answer(TEXT, id_slot=0)
        answer(TEXT[::-1], id_slot=1)
        found = answer(TEXT[60:])
        assert (found.id_slot, found.n_cached) == (0, 139)
        assert engine.prompt_cache.nbytes == 0, "most of the text stays: there is nothing to save"


def test_cells_that_another_slot_uses_stay_as_they_are(tmp_path: Path) -> None:
    with engine_of(llama(Dims())[0], tmp_path, 2, cache_reuse=16) as (answer, _, _):
        first = answer(TEXT, id_slot=0)
        assert answer(TEXT, id_slot=1).n_cached == 199
        assert answer(TEXT[:10] + TEXT[100:], id_slot=1).n_cached == 109
        assert answer(TEXT, id_slot=0).tokens == first.tokens


@pytest.mark.parametrize("model", ["window", "latent"])
def test_caches_that_cannot_be_shifted(model: str, tmp_path: Path) -> None:
    """Nothing is moved, and one line of the log says so."""
    if model == "window":
        with engine_of(gemma3(Dims())[0], tmp_path, 1, cache_reuse=16) as (answer, _, out):
            answer(TEXT)
            assert answer(TEXT[:4] + TEXT[100:]).n_cached <= 4
            assert out.getvalue().count("cannot be shifted") == 1
        return
    with harness.running("llama-server -m MODEL -t 1 -c 512 -np 1 --cache-reuse 2") as client:
        words = "one two three four five six seven eight nine ten eleven twelve"
        for prompt in (words, words[9:]):
            body = {"prompt": prompt, "n_predict": 2, "temperature": 0}
            answer = client.post("/completion", json=body).json()
        assert answer["timings"]["prompt_n"] >= answer["tokens_evaluated"] - 1


def test_a_request_can_ask_for_it() -> None:
    """Field `n_cache_reuse`."""
    with harness.running("llama-server -m PUPPET -t 1 -c 512 -np 1") as client:
        ids = list(range(40, 100))
        counts = []
        for more in ({}, {"n_cache_reuse": 8}):
            for prompt in (ids, ids[:10] + ids[30:]):
                body = {"prompt": prompt, "n_predict": 2, "temperature": 0, **more}
                counts.append(client.post("/completion", json=body).json()["timings"]["prompt_n"])
        assert counts[1] == 30 and counts[3] == 1
