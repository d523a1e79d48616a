"""Vocabularies against ids and texts recorded from the reference, limits of time, and errors."""

from __future__ import annotations

import hashlib
import itertools
import re
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikpy.errors import FileFormatError, IkpyError, UnsupportedError, UsageError
from ikpy.vocab import ChatTemplate, TokenType, Vocab
from ikpy.vocab.pretokenizers import PRE_TOKENIZERS
from ikpy.vocab.split_rules import split_rule
from tests.cpu.vocab.vocab_data import (
    CASES,
    VOCABS,
    assert_ids,
    first_difference,
    made,
    metadata_of,
    recorded,
    tiny,
    vocab_of,
)
from tests.shared import SHARED

EXTRA = recorded("extra.json")["vocabs"]
VARIANTS = recorded("pre-variants.json")
# The reference cuts Laguna's texts as Llama 3's; llama.cpp, whose files have the name, as the model does.
OWN_RULES = {"laguna"}
PRE_NAMES = [(name, group["plain"]) for group in VARIANTS["groups"] for name in group["pre"] if name not in OWN_RULES]
FILES = sorted(entry["file"] for entry in EXTRA.values() if entry["file"].startswith("ggml-vocab"))

# Ids the reference gives for wiki.test.raw with the bundled vocabulary (little-endian i32).
WIKI_TOKENS = 433573
WIKI_SHA256 = "466a4ff22de4239b0d47dc7156d08a965b55e72de9dc6888fbd81ebfabc39b48"
# Names that the reference does not know, with one of its own.
OF_LLAMA_CPP = {"cohere2moe": "tiny_aya"}


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("name", EXTRA)
def test_recorded_ids(name, parse_special):
    entry = EXTRA[name]
    vocab = vocab_of(entry["file"], reference_lowercase=True)
    for text, want in zip(CASES, entry["special" if parse_special else "plain"], strict=True):
        assert_ids(vocab, text, vocab.tokenize(text, True, parse_special), want)


@pytest.mark.parametrize("name", EXTRA)
def test_recorded_prefix_and_texts(name):
    entry = EXTRA[name]
    vocab = vocab_of(entry["file"], reference_lowercase=True)
    assert vocab.n_tokens == entry["n_vocab"]
    assert vocab.add_bos == entry["add_bos"]
    assert vocab.tokenize("") == entry["prefix"] + entry["suffix"]
    n_prefix, n_suffix = len(entry["prefix"]), len(entry["suffix"])
    for ids, want in zip(entry["plain"], entry["detok"], strict=True):
        inner = ids[n_prefix : len(ids) - n_suffix]
        assert vocab.detokenize_bytes(inner) == bytes.fromhex(want), inner


@pytest.mark.parametrize("file", FILES)
def test_published_ids(file):
    vocab = vocab_of(file)
    text = (VOCABS / f"{file}.inp").read_bytes().decode()
    lines = (VOCABS / f"{file}.out").read_text().split("\n")
    inputs = text.split("\n__ggml_vocab_test__\n")
    assert len(inputs) >= 46
    for case, line in zip(inputs, lines, strict=True):
        assert_ids(vocab, case.encode(), vocab.tokenize(case, add_special=False), list(map(int, line.split())))


def test_every_pre_tokenizer_name_is_recorded():
    assert {name for name, _ in PRE_NAMES} | OWN_RULES == set(PRE_TOKENIZERS) - set(OF_LLAMA_CPP)
    assert len(PRE_NAMES) == 81


def test_names_of_llama_cpp_alone():
    """It cuts texts of both names alike."""
    for name, other in OF_LLAMA_CPP.items():
        assert PRE_TOKENIZERS[name] == PRE_TOKENIZERS[other]


@pytest.mark.parametrize(("name", "plain"), PRE_NAMES, ids=[name for name, _ in PRE_NAMES])
def test_pre_tokenizer(name, plain):
    metadata = {**metadata_of("ggml-vocab-gpt-2.gguf"), "tokenizer.ggml.pre": name}
    vocab = Vocab.from_metadata(metadata)
    assert vocab.add_bos == (name in VARIANTS["add_bos_forced"])
    for text, want in zip(CASES, plain, strict=True):
        assert_ids(vocab, text, vocab.tokenize(text, add_special=False), want)


@pytest.mark.parametrize(
    ("rule", "text", "want"),
    [
        # A whole group is not cut off the text before it, but the run's end is a cut.
        ("TINY-AYA", "a 1234567x", ["a", " ", "1", "234", "567", "x"]),
        ("AFMOE", "456Ñ", ["456", "Ñ"]),
        ("SUPERBPE", "see 1234567 here", ["see ", "1", "234", "567", " here"]),
        ("KIMI-K2", "中文x々y", ["中文", "x々y"]),
        ("LLAMA3", "O'Doherty 12345", ["O", "'D", "oherty", " ", "123", "45"]),
        ("DEEPSEEK3", "a~b", ["a", "~b"]),
        ("GPT2", "x  y\n", ["x", " ", " y", "\n"]),
        ("LAGUNA", "f(12);\n\n  x  \n", ["f", "(", "1", "2", ");", "\n\n", " ", " x", "  ", "\n"]),
    ],
)
def test_split_rule(rule, text, want):
    assert split_rule(rule).split(text) == want


