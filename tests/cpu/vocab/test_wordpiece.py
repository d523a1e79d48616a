"""WordPiece vocabularies: words as Hugging Face's BertTokenizer makes them, or as the reference does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from ikpy.vocab import Vocab
from tests.cpu.vocab.vocab_data import made

WPM_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁hello", "▁wor", "ld", "▁!", "▁e", "▁中", "▁文", "▁i"]
WPM = made(
    "bert",
    WPM_TOKENS,
    token_type=[3, 2, 3, 3] + [1] * 8,
    bos_token_id=2,
    unknown_token_id=1,
    seperator_token_id=3,
)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("hello world!", [4, 5, 6, 7]),
        ("HELLO\tWorld", [4, 5, 6]),
        ("É\x00é", [1]),
        ("é e", [8, 8]),
        ("中文", [9, 10]),
        ("hello x", [4, 1]),
        ("İ", [11]),
        ("", []),
    ],
)
def test_wordpiece(text, want):
    assert Vocab.from_metadata(WPM).tokenize(text) == [2, *want, 3]


def test_wordpiece_lower_casing_of_the_reference():
    vocab = Vocab.from_metadata(WPM, reference_lowercase=True)
    assert vocab.tokenize("hello HELLO", add_special=False) == [4, 1]


# Letters, marks alone and in one code point, Hangul, signs, white space of all kinds, what is dropped.
WPM_CHARACTERS = (
    "abzABZßİΣσéÉçñ\u0301\u0327한글한中文のガ\u3099नि्ไท!.$—。、×©😀\ufe0f\u200d\u2581 \t\n\x0b\x0c\x85\u3000\xad\x00ﬁ1²"
)


def published_wordpiece(lowercase: bool = True) -> tuple[Tokenizer, Vocab]:
    """A vocabulary with words and continuations of single characters, and some that are longer, in both forms."""
    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    normalised = "".join(sorted(set(normalizer.normalize_str(WPM_CHARACTERS)) - set(" zσ文ᄀ▁")))
    texts = ["[UNK]", *normalised, "ab", "한", *(f"##{char}" for char in normalised), "##ba", "##中", "##aab"]
    texts = list(dict.fromkeys(texts))
    peer = Tokenizer(models.WordPiece({text: i for i, text in enumerate(texts)}, unk_token="[UNK]"))
    peer.normalizer, peer.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    tokens = [text[2:] if text.startswith("##") else f"▁{text}" for text in texts[1:]]
    keys = {"token_type": [2] + [1] * len(tokens), "unknown_token_id": 0}
    return peer, Vocab.from_metadata(made("bert", ["[UNK]", *tokens], **keys))


WPM_PEER, WPM_OURS = published_wordpiece()
CASED_PEER, CASED_OURS = published_wordpiece(lowercase=False)


@given(st.text(WPM_CHARACTERS, max_size=24) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
@settings(max_examples=500, deadline=None)
def test_wordpiece_is_that_of_hugging_face(text):
    assert WPM_OURS.tokenize(text, add_special=False) == WPM_PEER.encode(text).ids


@given(st.text(WPM_CHARACTERS, max_size=24) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
@settings(max_examples=500, deadline=None)
def test_vocabularies_with_capitals_keep_case_and_accents(text):
    assert CASED_OURS.tokenize(text, add_special=False) == CASED_PEER.encode(text).ids


@pytest.mark.parametrize("text", ["한국어", "cafe\u0301", "ab" * 50, "ab" * 51, "a\u2581b", "नमस्ते", "a\x0bb", "ไทย"])
def test_wordpiece_of_words_that_the_reference_takes_apart_otherwise(text):
    assert WPM_OURS.tokenize(text, add_special=False) == WPM_PEER.encode(text).ids
