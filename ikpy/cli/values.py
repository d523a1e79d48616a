"""Conversion of option values: number prefixes, on/off words, cache types, pairs and lists.

A converter takes the text and a `warn` callback, returns the value, and raises ValueError for a bad text. The message
of the ValueError completes the line "error: invalid parameter for argument: X".
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ikpy.engine.sampling_params import RANDOM_SEED
from ikpy.errors import UsageError
from ikpy.quants import registry

Warn = Callable[[str], None]
Convert = Callable[[str, Warn], Any]

INTEGER = re.compile(r"\s*[+-]?\d+")
RANGE = re.compile(r"(\d+)-(\d+)(?:([+*])(\d+))?")
MAX_RANGE = 10_000
"""Numbers."""
FLOAT = re.compile(r"\s*[+-]?(inf(inity)?|nan|(\d+\.?\d*|\.\d+)(e[+-]?\d+)?)", re.IGNORECASE)
LARGEST = (1 << 31) - 1
"""Largest integer of options: positions and counts have 32 bits."""
SWITCH_WORDS = {
    "on": True,
    "auto": True,
    "1": True,
    "true": True,
    "enabled": True,
    "off": False,
    "0": False,
    "false": False,
    "disabled": False,
}


def _number(text: str, pattern: re.Pattern[str], what: str, warn: Warn) -> str:
    match = pattern.match(text)
    if not match:
        raise ValueError(f"expected {what}, got {text!r}")
    if match.end() != len(text.rstrip()):
        warn(f"reading {match.group().strip()} from {text!r}, the rest is not part of the number")
    return match.group()


def _integer(text: str, warn: Warn) -> int:
    return int(_number(text, INTEGER, "an integer", warn))


def to_int(text: str, warn: Warn) -> int:
    """Decimal integer of 32 bits, as positions and counts are; text behind it is ignored with a warning."""
    value = _integer(text, warn)
    if not -LARGEST - 1 <= value <= LARGEST:
        raise ValueError(f"expected {-LARGEST - 1} to {LARGEST}, got {value}")
    return value


def to_float(text: str, warn: Warn) -> float:
    """Decimal floating-point number at the start of the text; the rest is ignored with a warning."""
    return float(_number(text, FLOAT, "a number", warn))


def to_seconds(text: str, warn: Warn) -> float:
    """A time of at most a day."""
    return checked_seconds(to_float(text, warn))


def checked_seconds(value: float) -> float:
    """A time of at most a day. Raises ValueError."""
    if not 0 <= value <= 86400:
        raise ValueError(f"expected 0 to 86400 seconds, got {value:g}")
    return value


def to_text(text: str, warn: Warn) -> str:
    """The text itself."""
    return text


def to_file(text: str, warn: Warn) -> str:
    """The name of a file, not empty."""
    if not text:
        raise ValueError("the name of the file is empty")
    return text


def to_list(text: str, warn: Warn) -> list[str]:
    """Texts with commas between; blanks around them and empty ones are left out."""
    return [item for part in text.split(",") if (item := part.strip())]


def to_stop_text(text: str, warn: Warn) -> list[str]:
    """A text to stop at; none for an empty one, which every text has at its end."""
    if not text:
        warn("an empty text stops nothing")
    return [text] if text else []


def to_hosts(text: str, warn: Warn) -> list[str]:
    """Addresses with commas between, at least one."""
    hosts = to_list(text, warn)
    if not hosts:
        raise ValueError("expected an address")
    return hosts


def to_keys(text: str, warn: Warn) -> list[str]:
    """API keys with commas between, at least one."""
    keys = to_list(text, warn)
    if not keys:
        raise ValueError("no key in it, which would open the server")
    return keys


def to_path_prefix(text: str, warn: Warn) -> str:
    """The beginning of URL paths, without a slash at its end."""
    prefix = text.rstrip("/")
    if prefix and (not prefix.startswith("/") or "//" in prefix or set(prefix) & set("?#% \t")):
        raise ValueError(f"expected a path as /llm, got {text!r}")
    return prefix


def to_switch(text: str, warn: Warn) -> bool:
    """on/off/auto/0/1/true/false/enabled/disabled in any case."""
    if text.lower() not in SWITCH_WORDS:
        raise ValueError(f"expected on, off, auto, 0 or 1, got {text!r}")
    return SWITCH_WORDS[text.lower()]


def to_switch_or_auto(text: str, warn: Warn) -> bool | None:
    """Yes, no, or None for "auto", where that is a third choice."""
    return None if text.lower() == "auto" else to_switch(text, warn)


def choice(*words: str) -> Convert:
    """Converter that accepts exactly the given words, in any letter case."""

    def convert(text: str, warn: Warn) -> str:
        if text.lower() not in words:
            raise ValueError(f"expected one of {', '.join(words)}, got {text!r}")
        return text.lower()

    return convert


def bounded(low: int, high: int | None = None) -> Convert:
    """Converter to an integer in [low, high], `high` being the largest of 32 bits if it is left out."""

    def convert(text: str, warn: Warn) -> int:
        value = _integer(text, warn)
        if high is not None and not low <= value <= high:
            raise ValueError(f"expected {low}..{high}, got {value}")
        if not low <= value <= LARGEST:
            raise ValueError(f"expected {f'at least {low}' if value < low else f'at most {LARGEST}'}, got {value}")
        return value

    return convert


def in_range(text: str) -> list[str]:
    """Numbers of `first-last`, `first-last+step` or `first-last*factor`; any other text as it is."""
    match = RANGE.fullmatch(text)
    if not match:
        return [text]
    value, last, step = int(match[1]), int(match[2]), int(match[4] or 1)
    if last < value or step < (2 if match[3] == "*" else 1) or (match[3] == "*" and value == 0):
        raise ValueError(f"expected first-last, first-last+step or first-last*factor, got {text!r}")
    if match[3] != "*" and (last - value) // step >= MAX_RANGE:
        raise ValueError(f"{text!r} is a range of more than {MAX_RANGE} numbers; give a step such as {text}+1000")
    found = []
    while value <= last:
        found.append(str(value))
        value = value * step if match[3] == "*" else value + step
    return found


def to_counts(text: str, warn: Warn) -> list[int]:
    """Positive integers and ranges of them, separated by commas."""
    return [bounded(1)(number, warn) for part in text.split(",") for number in in_range(part)]


def to_numa(text: str, warn: Warn) -> str:
    """Mode of --numa; an empty value is distribute."""
    from ikpy.machine.numa import MODES

    return choice(*MODES)(text or MODES[0], warn)


def to_parallel(text: str, warn: Warn) -> int:
    """Number of sequences; -1, with which other programs choose one, is the default."""
    return 1 if _integer(text, warn) == -1 else bounded(1)(text, warn)


def to_seed(text: str, warn: Warn) -> int:
    """Unsigned 32-bit seed; any negative number means a random one."""
    value = _integer(text, warn)
    if value > 0xFFFFFFFF:
        warn(f"using the low 32 bits of {value}, {value & 0xFFFFFFFF}")
    return RANDOM_SEED if value < 0 else value & 0xFFFFFFFF


MAX_THREADS = 1024


def to_threads(text: str, warn: Warn) -> int:
    """Thread count; zero or less means all hardware threads."""
    from ikpy.machine.threads import hardware_threads

    value = to_int(text, warn)
    if value > MAX_THREADS:
        raise ValueError(f"expected at most {MAX_THREADS}, got {value}")
    return value if value > 0 else hardware_threads()


def to_group_size(text: str, warn: Warn) -> int:
    """Group size of self-extend: 1, which is off."""
    value = to_int(text, warn)
    if value != 1:
        raise UsageError(
            "self-extend is not supported; extend the context with YaRN instead: --rope-scaling yarn --rope-scale N, "
            "N being the context divided by that of the training"
        )
    return value


def to_cache_type(text: str, warn: Warn) -> str:
    """KV cache type in any letter case, returned in its own spelling."""
    kind = registry.cache_type(text)
    if kind is None:
        raise UsageError(f"Invalid cache type: {text} (known: {', '.join(registry.CACHE_TYPES)})")
    return kind.name


def to_layer_type(text: str, warn: Warn) -> tuple[str, int]:
    """`TYPE,N`: a KV cache type and the number of layers that have it; none if N is not above 0."""
    name, comma, count = text.rpartition(",")
    if not comma:
        raise ValueError(f"expected TYPE,N such as q8_0,2, got {text!r}")
    return to_cache_type(name, warn), to_int(count, warn)


def to_attention_batch(text: str, warn: Warn) -> int:
    """Size bound of the attention scratch in MiB: 0 = none, 1..127 become 128."""
    value = to_int(text, warn)
    if 0 < value < 128:
        warn(f"{value} MiB is too small, using 128")
        return 128
    return max(value, 0)


def to_expert_reduction(text: str, warn: Warn) -> tuple[int, float]:
    """`K,t`: experts always kept, share of the largest probability below which the others are dropped."""
    parts = text.split(",")
    if len(parts) != 2:
        raise ValueError(f"expected K,t such as 6,1, got {text!r}")
    kept, threshold = to_int(parts[0], warn), to_float(parts[1], warn)
    if not threshold >= 0:
        raise ValueError(f"expected a share of at least 0, got {parts[1]!r}")
    return kept, threshold


def to_rope_scale(text: str, warn: Warn) -> float:
    """Context extension factor f, stored as the frequency scale 1/f."""
    value = to_float(text, warn)
    if value == 0:
        raise ValueError("the scale must not be 0")
    return 1.0 / value


def to_file_unscaled(text: str, warn: Warn) -> tuple[str, float]:
    """A file with scale 1."""
    return text, 1.0


def to_file_scaled(text: str, warn: Warn) -> tuple[str, float]:
    """`FILE SCALE`."""
    path, _, scale = text.rpartition(" ")
    try:
        return path, to_float(scale, warn)
    except ValueError:
        raise ValueError(f"expected FILE SCALE, two words, got {text!r}") from None


def to_layer_range(text: str, warn: Warn) -> tuple[int, int]:
    """`START END`, both included."""
    start, _, end = text.partition(" ")
    first, last = to_int(start, warn), to_int(end, warn)
    if 0 < last < first:
        raise ValueError(f"expected START END with START not above END, got {text!r}")
    return first, last


def to_kv_override(text: str, warn: Warn) -> tuple[str, object]:
    """`KEY=TYPE:VALUE` with TYPE int, float, bool or str; key up to 127 bytes, str up to 127 bytes."""
    key, equals, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not (key and equals and colon) or len(key.encode()) > 127:
        raise ValueError(f"expected KEY=TYPE:VALUE, got {text!r}")
    if kind == "int" and -(1 << 63) <= (number := _integer(value, warn)) < 1 << 63:
        return key, number
    if kind == "float":
        return key, to_float(value, warn)
    if kind == "bool" and value in ("true", "false"):
        return key, value == "true"
    if kind == "str" and len(value.encode()) <= 127:
        return key, value
    raise ValueError(f"TYPE:VALUE must be int:N (64 bits), float:F, bool:true|false or str:TEXT, got {rest!r}")


def to_kv_overrides(text: str, warn: Warn) -> list[tuple[str, object]]:
    """`KEY=TYPE:VALUE[,KEY=TYPE:VALUE...]`; a comma before anything else belongs to the value."""
    return [to_kv_override(item, warn) for item in re.split(r",(?=[^,=:]+=(?:int|float|bool|str):)", text)]


def to_json_object(text: str, warn: Warn) -> dict[str, Any]:
    """JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}
ESCAPE = re.compile(rb"""\\(x[0-9a-fA-F]{2}|[nrt'"\\])""")


def unescape(text: str) -> str:
    r"""Decode \n \r \t \' \" \\ and \xHH (a byte); an unknown escape keeps its backslash."""
    if "\\" not in text:
        return text

    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code[1:], 16)]) if code.startswith(b"x") else ESCAPES[code]

    return ESCAPE.sub(replace, text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def to_table_format(text: str, warn: Warn) -> str:
    """Form of the rows of sweep-bench and batched-bench; `table` is another word for md."""
    return choice("md", "jsonl", "csv")("md" if text == "table" else text, warn)
