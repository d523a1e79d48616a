"""Special tokens: ids by role, end-of-generation set, strip attributes, and cutting them out of text."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ikpy.vocab import keys
from ikpy.vocab.table import TokenTable, TokenType

_log = logging.getLogger(__name__)

# Roles and the key that holds their id ("seperator" is how the format spells it), oldest spelling last.
ID_KEYS: dict[str, tuple[str, ...]] = {
    "bos": ("bos_token_id",),
    "eos": ("eos_token_id",),
    "eot": ("eot_token_id",),
    "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",),
    "sep": ("seperator_token_id",),
    "pad": ("padding_token_id",),
    "mask": ("mask_token_id",),
    "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"),
    "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",),
    "fim_rep": ("fim_rep_token_id",),
    "fim_sep": ("fim_sep_token_id",),
}

_DETECTED: dict[str, tuple[str, ...]] = {
    "eot": (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>",
        "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>",
        "<|code_prefix|>", "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>",
        "<|code_suffix|>", "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>",
        "<|code_middle|>", "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}  # fmt: skip

_EOG_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>",
)  # fmt: skip

_CHANNEL_TEXTS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")

# White space that the strip attributes remove: C's isspace on ASCII.
STRIPPED = " \t\n\v\f\r"

_PREFIX = 2  # characters; texts without any token's beginning are the rule
_MANY = 16  # tokens of one prefix from which on its places in a text are fewer than they are


def read_role_ids(metadata: Mapping[str, Any], table: TokenTable, defaults: Mapping[str, int]) -> dict[str, int | None]:
    """Ids of the special roles: GGUF keys over family defaults; ids outside the vocabulary are ignored."""
    roles: dict[str, int | None] = {}
    for role, names in ID_KEYS.items():
        default = defaults.get(role)
        roles[role] = default if default is not None and default < len(table) else None
        for name in reversed(names):
            value = keys.integer(metadata, f"tokenizer.ggml.{name}")
            if value is None:
                continue
            if 0 <= value < len(table):
                roles[role] = value
            else:
                _log.warning("tokenizer.ggml.%s = %d is outside the vocabulary; ignored", name, value)
    return roles


def detect_roles(metadata: Mapping[str, Any], table: TokenTable, roles: dict[str, int | None]) -> None:
    """Fill roles without an id key from well-known texts; such tokens become control tokens.

    Several matches: the lowest id is taken (the reference takes the first in hash order).
    """
    for role, texts in _DETECTED.items():
        if any(f"tokenizer.ggml.{key}" in metadata for key in ID_KEYS[role]) or roles[role] is not None:
            continue
        found = [table.ids[text] for text in texts if text in table.ids]
        if found:
            roles[role] = min(found)
            table.types[min(found)] = TokenType.CONTROL


def end_of_generation(table: TokenTable, roles: Mapping[str, int | None]) -> frozenset[int]:
    """Set of ids that end a generation; changes the types of such tokens and of marks of channels in ``table``."""
    ids = table.ids
    eog = {index for role in ("fim_pad", "fim_rep", "fim_sep") if (index := roles[role]) is not None}
    for text in _EOG_TEXTS:
        if text in ids:
            eog.add(ids[text])
            table.types[ids[text]] = TokenType.CONTROL
    for text in _CHANNEL_TEXTS:
        if text in ids:
            table.types[ids[text]] = TokenType.USER_DEFINED
    eog.update(index for role in ("eos", "eot", "eom") if (index := roles[role]) is not None)

    def holds(*texts: str) -> bool:
        return any(ids.get(text) in eog for text in texts)

    calls = holds("<|call|>", "<|calls|>")
    if holds("<|end|>") and calls and holds("<|return|>", "<|flush|>"):
        eog.discard(ids["<|end|>"])
        table.types[ids["<|end|>"]] = TokenType.USER_DEFINED
    if holds("<|tool_response>") and holds("</s>"):
        eog.discard(ids["</s>"])
        table.types[ids["</s>"]] = TokenType.NORMAL
    return frozenset(eog)


def strip_attributes(
    metadata: Mapping[str, Any], table: TokenTable, special: Iterable[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Ids that strip white space to their left, and to their right."""
    name = keys.text(metadata, "general.name").lower()
    pre = keys.text(metadata, "tokenizer.ggml.pre")
    ids = table.ids
    left: set[int] = set()
    right: set[int] = set()
    if "phi-3" in name or "phi3" in name:
        right.update(special)
        right.update(ids[text] for text in ("</s>",) if text in ids)
        right.difference_update(ids[text] for text in ("<unk>", "<s>", "<|endoftext|>") if text in ids)
    jina = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
    if (any(part in name or part == pre for part in jina)) and "<mask>" in ids:
        left.add(ids["<mask>"])
    if ("modern-bert" in name or pre == "modern-bert") and "[MASK]" in ids:
        left.add(ids["[MASK]"])
    return frozenset(left), frozenset(right)


