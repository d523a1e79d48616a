"""`ikpy perplexity`: perplexity, KL divergence, HellaSwag, Winogrande, multiple choice."""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ikpy.cli.banner import banner_lines
from ikpy.cli.checks import need_folder, need_output
from ikpy.cli.logs import log_stream, print_log
from ikpy.cli.needs import chooses, scores_text
from ikpy.cli.params import CommonParams, PerplexityOptions
from ikpy.cli.parser import MODES
from ikpy.cli.session import Session, load
from ikpy.cli.start import start
from ikpy.errors import UsageError
from ikpy.gguf.atomic import write_whole

if TYPE_CHECKING:
    from ikpy.tools.decoder import TimedContext
    from ikpy.tools.perplexity import PerplexityResult, Plan


def run(arguments: Sequence[str]) -> int:
    """Run the chosen mode; returns the exit status."""
    params = start("perplexity", arguments, "Perplexity of a model over a text, and other scores.")
    if params is None:
        return 0
    plan = make_plan(params)
    options = params.perplexity
    if not params.model.dry_run:
        check_input(params)
        check_tasks(params)
    if options.stride > 0 and scores_text(params):
        change = f"adjusting context size from {plan.n_ctx - options.stride // 2} to {plan.n_ctx}"
        print_log(params, [f"Will perform strided perplexity calculation -> {change}"])
    print_log(params, banner_lines(params))
    sizes = {"n_ctx": plan.n_ctx, "n_batch": plan.n_batch, "n_seq_max": plan.n_seq}
    session = load(params, **sizes)
    from ikpy.engine.sampling import NotANumberError
    from ikpy.tools.decoder import TimedContext

    context = session.new_context(**sizes)
    session.system_info()
    timed = TimedContext(context, session.timings)
    try:
        result = evaluate(session, timed, plan)
    except NotANumberError as error:
        raise NotANumberError(where=context.first_not_a_number(error.tokens)) from None
    if params.log.directory:
        write_result(params, session.path, result)
    session.finish()
    return 0


def evaluate(session: Session, context: TimedContext, plan: Plan) -> PerplexityResult | None:
    """Run the chosen mode; the estimate, if it makes one."""
    if chooses(session.params):
        run_choices(session, context, plan)
    elif session.params.perplexity.kl_divergence:
        run_kl_divergence(session, context, plan)
    else:
        return run_perplexity(session, context, plan)
    return None


def make_plan(params: CommonParams) -> Plan:
    """Context sizes of the chosen mode (perplexity.md)."""
    from ikpy.tools.perplexity import Plan, plan_perplexity

    context, options = params.context, params.perplexity
    if context.n_ctx <= 0:
        raise UsageError("perplexity tool requires '--ctx-size' > 0")
    n_batch = min(context.n_batch, context.n_ctx)
    if chooses(params):
        return Plan(context.n_ctx, context.n_ctx, n_batch, max(4, context.n_parallel))
    if options.kl_divergence:
        return Plan(context.n_ctx, context.n_ctx, n_batch, 1)
    return plan_perplexity(context.n_ctx, context.n_batch, options.stride)


def check_input(params: CommonParams) -> None:
    """Looks, before a model is loaded, whether there is something to evaluate.

    The bundled model gets the bundled text if none is given.

    Raises:
        UsageError: a text or file is missing.
    """
    options, prompt = params.perplexity, params.prompt
    if not chooses(params):
        check_base(options)
    if params.log.directory:
        need_folder("-ld", params.log.directory)
    if prompt.chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to evaluate; give a positive number, or -1 for the whole text")
    if options.multiple_choice and prompt.binary_file is None:
        raise UsageError("--multiple-choice needs its task file: -bf FILE")
    if options.kl_divergence or options.multiple_choice or prompt.text:
        return
    model_given = any((params.model.path, params.model.hf_repo, params.model.url))
    if options.hellaswag or options.winogrande or model_given or {"-p", "-f", "-bf"} & set(params.given):
        raise UsageError("there is no text to evaluate: give a file with -f")
    import ikpy

    path = ikpy.demo_text_path()
    print(f"no text given with -f: using the bundled demo text ({path})", file=sys.stderr)
    prompt.file, prompt.text = str(path), path.read_text(encoding="utf-8")


def check_base(options: PerplexityOptions) -> None:
    """Looks whether the base file can be read, or written.

    Raises:
        UsageError: there is none, it cannot be written, or not with strides.
    """
    if options.kl_divergence and not options.logits_file:
        raise UsageError(
            "you must provide a name of a file containing the log probabilities of the base model: "
            "--kl-divergence-base FILE"
        )
    if options.kl_divergence and options.logits_file:
        from ikpy.tools.kl_divergence import BaseFile

        BaseFile(options.logits_file)
    elif options.logits_file:
        if options.stride > 0:
            raise UsageError("--kl-divergence-base cannot be combined with --ppl-stride")
        need_output("--kl-divergence-base", options.logits_file)


