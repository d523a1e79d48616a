"""Drafts behind and between pictures: prediction layers see them, other drafters do not, texts stay as they are."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.head_draft import HeadDraft
from ikpy.engine.media import MediaStore
from ikpy.engine.model import Model
from ikpy.engine.model_draft import ModelDraft
from ikpy.engine.ngram_cache import NgramCache
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.session import MAX_INT32
from ikpy.engine.speculative import NGRAM_TYPES, Drafter, SpeculativeParams, Speculator
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.speculation import DraftFiles, make_speculation
from ikpy.vocab import Vocab
from tests.cpu.media import media_models as media
from tests.cpu.models import definition_checks as checks
from tests.cpu.models import reference_models as ref
from tests.cpu.models import test_arch_qwen3next as delta
from tests.cpu.models.reference_models import N_VOCAB, Evaluation, RandomModel

BOUND = 1e-4
N = 40


def model_of_pictures() -> RandomModel:
    """Recurrent layers, rotation by places in grids, and a layer that predicts further tokens."""
    return delta.predicting("qwen35", experts=False)


def right_head(model: RandomModel) -> RandomModel:
    """Makes the next token depend on the last one alone, so that the head knows it."""
    for name in model.weights:
        if name.endswith(("attn_output", "ffn_down", "ssm_out")):
            model.weights[name] *= 0.001
    p = f"blk.{delta.N_LAYER}.nextn"
    model.weights[f"{p}.eh_proj"] = np.eye(media.D, 2 * media.D, dtype=np.float32)
    model.weights[f"{p}.enorm"][:] = 1
    model.weights[f"{p}.shared_head_norm"] = model.weights["output_norm"]
    return model


def text_of_pictures() -> list:
    """Words that repeat, and two pictures, of which the first begins the text."""
    words = media.words(4, 9)
    return [media.picture(1, 15, (3, 5)), *words, *words, media.picture(2, 8, (4, 2)), *words, *words[:4]]


def settings(**more: object) -> ContextParams:
    return ContextParams(**{"n_ctx": 256, "n_threads": 2, "type_k": "f32", "type_v": "f32", **more})  # type: ignore[arg-type]


def head_logits(m: RandomModel, text: list, states: np.ndarray) -> np.ndarray:
    """In float64, of every entry: an item of the text but the first, with the state [D] behind the item before it."""
    e = Evaluation(m)
    w = checks.layer_weights(e, delta.N_LAYER)
    placed = media.Placed(text, media.D)
    x = np.where(placed.is_row[:, None], placed.rows, e.w["token_embd"][placed.tokens])[1:]
    parts = ref.rms_norm(x, w["nextn.enorm"], e.eps), ref.rms_norm(states, w["nextn.hnorm"], e.eps)
    x = np.concatenate(parts, axis=1) @ w["nextn.eh_proj"].T
    seen = np.tri(len(x), dtype=bool)
    entries = SimpleNamespace(places=placed.places[1:], visible=lambda: seen)
    x = x + media._gated_attention(e, w, ref.rms_norm(x, w["attn_norm"], e.eps), entries)  # type: ignore[arg-type]
    x = x + delta.feed_forward(e, delta.N_LAYER, w, ref.rms_norm(x, w["post_attention_norm"], e.eps))
    return ref.rms_norm(x, w["nextn.shared_head_norm"], e.eps) @ e.w["output"].T


@pytest.mark.parametrize("n_ubatch", [512, 7])
def test_logits_of_a_head(n_ubatch: int, tmp_path: Path) -> None:
    """An entry has the embedding and, but for a shift of all of them, the place of its token."""
    model, text = model_of_pictures(), text_of_pictures()
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = media.ids_of(store, text)
    states = np.random.default_rng(3).normal(size=(len(ids) - 1, media.D)).astype(np.float32)
    truth = head_logits(model, text, states.astype(np.float64))
    head = Model.load(model.write(tmp_path / "model.gguf")).prediction_head()
    context = Context(head, settings(media=store, n_ubatch=n_ubatch))
    checks.hold("", context.decode(Batch.single(ids[1:], logits="all"), states), truth, BOUND)
    other = head_logits(model, [media.picture(9, 15, (3, 5)), *text[1:]], states.astype(np.float64))
    assert np.abs(other - truth)[-1].max() > 0.01, "pictures do not matter"


def test_drafts_are_those_of_the_definition(tmp_path: Path) -> None:
    """Behind texts that are shown in pieces which end inside and behind pictures."""
    model, text = model_of_pictures(), text_of_pictures()
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = media.ids_of(store, text)
    states = np.random.default_rng(3).normal(size=(len(ids) + 9, media.D)).astype(np.float32)
    head = Model.load(model.write(tmp_path / "model.gguf")).prediction_head()
    drafter = HeadDraft(Context(head, settings(media=store, embeddings=True)), p_min=0.0, n_ctx=128)
    start = 0
    for end in (6, 15, 16, 35, 40, len(ids)):
        drafter.observe(ids[:end], states[start:end])
        start = end
    for token in (17, 90):
        ids, text = [*ids, token], [*text, token]
        n = len(ids)
        wanted = head_logits(model, text, states[: n - 1].astype(np.float64))[-1]
        found = drafter.draft(ids, 3)
        assert len(found) == 3 and found[0] == int(wanted.argmax())
        drafter.observe(ids, states[n - 1 : n])


def grown(loaded: Model, ids: list[int], store: MediaStore, speculator: Speculator | None) -> list[int]:
    """N greedy tokens behind a text."""
    reads = speculator is not None and speculator.needs_states
    context = Context(
        loaded, settings(media=store, token_states=reads, n_kept_states=4 if speculator else 0, n_ubatch=16)
    )
    sequence = GrowingSequence(context, speculator=speculator, media=store)
    sampler = Sampler(SamplingParams(temperature=0.0), N_VOCAB)
    return list(islice(sequence.generate(sampler, sequence.feed(ids), frozenset()), N))


def speculator_of(kind: str, loaded: Model, folder: Path, store: MediaStore | None) -> Speculator:
    """Drafters of a kind as programs make them, for a model whose file is in the folder."""
    params = SpeculativeParams(types=(kind,), n_max=4, p_min=0.0, size_n=2, size_m=4)
    files = DraftFiles(folder / "small.gguf" if kind == "draft" else None, lookup_dynamic=str(folder / "lookup"))
    vocab = Vocab.from_metadata(loaded.gguf.metadata)
    made = make_speculation(params, vocab, files, draft_params=settings(media=store), model=loaded)
    assert made is not None
    return made.speculator()


@pytest.mark.parametrize("kind", [*NGRAM_TYPES, "suffix", "draft", "mtp"])
@pytest.mark.parametrize("is_right", [False, True])
def test_texts_are_those_without_drafts(kind: str, is_right: bool, tmp_path: Path) -> None:
    """Also of answers behind which another picture and a further answer follow."""
    model = right_head(model_of_pictures()) if is_right else model_of_pictures()
    media.llama().write(tmp_path / "small.gguf")
    loaded = Model.load(model.write(tmp_path / "model.gguf"))
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = media.ids_of(store, text_of_pictures())
    speculator = speculator_of(kind, loaded, tmp_path, store)
    found = [grown(loaded, ids, store, drafting) for drafting in (None, speculator)]
    assert found[0] == found[1]
    ids += [*found[0], *media.ids_of(store, [media.picture(5, 6, (2, 3)), 9, 8])]
    assert grown(loaded, ids, store, None) == grown(loaded, ids, store, speculator)
    assert speculator.n_drafted or not is_right, "nothing was drafted"
    if is_right and kind == "mtp":
        assert speculator.n_accepted > 0.8 * speculator.n_drafted


class Watching(Drafter):
    """Remembers what it was shown, and guesses tokens that were seen."""

    name = "watching"

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def begin(self, tokens: list[int]) -> None:  # type: ignore[override]
        self.shown.append(list(tokens))

    def draft(self, tokens: list[int], n_max: int, p_min: float | None = None) -> list[int]:  # type: ignore[override]
        self.shown.append(list(tokens))
        return self.shown[-1][:n_max]


def test_other_drafters_see_no_pictures(tmp_path: Path) -> None:
    loaded = Model.load(model_of_pictures().write(tmp_path / "model.gguf"))
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = media.ids_of(store, text_of_pictures())
    drafter = Watching()
    grown(loaded, ids, store, Speculator([drafter], SpeculativeParams(n_max=3), store))
    words = [token for token in ids if token < N_VOCAB]
    assert drafter.shown[0] == words and all(shown[: len(words)] == words for shown in drafter.shown)
    alone = Watching()
    speculator = Speculator([alone], SpeculativeParams(n_max=3), store)
    assert speculator.draft(ids[:15], 3) == [] and not alone.shown, "there is nothing to go on from"


def test_files_of_lookup_caches_hold_no_pictures(tmp_path: Path) -> None:
    loaded = Model.load(model_of_pictures().write(tmp_path / "model.gguf"))
    store = MediaStore(N_VOCAB, 1 << 20)
    speculator = speculator_of("ngram-cache", loaded, tmp_path, store)
    grown(loaded, media.ids_of(store, text_of_pictures()), store, speculator)
    speculator.save()
    assert NgramCache.load(tmp_path / "lookup", N_VOCAB).n_pairs > 20


def test_a_draft_model_reads_no_pictures(tmp_path: Path) -> None:
    loaded = Model.load(model_of_pictures().write(tmp_path / "model.gguf"))
    media.llama().write(tmp_path / "small.gguf")
    store = MediaStore(N_VOCAB, 1 << 20)
    drafter = speculator_of("draft", loaded, tmp_path, store).drafters[0]
    assert isinstance(drafter, ModelDraft) and drafter._context.params.media is None


def test_states_of_texts_with_pictures(tmp_path: Path) -> None:
    """They are taken and put back within a process, and written to files."""
    model, text = model_of_pictures(), text_of_pictures()
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = media.ids_of(store, text)
    states = np.random.default_rng(3).normal(size=(len(ids), media.D)).astype(np.float32)
    head = Model.load(model.write(tmp_path / "model.gguf")).prediction_head()
    context = Context(head, settings(media=store, embeddings=True, n_seq_max=2))
    first, second = (HeadDraft(context, p_min=0.0, n_ctx=128, seq_id=i) for i in range(2))
    first.observe(ids, states)
    state = first.take_state()
    assert state is not None
    second.put_state(state)
    second.observe(ids, states[-2:])
    want = first.draft([*ids, 5], 3)
    assert want == second.draft([*ids, 5], 3) != []
    first.write_state(tmp_path / "state")
    second.read_state(tmp_path / "state")
    second.observe(ids, states[-2:])
    assert second.draft([*ids, 5], 3) == want
    assert max(ids) < MAX_INT32
