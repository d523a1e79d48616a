"""Tokenizer families against plain definitions on small vocabularies, and the rules of special tokens."""

from __future__ import annotations

import itertools
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ikpy.errors import FileFormatError
from ikpy.server.routes_rerank import pair
from ikpy.vocab import TokenType, Vocab
from ikpy.vocab.text import byte_encode, byte_to_char, decode_structural, to_internal
from ikpy.vocab.ugm import CharsMap
from tests.cpu.vocab.double_array import charsmap
from tests.cpu.vocab.vocab_data import made

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


# -- BPE ---------------------------------------------------------------------------------------------------

# "c" is no token; merges name parts and results that are none ("cc", "ab c"); "a b" comes twice.
BPE_TOKENS = [*(set(byte_to_char()) - {"c"}), "ab", "abc", "bb", "aab", "<eot>"]
BPE_MERGES = ["c c", "a b", "b b", "a ab", "ab c", "a b", "Ġ a", "cc a"]
BPE = Vocab.from_metadata(made("gpt2", BPE_TOKENS, pre="gpt-2", merges=BPE_MERGES))


def plain_bpe(word: str) -> list[int]:
    """Merge texts by rank, leftmost first; look tokens up at the end."""
    ranks = {tuple(line.split(" ")): rank for rank, line in reversed(list(enumerate(BPE_MERGES)))}
    symbols = list(byte_encode(word))
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
        if not pairs:
            break
        at = min(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        texts = [symbol] if symbol in BPE_TOKENS else list(symbol)
        ids += [BPE_TOKENS.index(text) for text in texts if text in BPE_TOKENS]
    return ids


@given(st.text("abc", max_size=12))
@settings(max_examples=300, deadline=None)
def test_bpe_merges_through_texts_that_are_no_tokens(word):
    assert BPE.tokenize(word, add_special=False) == plain_bpe(word)


@pytest.mark.parametrize("model", ["gpt2", "gemma4", "t5", "llama", "bert"])
def test_tokens_and_merges_that_are_not_utf8(model):
    """Bytes of damaged files, which are lone surrogates here."""
    tokens = ["a", "b", "ab", "\udcff", "a\udcff", "\udcc3b", "▁ab"]
    keys = {"merges": ["a \udcff", "\udcc3 b", "a b"], "scores": [-1.0] * 7, "unknown_token_id": 3}
    vocab = Vocab.from_metadata(made(model, tokens, pre="gpt-2", token_type=[1] * 7, **keys))
    for text in ("ab", b"a\xff", b"\xc3b", "é"):
        ids = vocab.tokenize(text, add_special=False)
        assert all(0 <= index < 7 for index in ids), text
    assert vocab.token_to_piece(vocab.tokenize("ab", add_special=False)[-1]) in (b"ab", b" ab")
    vocab.detokenize(range(7))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"ok \xff\xfe \x80", "ok \ufffd\ufffd \ufffd"),
        (b"\xe2\x82 \xf0\x9f\x98", "\ufffd\ufffd \ufffd\ufffd\ufffd"),
        (b"\xc0\xaf", "/"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        (b"\xf4\x90\x80\x80", "\ufffd\ufffd\ufffd\ufffd"),
        ("naïve 🦙".encode(), "naïve 🦙"),
    ],
)
def test_structural_decoding(data, text):
    assert decode_structural(to_internal(data)) == text


def test_foreign_characters_of_a_token_are_named():
    vocab = Vocab.from_metadata(made("gpt2", ["a", "a日"], pre="gpt-2", merges=[]))
    assert vocab.token_to_piece(1) == b"a[UNK_BYTE_0xe697a5]"


def test_gemma4_lines_spaces_and_byte_tokens():
    tokens = ["<pad>", "▁", "a", "b", "▁a", "\n", "\n\n", *BYTES]
    vocab = Vocab.from_metadata(made("gemma4", tokens, merges=["▁ a"], bos_token_id=0))
    byte = {text: index for index, text in enumerate(tokens)}
    assert vocab.add_bos
    assert vocab.tokenize("b a\n\né") == [0, 3, 4, 6, byte["<0xC3>"], byte["<0xA9>"]]
    assert vocab.eos is None


