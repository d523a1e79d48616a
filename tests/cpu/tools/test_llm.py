"""The LLM class on the bundled model."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ikpy import LLM
from ikpy.engine.adapter import LoraAdapter
from ikpy.errors import UsageError
from ikpy.tools.stop_strings import StopFilter
from tests.cpu.models.test_adapters import write_adapter

OLD_MAN = "The old man looked at"
GREEDY = " the room, and the\nsame, and the old gentleman, and the other, and the\nsame of"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(n_ctx=512, n_threads=1)


def test_generate_and_stream(llm: LLM) -> None:
    assert llm.generate(OLD_MAN, 24, temperature=0) == GREEDY
    pieces = list(llm.stream(OLD_MAN, 24, temperature=0))
    assert len(pieces) > 15 and "".join(pieces) == GREEDY
    assert llm.generate(llm.tokenize(OLD_MAN, add_special=True), 24, temperature=0) == GREEDY
    assert llm.generate(OLD_MAN, 0) == ""


@pytest.mark.parametrize("drafts", [False, True])
def test_a_stream_ends_with_an_error_when_another_text_begins(llm: LLM, drafts: bool) -> None:
    """Texts are not mixed; a stream that was dropped disturbs nothing."""
    from ikpy.engine.speculative import SpeculativeParams

    if drafts:
        llm = LLM(n_ctx=512, n_threads=1, speculative=SpeculativeParams(types=("suffix",), pattern_len=1, p_min=0.1))
    first, second = llm.stream(OLD_MAN, 24, temperature=0), llm.stream("The sea", 24, temperature=0)
    wanted = LLM(n_ctx=512, n_threads=1).generate("The sea", 24, temperature=0)
    assert GREEDY.startswith("".join(next(first) for _ in range(4)))
    begun = next(second)
    with pytest.raises(UsageError, match="another text was begun while this one was streamed"):
        next(first)
    assert begun + "".join(second) == wanted
    dropped = llm.stream(OLD_MAN, 24, temperature=0)
    next(dropped)
    assert llm.generate("The sea", 24, temperature=0) == wanted
    assert llm.generate(OLD_MAN, 24, temperature=0) == GREEDY
    assert llm.context.kv.seq_pos_max(0) == len(llm._sequence.tokens) - 1, "no guesses are left in the cache"
    complete = llm.stream(OLD_MAN, 1, temperature=0)
    assert GREEDY.startswith(next(complete))
    llm.generate("The sea", 2)
    assert list(complete) == [], "its text was complete"


def test_a_common_beginning_is_not_evaluated_again(llm: LLM) -> None:
    llm.generate(OLD_MAN, 3, temperature=0)
    kept = list(llm._sequence.tokens)
    longer = llm.generate(OLD_MAN + " the room", 5, temperature=0)
    assert llm._sequence.tokens[: len(kept) - 1] == kept[: len(kept) - 1]
    assert longer == LLM(n_ctx=512, n_threads=1).generate(OLD_MAN + " the room", 5, temperature=0)


def test_stop_strings_and_grammar(llm: LLM) -> None:
    assert llm.generate(OLD_MAN, 24, temperature=0, stop=["gentle", "zzz"]) == GREEDY[: GREEDY.index("gentle")]
    assert llm.generate("Answer:", 24, temperature=0, grammar='root ::= " " ("yes" | "no") "."') == " no."


def test_seed_makes_sampling_reproducible(llm: LLM) -> None:
    first = llm.generate(OLD_MAN, 12, seed=3, temperature=1.0)
    assert llm.generate(OLD_MAN, 12, seed=3, temperature=1.0) == first
    assert any(llm.generate(OLD_MAN, 12, seed=seed, temperature=1.0) != first for seed in (4, 5))


def test_drafts_leave_the_text_as_it_is(llm: LLM) -> None:
    from ikpy import default_model_path
    from ikpy.engine.speculative import SpeculativeParams
    from ikpy.tools.speculation import DraftFiles

    params = SpeculativeParams(types=("suffix",), pattern_len=1, p_min=0.1)
    drafting = LLM(n_ctx=512, n_threads=1, speculative=params, draft_files=DraftFiles(default_model_path()))
    for prompt in ("The old man looked at", "one two, and the powers of the powers of the"):
        for sampling in ({"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_k": 4}):
            assert drafting.generate(prompt, 40, **sampling) == llm.generate(prompt, 40, **sampling)
            assert drafting.generate(prompt, 40, stop=["the"], **sampling) == llm.generate(
                prompt, 40, stop=["the"], **sampling
            )
    assert drafting.speculator is not None and drafting.speculator.n_accepted > 20
    assert [line.split()[1] for line in drafting.speculator.lines()] == ["acceptance", "suffix:", "draft:"]


def test_adapters_from_files_and_loaded_ones_add_up(llm: LLM, tmp_path: Path) -> None:
    random, name = np.random.default_rng(1), "blk.0.attn_output.weight"
    n_in, n_out = llm.model.weights[name].shape[:2]
    files, loaded = [], []
    for i in range(2):
        pair = random.normal(0, 0.5, (4, n_in)), random.normal(0, 0.5, (n_out, 4))
        pairs = {name.removesuffix(".weight"): (pair[0].astype(np.float32), pair[1].astype(np.float32))}
        files.append(write_adapter(tmp_path / f"{i}.gguf", llm.model.hparams.arch, pairs, 0.0))
        loaded.append(LoraAdapter.load(files[-1], llm.model))
    scaled = LoraAdapter("scaled", {key: (a, b * np.float32(0.5)) for key, (a, b) in loaded[1].pairs.items()})
    texts = [
        LLM(n_ctx=512, n_threads=1, **options).generate(OLD_MAN, 16, temperature=0)
        for options in (
            {"lora": [(files[0], 1.0), (files[1], 0.5)]},
            {"adapters": [loaded[0]], "lora": [(files[1], 0.5)]},
            {"adapters": [loaded[0], scaled]},
        )
    ]
    assert texts[0] == texts[1] == texts[2] != GREEDY[: len(texts[0])]


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    prompt = "<|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>"
    assert llm.chat(messages, 8, temperature=0) == llm.generate(prompt, 8, temperature=0)
    assert llm.chat("Hello", 4, temperature=0) == "".join(llm.stream_chat("Hello", 4, temperature=0))


def test_embeddings(llm: LLM) -> None:
    """Values recorded from the reference server with mean pooling."""
    vectors = llm.embed(["Hello", "Hello world"])
    assert vectors.shape == (2, 256) and vectors.dtype == np.float32
    hello = [0.12901902, 0.03007466, -0.07978260, -0.05088048, 0.02662782, 0.09078663]
    both = [0.12704556, 0.02573400, -0.04430432, -0.04817868, 0.01703639, 0.08128852]
    np.testing.assert_allclose(vectors[:, :6], [hello, both], atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=-1), 1.0, rtol=1e-5)
    last = llm.embed("Hello world", pooling="last", normalize=False)
    assert last.shape == (1, 256) and np.linalg.norm(last) > 1.5
    assert llm.embed([]).shape == (0, 256)
    with pytest.raises(UsageError, match="pooling 'median'"):
        llm.embed("x", pooling="median")


def test_tokens(llm: LLM) -> None:
    text = "Héllo wörld 😀"
    assert llm.detokenize(llm.tokenize(text)) == text
    assert llm.tokenize("x", add_special=True)[0] == 4090
    assert llm.detokenize([4090, 87], special=True).startswith("<|begin_of_text|>")


def test_errors(llm: LLM) -> None:
    with pytest.raises(UsageError, match="unknown parameter n_contexts"):
        LLM(n_contexts=3)
    with pytest.raises(UsageError, match="the context 512"):
        llm.generate("word " * 600)
    with pytest.raises(UsageError, match="unknown parameter temprature; see SamplingParams"):
        llm.generate("x", temprature=1)
    prompts: list[Any] = [None, 5, ["a"], [1.5]]
    for prompt in prompts:
        with pytest.raises(UsageError, match="a prompt is a text or a sequence of token ids"):
            llm.generate(prompt)
    with pytest.raises(UsageError, match="a prompt is a text"):
        llm.embed(["a", 5])  # type: ignore[list-item]
    conversations: list[Any] = [["a"], {"role": "user", "content": "a"}, 5]
    for messages in conversations:
        with pytest.raises(UsageError, match="messages are a text, or a list of mappings"):
            llm.chat(messages)
    with pytest.raises(UsageError, match=r"max_tokens 2\.5 is no whole number"):
        llm.generate("x", 2.5)  # type: ignore[arg-type]
    assert llm.generate(OLD_MAN, np.int64(2), temperature=0) == " the room"  # type: ignore[arg-type]
    for stop in (None, 5, ["a", 5]):
        with pytest.raises(UsageError, match="is neither a text nor a list of texts"):
            llm.generate("x", stop=stop)  # type: ignore[arg-type]
    for token in (-1, 4096, 10**30):
        with pytest.raises(UsageError, match=f"token {token} of the prompt is outside the vocabulary of 4096"):
            llm.generate([5, token])
    measured = LLM(n_ctx=512, n_threads=1, header_only=True)
    for call in (measured.generate, measured.embed):
        with pytest.raises(UsageError, match="only the header of the model was read"):
            call("x")  # type: ignore[operator]
    for name, wrong in (("n_threads", -1), ("n_threads", 0), ("n_threads_batch", -1), ("n_ctx", -5)):
        with pytest.raises(UsageError, match=f"{wrong} t"):
            LLM(**{name: wrong})


def test_overrides_reach_vocabulary_and_template(llm: LLM) -> None:
    changed = {"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages[0]['content'] }}!"}
    other = LLM(n_ctx=512, n_threads=1, kv_overrides=changed)
    assert llm.vocab.add_bos and not other.vocab.add_bos
    assert other.tokenize("x", add_special=True) == llm.tokenize("x")
    assert other.chat_template.render([{"role": "user", "content": "Hello"}]) == "Hello!"


def test_one_stop_string_and_a_full_context(llm: LLM) -> None:
    assert llm.generate(OLD_MAN, 24, temperature=0, stop="same, and") == GREEDY.partition("same, and")[0]
    small = LLM(n_ctx=256, n_threads=1)
    text = small.generate(OLD_MAN, -1, temperature=0)
    assert text.startswith(GREEDY), "what was written is not lost"
    assert len(small.tokenize(OLD_MAN + text, add_special=True)) <= 257


def test_threads_wait_for_each_other(llm: LLM) -> None:
    """Each text is the one that it is without other threads; a stream that another text ended says so."""
    prompts = [OLD_MAN, "The sea", "Once upon a time", "I have"]
    wanted = [llm.generate(prompt, 16, temperature=0) for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: llm.generate(prompt, 16, temperature=0), prompts)) == wanted
        embedded = list(pool.map(llm.embed, prompts))
        stream = llm.stream(OLD_MAN, 16, temperature=0)
        begun = next(stream)
        assert pool.submit(llm.generate, "The sea", 16, temperature=0).result() == wanted[1]
    assert GREEDY.startswith(begun)
    with pytest.raises(UsageError, match="another text was begun"):
        next(stream)
    np.testing.assert_array_equal(np.concatenate(embedded), llm.embed(prompts))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_made_by_fork() -> None:
    """With one thread they work; several, which the parent had, are refused instead of waited for."""
    program = f"""
