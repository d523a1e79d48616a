"""`ikpy imatrix`: importance matrices for quantization: collect, combine, convert, show."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ikpy.cli.banner import banner_lines
from ikpy.cli.logs import print_log
from ikpy.cli.params import CommonParams
from ikpy.cli.session import Session, load
from ikpy.cli.start import start
from ikpy.errors import UnsupportedError, UsageError
from ikpy.gguf.atomic import check_replaceable

if TYPE_CHECKING:
    from ikpy.engine.context import Context
    from ikpy.graph.activations import ActivationCollector
    from ikpy.tools.imatrix import Settings
    from ikpy.tools.imatrix_data import ImatrixData


def run(arguments: Sequence[str]) -> int:
    """Collect over a text, or work on files alone; returns the exit status."""
    params = start("imatrix", arguments, "Importance matrix of a model over a text, for quantization.")
    if params is None:
        return 0
    check(params)
    from ikpy.tools.imatrix_data import ImatrixData
    from ikpy.tools.imatrix_file import is_gguf

    data = ImatrixData()
    needs_no_model = params.model.path is None or params.imatrix.show_statistics
    files_alone = not params.prompt.text and bool(params.prompt.in_files) and needs_no_model
    # Legacy files do not hold numbers of tokens: those of the others would outweigh their calls by far.
    by_calls = files_alone and len({is_gguf(path) for path in params.prompt.in_files}) > 1
    for path in params.prompt.in_files:
        print(f"main : loading imatrix from '{path}'", flush=True)
        try:
            data.load(path, by_calls=by_calls)
        except Exception:
            print(f"main : failed to load {path}", file=sys.stderr)
            raise
    if files_alone:
        return work_on_files(params, data)
    if len(params.prompt.in_files) > 1:
        save_combined(params, data)
    return collect(params, data)


def check(params: CommonParams) -> None:
    """Refuse what cannot work before anything is loaded.

    Raises:
        IkpyError: an option this tool does not support, a missing file, an output that cannot be written.
    """
    from ikpy.graph.activations import MIN_ROWS

    options = params.imatrix
    if options.output_draft:
        raise UnsupportedError("--output-draft: collecting for a model and its draft model together is not supported")
    for path in params.prompt.in_files:
        if not os.path.isfile(path):
            reason = "Is a directory" if os.path.isdir(path) else "No such file or directory"
            raise UsageError(f"failed to open file '{path}': {reason} [--in-file]")
    if not (params.prompt.text or params.prompt.in_files or params.model.dry_run):
        what = "the text is empty" if {"-f", "-p"} & set(params.given) else "no text"
        raise UsageError(f"{what}: give one with -f FILE")
    if params.prompt.chunks == 0:
        raise UsageError("--chunks 0 leaves nothing to process; give a positive number, or -1 for the whole text")
    n_tokens = min(params.context.n_ubatch or params.context.n_batch, params.context.n_batch)
    if n_tokens < MIN_ROWS and params.prompt.text:
        raise UsageError(
            f"batches of {n_tokens} tokens: those below {MIN_ROWS} count for experts only; leave -b and -ub out"
        )
    _check_output(params)


def _check_output(params: CommonParams) -> None:
    """Refuse an output that cannot be written."""
    output = params.imatrix.output
    folder = os.path.dirname(os.path.abspath(output))
    if os.path.isdir(output):
        raise UsageError(f"-o {output}: this is a folder; name a file")
    for option, source in (("-m", params.model.path), ("-f", params.prompt.file)):
        if source and os.path.realpath(source) == os.path.realpath(output):
            raise UsageError(f"-o {output}: this is the file given with {option}; name another one")
    try:
        check_replaceable(output)
    except OSError as error:
        raise UsageError(f"-o {output}: {error.strerror}") from None
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {output}: cannot make the folder {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"-o {output}: the folder {folder} is not writable")


def save_combined(params: CommonParams, data: ImatrixData, *, chunks: int = 0, dataset: str = "") -> None:
    """Write what was loaded. As in llama-imatrix, the legacy trailer stays empty when a run is to follow."""
    from ikpy.tools.imatrix_data import file_format, save

    options = params.imatrix
    print(f"main : saving combined imatrix to '{options.output}'", flush=True)
    fmt = file_format(options.output, options.output_format)
    log = partial(_log, params)
    save(data, options.output, fmt, chunks=chunks, dataset=dataset, log=log)
    if params.log.verbosity > 0:
        log(f"\nsave_imatrix: stored collected data after {chunks} chunks in {options.output}")


def _log(params: CommonParams, text: str) -> None:
    print_log(params, [text])


def work_on_files(params: CommonParams, data: ImatrixData) -> int:
    """Combine, convert or show files without a model."""
    wants_file = len(params.prompt.in_files) > 1 or "-o" in params.given
    if not wants_file and not params.imatrix.show_statistics:
        raise UsageError(
            "nothing to do with one --in-file alone: add -f TEXT, -o FILE to convert, or --show-statistics"
        )
    if wants_file:
        dataset = data.datasets[0] if data.datasets else ""
        save_combined(params, data, chunks=data.chunks_loaded, dataset=dataset)
    if params.imatrix.show_statistics:
        show_statistics(data, ", ".join(params.prompt.in_files))
    return 0


def show_statistics(data: ImatrixData, source: str) -> None:
    """Print the tables on standard output."""
    from ikpy.tools.imatrix_report import statistics_lines

    print(*statistics_lines(data, source), sep="\n", flush=True)


def collect(params: CommonParams, data: ImatrixData) -> int:
    """Run the model over the text."""
    print_log(params, banner_lines(params))
    session = load(params)
    from ikpy.engine.sampling import NotANumberError
    from ikpy.graph.activations import ActivationCollector
    from ikpy.tools.decoder import TimedContext
    from ikpy.tools.imatrix import NotEnoughTextError, Run

    options, asked = params.imatrix, params.context
    stored = {name: info.shape[2] if len(info.shape) > 2 else 1 for name, info in session.model.gguf.tensors.items()}
    collector = ActivationCollector(
        stored,
        output_name=options.output_tensor_name if options.process_output else None,
        head_name="output.weight" if "output.weight" in stored else "token_embd.weight",
        similarity=options.layer_similarity,
    )
    n_batch = min(asked.n_batch, asked.n_ctx) if asked.n_ctx > 0 else asked.n_batch
    changes = {"n_batch": n_batch, "n_seq_max": 1, "token_states": options.predicts}
    heads = contexts_of_heads(session, collector, changes) if options.predicts else []
    context = session.new_context(**changes, collector=collector)
    session.system_info()
    warn_of_call_weights(params, data)
    data.live = collector.entries
    data.check_sizes()
    timed = TimedContext(context, session.timings)
    asked_for = settings(session, context.n_ubatch)
    work = Run(timed, session.vocab, data, asked_for, heads=heads, log=lambda text: session.log([text]))
    try:
        work.run(params.prompt.text)
    except NotEnoughTextError as error:
        print(*error.lines, sep="\n", file=sys.stderr)
        if not params.prompt.text:
            print("compute_imatrix: no text: give one with -f FILE", file=sys.stderr)
        return 1
    except NotANumberError as error:
        raise NotANumberError(where=context.first_not_a_number(error.tokens)) from None
    report(session, data, collector)
    session.finish()
    return 0


def contexts_of_heads(session: Session, collector: ActivationCollector, changes: dict[str, Any]) -> list[Context]:
    """Contexts of the prediction layers, whose statistics the collector has as well. UsageError if there are none."""
    from ikpy.engine.context import Context
    from ikpy.graph.activations import ActivationCollector

    # The output matrix has the statistics of the model alone, and layers apart resemble none.
    own = ActivationCollector(collector.stored)
    own.entries = collector.entries
    params = session.params.context_params(**{**changes, "token_states": False, "collector": own})
    return [Context(head, params, log=lambda line: session.log([line])) for head in session.model.prediction_heads()]


def warn_of_call_weights(params: CommonParams, data: ImatrixData) -> None:
    """Legacy files hold no numbers of rows, so a whole call in them weighs as much as one row of new text."""
    if data.has_call_weights and params.prompt.text:
        warning = (
            "main : warning: .dat files do not say how many tokens they were made from: as in llama-imatrix, one call "
            "of theirs counts like one token of the new text (.gguf files continue exactly)"
        )
        print_log(params, [warning])


def settings(session: Session, n_micro_batch: int) -> Settings:
    """Settings of the run from the command line."""
    from ikpy.tools.imatrix import Settings
    from ikpy.tools.imatrix_data import file_format

    params = session.params
    options = params.imatrix
    return Settings(
        output=options.output,
        output_format=file_format(options.output, options.output_format),
        dataset=params.prompt.file or "",
        n_chunks=params.prompt.chunks,
        from_chunk=options.from_chunk,
        n_micro_batch=n_micro_batch,
        output_frequency=options.output_frequency,
        save_frequency=options.save_frequency,
        compute_ppl=options.compute_ppl,
        parse_special=options.parse_special,
        verbosity=params.log.verbosity,
        n_threads=params.n_threads_batch,
    )


def report(session: Session, data: ImatrixData, collector: ActivationCollector) -> None:
    """Coverage of experts, and the tables that were asked for."""
    from ikpy.tools.imatrix_report import coverage_lines, similarity_lines

    params = session.params
    session.log(f"main : {line}" for line in coverage_lines(data, each=params.log.verbosity > 1))
    if collector.similarity:
        print(*similarity_lines(collector.similarities), sep="\n", flush=True)
    if params.imatrix.show_statistics:
        show_statistics(data, params.imatrix.output)
