"""Split rules of byte-level BPE by class."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ikpy.vocab.split_stages import (
    SplitRule,
    before_triples,
    code_points,
    collapsed,
    digit_groups,
    exact,
    in_order,
    whole,
)

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
    return in_order(
        code_points(r"[\r\n]"),
        code_points(rf"\s?[{_ranges(_LETTER_RANGES)}]+"),
        code_points(rf"\s?{punctuation}+"),
        code_points(r"\s+\Z"),
        code_points(_EAST_ASIAN),
        exact(r"\p{N}+"),
    )


def _chameleon() -> SplitRule:
    return in_order(
        code_points(r"<sentinel:[0-9]+>"),
        code_points(r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
        code_points(r"([\t\n]|    |  )"),
        exact(r"\p{N}"),
        collapsed(r"[\p{P}!-/:-@\[-`{-~]"),
        exact(_GPT2),
    )


def _jais2_tail() -> str:
    powers = "|".join(rf"\s{{{2**exponent}}}(?!\S)" for exponent in range(9, 1, -1))
    # Behind white space that is no line end, no line end follows: it would have belonged to the match before.
    return rf"(?<![^\S\r\n])\s*[\r\n]+|{powers}|\s{{1,2}}(?!\S)|\s{{1}}"


_BUILDERS: dict[str, Callable[[], SplitRule]] = {
    "GPT2": lambda: whole(_GPT2),
    "LLAMA3": lambda: whole(f"{_LLAMA3_HEAD}|{_W}"),
    "QWEN2": lambda: whole(_QWEN2),
    # Line ends stand apart from what is before them.
    "LAGUNA": lambda: in_order(code_points(r"[^\n]+|\n+"), exact(_QWEN2)),
    "QWEN35": lambda: in_order(
        collapsed(rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_W}")
    ),
    "STARCODER": lambda: in_order(exact(r"\p{N}"), exact(_GPT2)),
    "FALCON": lambda: in_order(collapsed(r"[\p{P}\$\+<=>\^~\|`]+"), exact(_GPT2), code_points("[0-9][0-9][0-9]")),
    "DEFAULT": lambda: in_order(
        collapsed(r"[\p{P}\$\+<=>\^~\|]+"),
        exact(_GPT2),
        exact(r"\p{N}+"),
        code_points("[0-9][0-9][0-9]"),
    ),
    "DEEPSEEK-LLM": _deepseek_llm,
    "DEEPSEEK-CODER": lambda: in_order(
        code_points(r"[\r\n]"),
        collapsed(r"\s?\p{L}+"),
        collapsed(r"\s?\p{P}+"),
        code_points(_EAST_ASIAN),
        exact(r"\p{N}"),
    ),
    "DEEPSEEK3": lambda: in_order(exact(r"\p{N}{1,3}"), code_points(_CJK), collapsed(_DEEPSEEK3_TAIL)),
    "YOUTU": lambda: in_order(code_points(_YOUTU_SCRIPTS), collapsed(_gpt4o_long(r"\p{N}"))),
    "TEKKEN": lambda: in_order(collapsed(_letter_words(r"\p{N}", ""))),
    "GPT4O": lambda: in_order(collapsed(_letter_words(r"\p{N}{1,3}", f"{_C}?"))),
    "TINY-AYA": lambda: in_order(digit_groups(r"\p{N}+"), collapsed(_gpt4o_long())),
    "BLOOM": lambda: in_order(code_points(_BLOOM)),
    "VIKING": lambda: in_order(code_points(_BLOOM), exact(r"\p{N}")),
    "CHAMELEON": _chameleon,
    "JAIS2": lambda: in_order(collapsed(f"{_LLAMA3_HEAD}|{_jais2_tail()}")),
    "BAILING": lambda: in_order(
        collapsed(
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "SEED-CODER": lambda: in_order(
        collapsed(rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_W}")
    ),
    "EXAONE-MOE": lambda: in_order(
        collapsed(
            rf"{_C}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    "SUPERBPE": lambda: in_order(exact(r"\p{N}+"), before_triples("[0-9]+")),
    "AFMOE": lambda: in_order(
        digit_groups(r"\p{N}+"),
        code_points(f"[{_ranges(_AFMOE_RANGES)}]+"),
        collapsed(_DEEPSEEK3_TAIL),
    ),
    "KIMI-K2": lambda: whole(_KIMI_K2),
    # Runs of newlines and of everything else: every character belongs to one of the two.
    "GEMMA4": lambda: whole(r"[^\n]+|\n+"),
}


@functools.cache
def split_rule(name: str, reference_lowercase: bool = False) -> SplitRule:
    """Split rule of a class (``"LLAMA3"``, ``"DEEPSEEK3"``, …).

    ``reference_lowercase``: the exact rules take only lower-case contractions, as the reference does.
    """
    rule = _BUILDERS[name]()
    if reference_lowercase and rule.whole is not None:
        return whole(rule.whole.pattern.replace(_C, _LOWER_CASE_C))
    return rule