# -- SPM ---------------------------------------------------------------------------------------------------

SPM_TOKENS = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "ba", "▁a", "▁▁", "aa", "▁ab", "b▁", "aab"]
SPM_SCORES = [0.0] * (3 + 256) + [-9, -1, -2, -4, -4, -3, -8, -4, -2.5, -6, -1.5]
SPM_TYPES = [2, 3, 3] + [6] * 256 + [1] * 11


def spm(with_crossing: bool) -> Vocab:
    """``with_crossing``: a token holds a letter before U+2581, so words may not be treated one by one."""
    tokens = [text if with_crossing or text != "b▁" else "zz" for text in SPM_TOKENS]
    return Vocab.from_metadata(made("llama", tokens, scores=SPM_SCORES, token_type=SPM_TYPES))


def plain_spm(vocab: Vocab, text: str) -> list[int]:
    symbols = list((" " + text).replace(" ", "▁")) if text else []
    while True:
        best = [
            (-SPM_SCORES[index], i)
            for i in range(len(symbols) - 1)
            if (index := vocab.token_id(symbols[i] + symbols[i + 1])) is not None
        ]
        if not best:
            break
        at = min(best)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        index = vocab.token_id(symbol)
        ids += [index] if index is not None else [3 + byte for byte in symbol.encode()]
    return ids


@pytest.mark.parametrize("with_crossing", [True, False])
@given(text=st.text("ab é", max_size=14))
@settings(max_examples=200, deadline=None)
def test_spm_merges_by_score(with_crossing, text):
    vocab = spm(with_crossing)
    assert vocab.tokenize(text, add_special=False) == plain_spm(vocab, text)


def test_spm_space_prefix_follows_special_tokens():
    vocab = spm(False)
    a, space_a = vocab.token_id("a"), vocab.token_id("▁a")
    assert vocab.tokenize("a<s>a", add_special=False, parse_special=True) == [space_a, 1, space_a]
    assert vocab.detokenize([1, space_a, a], remove_special=True) == " aa"
    assert vocab.detokenize([space_a, a]) == "aa"
    assert vocab.nl == 3 + 0x0A


# -- UGM ---------------------------------------------------------------------------------------------------

UGM_TOKENS = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "ab", "▁a", "aba", "fi", "<x>"]
UGM_SCORES = [0.0, 0.0, 0.0, -3.0, -2.0, -2.5, -3.9, -4.0, -7.0, -5.0, -1.0]
UGM_TYPES = [3, 3, 2, 1, 1, 1, 1, 1, 1, 1, 4]
MAP = {"ﬁ": "fi", "ab\u0301": "b", "\u3000": " ", "a\u0301": "a", "日": ""}


def ugm(**keys) -> Vocab:
    keys = {"scores": UGM_SCORES, "token_type": UGM_TYPES, "add_space_prefix": True, **keys}
    return Vocab.from_metadata(made("t5", UGM_TOKENS, **keys))


def test_pairs_of_texts_have_two_separators() -> None:
    """As XLM-RoBERTa's tokenizer writes them: <s> A </s> </s> B </s>."""
    asked = {"bos_token_id": 0, "add_bos_token": True, "seperator_token_id": 1}
    first, second = plain_unigram("▁a"), plain_unigram("▁ab")
    for more, between in (({}, [1, 1]), ({"add_sep_token": False}, [1])):
        front = SimpleNamespace(vocab=ugm(**asked, **more))
        assert pair(front, "a", "ab") == [0, *first, *between, *second, 1]


def plain_unigram(text: str) -> list[int]:
    """Best path over characters; unknown characters score 10 below the worst token and fuse."""
    scores = {t: s for t, s, k in zip(UGM_TOKENS, UGM_SCORES, UGM_TYPES, strict=True) if k == 1} | {"<x>": 0.0}
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        found: tuple[float, list[int]] | None = None
        for start in range(end):
            score, path = best[start]
            piece = text[start:end]
            if piece in scores:
                candidate = score + scores[piece], [*path, UGM_TOKENS.index(piece)]
            elif end - start == 1:
                candidate = score - 17.0, path if path[-1:] == [2] else [*path, 2]
            else:
                continue
            found = candidate if found is None or candidate[0] > found[0] else found
        assert found is not None
        best.append(found)
    return best[-1][1]


