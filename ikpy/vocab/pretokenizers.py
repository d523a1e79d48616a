"""Pre-tokenizers of byte-level BPE: every ``tokenizer.ggml.pre`` name, its split rule and flags.

Split rules follow model semantics 8.5. Three kinds of expression exist, because the reference runs them
differently and the difference is visible in token ids:

* *exact*: Unicode categories, used for the GPT-2, Llama 3, Qwen 2, Kimi K2 and digit rules;
* *collapsed*: every non-ASCII code point is replaced by one placeholder for its category first, so letter
  case outside ASCII is lost; used for all other expressions that name a category;
* *code point*: no categories; non-ASCII white space reads as vertical tab.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import regex

from ikpy.errors import UnsupportedError

Cutter = Callable[[str, int, int], Iterator[int]]


@dataclass(frozen=True)
class Stage:
    """One expression of a split rule: ``view`` maps the text 1:1, ``cut`` yields cut offsets in a piece."""

    view: Callable[[str], str]
    cut: Cutter


@dataclass(frozen=True)
class SplitRule:
    """Expressions applied in order, each inside the pieces the previous one left.

    ``whole`` is set when one exact expression alone covers every character.
    """

    stages: tuple[Stage, ...]
    whole: regex.Pattern[str] | None = None

    def split(self, text: str) -> list[str]:
        """Pieces of ``text`` in order; their concatenation is ``text``."""
        if self.whole is not None:
            return self.whole.findall(text)
        cuts = [0, len(text)]
        for stage in self.stages:
            view = stage.view(text)
            new = [0]
            last = 0
            for start, end in itertools.pairwise(cuts):
                if end - start > 1:
                    for at in stage.cut(view, start, end):
                        if at > last:
                            new.append(at)
                            last = at
                if end > last:
                    new.append(end)
                    last = end
            cuts = new
        return [text[start:end] for start, end in itertools.pairwise(cuts)]


class _CategoryTable(dict[int, str]):
    """Translation table filled on demand: code point to its placeholder in the collapsed text."""

    _CLASSES = regex.compile(r"(?P<W>\p{White_Space})|(?P<N>\p{N})|(?P<L>\p{L})|(?P<P>\p{P})|(?P<M>\p{M})|(?P<S>\p{S})")
    _PLACEHOLDER: ClassVar = {"W": "\x0b", "N": "\xd1", "L": "\xd2", "P": "\xd3", "M": "\xd4", "S": "\xd5"}

    def __missing__(self, code: int) -> str:
        match = None if code < 128 else self._CLASSES.match(chr(code))
        kind = match.lastgroup if match else None
        value = chr(code) if code < 128 else self._PLACEHOLDER[kind] if kind else "\xd0"
        self[code] = value
        return value


class _SpaceTable(dict[int, str]):
    """Translation table that reads non-ASCII white space as vertical tab."""

    _SPACE = regex.compile(r"\p{White_Space}")

    def __missing__(self, code: int) -> str:
        char = chr(code)
        value = "\x0b" if code >= 128 and self._SPACE.match(char) else char
        self[code] = value
        return value


_CATEGORIES = _CategoryTable()
_SPACES = _SpaceTable()

# ASCII members and placeholder of each category in the collapsed text; "~" belongs to none.
_COLLAPSED_SETS = {
    "N": "0-9\xd1",
    "L": "A-Za-z\xd2",
    "P": r"!-#%-*,-/:;?@\[-\]_{}" + "\xd3",
    "M": "\xd4",
    "S": r"$+<=>\^`|" + "\xd5",
}


def _expand_categories(pattern: str) -> str:
    r"""Replace every ``\p{X}`` by the members of X in the collapsed text."""
    out: list[str] = []
    pos, in_class = 0, False
    while pos < len(pattern):
        if pattern.startswith(r"\p{", pos):
            close = pattern.index("}", pos)
            members = _COLLAPSED_SETS[pattern[pos + 3]]
            out.append(members if in_class else f"[{members}]")
            pos = close + 1
            continue
        if pattern[pos] == "\\":
            out.append(pattern[pos : pos + 2])
            pos += 2
            continue
        in_class = pattern[pos] == "[" or (in_class and pattern[pos] != "]")
        out.append(pattern[pos])
        pos += 1
    return "".join(out)


def _match_cuts(pattern: re.Pattern[str] | regex.Pattern[str]) -> Cutter:
    """Cuts before and after every match."""

    def cut(view: str, start: int, end: int) -> Iterator[int]:
        for match in pattern.finditer(view, start, end):
            yield from match.span()

    return cut


def _identity(text: str) -> str:
    return text


def _exact(pattern: str) -> Stage:
    return Stage(_identity, _match_cuts(regex.compile(pattern, regex.V1)))


def _collapsed(pattern: str) -> Stage:
    compiled = re.compile(_expand_categories(pattern), re.ASCII)
    return Stage(lambda text: text.translate(_CATEGORIES), _match_cuts(compiled))


def _code_points(pattern: str) -> Stage:
    return Stage(lambda text: text.translate(_SPACES), _match_cuts(re.compile(pattern, re.ASCII)))


def _digit_groups(runs: str) -> Stage:
    """Cut runs of digits after every group of three counted from the right; not before the first group."""
    pattern = regex.compile(runs)

    def cut(view: str, start: int, end: int) -> Iterator[int]:
        for match in pattern.finditer(view, start, end):
            first, last = match.span()
            yield from range(first + ((last - first) % 3 or 3), last + 1, 3)

    return Stage(_identity, cut)


def _before_triples(runs: str) -> Stage:
    """Cut before every position of a digit run that a multiple of three digits follows to its end."""
    pattern = regex.compile(runs)

    def cut(view: str, start: int, end: int) -> Iterator[int]:
        for match in pattern.finditer(view, start, end):
            first, last = match.span()
            yield from range(first + (last - first) % 3, last, 3)

    return Stage(_identity, cut)


def _whole(pattern: str) -> SplitRule:
    return SplitRule((_exact(pattern),), regex.compile(pattern, regex.V1))


def _rule(*stages: Stage) -> SplitRule:
    return SplitRule(stages)


# The reference compares contractions after lower-casing with a table that holds no ASCII capitals, so the
# exact rules know only lower-case ones there; _LOWER_CASE_C reproduces that on request.
_C = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_LOWER_CASE_C = r"(?:'s|'t|'re|'ve|'m|'ll|'d)"
_W = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_HEAD = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
_QWEN2 = rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_W}"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK3_TAIL = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_W}"
)
_LETTER_RANGES = (
    "0041-005A 0061-007A 00B5 00C0-00D6 00D8-00F6 00F8-01BA 01BC-01BF 01C4-0293 0295-02AF 0370-0373 "
    "0376 0377 037B-037D 037F 0386 0388-038A 038C 038E-03A1 03A3-03F5 03F7-0481 048A-052F 0531-0556 "
    "10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 "
    "1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
    "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 "
    "2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF "
    "FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 "
    "10CC0-10CF2 118A0-118DF 1E900-1E943"
)
_AFMOE_RANGES = (
    "4E00-9FFF 3400-4DBF 8C48-FAFF 3040-309F 30A0-30FF FF65-FF9F 2F00-2FDF 0E40-0E7F 0E80-0EFF "
    "1780-17FF 1000-109F AA60-AA7F A9E0-A9FF AC00-D7AF 1100-11FF"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_CJK}"
)
# The ideographs the reference takes for Han: iteration marks, radicals and U+3007 are not among them.
_HAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    r"\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\U0002f800-\U0002fa1f]"
)
_KIMI_K2 = (
    rf"{_HAN}+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}--{_HAN}]+{_C}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_W}"
)


def _ranges(listing: str) -> str:
    """Members of a character class from a listing of hexadecimal code points and ranges."""
    return "".join("-".join(f"\\U{end:0>8}" for end in item.split("-")) for item in listing.split())


def _letter_words(digits: str, contraction: str) -> str:
    r"""TEKKEN and GPT4O: words split where lower case changes to upper case."""
    head = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
    return (
        rf"{head}{upper}*{lower}+{contraction}|{head}{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_W}"
    )


def _gpt4o_long(digits: str = r"\p{N}{1,3}") -> str:
    head = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"{head}{upper}*{lower}+{_C}?|{head}{upper}+{lower}*{_C}?|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_W}"
    )


def _deepseek_llm() -> SplitRule:
    punctuation = "[\\u0021-\\u002F\\u003A-\\u007E\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]"
    return _rule(
        _code_points(r"[\r\n]"),
        _code_points(rf"\s?[{_ranges(_LETTER_RANGES)}]+"),
        _code_points(rf"\s?{punctuation}+"),
        _code_points(r"\s+\Z"),
        _code_points(_EAST_ASIAN),
        _exact(r"\p{N}+"),
    )


def _chameleon() -> SplitRule:
    return _rule(
        _code_points(r"<sentinel:[0-9]+>"),
        _code_points(r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
        _code_points(r"([\t\n]|    |  )"),
        _exact(r"\p{N}"),
        _collapsed(r"[\p{P}!-/:-@\[-`{-~]"),
        _exact(_GPT2),
    )


def _jais2_tail() -> str:
    powers = "|".join(rf"\s{{{2**exponent}}}(?!\S)" for exponent in range(9, 1, -1))
    return rf"\s*[\r\n]+|{powers}|\s{{1,2}}(?!\S)|\s{{1}}"


_BUILDERS: dict[str, Callable[[], SplitRule]] = {
    "GPT2": lambda: _whole(_GPT2),
    "LLAMA3": lambda: _whole(f"{_LLAMA3_HEAD}|{_W}"),
    "QWEN2": lambda: _whole(_QWEN2),
    "QWEN35": lambda: _rule(
        _collapsed(rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_W}")
    ),
    "STARCODER": lambda: _rule(_exact(r"\p{N}"), _exact(_GPT2)),
    "FALCON": lambda: _rule(_collapsed(r"[\p{P}\$\+<=>\^~\|`]+"), _exact(_GPT2), _code_points("[0-9][0-9][0-9]")),
    "DEFAULT": lambda: _rule(
        _collapsed(r"[\p{P}\$\+<=>\^~\|]+"),
        _exact(_GPT2),
        _exact(r"\p{N}+"),
        _code_points("[0-9][0-9][0-9]"),
    ),
    "DEEPSEEK-LLM": _deepseek_llm,
    "DEEPSEEK-CODER": lambda: _rule(
        _code_points(r"[\r\n]"),
        _collapsed(r"\s?\p{L}+"),
        _collapsed(r"\s?\p{P}+"),
        _code_points(_EAST_ASIAN),
        _exact(r"\p{N}"),
    ),
    "DEEPSEEK3": lambda: _rule(_exact(r"\p{N}{1,3}"), _code_points(_CJK), _collapsed(_DEEPSEEK3_TAIL)),
    "YOUTU": lambda: _rule(_code_points(_YOUTU_SCRIPTS), _collapsed(_gpt4o_long(r"\p{N}"))),
    "TEKKEN": lambda: _rule(_collapsed(_letter_words(r"\p{N}", ""))),
    "GPT4O": lambda: _rule(_collapsed(_letter_words(r"\p{N}{1,3}", f"{_C}?"))),
    "TINY-AYA": lambda: _rule(_digit_groups(r"\p{N}+"), _collapsed(_gpt4o_long())),
    "BLOOM": lambda: _rule(_code_points(_BLOOM)),
    "VIKING": lambda: _rule(_code_points(_BLOOM), _exact(r"\p{N}")),
    "CHAMELEON": _chameleon,
    "JAIS2": lambda: _rule(_collapsed(f"{_LLAMA3_HEAD}|{_jais2_tail()}")),
    "BAILING": lambda: _rule(
        _collapsed(
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "SEED-CODER": lambda: _rule(
        _collapsed(rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_W}")
    ),
    "EXAONE-MOE": lambda: _rule(
        _collapsed(
            rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "SUPERBPE": lambda: _rule(_exact(r"\p{N}+"), _before_triples("[0-9]+")),
    "AFMOE": lambda: _rule(
        _digit_groups(r"\p{N}+"),
        _code_points(f"[{_ranges(_AFMOE_RANGES)}]+"),
        _collapsed(_DEEPSEEK3_TAIL),
    ),
    "KIMI-K2": lambda: _whole(_KIMI_K2),
    # Runs of newlines and of everything else: every character belongs to one of the two.
    "GEMMA4": lambda: _whole(r"[^\n]+|\n+"),
}


@functools.cache
def split_rule(name: str, reference_lowercase: bool = False) -> SplitRule:
    """Split rule of a class named in model semantics 8.5 (``"LLAMA3"``, ``"DEEPSEEK3"``, …).

    ``reference_lowercase``: the exact rules take only lower-case contractions, as the reference does.
    """
    rule = _BUILDERS[name]()
    if reference_lowercase and rule.whole is not None:
        return _whole(rule.whole.pattern.replace(_C, _LOWER_CASE_C))
    return rule


@dataclass(frozen=True)
class PreTokenizer:
    """What one ``tokenizer.ggml.pre`` name selects.

    ``rule`` names the split rule; ``ignore_merges``: a word that is a token is taken whole; ``add_bos``,
    ``add_sep``, ``clean_spaces`` are defaults for the vocabulary; ``has_default_bos`` is false when no BOS
    exists unless its id is given; ``needs_merges`` is false when the merge list may be absent.
    """

    rule: str
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False
    clean_spaces: bool = True
    has_default_bos: bool = True
    needs_merges: bool = True
    escape_spaces: bool = False


_ROWS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer("DEFAULT")),
    (
        "llama3 llama-v3 llama-bpe laguna falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer("LLAMA3", ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe", PreTokenizer("LLAMA3")),
    ("glm4 chatglm-bpe", PreTokenizer("LLAMA3", has_default_bos=False)),
    ("deepseek-llm", PreTokenizer("DEEPSEEK-LLM", clean_spaces=False)),
    ("deepseek-coder", PreTokenizer("DEEPSEEK-CODER", clean_spaces=False)),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer("DEEPSEEK3", clean_spaces=False)),
    ("youtu", PreTokenizer("YOUTU", ignore_merges=True, clean_spaces=False)),
    ("falcon", PreTokenizer("FALCON")),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt olmo jais exaone4",
        PreTokenizer("GPT2"),
    ),
    ("jina-v1-en jina-v2-code roberta-bpe", PreTokenizer("GPT2", add_sep=True)),
    ("trillion granite-docling", PreTokenizer("GPT2", clean_spaces=False)),
    ("starcoder refact codeshell exaone minerva-7b mellum2", PreTokenizer("STARCODER")),
    ("command-r cohere2_moe smollm", PreTokenizer("STARCODER", clean_spaces=False)),
    (
        "qwen2 deepseek-r1-qwen kormo openpangu f2llmv2 hunyuan solar-open grok-2",
        PreTokenizer("QWEN2", clean_spaces=False),
    ),
    ("stablelm2 megrez", PreTokenizer("QWEN2")),
    ("qwen35", PreTokenizer("QWEN35", clean_spaces=False)),
    ("poro-chat", PreTokenizer("BLOOM", clean_spaces=False)),
    ("bloom gpt3-finnish", PreTokenizer("BLOOM")),
    ("viking", PreTokenizer("VIKING", clean_spaces=False)),
    ("tekken", PreTokenizer("TEKKEN", ignore_merges=True, add_bos=True, clean_spaces=False)),
    ("chameleon", PreTokenizer("CHAMELEON", add_bos=True, clean_spaces=False)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer("GPT4O", clean_spaces=False)),
    ("tiny_aya", PreTokenizer("TINY-AYA", clean_spaces=False)),
    ("superbpe", PreTokenizer("SUPERBPE", clean_spaces=False)),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer("BAILING", clean_spaces=False)),
    ("seed-coder", PreTokenizer("SEED-CODER", clean_spaces=False)),
    ("kimi-k2", PreTokenizer("KIMI-K2", clean_spaces=False, needs_merges=False)),
    ("afmoe", PreTokenizer("AFMOE", clean_spaces=False)),
    ("exaone-moe", PreTokenizer("EXAONE-MOE")),
    ("jais-2", PreTokenizer("JAIS2")),
    ("gemma4", PreTokenizer("GEMMA4", add_bos=True, has_default_bos=False, escape_spaces=True)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: row for names, row in _ROWS for name in names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Row of the table for a ``tokenizer.ggml.pre`` value; an unknown name raises UnsupportedError."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedError(
            f"unknown pre-tokenizer type: '{name}' (key tokenizer.ggml.pre); "
            "override the key with the name of a tokenizer that splits alike"
        ) from None
