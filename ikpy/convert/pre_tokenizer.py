"""Finds the `tokenizer.ggml.pre` name whose splitting equals that of a tokenizer.json."""

from __future__ import annotations

import itertools

from tokenizers import Tokenizer

from ikpy.errors import UnsupportedError
from ikpy.vocab.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from ikpy.vocab.split_rules import split_rule
from ikpy.vocab.text import byte_encode

# Texts on which all rules of the table differ: contractions, digits, letter case, spaces, line ends, punctuation.
ASCII_PROBES = (
    "I'll we'LL You'Re don't 'tis rock'n'roll O'Malley's d'etat",
    "1 12 123 1234 1234567 3.14159 v2.0 a1b22c333",
    "camelCase HTTPServer snake_case XMLHttpRequest ABCdef",
    "  two   spaces\tand\t\ttabs  \n\n\n  lines\r\n\r\n x \n y",
    'x//y\n/z (a,b)[c]{d} !!! ... ?? -- ** ^^ ``a`` $5 <b>+=</b>|#@&\\n;:"q" ',
    "...\n\n!!\n \n) \n( end   ",
)
OTHER_PROBES = (
    "~~ a~b ~/x",
    "Äpfel naïve Ünïcode ÉCOLE été ñandú Straße",
    "日本語テキスト、中文字符。 한국어 텍스트",
    "Привет МИР русскийТекст αβγ ΔΕΖ",
    "١٢٣ १२३ ½ Ⅷ é…—“quote” ‘x’ 🙂👍🏽 a\u00a0b\u3000c e\u0301",
)
# First of the names with the same splitting; their other flags are written as keys of their own.
_PREFERRED = ("llama-bpe", "qwen2", "gpt-2", "deepseek-v3", "gpt-4o", "command-r", "tekken")


def find_pre_tokenizer(
    tokenizer: Tokenizer, *, usual: str, ignore_merges: bool, has_bos: bool, clean_spaces: bool | None, where: str
) -> str:
    """Name of the pre-tokenizer; UnsupportedError if none gives the tokens of this tokenizer on plain ASCII text.

    The one that cuts ASCII alike is taken. If there is none, `usual` (the name that models of this kind have, or "") or
    else the closest, provided the tokens are the same: a vocabulary without numbers of two digits, for example, hides
    how digits are cut. Outside ASCII some rules of the table follow the reference instead of the model (model
    semantics 8.5): fewest differing cuts decide.
    """
    candidates = [name for name, row in PRE_TOKENIZERS.items() if not row.escape_spaces and not row.add_sep]

    def rank(name: str) -> tuple[int, int, bool, bool, bool, int]:
        row = PRE_TOKENIZERS[name]
        return (
            sum(len(_cuts(tokenizer, text) ^ _rule_cuts(row, text)) for text in ASCII_PROBES),
            sum(len(_cuts(tokenizer, text) ^ _rule_cuts(row, text)) for text in OTHER_PROBES),
            row.ignore_merges != ignore_merges,
            row.has_default_bos and not has_bos,
            clean_spaces is not None and row.clean_spaces != clean_spaces,
            _PREFERRED.index(name) if name in _PREFERRED else len(_PREFERRED),
        )

    ranked = sorted(candidates, key=rank)
    if rank(ranked[0])[0] == 0:
        return ranked[0]
    for name in [usual, *ranked] if usual else ranked:
        if all(_rule_tokens(tokenizer, name, text) == _tokens(tokenizer, text) for text in ASCII_PROBES):
            return name
    raise UnsupportedError(
        f"{where}: no known pre-tokenizer splits text as this one does (closest: {ranked[0]}); name one with --pre"
    )


def _cuts(tokenizer: Tokenizer, text: str) -> set[int]:
    """Offsets at which the tokenizer cuts a text."""
    return {end for _, (_, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)}


def _rule_cuts(row: PreTokenizer, text: str) -> set[int]:
    return set(itertools.accumulate(len(piece) for piece in split_rule(row.rule).split(text)))


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text by the tokenizer's own pieces, special tokens left alone."""
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for piece in pieces for token in tokenizer.model.tokenize(piece)]


def _rule_tokens(tokenizer: Tokenizer, name: str, text: str) -> list[int]:
    """Ids of a text by the pieces of a rule."""
    pieces = split_rule(PRE_TOKENIZERS[name].rule).split(text)
    return [token.id for piece in pieces for token in tokenizer.model.tokenize(byte_encode(piece))]
