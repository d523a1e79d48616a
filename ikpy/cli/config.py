"""Options from a TOML file: `ctx-size = 8192`, `metrics = true`, `api-key = ["a", "b"]`, tables for single tools."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ikpy.cli.options import TOOLS, by_name
from ikpy.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def config_arguments(path: str, tool: str) -> list[str]:
    """The file as command-line arguments for a tool: top-level keys, then those of the table with its name.

    Raises UsageError naming file and key.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also numbers and nesting without bound
        raise UsageError(f"--config {path}: {error}") from None
    arguments: list[str] = []
    for key, value in content.items():
        if not isinstance(value, dict):
            arguments += option_arguments(path, tool, key, value)
        elif key not in TOOLS:
            raise UsageError(f"--config {path}: no tool is called [{key}]; tables are: {', '.join(TOOLS)}")
    for key, value in content.get(tool, {}).items():
        arguments += option_arguments(path, tool, key, value)
    return arguments


def option_arguments(path: str, tool: str, key: str, value: Any) -> list[str]:
    """One key as arguments. A list stands for several uses of the option, a list in it for several values."""
    name = "--" + key.replace("_", "-")
    row = by_name(TOOLS[tool]).get(name)
    if row is None or name == "--config":
        raise UsageError(f"--config {path}: unknown option {key}")
    if isinstance(value, list):
        return [word for item in value for word in [name, *words(path, key, item)]]
    if isinstance(value, bool) and not row.kind.metavar:
        if value:
            return [name]
        raise UsageError(f"--config {path}: {key} = {str(value).lower()} has no meaning; leave the key out")
    if isinstance(value, bool) and row.kind.optional:
        return [name, *row.kind.words(value)]
    return [name, *words(path, key, value)]


def words(path: str, key: str, value: Any) -> list[str]:
    """A value as arguments."""
    if isinstance(value, list):
        return [word for item in value for word in words(path, key, item)]
    if isinstance(value, bool):
        return ["on" if value else "off"]
    if isinstance(value, int) and value.bit_length() > 64:  # Python does not print numbers of any length
        raise UsageError(f"--config {path}: {key} is too large")
    if isinstance(value, (int, float, str)):
        return [str(value)]
    raise UsageError(f"--config {path}: {key} must be a number, a text, true, false or a list")
