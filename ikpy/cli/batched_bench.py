"""`ikpy batched-bench`: speed of several sequences at once."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ikpy.cli.params import CommonParams
from ikpy.cli.session import bench_numbers, load
from ikpy.cli.start import start
from ikpy.errors import UsageError

if TYPE_CHECKING:
    from ikpy.tools.batched_bench import BatchedSettings


def make_settings(params: CommonParams) -> BatchedSettings:
    """Settings from the command line; without -c the context holds every combination.

    Raises:
        UsageError: no combination fits into the context.
    """
    from ikpy.tools.batched_bench import BatchedSettings

    context, batched = params.context, params.batched
    settings = BatchedSettings(
        **bench_numbers(params, context.n_ctx),
        shared=batched.shared,
        separate=batched.separate,
        n_prompt=tuple(batched.n_prompt),
        n_generate=tuple(batched.n_generate),
        n_sequences=tuple(batched.n_sequences),
    )
    needs = [settings.n_kv(*row) for row in settings.rows()]
    if context.n_ctx and min(needs) > context.n_ctx:
        raise UsageError(
            f"no combination of -npp, -ntg and -npl fits into -c {context.n_ctx}: the smallest needs {min(needs)} cells"
        )
    return settings if context.n_ctx else replace(settings, n_kv_max=max(needs))


def run(arguments: Sequence[str]) -> int:
    """Measure all combinations; returns the exit status."""
    params = start("batched-bench", arguments, "Speed of several sequences at once.")
    if params is None:
        return 0
    settings = make_settings(params)
    changes = {"n_ctx": settings.n_kv_max, "n_seq_max": max(settings.n_sequences)}
    session = load(params, **changes)
    context = session.new_context(**changes)
    from ikpy.tools.batched_bench import FORMS, BatchedBench

    settings = replace(settings, n_kv_max=context.n_ctx, n_batch=context.n_batch, n_ubatch=context.n_ubatch)
    bench = BatchedBench(settings, context, session.timings)
    session.model.gguf.wait_until_filled()
    bench.warm_up()
    session.reset_timings()
    bench.run(FORMS[params.batched.output_format], sys.stdout, lambda line: session.log([line]))
    session.finish()
    return 0
