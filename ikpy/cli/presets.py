"""`--models-preset FILE`: models of a router and their options from an INI file, in the form llama-server reads.

A section is a model; `[*]` holds options for all. Keys are options without their dashes (`ctx-size`, `c`) or names of
their environment variables.
"""

from __future__ import annotations

import configparser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ikpy.cli.options import Effect, Option, all_options, by_name, normalize_name
from ikpy.cli.parser import Parser, suggest
from ikpy.cli.values import SWITCH_WORDS, checked_seconds
from ikpy.errors import UsageError

TOP, COMMON = "\0", "*"
"""Section of the lines before the first section, and the one for all models."""
Uses = list[tuple[Option, list[str]]]
"""Options, each with its words on a command line."""


@dataclass(frozen=True)
class Preset:
    """Options of a model; ``at_start``: it is loaded with the router, ``stop_seconds``: how long its requests may take
    to end when it is unloaded (None: as long as with other models)."""

    uses: Uses
    at_start: bool = False
    stop_seconds: float | None = None

    @property
    def sources(self) -> dict[str, str]:
        """What says where the model is: value by name of the option."""
        return {row.name: words[-1] for row, words in self.uses if row.name in SOURCES}


SOURCES = ("-m", "-hf", "-mu")


def read_presets(path: str, own: Sequence[tuple[str, ...]]) -> dict[str, Preset]:
    """Presets by name, the options of `[*]` in all of them; `*` itself holds for other models.

    Options whose spellings are in ``own`` belong to the router and are left out. Raises UsageError naming file, section
    and key.
    """
    sections = read_sections(path)
    common = {"version": "1", **sections.pop(TOP, {}), **sections.pop(COMMON, {})}
    found = {}
    for name, keys in {COMMON: {}, **sections}.items():
        where = f"--models-preset {path}: [{name}]"
        found[name] = read_preset(
            where, {**{key: value for key, value in common.items() if key not in keys}, **keys}, own
        )
        if name != COMMON:
            check(where, found[name])
    return found


def read_sections(path: str) -> dict[str, dict[str, str]]:
    """Keys and values of the sections. Raises UsageError."""
    file = configparser.ConfigParser(
        interpolation=None, strict=False, delimiters=("=",), comment_prefixes=(";", "#"), default_section="\1"
    )
    file.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        # Indented lines would go on with the value above them.
        file.read_string("\n".join([f"[{TOP}]", *(line.strip() for line in lines)]), path)
    except OSError as error:
        raise UsageError(f"--models-preset {path}: {error.strerror}") from None
    except (UnicodeDecodeError, configparser.Error) as error:
        raise UsageError(f"--models-preset {path}: {' '.join(str(error).split())}") from None
    return {name: {key: value.strip() for key, value in file.items(name)} for name in file.sections()}


def read_preset(where: str, keys: Mapping[str, str], own: Sequence[tuple[str, ...]]) -> Preset:
    """The preset of a section. Raises UsageError."""
    keys = dict(keys)
    if keys.pop("version") != "1":
        raise UsageError(f"{where}: only version 1 is known")
    keys.pop("dedup-cache-models", None)  # downloaded models are not listed apart from presets
    at_start = is_on(where, "load-on-startup", keys.pop("load-on-startup", "false"))
    seconds = keys.pop("stop-timeout", None)
    stop_seconds = None if seconds is None else to_seconds(where, "stop-timeout", seconds)
    uses = [use_of(where, key, value) for key, value in keys.items()]
    kept = [(row, words) for row, words in uses if row.names not in own and words]
    return Preset(overriding(kept, []), at_start, stop_seconds)


def to_seconds(where: str, key: str, value: str) -> float:
    """A time of at most a day. Raises UsageError."""
    try:
        return checked_seconds(float(value))
    except ValueError:
        raise UsageError(f"{where}: {key} = {value}: expected 0 to 86400 seconds") from None


def is_on(where: str, key: str, value: str) -> bool:
    """The value of a switch. Raises UsageError."""
    if value.lower() not in SWITCH_WORDS:
        raise UsageError(f"{where}: {key} = {value}: expected true or false")
    return SWITCH_WORDS[value.lower()]


def use_of(where: str, key: str, value: str) -> tuple[Option, list[str]]:
    """An option with its words; without words if the value switches off what is off anyway. Raises UsageError."""
    name, row = option_of(where, key)
    if row.kind.optional:
        said = [value] if value in row.kind.optional else row.kind.words(is_on(where, key, value))
        return row, [name, *said]
    if row.kind.metavar:
        return row, [name, *(value.split(None, row.kind.nargs - 1) if row.kind.nargs > 1 else [value])]
    if is_on(where, key, value):
        return row, [name]
    opposite = name.replace("--no-", "--", 1) if name.startswith("--no-") else name.replace("--", "--no-", 1)
    other = by_name("S").get(opposite)
    return (row, []) if other is None else (other, [opposite])


def option_of(where: str, key: str) -> tuple[str, Option]:
    """The option of a key, as it is spelled. Raises UsageError."""
    table = by_name("S")
    for name in (normalize_name(f"--{key}"), f"-{key}"):
        if name in table:
            return name, table[name]
    parser = Parser("server", {})
    for row in all_options():
        if key in parser.variables(row) and table.get(row.names[-1]) is row:
            return row.names[-1], row
    raise UsageError(f"{where}: unknown option {key}{suggest(f'--{key}', table)}")


def check(where: str, preset: Preset) -> None:
    """Raises UsageError for values that cannot be read, and for two sources of the model."""
    if len(preset.sources) > 1:
        raise UsageError(f"{where}: {' and '.join(preset.sources)} exclude each other")
    for row, words in preset.uses:
        if row.effect is Effect.REFUSED:
            raise UsageError(f"{where}: {words[0]}: {row.reason}")
    try:
        Parser("server", {}).parse([word for _, words in preset.uses for word in words])
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def overriding(uses: Uses, others: Uses) -> Uses:
    """The last use of each option, without those that ``others`` set too."""
    last = {(row.dest or row.name): (row, words) for row, words in uses}
    given = {row.dest or row.name for row, _ in others}
    return [use for target, use in last.items() if target not in given]