def test_reference_takes_no_contractions_in_capitals():
    assert split_rule("LLAMA3", reference_lowercase=True).split("O'Doherty") == ["O", "'Doherty"]


@given(st.text(max_size=40))
@settings(max_examples=150, deadline=None)
def test_pieces_of_every_rule_add_up_to_the_text(text):
    for rule in sorted({row.rule for row in PRE_TOKENIZERS.values()}):
        assert "".join(split_rule(rule).split(text)) == text, rule


def test_wiki_ids():
    path = SHARED / "public" / "wiki.test.raw"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    vocab = Vocab.from_metadata(metadata_of("tiny-mla-moe-f16.gguf"))
    text = path.read_bytes()
    ids = vocab.tokenize(text)
    assert len(ids) == WIKI_TOKENS
    assert hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest() == WIKI_SHA256


def test_load_of_150k_tokens():
    source = metadata_of("tiny-mla-moe-f16.gguf")
    tokens, merges = list(source["tokenizer.ggml.tokens"]), list(source["tokenizer.ggml.merges"])
    parts, known = tokens[300:800], set(tokens)
    for left, right in itertools.product(parts, parts):
        if len(tokens) < 150_000 and left + right not in known:
            known.add(left + right)
            tokens.append(left + right)
            merges.append(f"{left} {right}")
    metadata = {
        **source,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": np.ones(len(tokens), np.int32),
    }
    vocab = Vocab.from_metadata(metadata)
    assert vocab.n_tokens == 150_000
    assert [vocab.token_text(i) for i in (0, 75_000, 149_999)] == [tokens[i] for i in (0, 75_000, 149_999)]


@pytest.mark.parametrize("piece", ["a", " ", "\n", "1", "日本", "!", " \n", "é"])
def test_long_runs_take_linear_time(piece):
    vocab = tiny()
    start = time.process_time()
    ids = vocab.tokenize(piece * 50_000, add_special=False)
    assert b"".join(map(vocab.token_to_piece, ids)) == (piece * 50_000).encode()
    assert time.process_time() - start < 5


@pytest.mark.parametrize("piece", ["\t", " ", "\u3000", " \n"])
def test_long_runs_of_white_space_are_split_in_linear_time_by_jais_2(piece):
    start = time.process_time()
    assert "".join(split_rule("JAIS2").split(piece * 500_000)) == piece * 500_000
    assert time.process_time() - start < 3


@given(st.lists(st.sampled_from([" ", "\t", "\n", "\r", "\x0b", "a", "!", "1", " " * 7, "\t" * 600]), max_size=10))
def test_white_space_of_jais_2_is_split_by_its_published_expression(parts):
    """Line ends with what stands before them, else runs of 512, 256, ... characters, but for the last one."""
    powers = "|".join(rf"\s{{{2**exponent}}}(?!\S)" for exponent in range(9, 1, -1))
    text = "".join(parts)
    words = r"[^\r\na-z0-9]?[a-z]+|[0-9]{1,3}| ?[^\sa-z0-9]+[\r\n]*"
    published = re.findall(rf"{words}|\s*[\r\n]+|{powers}|\s{{1,2}}(?!\S)|\s", text)
    assert split_rule("JAIS2").split(text) == published


def test_tiny_special_tokens():
    vocab = tiny()
    assert (vocab.kind, vocab.bos, vocab.eos, vocab.eot, vocab.unk) == ("bpe", 4090, 4091, 4095, None)
    assert vocab.token_id("<|end|>") == 4095
    assert vocab.eog == {4091, 4095}
    assert vocab.token_type(4090) == TokenType.CONTROL
    assert vocab.token_type(0) == TokenType.NORMAL
    assert vocab.nl == vocab.tokenize("\n", add_special=False)[0]
    assert vocab.token_to_piece(4095) == b""
    assert vocab.token_to_piece(4095, special=True) == b"<|end|>"


def test_tiny_round_trip():
    vocab = tiny()
    text = "Hello, wörld! 🦙\n\n  12345 <|end|>"
    ids = vocab.tokenize(text, parse_special=True)
    assert ids[0] == vocab.bos
    assert ids[-1] == vocab.eot
    assert vocab.detokenize(ids, remove_special=True) == text
    assert vocab.detokenize(ids, remove_special=True, unparse_special=False) == text.removesuffix("<|end|>")
    assert vocab.tokenize(text.encode(), parse_special=True) == ids


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_pieces_give_the_text_back(text):
    vocab = tiny()
    ids = vocab.tokenize(text, add_special=False)
    assert b"".join(vocab.token_to_piece(index, special=True) for index in ids) == text.encode()