@given(st.text("abz", min_size=1, max_size=12))
@settings(max_examples=200, deadline=None)
def test_unigram_best_path(text):
    assert ugm().tokenize(text) == [*plain_unigram("▁" + text), 1]


@pytest.mark.parametrize(
    ("text", "keys", "want"),
    [
        ("  a  b ", {"remove_extra_whitespaces": True}, "▁a▁b"),
        ("  a  b ", {}, "▁▁▁a▁▁b▁"),
        ("  a  b ", {"add_space_prefix": False}, "▁▁a▁▁b▁"),
        ("ﬁ\u3000ab\u0301日", {"remove_extra_whitespaces": True}, "▁fi▁b"),
    ],
)
def test_unigram_normalisation(text, keys, want):
    data = np.frombuffer(charsmap(MAP), np.uint8)
    model = ugm(precompiled_charsmap=data, **keys)._model
    assert model.normalise(text) == want


def test_unigram_user_defined_tokens_are_cut_out_first():
    assert ugm().tokenize("a<x>a", add_special=False) == [7, 10, 7]


@given(st.text("ﬁab\u0301\u3000日z", max_size=10))
@settings(max_examples=150, deadline=None)
def test_charsmap_finds_the_longest_key(text):
    found = CharsMap(charsmap(MAP)).longest_prefix(text.encode(), 0)
    keys = [key for key in MAP if text.startswith(key)]
    longest = max(keys, key=len, default=None)
    assert found == (None if longest is None else (len(longest.encode()), MAP[longest]))


@given(st.binary(max_size=64), st.text(max_size=5))
@settings(max_examples=300, deadline=None)
def test_broken_charsmap_is_an_error_not_an_over_read(data, text):
    sized = len(data).to_bytes(4, "little") + data
    for source in (data, sized):
        try:
            CharsMap(source).longest_prefix(text.encode(), 0)
        except FileFormatError as error:
            assert "precompiled_charsmap" in str(error)


# -- special tokens ----------------------------------------------------------------------------------------


def plain_vocab(special: dict[str, int], name: str = "", **keys) -> Vocab:
    tokens = [*byte_to_char(), *special]
    types = [1] * 256 + list(special.values())
    metadata = made("gpt2", tokens, **{"pre": "gpt-2", "merges": [], "token_type": types, **keys})
    return Vocab.from_metadata({**metadata, "general.name": name})


def test_longer_special_tokens_win():
    vocab = plain_vocab({"<a>": 3, "<a><b>": 3})
    end = vocab.token_id("<a><b>")
    assert vocab.tokenize("<a><b><a>", add_special=False, parse_special=True) == [end, 256]


def cut_one_by_one(text: str, tokens: list[str]) -> list[str]:
    """A text divided at one token after the other, the longest first."""
    fragments = [text]
    for token in sorted(tokens, key=lambda token: -len(token.encode())):
        parts = (re.split(f"({re.escape(token)})", part) if part not in tokens else [part] for part in fragments)
        fragments = [part for group in parts for part in group if part]
    return fragments


@given(
    st.lists(st.sampled_from(["<u", "<u1>", "<u12>", "<u3><u1>", ">", "1", "<|x|>", "<", "日", "ab", "a"]), max_size=30)
)
@settings(max_examples=200, deadline=None)
def test_many_special_tokens_of_one_beginning(parts):
    special = [*(f"<u{i}>" for i in range(40)), "<u3><u1>", "<u", "日", "<|x|>", "ab"]
    vocab = plain_vocab(dict.fromkeys(special, 3))
    ids = vocab.tokenize("".join(parts), add_special=False, parse_special=True)
    found = [vocab.token_text(index) for index in ids if index >= 256]
    assert found == [part for part in cut_one_by_one("".join(parts), special) if part in special]


def test_thousands_of_special_tokens_cost_little():
    vocab = plain_vocab(dict.fromkeys((f"<unused{i}>" for i in range(6000)), 3))
    text = "<ul><li>words</li></ul><unused17>\n" * 10_000
    start = time.process_time()
    assert vocab.tokenize(text, add_special=False, parse_special=True).count(vocab.token_id("<unused17>")) == 10_000
    assert time.process_time() - start < 0.7