import os, sys
from ikpy import LLM
from ikpy.errors import UsageError
def answer(llm):
    try:
        llm.generate("", 8, grammar="root ::= [0-9 ]*")  # which has threads of its own
        return llm.generate({OLD_MAN!r}, 4, temperature=0)
    except UsageError as error:
        return "refused: " + str(error)
one, two = LLM(n_threads=1, n_ctx=256), LLM(n_threads=2, n_ctx=256)
answer(one), answer(two)
sys.stdout.flush()
if os.fork() == 0:
    print(repr(answer(one)), repr(answer(two)), sep="\\n", flush=True)
    try:
        LLM(n_threads=2, n_ctx=256)
    except UsageError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print(repr(answer(two)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    one, two, made, parent = result.stdout.splitlines()
    assert one == parent == "' the room, and'"
    assert "refused: this process was forked" in two and made.startswith("this process was forked")


@pytest.mark.parametrize(("pieces", "out", "stopped"), [
    (["ab", "cd"], "abcd", None),
    (["a<", "e", "nd>", "x"], "a", "<end>"),
    (["a<", "e", "nx"], "a<enx", None),
    (["<en", "<end>"], "<en", "<end>"),
    (["aST", "OP<end>"], "a", "STOP"),
])  # fmt: skip
def test_stop_filter(pieces: list[str], out: str, stopped: str | None) -> None:
    stops = StopFilter(["<end>", "STOP"])
    text = ""
    for piece in pieces:
        text += stops.feed(piece)
        if stops.stopped:
            break
    assert text + ("" if stops.stopped else stops.flush()) == out and stops.stopped == stopped
