"""Reads tokenizer.model: the few fields of the sentencepiece model message that GGUF files carry."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ikpy.errors import FileFormatError

# Field numbers of ModelProto, SentencePiece, TrainerSpec and NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BPE = 3, 2
_SPACE_AS_SUFFIX = 24
_RULES, _CHARACTER_MAP, _DUMMY_PREFIX, _REMOVE_SPACES = 1, 2, 3, 4


@dataclass(frozen=True)
class SentencePieceModel:
    """Texts, scores and types (numbered as in GGUF files) by id; whether a space is put in front of a text; what else
    becomes of a text before it is cut, in words, and as far as files of Unigram vocabularies say it."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    add_space_prefix: bool
    is_bpe: bool
    changes: list[str]
    character_map: bytes = b""
    removes_spaces: bool = True


def read_model(path: Path) -> SentencePieceModel:
    """Parse a file; FileFormatError if it is none."""
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    try:
        for number, value in _fields(path.read_bytes()):
            if number == _PIECES and isinstance(value, bytes):
                piece = dict(_fields(value))
                texts.append(_text(piece, _TEXT))
                scores.append(struct.unpack("<f", piece.get(_SCORE, b"\0\0\0\0"))[0])  # type: ignore[arg-type]
                types.append(int(piece.get(_TYPE, 1)))
            elif number == _TRAINER and isinstance(value, bytes):
                trainer |= dict(_fields(value))
            elif number == _NORMALIZER and isinstance(value, bytes):
                normalizer |= dict(_fields(value))
        is_bpe = int(trainer.get(_MODEL_TYPE, 1)) == _BPE
        prefix = bool(int(normalizer.get(_DUMMY_PREFIX, 1)))
        changes = _changes(trainer, normalizer)
        table, removes = normalizer.get(_CHARACTER_MAP, b""), bool(int(normalizer.get(_REMOVE_SPACES, 1)))
        if isinstance(table, int):
            raise ValueError("the character map is a number")
    except (IndexError, ValueError, struct.error, TypeError) as error:
        raise FileFormatError(f"{path}: not a sentencepiece model: {error}") from None
    if not texts:
        raise FileFormatError(f"{path}: no tokens found; not a sentencepiece model")
    return SentencePieceModel(texts, scores, types, prefix, is_bpe, changes, table, removes)


def _changes(trainer: dict[int, int | bytes], normalizer: dict[int, int | bytes]) -> list[str]:
    """What a model does to texts that GGUF files of this kind of vocabulary cannot say."""
    found = []
    if normalizer.get(_CHARACTER_MAP):
        found.append(f"characters are normalised ({_text(normalizer, _RULES) or 'own rules'})")
    if normalizer.get(_REMOVE_SPACES, 1):
        found.append("spaces at the ends and doubled ones are removed")
    if trainer.get(_SPACE_AS_SUFFIX, 0):
        found.append("spaces belong to the word in front of them")
    return found


def _text(fields: Mapping[int, int | bytes], number: int) -> str:
    """A text field. ValueError for one that is a number: bytes() would make so many zeros of it."""
    value = fields.get(number, b"")
    if isinstance(value, int):
        raise ValueError(f"field {number} is a number, not a text")
    return value.decode()


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protobuf message: integers of varints, bytes of all other wire types."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError("cut off")
        yield tag >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("number too long")
