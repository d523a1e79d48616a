"""`ikpy --completion-bash`: a script with which bash completes commands, options and file names."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from ikpy.cli import COMMANDS, PROGRAMS, bench_options, convert, gguf, quantize_arguments, rpc_server, tokenize
from ikpy.cli.options import TOOLS, Effect, by_name

SCRIPT = """# Completion for bash of ikpy and of links to it: source <(ikpy --completion-bash)
_ikpy() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} name=${{COMP_WORDS[0]##*/}} line=${{COMP_WORDS[*]:1:COMP_CWORD-1}}
    local words= options=
    case $name in
{programs}
    esac
    case "$line " in
{commands}
    esac
    if [[ $current == -* ]]; then words=$options; fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _ikpy ikpy {names}
"""


def bash_script() -> str:
    """The script; with nothing to offer, bash completes file names."""
    programs = {f"llama-{name}": name for name in COMMANDS} | PROGRAMS
    options = options_of_commands()
    commands = [f'"{line} "*) options="{" ".join(names)}" ;;' for line, names in options.items() if " " in line]
    parents = {line.partition(" ")[0] for line in options if " " in line}
    commands += [f'"{name} ") words="{" ".join(subcommands(name, options))}" ;;' for name in sorted(parents)]
    commands += [f'"{line} "*) options="{" ".join(names)}" ;;' for line, names in options.items() if " " not in line]
    commands.append(f'" ") words="{" ".join(COMMANDS)}" options="--help --version" ;;')
    return SCRIPT.format(
        programs=indented(f'{name}) line="{to} $line" ;;' for name, to in programs.items()),
        commands=indented(commands),
        names=" ".join(programs),
    )


def indented(lines: Iterable[str]) -> str:
    """Lines of a `case`."""
    return "\n".join(f"        {line}" for line in lines)


def subcommands(command: str, options: Iterable[str]) -> list[str]:
    """Second words of a command."""
    return [line.partition(" ")[2] for line in options if line.startswith(f"{command} ")]


def options_of_commands() -> dict[str, list[str]]:
    """Options that have an effect, by command, or command and subcommand."""
    found = {
        tool: [
            name
            for name, row in by_name(letter).items()
            if letter in row.used and row.effect in (Effect.USED, Effect.ALWAYS)
        ]
        for tool, letter in TOOLS.items()
    }
    found["bench"] = [name for name, row in bench_options.BY_NAME.items()]
    found["quantize"] = [*quantize_arguments.FLAGS, *sorted(quantize_arguments.VALUE_OPTIONS)]
    found["tokenize"] = [*tokenize.FLAGS, *tokenize.VALUE_OPTIONS]
    found["rpc-server"] = [*rpc_server.FLAGS, *rpc_server.VALUE_OPTIONS]
    found["convert"] = options_of(typer.main.get_command(convert.app))
    for name, command in getattr(typer.main.get_command(gguf.app), "commands", {}).items():
        found[f"gguf {name}"] = options_of(command)
    found |= {"cuda info": [], "cuda build": ["--arch", "--jobs", "--force", "--usage", "--no-spills"], "cuda tune": []}
    found["cuda check"] = found["cli"]
    return {line: [*dict.fromkeys([*names, "--help"])] for line, names in found.items()}


def options_of(command: object) -> list[str]:
    """Spellings of the options of a command of Typer that its help shows."""
    parameters = getattr(command, "params", [])
    return [
        name
        for parameter in parameters
        if not getattr(parameter, "hidden", False)
        for name in parameter.opts
        if name.startswith("-")
    ]
