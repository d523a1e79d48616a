"""Vocab: tokenizer, special tokens and detokenizer built from GGUF metadata."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.vocab import keys
from ikpy.vocab.bpe import ByteLevelBpe, EscapedBpe
from ikpy.vocab.plamo import PlamoModel
from ikpy.vocab.pretokenizers import PreTokenizer, pre_tokenizer
from ikpy.vocab.rwkv import RwkvModel, unescaped
from ikpy.vocab.special import (
    SpecialSplitter,
    detect_roles,
    end_of_generation,
    read_role_ids,
    strip_attributes,
)
from ikpy.vocab.spm import SpmModel
from ikpy.vocab.stream import StreamDecoder
from ikpy.vocab.table import TokenTable, TokenType
from ikpy.vocab.text import SPACE_SYMBOL, char_to_byte, to_bytes, to_internal
from ikpy.vocab.ugm import UgmModel
from ikpy.vocab.wpm import WpmModel

_log = logging.getLogger(__name__)

_KINDS = {
    "llama": "spm",
    "gpt2": "bpe",
    "gemma4": "bpe",
    "bert": "wpm",
    "t5": "ugm",
    "plamo2": "plamo",
    "rwkv": "rwkv",
    "no_vocab": "none",
    "none": "none",
}

_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "spm": {"bos": 1, "eos": 2, "unk": 0},
    "bpe": {"bos": 11, "eos": 11},
    "wpm": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "ugm": {"eos": 1, "unk": 2, "pad": 0},
    "plamo": {"bos": 1, "eos": 2, "unk": 0, "pad": 3},
    "rwkv": {},
    "none": {},
}

# add_bos, add_eos, add_space_prefix, clean_spaces
_DEFAULT_FLAGS: dict[str, tuple[bool, bool, bool, bool]] = {
    "spm": (True, False, True, False),
    "bpe": (False, False, False, True),
    "wpm": (True, False, False, True),
    "ugm": (False, True, False, False),
    "plamo": (False, False, False, False),
    "rwkv": (False, False, False, False),
    "none": (False, False, False, False),
}


class _FragmentModel(Protocol):
    def encode(self, fragment: str) -> list[int]: ...


class Vocab:
    """Tokenizer of one model.

    Attributes: ``n_tokens``; ``kind`` ("spm", "bpe", "wpm", "ugm", "plamo", "rwkv" or "none"); ids or None of
    ``bos``, ``eos``, ``eot``, ``eom``, ``unk``, ``sep``, ``pad``, ``mask``, ``nl``, ``fim_pre``, ``fim_suf``,
    ``fim_mid``, ``fim_pad``, ``fim_rep``, ``fim_sep``; flags ``add_bos``, ``add_eos``, ``add_sep``,
    ``add_space_prefix``, ``clean_spaces``; ``eog``, the ids that end a generation.
    """

    bos: int | None
    eos: int | None
    eot: int | None
    eom: int | None
    unk: int | None
    sep: int | None
    pad: int | None
    mask: int | None
    fim_pre: int | None
    fim_suf: int | None
    fim_mid: int | None
    fim_pad: int | None
    fim_rep: int | None
    fim_sep: int | None

    def __init__(self, metadata: Mapping[str, Any], *, reference_lowercase: bool = False):
        self.kind, pre = _family(metadata)
        table = TokenTable.empty() if self.kind == "none" else TokenTable.from_metadata(metadata)
        self._table = table
        self.n_tokens = len(table)
        self._set_flags(metadata, pre)
        defaults = dict(_DEFAULT_IDS[self.kind])
        if pre is not None and not pre.has_default_bos:
            defaults.pop("bos")
            if pre.escape_spaces:
                defaults.pop("eos")
        roles = read_role_ids(metadata, table, defaults)
        detect_roles(metadata, table, roles)
        self.eog = end_of_generation(table, roles)
        for role, index in roles.items():
            setattr(self, role, index)
        self._escaped = self.kind != "bpe" or (pre is not None and pre.escape_spaces)
        self._model = self._build_model(metadata, pre, reference_lowercase)
        self._splitter = self._build_splitter(metadata)
        self._pieces: dict[int, bytes] = {}
        self._special_pieces: dict[int, bytes] = {}
        self.nl = self._newline_token()

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], *, reference_lowercase: bool = False) -> Vocab:
        """Vocabulary from GGUF keys ``tokenizer.ggml.*`` and ``general.name``.

        Arrays of strings are sequences of str, numeric arrays numpy arrays. ``reference_lowercase`` is
        for comparisons with the reference, whose lower-casing finds 30 of its 1433 code points: WordPiece
        does not lower-case ASCII then, and treats marks and Hangul as the reference does; Llama 3, Qwen 2 and
        Kimi K2 splitting takes no contractions in capitals.
        Raises FileFormatError for missing, inconsistent or wrongly typed keys, UnsupportedError for unknown tokenizers.
        """
        return cls(metadata, reference_lowercase=reference_lowercase)

    def _set_flags(self, metadata: Mapping[str, Any], pre: PreTokenizer | None) -> None:
        add_bos, add_eos, add_space_prefix, clean_spaces = _DEFAULT_FLAGS[self.kind]
        add_sep = self.kind == "ugm"  # XLM-RoBERTa: two texts have two separators between
        if pre is not None:
            add_bos, add_sep, clean_spaces = pre.add_bos, pre.add_sep, pre.clean_spaces

        def flag(name: str, default: bool) -> bool:
            return keys.flag(metadata, f"tokenizer.ggml.{name}", default)

        self.add_bos = True if pre is not None and pre.escape_spaces else flag("add_bos_token", add_bos)
        self.add_eos = flag("add_eos_token", add_eos)
        if self.kind == "rwkv":  # texts have no mark at either end, whatever converters wrote
            self.add_bos = self.add_eos = False
        self.add_sep = flag("add_sep_token", add_sep)
        self.add_space_prefix = flag("add_space_prefix", add_space_prefix)
        self.clean_spaces = clean_spaces

    def _build_model(
        self, metadata: Mapping[str, Any], pre: PreTokenizer | None, reference_lowercase: bool
    ) -> _FragmentModel | None:
        if self.kind == "spm":
            return SpmModel(self._table)
        if self.kind == "wpm":
            return WpmModel(self._table, self.unk, reference_words=reference_lowercase)
        if self.kind == "ugm":
            return UgmModel(self._table, metadata, self.unk, self.add_space_prefix)
        if self.kind == "plamo":
            return PlamoModel(self._table)
        if self.kind == "rwkv":
            return RwkvModel(self._table)
        if pre is None:
            return None
        merges = keys.texts(metadata, "tokenizer.ggml.merges")
        if merges is None and pre.needs_merges:
            raise FileFormatError("cannot find tokenizer merges: key tokenizer.ggml.merges is missing")
        merges = merges or []
        if pre.escape_spaces:
            return EscapedBpe(self._table, merges, pre)
        return ByteLevelBpe(self._table, merges, pre, reference_lowercase)

    def _build_splitter(self, metadata: Mapping[str, Any]) -> SpecialSplitter:
        kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        special = [index for index, kind in enumerate(self._table.types) if kind in kinds]
        left, right = strip_attributes(metadata, self._table, special)
        return SpecialSplitter(self._table, left, right)

    def _newline_token(self) -> int | None:
        if isinstance(self._model, SpmModel):
            return self._model.byte_token(0x0A)
        ids = self._model.encode("\n") if self._model else []
        return ids[0] if ids else self.pad

    # -- token properties -------------------------------------------------------------------------------

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.n_tokens:
            raise UsageError(f"token id {index} is outside the vocabulary (0 to {self.n_tokens - 1})")
        return index

    def token_text(self, index: int) -> str:
        """Text of a token as the file stores it."""
        return self._table.texts[self._checked(index)]

    def special_text(self, index: int | None) -> str:
        """Text of a special token; "" when the vocabulary has none."""
        return "" if index is None else self.token_text(index)

    def token_type(self, index: int) -> TokenType:
        """Type of a token, adjusted for tokens that end a generation (`ikpy.vocab.special.end_of_generation`)."""
        return TokenType(self._table.types[self._checked(index)])

    def token_id(self, text: str) -> int | None:
        """Id of the token with exactly this stored text."""
        return self._table.ids.get(text)

    # -- text to ids ------------------------------------------------------------------------------------

    def tokenize(self, text: str | bytes, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of ``text`` (bytes need not be valid UTF-8).

        ``add_special``: add BOS/EOS (BERT: CLS/SEP) as the vocabulary asks. ``parse_special``: texts of
        control tokens become those tokens; user-defined tokens always do.
        """
        if self._model is None:
            raise UnsupportedError("this model has no vocabulary; give token ids instead of text")
        out = self._prefix() if add_special else []
        after_special = True
        for fragment in self._splitter.split(to_internal(text), parse_special):
            if isinstance(fragment, int):
                out.append(fragment)
                after_special = True
                continue
            spaced = self.kind == "spm" and self.add_space_prefix and after_special
            out += self._model.encode(" " + fragment if spaced else fragment)
            after_special = False
        if add_special:
            out += self._suffix()
        return out

    def _prefix(self) -> list[int]:
        wanted = self.add_bos or self.kind == "wpm"
        return [self.bos] if wanted and self.bos is not None else []

    def _suffix(self) -> list[int]:
        if self.kind == "wpm":
            return [] if self.sep is None else [self.sep]
        return [self.eos] if self.add_eos and self.eos is not None else []

    # -- ids to text ------------------------------------------------------------------------------------

    def token_to_piece(self, index: int, special: bool = False) -> bytes:
        """Bytes a token stands for; control and unknown tokens give nothing unless ``special``."""
        pieces = self._special_pieces if special else self._pieces
        piece = pieces.get(index)
        if piece is None:
            kind = self._table.types[self._checked(index)]
            hidden = not special and kind in (TokenType.CONTROL, TokenType.UNKNOWN)
            piece = pieces[index] = b"" if hidden else self._piece(index, kind)
        return piece

    def _piece(self, index: int, kind: int) -> bytes:
        text = self._table.texts[index]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            return to_bytes(text)
        if kind == TokenType.BYTE:
            return _byte_piece(text)
        if kind != TokenType.NORMAL:
            return b""
        if self.kind == "plamo":
            return to_bytes(text)
        if self.kind == "rwkv":
            return unescaped(text)
        if self._escaped:
            return to_bytes(text.replace(SPACE_SYMBOL, " "))
        return _unmap(text)

    def detokenize_bytes(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = True) -> bytes:
        """Bytes of a sequence of ids. ``remove_special``: leave out the BOS/EOS that ``tokenize`` adds;
        ``unparse_special``: render control tokens as their text."""
        sequence = list(ids)
        strip_space = self.add_space_prefix
        if remove_special and self.add_bos and sequence[:1] == [self.bos]:
            del sequence[0]
            strip_space = False
        if remove_special and self.add_eos and sequence[-1:] == [self.eos]:
            del sequence[-1]
        pieces = [self.token_to_piece(index, unparse_special) for index in sequence]
        if strip_space and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        text = b"".join(pieces)
        return _clean_spaces(text) if self.clean_spaces else text

    def detokenize(self, ids: Iterable[int], remove_special: bool = False, unparse_special: bool = True) -> str:
        """Text of a sequence of ids; bytes that are not valid UTF-8 become U+FFFD."""
        return self.detokenize_bytes(ids, remove_special, unparse_special).decode("utf-8", "replace")

    def stream_decoder(self, special: bool = False) -> StreamDecoder:
        """Decoder for ids that arrive one by one; it never gives out half a character."""
        return StreamDecoder(lambda index: self.token_to_piece(index, special))


