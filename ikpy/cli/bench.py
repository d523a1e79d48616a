"""`ikpy bench`: speed of prompt processing and generation for every combination of the given values."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from ikpy.backends.remote import hosts
from ikpy.cli.bench_command import parse_bench
from ikpy.cli.bench_options import help_rows
from ikpy.cli.model_files import default_model
from ikpy.cli.start import place_on_nodes, print_devices, warn_of_threads
from ikpy.cli.thread_options import ThreadOptions, use_sets
from ikpy.cli.values import MAX_THREADS
from ikpy.errors import UsageError

if TYPE_CHECKING:
    from ikpy.tools.bench_tests import BenchParams


def run(arguments: Sequence[str]) -> int:
    """Run the benchmark; returns the exit status."""
    command = parse_bench(arguments)
    if command.action == "help":
        from ikpy.cli.help import print_help

        title = "Measure prompt processing and generation. Lists are separated by commas; options may be repeated."
        print_help(title, "ikpy bench [options]", help_rows())
        return 0
    hosts.use(command.values.get("hosts", ()))
    if command.values.get("list_devices"):
        print_devices()
        return 0
    for line in dict.fromkeys(command.warnings):
        print(f"warning: {line}", file=sys.stderr)
    from ikpy.cli.bench_log import LoggingEngine
    from ikpy.tools.bench import NothingWrittenError, Runner
    from ikpy.tools.bench_output import PRINTERS
    from ikpy.tools.bench_tests import bench_tests

    limit = place_on_nodes(command.values.get("numa"))  # before the cores are counted
    limit = min(limit, place_bench_threads(command.values))
    command.values["models"] = [*command.values.get("models", []), *fetch_models(command.values)]
    params = command.params(default_model)
    params.threads = [(min(generation, limit), min(batch, limit)) for generation, batch in params.threads]
    warn_of_threads(*(count for pair in params.threads for count in pair))
    if params.dry_run:
        print_plans(params)
        return 0
    printers = [PRINTERS[params.output](params, sys.stdout), PRINTERS[params.output_err](params, sys.stderr)]
    for printer in printers:
        printer.begin()
    runner = Runner(params, LoggingEngine(params))
    tests = list(bench_tests(params))
    skipped: list[str] = []
    """Why some measure nothing."""
    if not tests:
        print("warning: nothing is measured: -p and -n are 0", file=sys.stderr)
    for number, test in enumerate(tests, 1):
        if params.progress:
            print(f"bench: test {number}/{len(tests)}: {test.label}", file=sys.stderr)
        time.sleep(params.delay)
        try:
            result = runner.run(test)
        except NothingWrittenError as error:
            skipped.append(str(error))
            continue
        for printer in printers:
            printer.result(result)
    for printer in printers:
        printer.end()
    for line in dict.fromkeys(skipped):
        print(f"{'error' if len(skipped) == len(tests) else 'warning'}: {line}", file=sys.stderr)
    return int(bool(tests) and len(skipped) == len(tests))


def place_bench_threads(values: Mapping[str, Any]) -> int:
    """Does what the options of threads say; returns the largest number of threads that they leave.

    Raises:
        UsageError: CPUs that this process may not use.
    """
    names = ("mask", "strict", "priority", "poll")
    options = ThreadOptions(**{name: values[name] for name in names if name in values})
    if options != ThreadOptions():
        use_sets([options.as_set()] * 4, values.get("numa"), lambda line: print(f"warning: {line}", file=sys.stderr))
    return MAX_THREADS if options.mask is None or "threads" in values else len(options.mask)


def fetch_models(values: Mapping[str, Any]) -> list[str]:
    """Files of the models of -hf and -hff. UsageError for a file without a repository."""
    repos, files = values.get("hf_repos", []), values.get("hf_files", [])
    if len(files) > len(repos):
        raise UsageError("--hf-file requires --hf-repo")
    if not repos:
        return []
    from ikpy.tools.hub import fetch

    token, offline = values.get("hf_token") or os.environ.get("HF_TOKEN"), bool(values.get("offline"))
    pairs = zip_longest(repos, files)
    return [
        fetch(repo, file, token, lambda line: print(line, file=sys.stderr), offline=offline) for repo, file in pairs
    ]


def print_plans(params: BenchParams) -> None:
    """Print what every test would take in memory, on standard output."""
    from ikpy.cli.bench_log import LoggingEngine
    from ikpy.tools.bench import Runner
    from ikpy.tools.bench_tests import bench_tests

    runner = Runner(params, LoggingEngine(params))
    for test in bench_tests(params):
        print(f"{test.model}, {test.label}:", *runner.plan(test).lines(), sep="\n")
