"""`ikpy quantize`: make a quantized copy of a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ikpy.cli.parser import suggest
from ikpy.cli.quantize_arguments import SYNOPSIS, Arguments, CommandLineError, idle_options, parse, usage
from ikpy.errors import IkpyError, printable
from ikpy.quants.mixture import TypeOptions
from ikpy.quants.recipe import Recipe


def run(argv: Sequence[str]) -> int:
    """Run the tool on an argument vector without the program name; returns the exit status."""
    if "--help" in argv or "-h" in argv:
        print(usage())
        return 0
    try:
        arguments = parse(argv)
    except CommandLineError as error:
        # The mistake comes last: behind a long text it would have to be searched for.
        print(SYNOPSIS, "all options and types: ikpy quantize --help", sep="\n", flush=True)
        print(printable(str(error)), file=sys.stderr)
        return 1
    for line in idle_options(arguments):
        print(f"WARNING: no effect: {printable(line)}", file=sys.stderr)
    for rule in arguments.rules:
        print(f"Adding custom rule {rule.pattern} -> {rule.type}")
    from ikpy.machine.threads import hardware_threads
    from ikpy.tools import quantize as tool
    from ikpy.tools.quantize_plan import MissingImatrixError, refuse_without_imatrix

    stopwatch = tool.Stopwatch()
    try:
        options = _options(arguments)
        options.n_threads = arguments.n_threads if arguments.n_threads > 0 else hardware_threads()
        refuse_without_imatrix(options)
    except IkpyError as error:
        lines = str(error).split("\n") if isinstance(error, MissingImatrixError) else [str(error)]
        print(*map(printable, lines), sep="\n", file=sys.stderr)
        return 1
    _print_header(arguments)
    status = _convert(arguments, options)
    if status == 0:
        elapsed = stopwatch.milliseconds()
        print(f"\nmain: quantize time = {elapsed:8.2f} ms\nmain:    total time = {elapsed:8.2f} ms")
    return status


def _options(arguments: Arguments) -> Any:
    from ikpy.tools.quantize_plan import QuantizeOptions

    options = QuantizeOptions(
        arguments.ftype,
        types=TypeOptions(**{**arguments.recipe_roles, **arguments.roles}),
        extra_output_type=arguments.extra_output,
        recipe=Recipe(arguments.rules),
        recipe_paths=tuple(arguments.recipe_paths),
        repack_patterns=tuple(arguments.patterns),
        kv_overrides=arguments.overrides,
        target=arguments.target,
        save_recipe=arguments.save_recipe,
        prune_layers=frozenset(arguments.prune_layers),
    )
    for flag in arguments.flags:
        setattr(options, flag, True)
    if arguments.imatrix:
        options.imatrix = _load_imatrix(arguments)
        options.imatrix_path = arguments.imatrix if options.imatrix else ""
    return options


def _load_imatrix(arguments: Arguments) -> Any:
    from ikpy.tools.imatrix_file import read_imatrix

    matrix = read_imatrix(arguments.imatrix)
    if matrix.dataset:
        print(f"load_imatrix: imatrix dataset='{matrix.dataset}'")
    print(
        f"load_imatrix: loaded {len(matrix.values)} importance matrix entries from {arguments.imatrix} "
        f"computed on {matrix.chunks} chunks"
    )
    matrix = matrix.filtered(arguments.include, arguments.exclude)
    print(f"prepare_imatrix: have {len(matrix.values)} importance matrix entries", flush=True)
    for line in matrix.gaps():
        print(f"WARNING: {printable(line)}", file=sys.stderr)
    if matrix.values:
        return matrix
    option = f"--{'include' if arguments.include else 'exclude'}-weights"
    print(f"WARNING: {option} leaves no entry; going on without an importance matrix", file=sys.stderr)
    return None


def _print_header(arguments: Arguments) -> None:
    from ikpy.tools import machine

    lines = [
        f"main: build = {machine.build_number()} ({machine.build_commit()})",
        f"main: built with {machine.compiler()} for {machine.target()}",
        f"main: quantizing '{arguments.source}' to '{arguments.output}' as {arguments.type_name}"
        + (f" using {arguments.n_threads} threads" if arguments.n_threads > 0 else ""),
    ]
    print(*lines, sep="\n", file=sys.stderr)


def _convert(arguments: Arguments, options: Any) -> int:
    from ikpy.gguf.reader import GGUFFile
    from ikpy.tools.model_logs import loader_lines, override_line
    from ikpy.tools.quantize import Quantizer
    from ikpy.tools.quantize_progress import display_for

    display = display_for(sys.stderr)
    header_only = options.dry_run and not options.target.is_given
    try:
        try:
            file = GGUFFile.open(arguments.source, header_only=header_only)
        except IkpyError as error:
            raise type(error)(f"llama_model_loader: failed to load model from {arguments.source}: {error}") from None
        with file:
            for line in loader_lines(file, arguments.source):
                display.write(line + "\n")
            for key, value in options.kv_overrides.items():
                new = "" if key in file.metadata else f" (new: the input has no such key{suggest(key, file.metadata)})"
                display.write(f"{override_line(key, value)}{new}\n")
            Quantizer(file, arguments.output, options, out=_write_out, display=display).run()
    except IkpyError as error:
        display.end()
        display.write(f"llama_model_quantize: failed to quantize: {printable(str(error))}\n")
        display.write(f"main: failed to quantize model from '{arguments.source}'\n")
        return 1
    return 0


def _write_out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