def _family(metadata: Mapping[str, Any]) -> tuple[str, PreTokenizer | None]:
    """Kind of tokenizer and its pre-tokenizer (BPE only)."""
    model = keys.text(metadata, "tokenizer.ggml.model")
    if not model:
        raise FileFormatError("cannot find tokenizer model: key tokenizer.ggml.model is missing")
    if model not in _KINDS:
        raise UnsupportedError(
            f"unknown tokenizer: '{model}' (key tokenizer.ggml.model); known: {', '.join(sorted(_KINDS))}"
        )
    kind = _KINDS[model]
    if kind != "bpe":
        return kind, None
    name = "gemma4" if model == "gemma4" else keys.text(metadata, "tokenizer.ggml.pre")
    if not name:
        _log.warning(
            "key tokenizer.ggml.pre is missing: the 'default' pre-tokenizer is used and text may be split "
            "wrongly; convert the model again to get good results"
        )
        name = "default"
    return kind, pre_tokenizer(name)


def _byte_piece(text: str) -> bytes:
    match = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text)
    return bytes([int(match[1], 16)]) if match else to_bytes(text)


def _unmap(text: str) -> bytes:
    """Bytes of a token written with the GPT-2 byte map; foreign characters are named."""
    table = char_to_byte()
    try:
        return bytes([table[char] for char in text])
    except KeyError:
        return b"".join(
            bytes([table[char]]) if char in table else b"[UNK_BYTE_0x" + to_bytes(char).hex().encode() + b"]"
            for char in text
        )


def _clean_spaces(text: bytes) -> bytes:
    """Undo spaces a word-based tokenizer put before punctuation and around apostrophes (three passes)."""
    text = re.sub(rb" ([?!.,])", rb"\1", text)
    text = re.sub(rb" ' ", b"'", text)
    return re.sub(rb" ('(?:s|m|re|ve))", rb"\1", text)
