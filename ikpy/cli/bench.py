"""`ikpy bench`: speed of prompt processing and generation for every combination of the given values."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ikpy.cli.bench_options import help_rows, parse_bench
from ikpy.cli.common import default_model, place_on_nodes

if TYPE_CHECKING:
    from ikpy.tools.bench import BenchParams


def run(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit status."""
    command = parse_bench(arguments)
    if command.action == "help":
        from ikpy.cli.help import print_help

        title = "Measure prompt processing and generation. Lists are separated by commas; options may be repeated."
        print_help(title, "ikpy bench [options]", help_rows())
        return 0
    for line in dict.fromkeys(command.warnings):
        print(f"warning: {line}", file=sys.stderr)
    from ikpy.tools.bench import Engine, Runner, bench_tests
    from ikpy.tools.bench_output import PRINTERS

    limit = place_on_nodes(command.values.get("numa"))  # before the cores are counted
    params = command.params(default_model)
    params.threads = [(min(generation, limit), min(batch, limit)) for generation, batch in params.threads]
    if params.dry_run:
        print_plans(params)
        return 0
    printers = [PRINTERS[params.output](params, sys.stdout), PRINTERS[params.output_err](params, sys.stderr)]
    for printer in printers:
        printer.begin()
    log = (lambda line: print(line, file=sys.stderr)) if params.verbose else None
    runner = Runner(params, Engine(params, log))
    for test in bench_tests(params):
        result = runner.run(test)
        for printer in printers:
            printer.result(result)
    for printer in printers:
        printer.end()
    return 0


def print_plans(params: BenchParams) -> None:
    """Print what every test would take in memory, on standard output."""
    from ikpy.tools.bench import Engine, Runner, bench_tests

    runner = Runner(params, Engine(params))
    for test in bench_tests(params):
        print(f"{test.model}, {test.label}:", *runner.plan(test).lines(), sep="\n")
