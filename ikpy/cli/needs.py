"""Options that mean something only beside another one, so that giving them alone can be remarked on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ikpy.cli.checks import has_projector
from ikpy.cli.params import CommonParams


@dataclass(frozen=True)
class Need:
    """Options (first spellings) that have no effect on the tools with these letters unless a condition holds."""

    names: tuple[str, ...]
    tools: str
    holds: Callable[[CommonParams], object]
    reason: str


def need(names: str, tools: str, holds: Callable[[CommonParams], object], reason: str) -> Need:
    """A row of the table; `names` separates the options by blanks."""
    return Need(tuple(names.split()), tools, holds, reason)


def is_prompted(params: CommonParams) -> bool:
    """Whether the user's input is read as it is, not as messages of a chat."""
    prompt = params.prompt
    is_chat = prompt.conversation or prompt.single_turn or (prompt.system is not None and "-no-cnv" not in params.given)
    return (prompt.interactive or prompt.interactive_first) and not is_chat


def is_interactive(params: CommonParams) -> bool:
    """Whether input of the user is read at all."""
    prompt = params.prompt
    return prompt.interactive or prompt.interactive_first or prompt.conversation or prompt.system is not None


def drafts(params: CommonParams, *kinds: str) -> bool:
    """Whether there are drafters: any, or of one of these types."""
    options = params.speculative
    types = {entry.partition(":")[0] for entry in options.types}
    if kinds:
        return bool(types & set(kinds))
    return bool(types - {"none"} or options.model_draft or options.hf_repo)


def has_draft_file(params: CommonParams) -> bool:
    """Whether there is a draft model."""
    return bool(params.speculative.model_draft or params.speculative.hf_repo)


def chooses(params: CommonParams) -> bool:
    """Whether perplexity compares alternative continuations."""
    options = params.perplexity
    return options.hellaswag or options.winogrande or options.multiple_choice


def scores_text(params: CommonParams) -> bool:
    """Whether perplexity computes the perplexity of a text, its first mode."""
    return not (chooses(params) or params.perplexity.kl_divergence)


TASKS = "--hellaswag, --winogrande or --multiple-choice"
NEEDS = (
    need("--control-vector-layer-range", "PISWBC", lambda p: p.model.control_vectors, "it needs --control-vector"),
    need("--lora-init-without-apply", "PISWBC", lambda p: p.model.lora, "it needs --lora"),
    need("--log-append --log-new", "PISWBC", lambda p: p.log.file, "it needs --log-file"),
    need("--fit-margin -fitt -gfm", "PISWBC", lambda p: p.model.fit, "it needs --fit"),
    need("-np", "P", chooses, f"it needs {TASKS}"),
    need("--hellaswag-tasks", "P", lambda p: p.perplexity.hellaswag, "it needs --hellaswag"),
    need("--winogrande-tasks", "P", lambda p: p.perplexity.winogrande, "it needs --winogrande"),
    need("--multiple-choice-tasks", "P", lambda p: p.perplexity.multiple_choice, "it needs --multiple-choice"),
    need("--output-tensor-name", "I", lambda p: p.imatrix.process_output, "it needs --process-output"),
    need("--prompt-cache-all --prompt-cache-ro", "C", lambda p: p.prompt.prompt_cache, "it needs --prompt-cache"),
    need("--in-prefix --in-suffix --in-prefix-bos", "C", is_prompted, "it needs -i, and no chat"),
    need("-mli --simple-io", "C", is_interactive, "it needs -i or -cnv"),
    need("--cfg-negative-prompt", "C", lambda p: p.prompt.cfg_scale != 1, "it needs --cfg-scale"),
    need("--cfg-negative-prompt-file", "C", lambda p: p.prompt.cfg_scale != 1, "it needs --cfg-scale"),
    need("--repeat-last-n --penalize-nl", "C", lambda p: p.sampling.has_penalties, "it needs a penalty"),
    need("--dynatemp-exp", "C", lambda p: p.sampling.dynatemp_range > 0, "it needs --dynatemp-range"),
    need("--mirostat-lr --mirostat-ent", "C", lambda p: p.sampling.mirostat, "it needs --mirostat"),
    need("--xtc-threshold", "C", lambda p: p.sampling.xtc_probability > 0, "it needs --xtc-probability"),
    need(
        "--dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker",
        "C",
        lambda p: p.sampling.dry_multiplier > 0,
        "it needs --dry-multiplier",
    ),
    need(
        "--adaptive-decay --adaptive-updt-w-cur",
        "C",
        lambda p: p.sampling.adaptive_target >= 0,
        "it needs --adaptive-target",
    ),
    need(
        "-cd -td -tbd -ctkd -ctvd -draft --draft --draft-min --draft-p-min",
        "SC",
        drafts,
        "it needs -md or --spec-type",
    ),
    need(
        "-Cd -Crd --cpu-strict-draft --prio-draft --poll-draft -Cbd -Crbd --cpu-strict-batch-draft --prio-batch-draft "
        "--poll-batch-draft",
        "SC",
        drafts,
        "it needs -md or --spec-type",
    ),
    need("-ngld -devd -otd -cmoed -ncmoed", "SC", has_draft_file, "it needs -md"),
    need("--suffix-pattern-len --suffix-max-depth --suffix-corpus", "SC", lambda p: drafts(p, "suffix"), "it needs "
         "--spec-type suffix"),
    need("-lcs -lcd", "SC", lambda p: drafts(p, "ngram-cache"), "it needs --spec-type ngram-cache"),
    need(
        "--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits",
        "SC",
        lambda p: drafts(p, "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"),
        "it needs --spec-type ngram-...",
    ),
    need(
        "--models-max --models-ttl --models-memory",
        "S",
        lambda p: p.server.models_dir or p.server.models_preset,
        "it needs --models-dir or --models-preset",
    ),
    need("--image-min-tokens --image-max-tokens -tm -mmdev --mmproj-offload", "SC", has_projector, "it needs --mmproj"),
    need("--media-path", "S", has_projector, "it needs --mmproj"),
    need("-crs -cram-n-min", "S", lambda p: p.server.cache_ram, "--cache-ram is 0"),
    need(
        "--pooling",
        "S",
        lambda p: p.context.embeddings or p.context.reranking,
        "it needs --embeddings",
    ),
)  # fmt: skip


UNUSED_IN_MODES = (
    need("--ppl-stride --ppl-output-type", "P", scores_text, f"unused with --kl-divergence, {TASKS}"),
    need("--chunks --kl-divergence-base", "P", lambda p: not chooses(p), f"unused with {TASKS}"),
    need("-p -f -bf", "P", lambda p: not p.perplexity.kl_divergence, "the text is that of --kl-divergence-base"),
    need("-p -f", "P", lambda p: not p.perplexity.multiple_choice, "the tasks are those of -bf"),
)
"""Rows of options that have an effect unless another one chooses a mode without them."""


def idle_options(params: CommonParams, letter: str) -> Iterator[tuple[str, str]]:
    """First spelling of every given option that lacks what it needs, or a mode that uses it, with the reason."""
    for row in (*NEEDS, *UNUSED_IN_MODES):
        if letter in row.tools and not row.holds(params):
            yield from ((name, row.reason) for name in row.names if name in params.given)
