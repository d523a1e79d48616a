"""Command line of ikpy: one Typer application, subcommands imported when they are called.

The argument vector of a subcommand is handed on untouched: options such as `-ngl 99` or `-fa` with and without a value
are read by `ikpy.cli.parser`, not by Typer.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from itertools import dropwhile
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from ikpy.cli import log_streams
from ikpy.cli.streams import prepare_streams
from ikpy.errors import IkpyError, UsageError, printable
from ikpy.signals import lost_interrupts, termination

COMMANDS = {
    "cli": ("ikpy.cli.chat", "generate text, chat"),
    "perplexity": ("ikpy.cli.perplexity", "perplexity, KL divergence, multiple-choice scores"),
    "bench": ("ikpy.cli.bench", "speed of prompt processing and generation"),
    "sweep-bench": ("ikpy.cli.sweep_bench", "speed over the length of the context"),
    "batched-bench": ("ikpy.cli.batched_bench", "speed of several sequences at once"),
    "convert": ("ikpy.cli.convert", "make a GGUF file from a Hugging Face checkpoint"),
    "quantize": ("ikpy.cli.quantize", "make a quantized copy of a model"),
    "imatrix": ("ikpy.cli.imatrix", "compute an importance matrix"),
    "server": ("ikpy.cli.server", "HTTP server"),
    "rpc-server": ("ikpy.cli.rpc_server", "lend this machine to programs on others (--rpc)"),
    "tokenize": ("ikpy.cli.tokenize", "show how a text is divided into tokens"),
    "gguf": ("ikpy.cli.gguf", "show, split, merge and change GGUF files"),
    "cuda": ("ikpy.cli.cuda", "devices; kernels built, measured and checked"),
    "info": ("ikpy.cli.info", "version, build and machine"),
}
"""Subcommand -> module with a function run(arguments) -> exit status, help line."""

PROGRAMS = {
    "llama-completion": "cli",
    "llama-mtmd-cli": "cli",
    "llama-gguf-split": "gguf split",
    "llama-gguf-hash": "gguf hash",
    "gguf_dump.py": "gguf dump",
    "gguf-dump": "gguf dump",
    "gguf_set_metadata.py": "gguf set",
    "gguf-set-metadata": "gguf set",
    "convert_hf_to_gguf.py": "convert",
}
"""Names of programs that are not `llama-` and a subcommand -> command line they stand for; see `named_command`."""

INTERRUPTED = 130
READER_GONE = 141
"""Nobody reads the output any more: the status that shells give to programs that SIGPIPE ends."""
WRITERS = ("convert", "quantize", "imatrix", "perplexity", "gguf")
"""Subcommands that save or tidy up when they are told to end, as when they are interrupted."""
MEMORY_HINT = ": a smaller context (-c) or batch (-b, -ub) or fewer threads need less"
NO_THREADS = "the system starts no more threads: use fewer, or raise its limit (ulimit -u, that of a container)"
LOST_FILE = b"error: a file in use cannot be read any more: it was shortened, or its disk or network drive failed\n"
WITHOUT_CONTEXT = ("convert", "quantize", "tokenize", "gguf", "info", "rpc-server")
"""Subcommands that the hint does not suit."""


class PassThrough(TyperCommand):
    """A command whose arguments are not parsed by Typer."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments as they are, in `ctx.args`."""
        ctx.args = list(args)
        return []


def asks_for(option: str, arguments: Sequence[str]) -> bool:
    """Whether an option comes first behind a subcommand, or behind one of the subcommand's own."""
    words = list(dropwhile(lambda word: word.startswith("-"), arguments))
    return option in words[1 : 3 if words[:1] in (["gguf"], ["cuda"]) else 2]


def print_completion(wanted: bool) -> None:
    """Callback of --completion-bash."""
    if wanted:
        from ikpy.cli.completion import bash_script

        print(bash_script(), end="")
        raise typer.Exit()


def print_version(wanted: bool) -> None:
    """Callback of --version."""
    if wanted:
        from ikpy.tools.machine import version_lines

        print(*version_lines(), sep="\n")
        raise typer.Exit()


def runner(module: str) -> Callable[..., None]:
    """Callback that imports the module and runs it on the raw arguments."""

    def run(ctx: typer.Context) -> None:
        from ikpy._native.faults import name_bus_errors

        name_bus_errors(LOST_FILE)
        raise typer.Exit(import_module(module).run(list(ctx.args)) or 0)

    return run


def own_options(
    version: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Print version and compiler."
    ),
    verbose: bool = typer.Option(False, "--verbose", help="Print a traceback with errors."),
    completion: bool = typer.Option(
        False,
        "--completion-bash",
        callback=print_completion,
        is_eager=True,
        help="Print what makes bash complete commands and options: source <(ikpy --completion-bash)",
    ),
) -> None:
    """Run and make quantized GGUF language models."""


