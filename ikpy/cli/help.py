"""Help texts rendered from option tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ikpy.cli.options import TOOLS, Effect, Option, all_options, by_name
from ikpy.cli.parser import TOOL_DEFAULTS

EMPTY: tuple[Any, ...] = (None, "", [], {}, ())


def spelling(row: Option) -> str:
    """Spellings and value placeholders of an option."""
    metavar = f"[{row.kind.metavar}]" if row.kind.optional else row.kind.metavar
    return f"{', '.join(row.names)} {metavar}".rstrip()


def default_text(row: Option, tool: str = "") -> str:
    """` (default: X)` when the default says something: that of one tool, or the common one and those of other tools.

    Sentences that name a default themselves are left alone.
    """
    value = TOOL_DEFAULTS.get(tool, {}).get(row.dest, row.default)
    if isinstance(value, (list, tuple)) and value:
        value = (";" if isinstance(value[0], str) else ",").join(str(item) for item in value)
    if row.name == "-s":
        value = -1
    if value is True and row.kind.const is True:
        return " (default: on)"
    if isinstance(value, bool) or value in EMPTY or not row.kind.metavar or "default:" in row.help:
        return ""
    text = repr(value) if str(value) != str(value).strip() else str(value)
    if not tool:
        others = [(name, own[row.dest]) for name, own in TOOL_DEFAULTS.items() if row.dest in own]
        text += "".join(f"; {name}: {own}" for name, own in others)
    return f" (default: {text})"


def print_help(title: str, usage: str, rows: Iterable[Option], footer: str = "", tool: str = "") -> None:
    """Print options under their group headings, with the defaults of the tool."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 110
    console.print(Text(f"usage: {usage}\n\n{title}"))
    group = None
    table = None
    for row in rows:
        if row.group != group:
            if table is not None:
                console.print(Padding(table, (0, 0, 0, 2)))
            group = row.group
            console.print(Text(f"\n{group}:", style="bold"))
            table = Table(show_header=False, box=None, padding=(0, 1, 0, 0))
            table.add_column(width=min(38, console.width // 2), overflow="fold")
            table.add_column()
        assert table is not None
        env = f" [env: {row.env.replace(' ', ', ')}]" if row.env else ""
        always = "; always on" if row.effect is Effect.ALWAYS else ""
        table.add_row(Text(spelling(row)), Text(row.help + always + default_text(row, tool) + env))
    if table is not None:
        console.print(Padding(table, (0, 0, 0, 2)))
    if footer:
        console.print(Text(f"\n{footer}"))


def print_tool_help(tool: str, title: str, command: str) -> None:
    """Help of a command with a common tool's options: what it uses in groups, the other accepted ones as one list."""
    letter = TOOLS[tool]
    used = [row for row in all_options() if letter in row.used and row.effect in (Effect.USED, Effect.ALWAYS)]
    rest = {name: row for name, row in by_name(letter).items() if row not in used}
    refused = [name for name, row in rest.items() if row.effect is Effect.REFUSED and letter in row.used]
    accepted = [name for name in rest if name not in refused]
    footer = (
        f"Also accepted, without effect on {command} (docs/options.md says why): {' '.join(accepted)}\n\n"
        f"Refused, with the reason: {' '.join(refused)}"
    )
    print_help(title, f"ikpy {command} [options]", used, footer, tool)
