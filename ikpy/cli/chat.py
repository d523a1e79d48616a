"""`ikpy cli`: text generation from a prompt, interactive use, conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ikpy.cli.banner import banner_lines
from ikpy.cli.drafters import changes_for_drafts, needs_of_drafts, speculation
from ikpy.cli.logs import print_log
from ikpy.cli.session import Session, load
from ikpy.cli.start import start
from ikpy.errors import IkpyError, UsageError

if TYPE_CHECKING:
    from ikpy.cli.text_run import TextRun
    from ikpy.engine.sampling import SamplingParams
    from ikpy.tools.guidance import Guidance

INTERRUPTED = 130


def run(arguments: Sequence[str]) -> int:
    """Generate text; returns the exit status."""
    params = start("cli", arguments, "Generate text from a prompt, or chat with a model.")
    if params is None:
        return 0
    prompt = params.prompt
    if params.media.files and not prompt.interactive and "-no-cnv" not in params.given:  # as llama-mtmd-cli
        prompt.conversation = True
        prompt.single_turn = prompt.single_turn or bool(prompt.text and "-cnv" not in params.given)
    if prompt.single_turn or (prompt.system is not None and "-no-cnv" not in params.given):
        prompt.conversation = True
    if prompt.interactive_first or prompt.conversation:
        prompt.interactive = True
    if prompt.cfg_scale != 1.0 and prompt.interactive:
        raise UsageError("--cfg-scale works for the continuation of a prompt, not in interactive use or conversations")
    print_log(params, ["Log start", *banner_lines(params)])
    session = load(params, **changes_for_drafts(params))
    interrupted = run_session(session)
    print_log(params, ["Log end"])
    return INTERRUPTED if interrupted else 0


def guidance(session: Session) -> Guidance | None:
    """Classifier-free guidance of the command line, with a context of its own; None without any."""
    prompt = session.params.prompt
    if prompt.cfg_scale == 1.0:
        return None
    from ikpy.tools.decoder import TimedContext
    from ikpy.tools.guidance import Guidance

    if session.model.arch.decoder_start is not None:
        raise UsageError(f"--cfg-scale is not possible with a model of architecture '{session.model.hparams.arch}'")
    negative = session.vocab.tokenize(prompt.cfg_negative_prompt, add_special=True, parse_special=True)
    if not negative:
        raise UsageError("--cfg-scale needs a text to guide away from: give --cfg-negative-prompt")
    return Guidance(TimedContext(session.new_context(), session.timings), negative, prompt.cfg_scale)


def run_session(session: Session) -> bool:
    """Prepare, generate, report; returns whether the user interrupted."""
    from ikpy.cli.conversation import Conversation
    from ikpy.cli.text_run import Completion, TextRun
    from ikpy.tools.sampler_setup import make_sampler

    params = session.params
    if params.prompt.interactive and not params.prompt.conversation and session.model.arch.decoder_start is not None:
        arch = session.model.hparams.arch
        raise UsageError(f"a model of architecture '{arch}' reads one text and answers it: -i and -if need -cnv")
    context = session.new_context(**needs_of_drafts(session))
    conversation = Conversation(session) if params.prompt.conversation else None
    if conversation:
        session.log(["main: chat template example:", conversation.example(), ""])
    session.system_info()
    sampling = params.sampling
    sampler = make_sampler(sampling, session.vocab, session.model.hparams.n_vocab, context.n_ctx)
    sampler.guidance = guidance(session)
    drafters = speculation(session, context)
    speculator = drafters.speculator() if drafters else None
    text_run = TextRun(session, context, sampler, speculator=speculator)
    work = conversation or Completion(text_run)
    work.prepare(text_run)
    log_start(session, text_run, sampling)
    try:
        interrupted = params.prompt.n_predict != 0 and work.run(text_run)
        text_run.save_state()
    except IkpyError:
        text_run.console.end()
        session.log([""])  # the error's line shall not stand behind the text
        raise
    if speculator:
        session.log(["", *(f"warning: {reason}" for reason in speculator.save()), *speculator.lines()])
    session.log([""])
    if not text_run.times.n_generated:
        session.finish()
    elif params.log.timings:
        session.log(text_run.times.lines())
    return interrupted


def log_start(session: Session, text_run: TextRun, sampling: SamplingParams) -> None:
    """Log what was asked for, just before the first token."""
    params = session.params
    prompt = params.prompt
    if prompt.verbose_prompt:
        pieces = [f"{token:6d} -> '{text_run.text_of([token])}'" for token in text_run.prompt_tokens]
        session.log(
            [
                "",
                f"main: prompt: '{prompt.text}'",
                f"main: number of tokens in prompt = {len(text_run.prompt_tokens)}",
                *pieces,
                "",
            ]
        )
    if prompt.interactive:
        session.log(["main: interactive mode on."])
        obstacle = "" if prompt.conversation else text_run.sequence.obstacle
        if obstacle:
            end = f"the text ends when the {text_run.context.n_ctx_seq} tokens of the context are used"
            session.log([f"main: {obstacle}: {end}"])
        session.log([f"Reverse prompt: '{text}'" for text in prompt.reverse_prompts])
        if prompt.in_prefix:
            session.log([f"Input prefix: '{prompt.in_prefix}'"])
        if prompt.in_suffix:
            session.log([f"Input suffix: '{prompt.in_suffix}'"])
    session.log(sampling.describe().split("\n"))
    session.log(
        [
            f"generate: n_ctx = {text_run.context.n_ctx}, n_batch = {params.context.n_batch}, "
            f"n_predict = {prompt.n_predict}, n_keep = {text_run.sequence.n_keep}",
            "",
            "",
        ]
    )
    if prompt.interactive:
        control = (
            " - To return control to the AI, end your input with '\\'.\n"
            " - To return control without starting a new line, end your input with '/'."
            if prompt.multiline_input
            else " - Press Return to return control to the AI.\n"
            " - To return control without starting a new line, end your input with '/'.\n"
            " - If you want to submit another line, end your input with '\\'."
        )
        hints = [" - Press Ctrl+C to interject at any time.", control]
        if prompt.conversation:
            hints.append(" - /regen answers again, /clear forgets the conversation, /exit ends it.")
            if session.media is not None and not session.media.store.holds_texts:
                hints.append(" - /image FILE puts a picture into the next message.")
        session.log(["== Running in interactive mode. ==", *hints, ""])