def test_user_defined_tokens_are_always_parsed_and_control_tokens_on_request():
    vocab = plain_vocab({"<c>": 3, "<u>": 4, "<unk>": 2})
    assert 257 in vocab.tokenize("x<u>y")
    assert 256 not in vocab.tokenize("x<c>y")
    assert 258 not in vocab.tokenize("x<unk>y")
    assert 256 in vocab.tokenize("x<c>y", parse_special=True)
    assert vocab.token_to_piece(258) == b""
    assert vocab.token_to_piece(257) == b"<u>"


def test_roles_are_detected_by_text_unless_a_key_says_otherwise():
    texts = {"<|im_end|>": 1, "<|fim_prefix|>": 1, "<|fim_hole|>": 1, "<|repo_name|>": 1, "<|eom_id|>": 1}
    vocab = plain_vocab(texts)
    assert (vocab.eot, vocab.fim_pre, vocab.fim_rep, vocab.eom) == (256, 257, 259, 260)
    assert vocab.fim_suf is None
    assert vocab.token_type(257) == TokenType.CONTROL
    assert {256, 259, 260} <= vocab.eog
    assert 257 not in vocab.eog
    assert plain_vocab(texts, eot_token_id=5).eot == 5


def test_ids_outside_the_vocabulary_are_ignored(caplog):
    vocab = plain_vocab({}, bos_token_id=100_000, eos_token_id=7)
    assert (vocab.bos, vocab.eos) == (11, 7)
    assert "bos_token_id = 100000" in caplog.text


def test_deprecated_fim_keys():
    assert plain_vocab({}, prefix_token_id=1, suffix_token_id=2, middle_token_id=3).fim_suf == 2
    assert plain_vocab({}, prefix_token_id=1, fim_pre_token_id=4).fim_pre == 4


@pytest.mark.parametrize(
    ("texts", "removed", "kind"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], "<|end|>", TokenType.USER_DEFINED),
        (["<|end|>", "<|calls|>", "<|flush|>"], "<|end|>", TokenType.USER_DEFINED),
        (["</s>", "<|tool_response>"], "</s>", TokenType.NORMAL),
    ],
)
def test_end_of_generation_exceptions(texts, removed, kind):
    vocab = plain_vocab(dict.fromkeys(texts, 3))
    for text in texts:
        index = vocab.token_id(text)
        assert (index in vocab.eog) == (text != removed)
    assert vocab.token_type(vocab.token_id(removed)) == kind


def test_channel_markers_are_text():
    vocab = plain_vocab({"<|channel|>": 3, "<|end|>": 3})
    assert vocab.token_type(256) == TokenType.USER_DEFINED
    assert 257 in vocab.eog


def test_strip_attributes():
    phi = plain_vocab({"<|user|>": 3, "</s>": 3, "<s>": 3}, name="My Phi-3 mini")
    newline, x = phi.token_id("Ċ"), phi.token_id("x")
    assert phi.tokenize("<|user|>\n x", add_special=False, parse_special=True) == [256, x]
    assert phi.tokenize("<s>\nx", add_special=False, parse_special=True) == [258, newline, x]
    jina = plain_vocab({"<mask>": 3}, name="jina-v2-de")
    assert jina.tokenize("x \n<mask> x", add_special=False, parse_special=True)[:2] == [x, 256]


def test_clean_spaces():
    vocab = plain_vocab({})
    ids = vocab.tokenize("a , b ! it 's I 'm x ' y  .", add_special=False)
    assert vocab.detokenize(ids) == "a, b! it's I'm x'y ."
    kept = plain_vocab({}, pre="qwen2")
    assert kept.detokenize(kept.tokenize("a , b")) == "a , b"


def test_flags_from_keys():
    vocab = plain_vocab({}, add_bos_token=True, add_eos_token=True, bos_token_id=1, eos_token_id=2)
    ids = vocab.tokenize("x")
    assert ids == [1, vocab.token_id("x"), 2]
    assert vocab.detokenize(ids, remove_special=True) == "x"