def check_tasks(params: CommonParams) -> None:
    """Reads the tasks of a test, so that a wrong file is named before a model is loaded.

    Raises:
        FileFormatError: the file is none of the test's, or holds no task.
    """
    options, text = params.perplexity, params.prompt.text
    if not chooses(params):
        return
    from ikpy.tools import multiple_choice as tool

    if options.hellaswag:
        tool.read_hellaswag(text)
    elif options.winogrande:
        tool.read_winogrande(text, io.StringIO())
    else:
        tool.read_multiple_choice(Path(params.prompt.binary_file or "").read_bytes())


def run_perplexity(session: Session, context: TimedContext, plan: Plan) -> PerplexityResult:
    """Perplexity of the text, chunked or strided, saving the logits if asked to."""
    from ikpy.tools import perplexity as tool
    from ikpy.tools.kl_divergence import BaseWriter

    params = session.params
    options, text, n_chunks = params.perplexity, params.prompt.text, params.prompt.chunks
    threads = params.n_threads_batch
    if options.stride > 0:
        return tool.strided_perplexity(
            context, session.vocab, text, plan, options.stride,
            n_chunks=n_chunks, output_type=options.output_type, n_threads=threads, log=log_stream(params),
        )  # fmt: skip
    if not options.logits_file:
        return tool.perplexity(
            context, session.vocab, text, plan,
            n_chunks=n_chunks, output_type=options.output_type, n_threads=threads, log=log_stream(params),
        )  # fmt: skip
    session.log([f"perplexity: saving all logits to {options.logits_file}"])
    n_vocab = session.model.hparams.n_vocab
    with BaseWriter(options.logits_file, plan.chunk, n_vocab, threads) as writer:
        return tool.perplexity(
            context, session.vocab, text, plan,
            n_chunks=n_chunks, output_type=options.output_type, n_threads=threads, base_writer=writer.start,
            log=log_stream(params),
        )  # fmt: skip


def run_kl_divergence(session: Session, context: TimedContext, plan: Plan) -> None:
    """Statistics against the base file."""
    from ikpy.tools.kl_divergence import BaseFile, kl_divergence

    params = session.params
    assert params.perplexity.logits_file is not None
    base = BaseFile(params.perplexity.logits_file)
    n_vocab = session.model.hparams.n_vocab
    kl_divergence(
        context, session.vocab, n_vocab, base, plan.n_batch,
        n_chunks=params.prompt.chunks, n_threads=params.n_threads_batch, log=log_stream(params),
    )  # fmt: skip


def run_choices(session: Session, context: TimedContext, plan: Plan) -> None:
    """The three tests that compare alternative continuations."""
    from ikpy.tools import multiple_choice as tool

    params = session.params
    options, text, vocab = params.perplexity, params.prompt.text, session.vocab
    threads, log = params.n_threads_batch, log_stream(params)
    if options.hellaswag:
        n = options.hellaswag_tasks
        tool.hellaswag(context, vocab, text, n_tasks=n, n_seq_max=plan.n_seq, n_threads=threads, log=log)
    elif options.winogrande:
        n = options.winogrande_tasks
        tool.winogrande(context, vocab, text, n_tasks=n, n_seq_max=plan.n_seq, n_threads=threads, log=log)
    else:
        assert params.prompt.binary_file is not None
        data = Path(params.prompt.binary_file).read_bytes()
        n = options.multiple_choice_tasks
        tool.multiple_choice(context, vocab, data, n_tasks=n, n_seq_max=plan.n_seq, n_threads=threads)


def write_result(params: CommonParams, path: str, result: PerplexityResult | None) -> None:
    """Writes ``DIRECTORY/<time>.yml`` with build, model, parameters and, where there is one, the estimate.

    Texts are quoted as in JSON.
    """
    from ikpy.tools.machine import build_commit, build_number, cpu_name

    options, prompt = params.perplexity, params.prompt
    directory = Path(params.log.directory or ".")
    now = time.time_ns()  # several runs may end in the same second
    name = f"{time.strftime('%Y_%m_%d-%H_%M_%S', time.localtime(now // 10**9))}.{now % 10**9:09}"
    values = {
        "binary": "perplexity",
        "build_commit": build_commit(),
        "build_number": build_number(),
        "cpu_info": json.dumps(cpu_name()),
        "model": json.dumps(path, ensure_ascii=False),
        "ctx_size": params.context.n_ctx,
        "batch_size": params.context.n_batch,
        "ubatch_size": params.context.n_ubatch,
        "threads": params.n_threads,
        "flash_attn": str(params.context.flash_attn).lower(),
        "mla": params.context.mla,
        "cache_type_k": params.context.type_k,
        "cache_type_v": params.context.type_v,
        "mode": next((name for name in MODES if getattr(options, name)), "perplexity"),
        "ppl_stride": options.stride,
        "chunks": prompt.chunks,
        "file": json.dumps(prompt.file or prompt.binary_file or "", ensure_ascii=False),
        "kl_divergence_base": json.dumps(options.logits_file or "", ensure_ascii=False),
    }
    if result is not None:
        values["ppl_value"] = f"{result.ppl:f}"
    try:
        os.makedirs(directory, exist_ok=True)
        text = "".join(f"{key}: {value}\n" for key, value in values.items())
        write_whole(directory / f"{name}.yml", text.encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise UsageError(f"cannot write the result to {directory}: {error.strerror}") from None
