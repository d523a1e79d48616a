"""Rows of pictures in place of tokens: models against their definition, whatever micro-batches cut them into."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.media import MediaStore
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.sampling import Sampler
from ikpy.engine.sampling_params import SamplingParams
from ikpy.engine.sequence_state import load_sequence, save_sequence
from ikpy.engine.session import load_session, put_state, save_session, take_state
from ikpy.engine.speculative import SpeculativeParams, Speculator
from ikpy.errors import FileFormatError, ResourceError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import dequantize
from ikpy.tools.generation import ContextFullError, GrowingSequence
from ikpy.vision.rows import MediaRows
from tests.cpu.media import media_models as media
from tests.cpu.models.definition_checks import hold
from tests.cpu.models.reference_models import N_VOCAB, RandomModel
from tests.cpu.models.test_arch_gemma4 import gemma4, truth
from tests.cpu.models.test_encoders import MODELS
from tests.shared import DATA

BOUND = 2e-4


def new_context(path: Path, store: MediaStore, **params: object) -> Context:
    """A context with an F32 cache that reads pictures."""
    settings = {"n_ctx": 256, "n_threads": 2, "n_seq_max": 3, "type_k": "f32", "type_v": "f32", **params}
    return Context(Model.load(path), ContextParams(media=store, **settings))  # type: ignore[arg-type]


def decoded(context: Context, store: MediaStore, ids: list[int], cuts: list[int], seq: int = 0) -> np.ndarray:
    """Logits of all tokens of a text that is evaluated in parts that end at these indices."""
    found, start = [], 0
    for end in [*cuts, len(ids)]:
        turn = store.turn(ids[:start])
        found.append(context.decode(Batch.single(ids[start:end], start, seq, "all", turn)))
        start = end
    return np.concatenate(found)


def gemma4_small() -> RandomModel:
    """With inputs of layers, as models whose rows do not see each other."""
    return gemma4()


def gemma4_large() -> RandomModel:
    """Without them."""
    return gemma4(has_inputs=False)


EVALUATED = {name: (make, media.evaluate) for name, make in media.MODELS.items()}
EVALUATED |= {make.__name__: (make, truth) for make in (gemma4_small, gemma4_large)}


@pytest.mark.parametrize("name", EVALUATED)
@pytest.mark.parametrize("flash", [False, True])
def test_logits_are_those_of_the_definition(name: str, flash: bool, tmp_path: Path) -> None:
    """At once, in micro-batches and batches that end inside of pictures, and token by token behind them."""
    make, evaluate = EVALUATED[name]
    model = make()
    path, text = model.write(tmp_path / "model.gguf"), media.text_for(model)
    expected = evaluate(model, text)
    n = len(expected)
    # Rows that see each other are not to be cut apart.
    inside = [6, 21, 22] if name in ("gemma3", "gemma4_large") else [9, 17, 27]
    for n_ubatch, cuts in ((512, []), (16, []), (16, inside), (512, [n - 14, *range(n - 12, n)])):
        store = MediaStore(N_VOCAB, 1 << 20)
        ids = media.ids_of(store, text)
        context = new_context(path, store, n_ubatch=n_ubatch, flash_attn=flash)
        hold(f"micro-batches of {n_ubatch}, cut at {cuts}", decoded(context, store, ids, cuts), expected, BOUND)


@pytest.mark.parametrize("name", ["qwen3vl", "qwen35", "hunyuan_vl", "gemma3"])
def test_sequences_in_one_batch(name: str, tmp_path: Path) -> None:
    """Two texts that share a beginning with a picture, and a third one, in batches of several micro-batches."""
    model = media.MODELS[name]()
    path, text = model.write(tmp_path / "model.gguf"), media.text_for(model)
    texts = [text, [*text[:9], *media.words(7, 9)], [*media.words(8, 2), text[9], *media.words(9, 11)]]
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = [media.ids_of(store, each) for each in texts]
    context = new_context(path, store, n_ubatch=16)
    shared = 21 + 2  # words, the first picture, words
    assert ids[0][:shared] == ids[1][:shared]
    context.decode(Batch.single(ids[0][:shared]))
    context.kv.seq_cp(0, 1)
    batch = Batch()
    for seq, start in ((0, shared), (1, shared), (2, 0)):
        batch.add(ids[seq][start:], start, seq, "all", store.turn(ids[seq][:start]))
    lengths = [len(ids[0]) - shared, len(ids[1]) - shared]
    parts = np.split(context.decode(batch), np.cumsum(lengths))
    for seq, start in ((0, shared), (1, shared), (2, 0)):
        hold(f"sequence {seq}", parts[seq], media.evaluate(model, texts[seq])[start:], BOUND)


@pytest.mark.parametrize("name", ["qwen2vl", "qwen35", "hunyuan_vl", "granite", "gemma3"])
def test_states_are_taken_and_put_back(name: str, tmp_path: Path) -> None:
    """Copies of a sequence in host memory hold pictures as they hold text, and so do files."""
    model = media.MODELS[name]()
    path, text = model.write(tmp_path / "model.gguf"), media.text_for(model)
    store = MediaStore(N_VOCAB, 1 << 20)
    ids = media.ids_of(store, text)
    context = new_context(path, store)
    n = len(ids) - 9
    context.decode(Batch.single(ids[:n]))
    put_state(context, 1, take_state(context, 0, ids[:n]))
    found = context.decode(Batch.single(ids[n:], n, 1, "all", store.turn(ids[:n])))
    hold("put back", found, media.evaluate(model, text)[n:], BOUND)
    save_session(tmp_path / "session", context, ids[:n])
    save_sequence(tmp_path / "state", context, 1, ids)
    context.kv.clear()
    assert load_session(tmp_path / "session", context) == ids[:n]
    assert load_sequence(tmp_path / "state", context, 2, 256)[0] == ids
    found = context.decode(Batch.single(ids[n:], n, 0, "all", store.turn(ids[:n])))
    hold("from a file", found, media.evaluate(model, text)[n:], BOUND)
    following = context.decode(Batch.single(ids[:1], len(ids), 2, "all", store.turn(ids)))
    hold("behind the whole text of a file", following, media.evaluate(model, [*text, text[0]])[len(ids) :], BOUND)


@pytest.mark.parametrize("type_name", ["q8_0", "q4_0"])
def test_quantized_caches(type_name: str, tmp_path: Path) -> None:
    """A picture moves logits no further from the definition than text does."""
    model = media.qwen3vl()
    path, text = model.write(tmp_path / "model.gguf"), media.text_for(model)
    store = MediaStore(N_VOCAB, 1 << 20)
    context = new_context(path, store, type_k=type_name, type_v=type_name, k_hadamard=True)
    logits = decoded(context, store, media.ids_of(store, text), [30])
    hold(type_name, logits, media.evaluate(model, text), 0.05 if type_name == "q8_0" else 0.6)


@pytest.mark.parametrize("name", ["qwen3vl", "qwen35", "hunyuan_vl", "gemma3"])
def test_texts_without_pictures_are_as_in_other_contexts(name: str, tmp_path: Path) -> None:
    """To the last bit, and without a look at what else there may be; behind pictures too."""
    model = media.MODELS[name]()
    path, words = model.write(tmp_path / "model.gguf"), media.words(4, 50)
    store = MediaStore(N_VOCAB, 1 << 20)
    found = []
    for known in (store, None):
        context = new_context(path, known)  # type: ignore[arg-type]
        found.append([context.decode(Batch.single(words, logits="all")), context.decode(Batch.one(7, 50))])
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    context = new_context(path, store)
    if context.kv.recurrent is None:
        ids = media.ids_of(store, media.text_for(model))
        turn = store.turn(ids)
        context.decode(Batch.single(ids))
        context.decode(Batch.one(7, len(ids), 0, turn))
        assert context._steps.run(Batch.one(8, len(ids) + 1, 0, turn)) is not None, "the way of single tokens"


def test_generation_goes_on_behind_pictures(tmp_path: Path) -> None:
    """As the definition says; with the common beginning of the next prompt kept, whatever cuts it."""
    for name in ("qwen2vl", "gemma3"):
        model = media.MODELS[name]()
        path, text = model.write(tmp_path / "model.gguf"), list(media.text_for(model))
        store = MediaStore(N_VOCAB, 1 << 20)
        context = new_context(path, store, n_batch=24, n_ubatch=16)
        sequence = GrowingSequence(context, media=store)
        ids = media.ids_of(store, text)
        sampler = Sampler(SamplingParams(temperature=0), N_VOCAB)
        drawn = sequence.generate(sampler, sequence.feed(ids), frozenset())
        for _ in range(6):
            token = next(drawn)
            assert token == int(media.evaluate(model, text)[-1].argmax())
            text.append(token)
        turns = "a text with pictures or sounds that turns positions is not shifted"
        assert sequence.obstacle == ("" if name == "gemma3" else turns)
        # The last token that may be kept is inside of a picture.
        again = ids[:30]
        kept = sequence.rewind(again)
        assert kept == (23 if name == "gemma3" else 29)
        truth = media.evaluate(model, media.text_for(model))
        if name == "qwen2vl":
            hold("again", sequence.feed(again[kept:])[None], truth[29:30], BOUND)
        sequence.rewind(ids)
        hold("the whole", sequence.feed(ids[len(sequence.tokens) :])[None], truth[-1:], BOUND)


@pytest.mark.parametrize(
    ("n_keep", "n_between", "gone"),
    [
        (0, 100, (0, 129)),  # half of the text ends in the second picture, which goes as a whole
        (10, 100, (21, 138)),  # what is to be kept ends in the first one, which is kept
        (21, 100, (21, 138)),  # behind the first one, which is kept
        (21, 111, (21, 140)),
    ],
)
def test_full_contexts_drop_whole_pictures(n_keep: int, n_between: int, gone: tuple[int, int], tmp_path: Path) -> None:
    """The rest moves up. Keys and values of an only layer do not depend on what is gone, so that logits are those of
    the text that is left."""
    model = media.transformer("llama", 77, 1)
    path, store, n_ctx = model.write(tmp_path / "model.gguf"), MediaStore(N_VOCAB, 1 << 20), 256
    text = [*media.words(1, 6), media.picture(0, 15), *media.words(2, n_between), media.picture(1, 8)]
    text += media.words(3, n_ctx + 3 - len(media.ids_of(store, text)))
    ids = media.ids_of(store, text)
    context = new_context(path, store, n_ctx=n_ctx, n_seq_max=1)
    sequence, dropped = GrowingSequence(context, n_keep=n_keep, media=store), list[int]()
    sequence.on_shift = dropped.append
    sequence.feed(ids[:250])
    assert sequence.obstacle == ""
    for token in ids[250:]:
        found = sequence.feed([token])
    start, end = gone
    assert dropped == [end - start]
    ends = np.cumsum([len(item) if isinstance(item, MediaRows) else 1 for item in text])
    left = [item for item, at in zip(text, ends, strict=True) if not start < at <= end]
    assert sequence.tokens == media.ids_of(store, left)
    hold("behind what is left", found[None], media.evaluate(model, left)[-1:], BOUND)


def test_full_contexts_that_stay(tmp_path: Path) -> None:
    """Where a picture is not all there, or a drafter reads the text in its own way, nothing is dropped."""
    model = media.transformer("llama", 77, 1)
    path, store = model.write(tmp_path / "model.gguf"), MediaStore(N_VOCAB, 1 << 20)
    ids = media.ids_of(store, [*media.words(1, 240), media.picture(0, 30)])
    context = new_context(path, store, n_ctx=256, n_batch=12, n_seq_max=1)
    sequence = GrowingSequence(context, n_keep=235, media=store)
    with pytest.raises(ContextFullError, match="do not fit the context of 256"):
        sequence.feed(ids)
    drafted = GrowingSequence(context, media=store, speculator=Speculator([], SpeculativeParams()))
    drafted.tokens = ids
    assert drafted.obstacle == "a text with pictures or sounds that a drafter reads is not shifted"


def test_what_cannot_be_evaluated_is_one_line(tmp_path: Path) -> None:
    """And leaves nothing behind."""
    model = media.gemma3()
    path, store = model.write(tmp_path / "model.gguf"), MediaStore(N_VOCAB, 15 * media.D * 4)
    ids = media.ids_of(store, [*media.words(1, 6), media.picture(0, 15, both_ways=True), 5, 6, 7])
    wide = store.add(b"wide", lambda: media.picture(1, 3, n_deep=1))
    small = new_context(path, store, n_ubatch=14)
    context = new_context(path, store)
    for tried, tokens, error, message in (
        (context, [store.end], UsageError, f"token {store.end} at index 0 of the batch is outside the vocabulary"),
        (context, ids, ResourceError, "the rows of a picture or a sound are no longer kept"),
        (context, wide, UsageError, "rows of a picture have 128 elements and the model reads 64"),
    ):
        with pytest.raises(error, match=message):
            tried.decode(Batch.single(tokens))
        assert tried.kv.used_cells == 0
    media.ids_of(store, [media.picture(0, 15, both_ways=True)])
    for tried, tokens, error, message in (
        (context, ids[:-5], UsageError, "a batch ends behind 13 of the 15 rows of a picture, which see each other"),
        (small, ids, UsageError, "the 15 rows of a picture see each other and must fit one micro-batch of 14"),
    ):
        with pytest.raises(error, match=message):
            tried.decode(Batch.single(tokens))
        assert tried.kv.used_cells == 0
    context.decode(Batch.single(ids))


def test_models_that_read_no_pictures(tmp_path: Path) -> None:
    """Encoders, models of another vocabulary, and files with sections or layers that cannot be."""
    path = media.qwen3vl().write(tmp_path / "model.gguf")
    with pytest.raises(UsageError, match=f"ids of pictures begin at {N_VOCAB + 1} and the model has {N_VOCAB} tokens"):
        new_context(path, MediaStore(N_VOCAB + 1, 1 << 20))
    path = MODELS["bert"]().write(tmp_path / "encoder.gguf")
    with pytest.raises(UsageError, match="bert models read tokens only, no pictures and sounds"):
        new_context(path, MediaStore(N_VOCAB, 1 << 20))
    model = media.qwen2vl()
    del model.keys["rope.dimension_sections"]
    path = model.write(tmp_path / "without.gguf")
    with pytest.raises(UsageError, match=r"how pictures are rotated \(qwen2vl.rope.dimension_sections\)"):
        new_context(path, MediaStore(N_VOCAB, 1 << 20))
    new_context(path, None)  # type: ignore[arg-type]
    model.keys["rope.dimension_sections"] = [6, 4, 4, 2]
    with pytest.raises(UsageError, match=r"dimension_sections \[6, 4, 4, 2\]: a fourth section"):
        new_context(model.write(tmp_path / "four.gguf"), MediaStore(N_VOCAB, 1 << 20))
    for mapping in ([1, -1, 2], [-1, 2, -1], [-1, 0, 1], [-1, -2, 1], [-1, 1]):
        model = media.granite()
        model.keys["deepstack_mapping"] = np.array([*mapping, -1, -1], np.int32)
        with pytest.raises(FileFormatError, match="deepstack_mapping") as caught:
            Model.load(model.write(tmp_path / "odd.gguf"))
        assert "\n" not in str(caught.value)
    for key, value, message in (
        ("rope.dimension_sections", [9, 9, 9, 9], "are no parts of the 16 pairs"),
        ("rope.dimension_sections", [0, 0, 0, 0], "are no parts of the 16 pairs"),
        ("rope.dimension_sections", [8, 8], "must hold 4 integers"),
        ("rope.dimension_sections", [0.5, 8.0, 4.0, 0.0], "must hold 4 integers"),
        ("rope.dimension_sections", 16, "must hold 4 integers"),
        ("n_deepstack_layers", 3, "all but the last of 3 at most"),
    ):
        model = media.transformer("qwen3vl", **{key: value})
        with pytest.raises(FileFormatError, match=message):
            Model.load(model.write(tmp_path / "odd.gguf"))


@pytest.mark.parametrize("name", ["deepseek2-lite", "deepseek2-v3-mla", "llama-moe", "qwen2-yarn", "qwen3moe"])
def test_rows_that_are_embeddings_are_tokens(name: str) -> None:
    """To the last bit, in latent attention too: nothing but the embedding is another."""
    path = DATA / "zoo" / f"{name}.gguf"
    gguf = GGUFFile.open(path)
    info = gguf.tensors["token_embd.weight"]
    table = np.asarray(dequantize(gguf.data(info), info.type_id, info.shape), np.float32)
    words = np.random.default_rng(2).integers(4, len(table) - 1, 60)
    store = MediaStore(len(table), 1 << 22)
    ids = [*words[:7].tolist(), *store.add(b"a", lambda: MediaRows(table[words[7:40]])), *words[40:].tolist()]
    found = []
    for text in (words.tolist(), ids):
        context = new_context(path, store, n_ubatch=32, type_k="f16", type_v="f16")
        found.append(context.decode(Batch.single(text, logits="all")))
    assert np.array_equal(*found)