@given(st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_accepted(data):
    for file in ("tiny-mla-moe-f16.gguf", "ggml-vocab-llama-spm.gguf", "ggml-vocab-bert-bge.gguf"):
        if file.startswith("ggml") and not (VOCABS / file).exists():
            continue
        vocab = vocab_of(file)
        for parse_special in (False, True):
            ids = vocab.tokenize(data, parse_special=parse_special)
            assert all(0 <= index < vocab.n_tokens for index in ids)


def test_lone_surrogates_in_text_become_replacement_characters():
    vocab = tiny()
    assert vocab.tokenize("a\ud800b") == vocab.tokenize("a\ufffdb")


@given(st.text(max_size=30))
@settings(max_examples=150, deadline=None)
def test_stream_decoder_gives_whole_characters(text):
    vocab = tiny()
    decoder = vocab.stream_decoder(special=True)
    ids = vocab.tokenize(text, add_special=False)
    parts = [decoder.feed(index) for index in ids]
    assert "".join(parts) == text
    assert decoder.flush() == ""


def test_stream_decoder_holds_back_an_unfinished_character():
    vocab = tiny()
    ids = vocab.tokenize("🦙", add_special=False)
    assert len(ids) > 1
    decoder = vocab.stream_decoder()
    assert [decoder.feed(index) for index in ids[:-1]] == [""] * (len(ids) - 1)
    assert decoder.flush() == "\ufffd"
    assert [decoder.feed(index) for index in ids][-1] == "🦙"


def test_difference_message_names_the_token():
    assert "token 1" in first_difference(tiny(), b"x", [0, 1, 2], [0, 5, 2])


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({}, FileFormatError, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "zzz"}, UnsupportedError, "unknown tokenizer: 'zzz'"),
        (made("rwkv", ["a"]), FileFormatError, "needs a token for every byte; 1 are there, 0x00 has none"),
        ({"tokenizer.ggml.model": "llama"}, FileFormatError, "cannot find tokenizer vocab"),
        (made("llama", ["a", "b", "a"]), FileFormatError, "'a' appears twice"),
        (made("llama", ["a", "b"]), FileFormatError, "scores"),
        (made("llama", ["a", "b"], scores=[0.0]), FileFormatError, "1 entries for 2 tokens"),
        (made("llama", ["a"], token_type=[]), FileFormatError, "0 entries for 1 tokens"),
        (made("gpt2", ["a"], pre="gpt-2"), FileFormatError, "cannot find tokenizer merges"),
        (made("gpt2", ["a"], pre="gpt-2", merges=["ab"]), FileFormatError, "'ab'"),
        (made("gpt2", ["a"], pre="nope", merges=[]), UnsupportedError, "unknown pre-tokenizer type: 'nope'"),
    ],
)
def test_errors(metadata, error, message):
    with pytest.raises(error, match=message):
        Vocab.from_metadata(metadata)


KEYS = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eot_token_id", "add_bos_token",
    "add_space_prefix", "precompiled_charsmap", "remove_extra_whitespaces",
)  # fmt: skip
VALUES = (5, -1, 1.5, True, "text", np.arange(5), np.zeros((2, 2)), np.array(["a"]), ["a", "b"], [1, "b"], [], 2**63)


@pytest.mark.parametrize(
    "key", [f"tokenizer.ggml.{name}" for name in KEYS] + ["general.name", "tokenizer.chat_template"]
)
def test_values_of_another_type_are_errors_that_name_the_key(key):
    bases = [
        metadata_of("tiny-mla-moe-f16.gguf"),
        made("llama", ["<unk>", "▁a", "<0x0A>"], scores=[0.0, -1.0, -2.0], token_type=[2, 1, 6]),
        made("t5", ["<unk>", "▁a"], scores=[0.0, -1.0], token_type=[2, 1]),
    ]
    refused = 0
    for base, value in itertools.product(bases, VALUES):
        metadata = {**base, key: value}
        try:
            vocab = Vocab.from_metadata(metadata)
            ChatTemplate.from_metadata(metadata, vocab)
            vocab.tokenize("a <s> é", parse_special=True)
        except IkpyError as error:
            refused += key in str(error)
    assert refused >= len(VALUES) // 2


@pytest.mark.parametrize("index", [-1, 4096, 999999])
def test_id_outside_the_vocabulary(index):
    with pytest.raises(UsageError, match=r"outside the vocabulary \(0 to 4095\)"):
        tiny().detokenize([index])


def test_model_without_vocabulary():
    vocab = Vocab.from_metadata({"tokenizer.ggml.model": "no_vocab"})
    assert (vocab.kind, vocab.n_tokens, vocab.bos) == ("none", 0, None)
    with pytest.raises(UnsupportedError, match="no vocabulary"):
        vocab.tokenize("a")
