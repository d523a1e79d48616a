"""Vocabulary keys `tokenizer.*` from the tokenizer files of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from ikpy.convert import tiktoken, unigram
from ikpy.convert.checkpoint import Checkpoint, check_fetched
from ikpy.convert.config import TEXT_PARTS
from ikpy.convert.pre_tokenizer import find_pre_tokenizer
from ikpy.convert.scored_tokens import read_scored_tokens
from ikpy.convert.sentencepiece import read_model
from ikpy.convert.token_check import check_tokens
from ikpy.convert.world_tokens import WORLD, world_keys
from ikpy.errors import FileFormatError, UnsupportedError
from ikpy.vocab.pretokenizers import pre_tokenizer
from ikpy.vocab.table import TokenType

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_EOM = "<|eom_id|>"
GEMMA4 = "gemma4"
"""Model name of vocabularies with merges of text whose spaces are escaped."""
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|call|>", "<|user|>", "<EOT>", "[EOT]")
# Files of ranks, and the pre-tokenizers of model types whose Python code is known.
_RANKS = ("tiktoken.model", "qwen.tiktoken", "tokenizer.model")
_PRE_OF_RANKS = {"chatglm": "chatglm-bpe", "qwen": "qwen2"} | dict.fromkeys(
    ("kimi_k2", "kimi_k3", "kimi_linear"), "kimi-k2"
)
_QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
"""Behind the ranks of Qwen 1, whose files do not name them."""
# Roles in tokenizer_config.json -> GGUF keys ("seperator" is how the format spells it).
_ROLE_KEYS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
    "cls": "cls_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
}


@dataclass
class TokenTable:
    """Tokens by id; scores only for sentencepiece vocabularies."""

    texts: dict[int, str] = field(default_factory=dict)
    types: dict[int, TokenType] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)

    def set(self, index: int, text: str, kind: TokenType, score: float | None = None) -> None:
        """Store a token, over an earlier one with the same id."""
        self.texts[index], self.types[index] = text, kind
        if score is not None:
            self.scores[index] = score

    def id_of(self, text: str | None) -> int | None:
        """Id of a text."""
        return next((index for index, known in self.texts.items() if known == text), None)


def tokenizer_keys(
    checkpoint: Checkpoint, n_vocab: int, notes: list[str], *, name: str = "", pre: str = "", usual_pre: str = ""
) -> dict[str, Any]:
    """All `tokenizer.ggml.*` keys, for a model of n_vocab tokens. name: `general.name` of the file; pre: name of the
    pre-tokenizer, "" to find it; usual_pre: see find_pre_tokenizer.

    Appends to notes what was left out or differs. UnsupportedError for tokenizers of other kinds.
    """
    if (world := checkpoint.folder / WORLD).is_file():
        return world_keys(world, n_vocab)
    return _Reader(checkpoint, n_vocab, notes, name, pre, usual_pre).keys()


class _Reader:
    def __init__(
        self, checkpoint: Checkpoint, n_vocab: int, notes: list[str], name: str, pre: str, usual_pre: str
    ) -> None:
        self.checkpoint, self.n_vocab, self.notes = checkpoint, n_vocab, notes
        self.name, self.pre, self.usual_pre = name, pre, usual_pre
        self.data: dict[str, Any] = checkpoint.json("tokenizer.json")
        self.settings: dict[str, Any] = checkpoint.json("tokenizer_config.json")
        self.path = checkpoint.folder / "tokenizer.json"
        self.tokenizer: Tokenizer | None = None
        if self.data:
            try:
                unigram.check_maps(_steps(self.data.get("normalizer"), "Precompiled"))
                self.tokenizer = _read_tokenizer(self.path)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # the library panics, with no Exception, where files contradict themselves
                raise FileFormatError(f"{self.path}: {error}") from None
        self.table = TokenTable()
        self.further_roles: tuple[str, ...] = ()

    def keys(self) -> dict[str, Any]:
        model = self.data.get("model", {})
        sentencepiece = self.checkpoint.folder / "tokenizer.model"
        is_escaped = model.get("type") == "BPE" and bool(model.get("byte_fallback"))
        scored, pieces = (self.checkpoint.folder / name for name in ("tokenizer.jsonl", "spiece.model"))
        if not self.data and scored.is_file():
            keys = self._scored_lines(scored)
        elif _uses(self.data.get("pre_tokenizer"), "ByteLevel"):
            keys = self._byte_level(model)
        elif is_escaped and self.usual_pre == GEMMA4:
            keys = self._merges_of_lines(model)
        elif model.get("type") == "Unigram":
            keys = self._unigram(model)
        elif not self.data and pieces.is_file():
            keys = self._unigram_pieces(pieces)
        elif sentencepiece.is_file() and not self._is_glm4(sentencepiece):
            keys = self._sentencepiece(sentencepiece)
        elif ranks := [path for name in _RANKS if (path := self.checkpoint.folder / name).is_file()]:
            keys = self._tiktoken(ranks[0])
        elif is_escaped:
            keys = self._escaped_bpe(model)
        elif model.get("type") == "WordPiece":
            keys = self._word_pieces(model)
        else:
            kind = model.get("type") or "none"
            raise UnsupportedError(
                f"{self.checkpoint.folder}: no tokenizer that can be converted (tokenizer.json: {kind}); "
                "byte-level BPE, WordPiece, Unigram, sentencepiece BPE and tiktoken.model are supported"
            )
        keys |= self._arrays(keys) | self._special_ids() | self._flags()
        n_types = self.checkpoint.config.get("type_vocab_size")
        if isinstance(n_types, int) and n_types > 0:
            keys["tokenizer.ggml.token_type_count"] = n_types
        if self.tokenizer is not None:
            is_strict = keys["tokenizer.ggml.model"] in ("gpt2", unigram.UNIGRAM) and not self.pre
            named = {"general.name": self.name, **keys}
            self.notes += check_tokens(self.tokenizer, self.data, named, self.path, is_strict=is_strict)
        return keys

    # vocabularies

    def _byte_level(self, model: dict[str, Any]) -> dict[str, Any]:
        if model.get("type") != "BPE":
            raise UnsupportedError(f"{self.path}: byte-level tokenizer of type {model.get('type')}, not BPE")
        assert self.tokenizer is not None
        for text, index in model["vocab"].items():
            self.table.set(index, text, TokenType.NORMAL)
        self._take_added()
        if self.pre:
            pre_tokenizer(self.pre)
        pre = self.pre or find_pre_tokenizer(
            self.tokenizer,
            usual=self.usual_pre,
            ignore_merges=bool(model.get("ignore_merges")),
            has_bos=bool(self.settings.get("bos_token")),
            clean_spaces=self.settings.get("clean_up_tokenization_spaces"),
            where=str(self.path),
        )
        return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": _merge_lines(model)}

    def _scored_lines(self, path: Path) -> dict[str, Any]:
        """Tokens with scores, of no tokenizer.json (PLaMo 2 and 3)."""
        check_fetched(path)
        for index, token in enumerate(read_scored_tokens(path)):
            self.table.set(index, *token)
        return {"tokenizer.ggml.model": "plamo2", "tokenizer.ggml.add_space_prefix": False}

    def _word_pieces(self, model: dict[str, Any]) -> dict[str, Any]:
        """Pieces within words as they are, those that begin words behind a mark (both the other way round there)."""
        prefix = str(model.get("continuing_subword_prefix", "##"))
        for text, index in model["vocab"].items():
            self.table.set(
                index, text.removeprefix(prefix) if text.startswith(prefix) else f"▁{text}", TokenType.NORMAL
            )
        self._take_added()
        unknown = str(model.get("unk_token", "[UNK]"))
        if unknown in model["vocab"]:
            self.table.set(model["vocab"][unknown], unknown, TokenType.UNKNOWN)
        self.further_roles = ("cls",)
        return {"tokenizer.ggml.model": "bert"}

    def _tiktoken(self, path: Path) -> dict[str, Any]:
        """Ranks alone: how text is split stands in the model's Python code, which is known for some."""
        model_type = str(self.checkpoint.config.get("model_type"))
        pre = self.pre or _PRE_OF_RANKS.get(model_type, "")
        if not pre:
            raise UnsupportedError(f"{path}: the pre-tokenizer of this tokenizer is not known; name it with --pre")
        pre_tokenizer(pre)
        check_fetched(path)
        ranks = tiktoken.read_ranks(path)
        for token, index in ranks.items():
            self.table.set(index, tiktoken.mapped(token), TokenType.NORMAL)
        for index, text in enumerate(_QWEN_SPECIALS if model_type == "qwen" else (), len(ranks)):
            self.table.set(index, text, TokenType.CONTROL)
        self._take_added()
        merges = tiktoken.merges(ranks)
        return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}

    def _is_glm4(self, path: Path) -> bool:
        """Whether tokenizer.model holds ranks as tiktoken.model does. UnsupportedError for ChatGLM 2 and 3."""
        if self.checkpoint.config.get("model_type") != "chatglm":
            return False
        check_fetched(path)
        if not tiktoken.is_ranks(path):
            raise UnsupportedError(f"{path}: the special tokens of ChatGLM 2 and 3 stand in Python code; not supported")
        return True

    def _sentencepiece(self, path: Path) -> dict[str, Any]:
        check_fetched(path)
        source = read_model(path)
        if not source.is_bpe:
            raise UnsupportedError(f"{path}: a Unigram model; of sentencepiece models BPE is supported")
        for index, text in enumerate(source.texts):
            self.table.set(index, text, TokenType(source.types[index]), source.scores[index])
        self._take_added()
        if source.changes and self.tokenizer is None:
            self.notes.append(f"{path.name} changes texts as no key can say: {', '.join(source.changes)}")
        return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_space_prefix": source.add_space_prefix}

    def _unigram(self, model: dict[str, Any]) -> dict[str, Any]:
        """A vocabulary with scores, texts normalised by a table of characters (XLM-RoBERTa)."""
        self._set_all(unigram.tokens_of_json(model))
        return unigram.keys_of_json(_steps(self.data.get("normalizer"), "Precompiled"))

    def _unigram_pieces(self, path: Path) -> dict[str, Any]:
        """The same from a sentencepiece model alone (T5)."""
        is_t5 = self.checkpoint.config.get("model_type") == "t5"
        tokens, keys = unigram.read_pieces(path, n_most=self.n_vocab, gaps=is_t5)
        self._set_all(tokens)
        return keys

    def _set_all(self, tokens: Iterable[unigram.Token]) -> None:
        for token in tokens:
            self.table.set(*token)
        self._take_added()

    def _merges_of_lines(self, model: dict[str, Any]) -> dict[str, Any]:
        """Merges of text whose spaces are escaped, within lines and within runs of newlines."""
        self._take_escaped(model)
        return {"tokenizer.ggml.model": GEMMA4, "tokenizer.ggml.merges": _merge_lines(model)}

    def _take_escaped(self, model: dict[str, Any], scores: Mapping[str, float] | None = None) -> None:
        """Tokens of a vocabulary with byte tokens, and the added ones."""
        for text, index in model["vocab"].items():
            kind = TokenType.BYTE if _BYTE.fullmatch(text) else TokenType.NORMAL
            if text == model.get("unk_token"):
                kind = TokenType.UNKNOWN
            self.table.set(index, text, kind, None if scores is None else scores[text])
        self._take_added()

    def _escaped_bpe(self, model: dict[str, Any]) -> dict[str, Any]:
        """A sentencepiece vocabulary given as merges: the score of a token is minus the rank of its first merge."""
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(model["merges"]):
            pair = merge.split(" ") if isinstance(merge, str) else merge
            ranks.setdefault("".join(pair), rank)
        self._take_escaped(model, {text: -float(ranks.get(text, len(ranks))) for text in model["vocab"]})
        first = self._encoded(add_special_tokens=False).tokens[:1]
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.add_space_prefix": bool(first) and first[0].startswith("▁"),
        }

    def _take_added(self) -> None:
        """Added tokens: special ones are control tokens, others user-defined; the unknown token stays what it is."""
        added = self.data.get("added_tokens") or [
            {"id": int(index), **token} for index, token in self.settings.get("added_tokens_decoder", {}).items()
        ]
        if not added:
            names = self.checkpoint.json("added_tokens.json")
            added = [{"id": index, "content": text} for text, index in names.items()]
        for token in added:
            index, text = int(token["id"]), str(token["content"])
            kind = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
            if self.table.types.get(index) == TokenType.UNKNOWN and self.table.texts[index] == text:
                continue
            self.table.set(index, text, kind, self.table.scores.get(index, 0.0) if self.table.scores else None)

    def _arrays(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Tokens, types and scores for every row of the embedding; unused rows get a text of their own."""
        beyond = [index for index in self.table.texts if index >= self.n_vocab]
        if beyond:
            text = self.table.texts[min(beyond)]
            self.notes.append(f"{len(beyond)} tokens beyond the {self.n_vocab} of the model are left out ({text})")
            for index in beyond:
                del self.table.texts[index], self.table.types[index]
        ids = range(self.n_vocab)
        out: dict[str, Any] = {
            "tokenizer.ggml.tokens": [self.table.texts.get(index, f"[PAD{index}]") for index in ids],
            "tokenizer.ggml.token_type": np.array(
                [self.table.types.get(index, TokenType.UNUSED) for index in ids], np.int32
            ),
        }
        if keys["tokenizer.ggml.model"] in ("llama", "plamo2", unigram.UNIGRAM):
            out["tokenizer.ggml.scores"] = np.array([self.table.scores.get(index, 0.0) for index in ids], np.float32)
        return out

    def _encoded(self, *, add_special_tokens: bool) -> Encoding:
        """The text "a" as tokenizer.json encodes it."""
        assert self.tokenizer is not None
        try:
            return self.tokenizer.encode("a", add_special_tokens=add_special_tokens)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the library panics, with no Exception, where files contradict themselves
            raise FileFormatError(f"{self.path}: it cannot encode a text: {error}") from None

    # special tokens, flags, templates

    def _special_ids(self) -> dict[str, Any]:
        """Ids by role: texts of tokenizer_config.json, else ids of the configuration; ends of turns from
        generation_config.json."""
        generation = self.checkpoint.json("generation_config.json")
        inner: dict[str, Any] = next(filter(None, map(self.checkpoint.config.get, TEXT_PARTS)), {})
        config = {**self.checkpoint.config, **inner}
        roles: dict[str, int] = {}
        for role in ("bos", "eos", "unk", "sep", "pad", "mask", *self.further_roles):
            token = self.settings.get(f"{role}_token")
            index = self.table.id_of(token.get("content") if isinstance(token, dict) else token)
            given = config.get(f"{role}_token_id")
            if index is None and role in ("bos", "eos") and isinstance(given, int):
                index = given
            if index is not None and index in self.table.texts:
                roles[role] = index
        ends = generation.get("eos_token_id", config.get("eos_token_id"))
        ends = ends if isinstance(ends, list) else [ends]
        ends = [end for end in ends if isinstance(end, int) and end in self.table.texts]
        if ends:
            roles.setdefault("eos", ends[0])
        self.roles = roles
        if "cls" in self.further_roles and {"cls", "sep"} <= roles.keys():  # texts begin and end with these
            roles["bos"], roles["eos"] = roles["cls"], roles["sep"]
        roles |= self._turn_ends(ends)
        return {f"tokenizer.ggml.{_ROLE_KEYS[role]}": index for role, index in roles.items()}

    def _turn_ends(self, ends: list[int]) -> dict[str, int]:
        """EOT and EOM among the ids that end a generation: by their texts, else the first ones that are not EOS."""
        ids = {self.table.texts[end]: end for end in ends}
        found = {"eot": next((ids[text] for text in _TURN_ENDS if text in ids), None), "eom": ids.get(_EOM)}
        for role, index in found.items():
            taken = {self.roles.get("eos"), *found.values()}
            if index is None:
                found[role] = next((end for end in ends if end not in taken), None)
        return {role: index for role, index in found.items() if index is not None}

    def _flags(self) -> dict[str, Any]:
        """Whether BOS and EOS are added: as tokenizer_config.json says, else what tokenizer.json does to a text."""
        keys = {}
        for role, at in (("bos", 0), ("eos", -1)):
            is_added = self.settings.get(f"add_{role}_token")
            if is_added is None and self.tokenizer is not None:
                ids = self._encoded(add_special_tokens=True).ids
                is_added = bool(ids) and ids[at] == self.roles.get(role)
            if is_added is not None:
                keys[f"tokenizer.ggml.add_{role}_token"] = bool(is_added)
        self._note_other_additions(sum(keys.values()))
        return keys

    def _note_other_additions(self, n_known: int) -> None:
        """A note if the tokenizer adds more special tokens to a text than the n_known that the keys say."""
        if self.tokenizer is None:
            return
        tokens = self._encoded(add_special_tokens=True).tokens
        n_added = len(tokens) - len(self._encoded(add_special_tokens=False).tokens)
        if n_added > n_known:
            shown = " ".join(tokens)
            self.notes.append(f"the tokenizer adds special tokens to a text that no key can say: 'a' becomes '{shown}'")


def _merge_lines(model: dict[str, Any]) -> list[str]:
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def _read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer as a model is run with it: whole texts, always the same tokens."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def _steps(step: dict[str, Any] | None, kind: str) -> list[dict[str, Any]]:
    """The steps of a kind in a normalizer."""
    step = step or {}
    own = [step] if step.get("type") == kind else []
    return own + [found for part in step.get("normalizers", []) for found in _steps(part, kind)]


def _uses(step: dict[str, Any] | None, kind: str) -> bool:
    """Whether a pre-tokenizer or one of its steps is of a kind."""
    step = step or {}
    return step.get("type") == kind or any(_uses(part, kind) for part in step.get("pretokenizers", []))
