"""`ikpy bench`: speed of prompt processing and generation for every combination of the given values."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ikpy.cli.bench_options import help_rows, parse_bench
from ikpy.cli.common import default_model


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

    params = command.params(default_model)
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
