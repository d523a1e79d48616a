"""Log lines of `ikpy bench`: warnings, and with -v all that is known of a model and a context."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from ikpy.cli.logs import context_log
from ikpy.cli.session import rope_type
from ikpy.gguf.reader import GGUFFile
from ikpy.tools.bench import Engine
from ikpy.tools.bench_tests import BenchParams, BenchTest
from ikpy.tools.model_logs import loader_lines, meta_lines

if TYPE_CHECKING:
    from ikpy.engine.context import Context


class LoggingEngine(Engine):
    """Writes to standard error: the table has standard output to itself."""

    def __init__(self, params: BenchParams) -> None:
        super().__init__(params, self.write)
        self.warnings: set[str] = set()

    def write(self, line: str) -> None:
        """Write a line, or without -v a warning that was not written yet: models are loaded many times."""
        if not self.params.verbose:
            if not line.startswith("warning: ") or line in self.warnings:
                return
            self.warnings.add(line)
        print(line, file=sys.stderr, flush=True)

    def load(self, test: BenchTest) -> Any:
        if self.params.verbose:
            with GGUFFile.open(test.model, header_only=True) as file:
                for line in (*loader_lines(file, test.model), *meta_lines(file, rope_type=rope_type(file))):
                    self.write(line)
        return super().load(test)

    def context(self, model: Any, test: BenchTest) -> Context:
        context = super().context(model, test)
        if self.params.verbose:
            for line in context_log(context):
                self.write(line)
        return context
