"""The table of shared command-line options: every flag of the common tools is declared once.

The rows live in `ikpy.cli.flags`, one file per group; this module defines what a row is and gives look-ups. The
parser, `--help`, and docs/options.md are all driven by the table. Adding a flag is one row there, plus the use of its
value somewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

from ikpy.cli import values
from ikpy.cli.fields import get_field
from ikpy.cli.params import CommonParams

TOOLS = {"perplexity": "P", "imatrix": "I", "server": "S", "sweep-bench": "W", "batched-bench": "B", "cli": "C"}
ALL = "".join(TOOLS.values())
"""Letters of all common tools."""

NO_GPU = "no usable CUDA device"


class Effect(Enum):
    """What giving an option does."""

    USED = "used"
    ALWAYS = "always on"
    IGNORED = "accepted, no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Kind:
    """How an option takes its value.

    Attributes:
        metavar: placeholders of the values in the help text, separated by blanks; empty for a flag.
        convert: text to value; a flag stores `const` instead.
        const: value of a flag, or of an option whose value is left out.
        optional: the next argument is a value only if it is one of these words (lower-cased).
        many: values accumulate; the first use replaces the default.
        off: what a variable that says `off` stores, where that is not the opposite of a switch.
    """

    metavar: str = ""
    convert: values.Convert = values.to_text
    const: Any = None
    optional: tuple[str, ...] = ()
    many: bool = False
    off: Any = None

    @property
    def opposite(self) -> Any:
        """What a variable that says `off` stores; None if no opposite is known."""
        return not self.const if isinstance(self.const, bool) else self.off

    def words(self, on: bool) -> list[str]:
        """The value that says yes or no, of an option that may go without."""
        if "1" in self.optional:
            return [str(int(on))]
        return [] if on else [str(self.off)]

    @property
    def nargs(self) -> int:
        """Number of values that must follow."""
        return 0 if self.optional else len(self.metavar.split())


@dataclass(frozen=True)
class Option:
    """One option with all its spellings.

    Attributes:
        names: spellings, shortest first.
        kind: value syntax.
        dest: dotted path of the CommonParams field ("" when nothing is stored).
        help: one sentence.
        group: heading in the help text.
        used: letters of the tools whose behaviour it changes.
        effect: whether giving it does anything; `reason` says why not, or what to do instead.
        also: field that receives the raw text of the value (a file name whose content goes to `dest`).
        env: environment variables that set it, separated by blanks.
        quiet: raw values, separated by blanks, that give no warning because they ask for what happens anyway.
    """

    names: tuple[str, ...]
    kind: Kind
    dest: str
    help: str
    group: str = ""
    used: str = ALL
    effect: Effect = Effect.USED
    reason: str = ""
    also: str = ""
    env: str = ""
    quiet: str = ""

    @property
    def name(self) -> str:
        """The first spelling."""
        return self.names[0]

    @property
    def default(self) -> Any:
        """Value of the field when the option is not given."""
        return get_field(CommonParams(), self.dest) if self.dest else None


FLAG = Kind(const=True)
OFF = Kind(const=False)
INT = Kind("N", values.to_int)
COUNT = Kind("N", values.bounded(0))
COUNT_OR_ALL = Kind("N", values.bounded(-1))
FLOAT = Kind("F", values.to_float)
TEXT = Kind("TEXT")
PATH = Kind("FILE")
NONEMPTY_PATH = Kind("FILE", values.to_file)
SWITCH = Kind("on|off", values.to_switch, const=True, optional=tuple(values.SWITCH_WORDS))
SWITCH_OR_AUTO = replace(SWITCH, metavar="on|off|auto", convert=values.to_switch_or_auto)
BARE_OR_BIT = Kind("0|1", values.to_switch, const=True, optional=("0", "1"))


def option(names: str, kind: Kind, dest: str, text: str, used: str = ALL, **more: Any) -> Option:
    """A row of the table; `names` separates the spellings by blanks."""
    return Option(tuple(names.split()), kind, dest, text, used=used, **more)


def always(names: str, text: str, used: str = ALL, kind: Kind = FLAG, **more: Any) -> Option:
    """A switch for something that is on in any case."""
    return Option(tuple(names.split()), kind, "", text, used=used, effect=Effect.ALWAYS, **more)


def ignored(names: str, reason: str, text: str, used: str = ALL, kind: Kind = FLAG, **more: Any) -> Option:
    """An option that is accepted with a warning giving the reason."""
    return Option(tuple(names.split()), kind, "", text, used=used, effect=Effect.IGNORED, reason=reason, **more)


def refused(names: str, reason: str, text: str, used: str = ALL, kind: Kind = FLAG, **more: Any) -> Option:
    """An option whose request would change results but cannot be met: an error."""
    return Option(tuple(names.split()), kind, "", text, used=used, effect=Effect.REFUSED, reason=reason, **more)


@cache
def all_options() -> tuple[Option, ...]:
    """The whole table, in the order of the help text."""
    from ikpy.cli.flags import GROUPS

    rows = []
    for title, group in GROUPS:
        rows += [Option(**(vars(row) | {"group": title})) for row in group]
    return tuple(rows)


@cache
def by_name(letter: str = "") -> dict[str, Option]:
    """Option of every spelling; of two rows with one spelling, the one that the tool with this letter uses."""
    table: dict[str, Option] = {}
    for row in all_options():
        for name in row.names:
            if name not in table or not letter or letter not in table[name].used:
                table[name] = row
    return table


def normalize_name(argument: str) -> str:
    """In arguments that start with `--`, `_` is read as `-`."""
    return argument.replace("_", "-") if argument.startswith("--") else argument