def make_app(*, has_options: bool = True) -> typer.Typer:
    """The application with every subcommand. Without options, for which Typer loads pydantic, it starts faster."""
    app = typer.Typer(
        name="ikpy",
        help="Run and make quantized GGUF language models.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
        add_help_option=has_options,
    )
    if has_options:
        app.callback()(own_options)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    for name, (module, text) in COMMANDS.items():
        app.command(name, cls=PassThrough, help=text, context_settings=settings, add_help_option=False)(runner(module))
    return app


def check_command(arguments: Sequence[str]) -> None:
    """Refuse a subcommand that does not exist, naming the closest one.

    Raises:
        UsageError: unknown subcommand.
    """
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name is None or name in COMMANDS:
        return
    close = get_close_matches(name.removeprefix("llama-"), COMMANDS, n=1)
    hint = f" (did you mean {close[0]}?)" if close else f" (commands: {', '.join(COMMANDS)})"
    raise UsageError(f"no such command: {name}{hint}")


def named_command(program: str, arguments: Sequence[str]) -> list[str]:
    """The subcommand that a program name such as `llama-quantize`, a link to ikpy, stands for; none for others."""
    name = Path(program).name
    if name == "llama-gguf-split" and "--merge" in arguments:
        return ["gguf", "merge"]
    if name in PROGRAMS:
        return PROGRAMS[name].split()
    prefix, _, command = name.partition("-")
    return [command] if prefix == "llama" and command in COMMANDS else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    An error the user can cause is one line on standard error and status 1; `--verbose` adds the traceback.
    """
    lost_interrupts.install()
    prepare_streams()
    if arguments is None:
        arguments = named_command(sys.argv[0], sys.argv) + sys.argv[1:]
    arguments = list(arguments) or ["--help"]
    if arguments[0] not in COMMANDS:  # `ikpy gguf-split` of scripts in which `llama-` was replaced
        arguments[:1] = named_command(f"llama-{arguments[0]}", arguments) or arguments[:1]
    try:
        if next((name for name in arguments if not name.startswith("-")), None) not in WRITERS:
            return run(arguments)
        with termination.as_interruptions() as signals:
            status = run(arguments)
    finally:
        log_streams.remove()
    termination.count_as_handled()
    return status if signals.status is None else signals.status


def run(arguments: Sequence[str]) -> int:
    """Runs a subcommand; exit status as of `main`."""
    verbose = bool({"--verbose", "-v", "--log-verbose"} & set(arguments))
    try:
        check_command(arguments)
        if asks_for("--completion-bash", arguments):
            arguments = ["--completion-bash"]
        if asks_for("--version", arguments):
            from ikpy.tools.machine import version_lines

            print(*version_lines(), sep="\n", file=sys.stderr)
            return 0
        app = make_app(has_options=arguments[0] not in COMMANDS)
        status = app(args=arguments, prog_name="ikpy", standalone_mode=False)
        sys.stdout.flush()
        return int(status or 0)
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Keep the interpreter's own flush at exit quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # Typer has met it
            return READER_GONE
        raise
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # the interpreter wraps what comes while a class is made
            print(file=sys.stderr)
            return INTERRUPTED
        return report(error, arguments, verbose)


def report(error: Exception, arguments: Sequence[str], verbose: bool) -> int:
    """Print an error as one line, behind a wrong option with one on usage; returns the exit status."""
    sys.stdout.flush()
    if verbose:
        traceback.print_exception(error, file=sys.stderr)
    exit_code = getattr(error, "exit_code", 1)
    format_message = getattr(error, "format_message", None)
    if format_message is not None:
        print(f"error: {format_message()}", file=sys.stderr)
        if (context := getattr(error, "ctx", None)) is not None:
            path = context.command_path
            usage = " ".join([path, *context.command.collect_usage_pieces(context)])
            print(f"usage: {usage}; all options: {path} --help", file=sys.stderr)
        return min(exit_code, 1)
    if isinstance(error, (IkpyError, MemoryError, OSError)):
        command = next((name for name in arguments if name in COMMANDS), None)
        hint = MEMORY_HINT if isinstance(error, MemoryError) and command not in WITHOUT_CONTEXT else ""
        print(f"error: {one_line(error)}{hint}", file=sys.stderr)
        if isinstance(error, UsageError) and command and str(error).startswith(("unknown", "invalid parameter")):
            print(f"usage: ikpy {command} [options]; all options: ikpy {command} --help", file=sys.stderr)
        return 1
    from ikpy.machine.threads import is_lack_of_threads

    if is_lack_of_threads(error):
        print(f"error: {NO_THREADS}", file=sys.stderr)
        return 1
    print(f"error: internal error: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
    if not verbose:
        print("run `ikpy --verbose ...` to see where", file=sys.stderr)
    return 1


def one_line(error: BaseException) -> str:
    """Message of an exception without line breaks and control characters."""
    message = str(error)
    if isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    elif isinstance(error, MemoryError):
        message = f"not enough memory ({error})" if message else "not enough memory"
    return printable(message)
