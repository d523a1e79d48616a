"""`ikpy sweep-bench`: speed over the length of the context."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ikpy.cli.params import CommonParams
from ikpy.cli.session import bench_numbers, load
from ikpy.cli.start import start
from ikpy.errors import UsageError

if TYPE_CHECKING:
    from ikpy.tools.sweep_bench import SweepSettings


def make_settings(params: CommonParams, n_ctx: int) -> SweepSettings:
    """Settings of a sweep over a context of `n_ctx` tokens.

    Raises:
        UsageError: not one row fits into the context.
    """
    from ikpy.tools.sweep_bench import SweepSettings

    sweep = params.sweep
    numbers = bench_numbers(params, n_ctx)
    n_ubatch = numbers["n_ubatch"]
    n_generate = params.prompt.n_predict if params.prompt.n_predict > 0 else n_ubatch // 4
    if n_ubatch > n_ctx:
        raise UsageError(f"-ub {n_ubatch} is larger than the context ({n_ctx}): lower -ub or raise -c")
    if n_generate > n_ctx:
        raise UsageError(f"-n {n_generate} is larger than the context ({n_ctx}): lower -n or raise -c")
    return SweepSettings(
        **numbers,
        n_generate=n_generate,
        stride=sweep.stride,
        n_repetitions=sweep.n_repetitions,
        warmup_batch=sweep.warmup_batch,
        memory=sweep.memory,
    )


def run(arguments: Sequence[str]) -> int:
    """Run the sweep; returns the exit status."""
    params = start("sweep-bench", arguments, "Speed of prompt processing and generation at growing context length.")
    if params is None:
        return 0
    if params.context.n_ctx > 0:
        multiple = params.context_params().cell_multiple
        make_settings(params, -(-params.context.n_ctx // multiple) * multiple)
    session = load(params)
    context = session.new_context()
    settings = make_settings(params, context.n_ctx)
    from ikpy.tools.sweep_bench import PRINTERS, ContextDecoder, Sweep

    printer = PRINTERS[params.sweep.output_format](settings, sys.stdout)
    decoder = ContextDecoder(context, session.timings)
    sweep = Sweep(settings, decoder, session.model.hparams.n_vocab, session.vocab.bos)
    printer.begin()
    session.model.gguf.wait_until_filled()
    sweep.warm_up()
    session.reset_timings()
    sweep.run(printer.row)
    rest = settings.n_kv_max - settings.depths()[-1] - settings.n_ubatch
    if rest:
        session.log([f"the last {rest} tokens of the context were not measured: a whole row does not fit there"])
    session.finish()
    return 0
