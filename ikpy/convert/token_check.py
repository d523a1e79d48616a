"""Holds the vocabulary of a planned file to tokenizer.json: the tokens that both give to probe texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ikpy.convert.pre_tokenizer import ASCII_PROBES, OTHER_PROBES
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.vocab import Vocab
from ikpy.vocab.table import TokenType

_MORE_PROBES = ("한글 \u1112\u1161\u11ab ﬁ ① \u212b", "  tab\tand\r\n\x07 bell", "مرحبا สวัสดี 👨\u200d👩\u200d👧")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")
_MAX_ADDED = 1000
_SHOWN, _SHOWN_TEXT = 4, 60


@dataclass
class _Checker:
    """The tokenizer of a checkpoint beside the one of the file."""

    path: Path
    tokenizer: Tokenizer
    data: Mapping[str, Any]
    vocab: Vocab

    def expected(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the library panics, with no Exception, where files contradict themselves
            raise FileFormatError(f"{self.path}: it cannot encode a text: {error}") from None

    def given(self, text: str) -> list[int]:
        return self.vocab.tokenize(text, add_special=False, parse_special=True)

    def differing(self, texts: Iterable[str]) -> list[str]:
        return [text for text in texts if self.expected(text) != self.given(text)]

    def describe(self, text: str) -> str:
        """A text with the first tokens that differ, and what normalises it."""
        expected, given = self.expected(text), self.given(text)
        pairs = itertools.zip_longest(expected, given)
        first = next(i for i, (a, b) in enumerate(pairs) if a != b)
        there, here = self._shown(expected[first:]), self._shown(given[first:])
        kinds = ", ".join(_normalizers(self.data.get("normalizer")))
        more = f" (normalizer {kinds})" if kinds else ""
        return f"{text[:_SHOWN_TEXT]!r} has {there} there, {here} in the file{more}"

    def _shown(self, ids: list[int]) -> str:
        return repr([self.vocab.token_text(index) for index in ids[:_SHOWN] if index < self.vocab.n_tokens])


def _normalizers(step: Mapping[str, Any] | None) -> list[str]:
    """Kinds of the steps of a normalizer."""
    if not step:
        return []
    if "normalizers" in step:
        return [kind for part in step["normalizers"] for kind in _normalizers(part)]
    return [str(step.get("type"))]


def check_tokens(
    tokenizer: Tokenizer, data: Mapping[str, Any], keys: Mapping[str, Any], path: Path, *, is_strict: bool
) -> list[str]:
    """Notes about texts to which a file with these keys gives other tokens than tokenizer.json.

    data: content of that file. UnsupportedError where is_strict is set and plain ASCII text is affected;
    FileFormatError for vocabularies that would not load.
    """
    try:
        vocab = Vocab.from_metadata(keys)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from None
    checker = _Checker(path, tokenizer, data, vocab)
    plain = checker.differing(ASCII_PROBES)
    if plain and is_strict:
        raise UnsupportedError(
            f"{path}: no GGUF tokenizer gives the tokens of this one: {checker.describe(plain[0])}; "
            "--pre NAME converts it all the same"
        )
    probes = (*ASCII_PROBES, *OTHER_PROBES, *_MORE_PROBES, *_special_probe(vocab))
    differing = checker.differing(probes)
    notes = _note_added(checker)
    if differing:
        notes.append(
            f"{len(differing)} of {len(probes)} probe texts get other tokens than from {path.name}: "
            f"{checker.describe(differing[0])}"
        )
    return notes


def _special_probe(vocab: Vocab) -> list[str]:
    """Text behind a control token: a space may be put in front of it."""
    control = next((i for i in range(vocab.n_tokens) if vocab.token_type(i) == TokenType.CONTROL), None)
    return [] if control is None else [f"a{vocab.token_text(control)}b"]


def _note_added(checker: _Checker) -> list[str]:
    """A note on added tokens that take spaces with them or are found in some places only."""
    added = [token for token in checker.data.get("added_tokens") or [] if any(token.get(flag) for flag in _FLAGS)]
    found = []
    for token in added[:_MAX_ADDED]:
        text = str(token["content"])
        if int(token["id"]) < checker.vocab.n_tokens and checker.differing((f"a {text} b", f"a{text}b")):
            found.append((text, next(flag for flag in _FLAGS if token.get(flag))))
    if not found:
        return []
    text, flag = found[0]
    return [
        f"{len(found)} added tokens are found otherwise in a text, which no key can say; the first is {text!r} ({flag})"
    ]
