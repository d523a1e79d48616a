"""Vocabularies the tests read, and small ones they make up."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ikpy.gguf.reader import GGUFFile
from ikpy.vocab import Vocab
from tests.shared import DATA, ROOT, SHARED

ASSETS = ROOT / "ikpy" / "assets"
VOCABS = SHARED / "public" / "vocab"


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    """A file of tests/data/tokenizers."""
    return json.loads((DATA / "tokenizers" / name).read_text(encoding="utf-8"))


CASES = [bytes.fromhex(case["hex"]) for case in recorded("extra.json")["cases"]]


@functools.cache
def metadata_of(file: str) -> Mapping[str, Any]:
    """Metadata of a bundled or shared model file; skips the test when it is not there."""
    for folder in (ASSETS, VOCABS, SHARED / "models"):
        if (folder / file).exists():
            return GGUFFile.open(os.fspath(folder / file)).metadata
    pytest.skip(f"{file} is neither bundled nor in {SHARED}")


@functools.cache
def vocab_of(file: str, reference_lowercase: bool = False) -> Vocab:
    return Vocab.from_metadata(metadata_of(file), reference_lowercase=reference_lowercase)


def tiny() -> Vocab:
    """Vocabulary of the bundled model: 4096 byte-level BPE tokens."""
    return vocab_of("tiny-mla-moe-f16.gguf")


def made(model: str, tokens: list[str], **keys: Any) -> dict[str, Any]:
    """Metadata of a made-up vocabulary; keyword arguments are keys below ``tokenizer.ggml``."""
    metadata: dict[str, Any] = {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": tokens}
    for key, value in keys.items():
        metadata[f"tokenizer.ggml.{key}"] = np.asarray(value) if key in ("scores", "token_type") else value
    return metadata


def first_difference(vocab: Vocab, text: bytes, got: list[int], want: list[int]) -> str:
    """Message naming the first token that differs."""
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))

    def around(ids: list[int]) -> list[str]:
        return [vocab.token_text(index) for index in ids[max(0, at - 2) : at + 3]]

    return f"{text!r}: token {at}: got …{around(got)}…, want …{around(want)}…"


def assert_ids(vocab: Vocab, text: bytes, got: list[int], want: list[int]) -> None:
    assert got == want, first_difference(vocab, text, got, want)
