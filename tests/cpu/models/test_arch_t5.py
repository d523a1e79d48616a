"""t5: logits of random models against their definition, in every order that sequences can be evaluated in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ikpy
from ikpy.cli import main
from ikpy.cli.quantize import run as quantize
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.engine.session import load_session, put_state, save_session, take_state
from ikpy.engine.speculative import SpeculativeParams
from ikpy.errors import IkpyError, UsageError
from ikpy.models.size_class import size_class
from tests.cpu.models.definition_checks import context_of, hold
from tests.cpu.models.reference_models import N_VOCAB, RandomModel
from tests.cpu.models.t5_models import T5Evaluation, new_t5
from tests.cpu.models.test_encoders import unit

RANDOM = np.random.default_rng(51)
TEXT, OTHER = RANDOM.integers(4, N_VOCAB, 45), RANDOM.integers(4, N_VOCAB, 29)
START = 3
ANSWER = np.array([START, *RANDOM.integers(4, N_VOCAB, 22)])
LONG = np.array([START, *RANDOM.integers(4, N_VOCAB, 150)])
BOUND = 2e-5
KINDS: dict[str, dict[str, Any]] = {
    "gated": {"n_decoder": 2},
    "plain, tied": {"gated": False, "tied": True, "n_decoder": 3},
    "umt5, deeper decoder": {"own_biases": True, "n_decoder": 5},
}


def model_of(kind: str, seed: int = 61) -> RandomModel:
    n = KINDS[kind]["n_decoder"]
    return new_t5("t5", seed, **KINDS[kind], decoder_block_count=n, decoder_start_token_id=START)


def encode(context: Context, text: np.ndarray, seq_id: int = 0) -> None:
    """Has the encoder read the text of a sequence."""
    context.decode(Batch.single(text + N_VOCAB, 0, seq_id, logits="none"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash", [True, False])
def test_logits_are_those_of_the_definition(kind: str, flash: bool, tmp_path: Path) -> None:
    """As one batch, token by token, in small micro-batches, behind a long text, text and answer in one batch."""
    model = model_of(kind)
    e, path = T5Evaluation(model), model.write(tmp_path / "model.gguf")
    options = {"flash_attn": flash, "type_k": "f32", "type_v": "f32", "n_ctx": 512}
    truth, n = e.logits(TEXT, ANSWER), len(TEXT)
    context = context_of(path, **options)
    encode(context, TEXT)
    hold("one batch", context.decode(Batch.single(ANSWER, n, logits="all", turn=n)), truth, BOUND)
    context.kv.seq_rm(0, n, -1)
    steps = [context.decode(Batch.one(int(token), n + i, 0, n)) for i, token in enumerate(ANSWER)]
    hold("single steps", np.concatenate(steps), truth, BOUND)
    context.kv.clear()
    both = np.concatenate([TEXT + N_VOCAB, ANSWER])
    found = context.decode(Batch(both, np.arange(len(both)), [(0,)] * len(both), np.arange(len(both)) >= n))
    hold("text and answer", found, truth, BOUND)
    small = context_of(path, **options, n_ubatch=47)
    encode(small, TEXT)
    hold("micro-batches", small.decode(Batch.single(LONG, n, logits="all", turn=n)), e.logits(TEXT, LONG), BOUND)
    long = np.tile(TEXT, 5)
    context.kv.clear()
    encode(context, long)
    found = context.decode(Batch.single(ANSWER, len(long), logits="last", turn=len(long)))
    hold("long text", found, e.logits(long, ANSWER)[-1:], BOUND)
    one = TEXT[:1]
    context.kv.clear()
    encode(context, one)
    hold("one token", context.decode(Batch.single(ANSWER, 1, logits="all", turn=1)), e.logits(one, ANSWER), BOUND)


def test_sequences(tmp_path: Path) -> None:
    """Two texts in one batch with an answer of a third, copies, saved states, sessions, another answer to a text."""
    model = model_of("gated")
    e, path = T5Evaluation(model), model.write(tmp_path / "model.gguf")
    context = context_of(path, n_ctx=512, n_seq_max=4, type_k="f32", type_v="f32")
    first, second = e.logits(TEXT, ANSWER), e.logits(OTHER, ANSWER)
    n, m = len(TEXT), len(OTHER)
    encode(context, TEXT)
    batch = Batch()
    batch.add(OTHER + N_VOCAB, 0, 1, "none")
    batch.add(ANSWER[:9], n, 0, "all", n)
    batch.add(TEXT + N_VOCAB, 0, 2, "none")
    batch.add(OTHER + N_VOCAB, 0, 3, "none")
    hold("beside texts", context.decode(batch), first[:9], BOUND)
    batch = Batch()
    batch.add(ANSWER[9:], n + 9, 0, "all", n)
    batch.add(ANSWER, m, 1, "all", m)
    batch.add(ANSWER, n, 2, "all", n)
    batch.add(ANSWER[:5], m, 3, "all", m)
    found = context.decode(batch)
    hold("four sequences", found, np.concatenate([first[9:], second, first, second[:5]]), BOUND)
    context.kv.seq_rm(3, -1, -1)
    context.kv.seq_cp(0, 3, -1, n + 4)
    found = context.decode(Batch.single(ANSWER[4:], n + 4, 3, "all", n))
    hold("a copy", found, first[4:], BOUND)
    tokens = [*(TEXT + N_VOCAB).tolist(), *ANSWER[:7].tolist()]
    context.kv.seq_rm(0, n + 7, -1)
    put_state(context, 2, take_state(context, 0, tokens))
    hold("a saved state", context.decode(Batch.single(ANSWER[7:], n + 7, 2, "all", n)), first[7:], BOUND)
    save_session(tmp_path / "session", context, tokens)
    other = context_of(path, n_ctx=512, n_seq_max=4, type_k="f32", type_v="f32")
    assert load_session(tmp_path / "session", other) == tokens
    hold("a session", other.decode(Batch.single(ANSWER[7:], n + 7, 0, "all", n)), first[7:], BOUND)


def test_quantized_caches_and_types(tmp_path: Path) -> None:
    model = model_of("gated")
    truth, n = T5Evaluation(model).logits(TEXT, ANSWER), len(TEXT)
    path = model.write(tmp_path / "model.gguf")
    for kind, bound in (("f16", 5e-3), ("bf16", 5e-2), ("q8_0", 5e-2)):
        for options in ({}, {"k_hadamard": True} if kind == "q8_0" else {"flash_attn": False}):
            context = context_of(
                path, type_k=kind, type_v=kind if options.get("flash_attn", True) else "f16", **options
            )
            encode(context, TEXT)
            found = context.decode(Batch.single(ANSWER, n, logits="all", turn=n))
            hold(f"{kind} {options}", found, truth, bound)
    assert quantize([str(path), str(tmp_path / "small.gguf"), "Q8_0"]) == 0
    context = context_of(tmp_path / "small.gguf")
    encode(context, TEXT)
    hold("Q8_0", context.decode(Batch.single(ANSWER, n, logits="all", turn=n)), truth, 0.1)


def test_batches_that_cannot_be(tmp_path: Path) -> None:
    path, n = model_of("gated").write(tmp_path / "model.gguf"), len(TEXT)
    context = context_of(path, n_ubatch=32)
    with pytest.raises(UsageError, match="45 tokens of the encoder's text see each other and must fit one micro-batch"):
        encode(context, TEXT)
    with pytest.raises(UsageError, match="writes behind a text that its encoder has read"):
        context.decode(Batch.single(ANSWER))
    with pytest.raises(UsageError, match="reads a text as a whole"):
        context.decode(Batch.single(OTHER + N_VOCAB, 3))
    encode(context, OTHER)
    with pytest.raises(UsageError, match="sequence 0 holds a text already"):
        encode(context, OTHER)
    with pytest.raises(UsageError, match=f"token {2 * N_VOCAB}"):
        context.decode(Batch.single([2 * N_VOCAB], n))
    assert context.kv.used_cells == len(OTHER)


def test_texts(tmp_path: Path) -> None:
    """Greedy answers are those of the definition, of prompts one after the other, with drafts as without."""
    model = model_of("gated", 62)
    e, path = T5Evaluation(model), model.write(tmp_path / "model.gguf")
    llm = ikpy.LLM(path, n_threads=1, type_k="f32", type_v="f32")
    for text in ("the old man", "the old man and the sea", "the old man", "sea"):
        tokens, answer = np.array(llm.tokenize(text, add_special=True)), [START]
        for _ in range(8):
            answer.append(int(np.argmax(e.logits(tokens, np.array(answer))[-1])))
        wanted = llm.detokenize(answer[1:])
        assert llm.generate(text, max_tokens=8, temperature=0) == wanted, text
        assert llm.generate(tokens.tolist(), max_tokens=8, temperature=0) == wanted, text


@pytest.mark.parametrize(
    "command", ["bench -p 4", "batched-bench -c 256 -npp 4 -ntg 2 -npl 1", "sweep-bench -c 256 -ub 64"]
)
def test_tools_without_texts(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_of("gated").write(tmp_path / "model.gguf")
    assert main([*command.split(), "-m", str(path), "-t", "1"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == (
        "error: a model of architecture 't5' writes behind a text that its encoder has read: use ikpy cli, ikpy server "
        "or ikpy.LLM"
    )


def test_drafts_and_embeddings(tmp_path: Path) -> None:
    """Answers with drafts are the same; states are those of the encoder."""
    model = model_of("gated", 63)
    path = model.write(tmp_path / "model.gguf")
    exact = {"n_threads": 1, "type_k": "f32", "type_v": "f32"}
    llm = ikpy.LLM(path, **exact)  # type: ignore[arg-type]
    drafting = ikpy.LLM(path, **exact, speculative=SpeculativeParams(types=("ngram-simple",)))  # type: ignore[arg-type]
    for text in ("the old man and the sea", "man"):
        wanted = llm.generate(text, max_tokens=30, temperature=0)
        assert drafting.generate(text, max_tokens=30, temperature=0) == wanted
    states = T5Evaluation(model).states(np.array(llm.tokenize("the old man", add_special=True)))
    np.testing.assert_allclose(llm.token_embeddings("the old man"), states, atol=2e-5)
    np.testing.assert_allclose(llm.embed("the old man")[0], unit(states.mean(axis=0)), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_start_token_id": N_VOCAB}, "decoder_start_token_id is 160; there are 160 tokens"),
        ({"decoder_block_count": 0}, "decoder_block_count is 0"),
        ({"decoder_block_count": 4}, r"tensor 'dec.blk.2.attn_norm.weight' not found"),
        ({"decoder_block_count": 1}, r"dec\.blk\.1"),
    ],
)
def test_keys_that_cannot_be(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = model_of("gated")
    model.keys |= change
    with pytest.raises(IkpyError, match=message) as error:
        Model.load(model.write(tmp_path / "model.gguf"))
    assert "\n" not in str(error.value)


def test_size_classes() -> None:
    for layers, width, name in ((6, 2048, "60M"), (12, 3072, "220M"), (24, 10240, "11B"), (24, 1, "?B")):
        keys = {"general.architecture": "t5", "t5.block_count": layers, "t5.feed_forward_length": width}
        assert size_class(keys) == name


def test_memory_is_planned(tmp_path: Path) -> None:
    """A context takes what it was said to take, the encoder's plans included."""
    path = model_of("gated").write(tmp_path / "model.gguf")
    context = Context(Model.load(path), ContextParams(n_ctx=256, n_threads=1))
    before = context.compute_bytes
    encode(context, np.tile(TEXT, 4))
    context.decode(Batch.single(ANSWER, 180, logits="all", turn=180))
    assert context.compute_bytes == before