class _Candidates:
    """Special tokens in the order in which they are cut out, and which of them a text may hold."""

    def __init__(self, tokens: Sequence[tuple[str, int]]):
        self._tokens = tokens
        self._places: dict[str, dict[str, int]] = {}
        for place, (text, _) in enumerate(tokens):
            self._places.setdefault(text[:_PREFIX], {})[text] = place
        self._lengths = {prefix: sorted({len(text) for text in group}) for prefix, group in self._places.items()}

    def within(self, text: str) -> list[tuple[str, int]]:
        """Texts and ids of the tokens that occur in a text, in their order."""
        found: list[int] = []
        for prefix, group in self._places.items():
            if prefix in text:
                search = self._search_each if len(group) < _MANY else self._look_up
                found += search(text, prefix)
        return [self._tokens[place] for place in sorted(found)]

    def _search_each(self, text: str, prefix: str) -> Iterable[int]:
        return [place for token_text, place in self._places[prefix].items() if token_text in text]

    def _look_up(self, text: str, prefix: str) -> Iterable[int]:
        """Vocabularies hold thousands of tokens with one prefix: whether one begins is asked wherever the prefix is."""
        group, lengths = self._places[prefix], self._lengths[prefix]
        found: set[int] = set()
        at = text.find(prefix)
        while at >= 0:
            found.update(group[part] for n in lengths if (part := text[at : at + n]) in group)
            at = text.find(prefix, at + 1)
        return found


class SpecialSplitter:
    """Cuts special tokens out of text: longest text first, each replaced wherever it occurs."""

    def __init__(self, table: TokenTable, left: frozenset[int], right: frozenset[int]):
        kinds = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
        special = [index for index, kind in enumerate(table.types) if kind in kinds]
        special.sort(key=lambda index: -len(table.texts[index].encode("utf-8", "surrogateescape")))
        self.ids = tuple(special)
        self._all = _Candidates([(table.texts[index], index) for index in special])
        user_defined = [index for index in special if table.types[index] == TokenType.USER_DEFINED]
        self._user = _Candidates([(table.texts[index], index) for index in user_defined])
        self._left, self._right = left, right

    def split(self, text: str, parse_special: bool) -> list[str | int]:
        """Fragments (str) and special ids (int) in order.

        Without ``parse_special`` only user-defined tokens are cut out.
        """
        fragments: list[str | int] = [text] if text else []
        for token_text, index in (self._all if parse_special else self._user).within(text):
            fragments = [
                part
                for fragment in fragments
                for part in (self._cut(fragment, token_text, index) if isinstance(fragment, str) else [fragment])
            ]
        return fragments

    def _cut(self, fragment: str, token_text: str, index: int) -> list[str | int]:
        out: list[str | int] = []
        pieces = fragment.split(token_text)
        for number, piece in enumerate(pieces):
            if number > 0:
                out.append(index)
                if index in self._right:
                    piece = piece.lstrip(STRIPPED)  # noqa: PLW2901
            if number + 1 < len(pieces) and index in self._left:
                piece = piece.rstrip(STRIPPED)  # noqa: PLW2901
            if piece:
                out.append(piece)
        return out
