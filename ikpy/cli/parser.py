"""Parser of the common tools' command lines, driven by the option table.

Rules: whole arguments are matched exactly (no abbreviation, no `--option=value`); an option that needs a value takes
the next argument whatever it looks like; `_` equals `-` after `--`; the last use wins except for list options;
environment variables are read before the command line (by the server also after it).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ikpy.cli.fields import get_field, set_field
from ikpy.cli.needs import idle_options
from ikpy.cli.options import NO_GPU, TOOLS, Effect, Option, all_options, by_name, normalize_name
from ikpy.cli.params import CommonParams
from ikpy.cli.placement_values import to_hosts
from ikpy.cli.values import SWITCH_WORDS, unescape
from ikpy.errors import IkpyError, UsageError

HELP_NAMES = ("-h", "--help", "--usage")
VARIABLES = "LLAMA_ARG_"
"""How the environment variables of options begin."""
ACTIONS = {"--version": "version", "--list-devices": "devices"}
TOOL_DEFAULTS: dict[str, dict[str, Any]] = {
    "perplexity": {"context.n_ctx": 512},
    "imatrix": {"context.n_ctx": 512, "log.verbosity": 1},
}
NO_OFFLOAD = "not compiled with GPU offload support, --gpu-layers option will be ignored"
MODES = ("hellaswag", "winogrande", "multiple_choice", "kl_divergence")


def parse(argv: Sequence[str], tool: str, environ: Mapping[str, str] | None = None) -> CommonParams:
    """Parameters of `tool` from its argument list (without the program name).

    Raises:
        UsageError: unknown option, missing or bad value, options that contradict each other.
    """
    return Parser(tool, os.environ if environ is None else environ).parse(argv)


def has_devices() -> bool:
    """Whether options for GPUs mean anything on this machine."""
    from ikpy.backends.cuda.devices import local_devices

    return bool(local_devices())


def why_no_devices() -> str:
    """What this machine lacks to have devices."""
    from ikpy.backends.cuda.devices import why_none

    return why_none()


def suggest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the spelling closest to an unknown name, or an empty text."""
    base, equals, _ = name.partition("=")
    known = list(known)
    if equals and base in known:
        return f" (write the value as its own argument: {base} VALUE)"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (did you mean {close[0]}?)" if close else ""


class Parser:
    """One pass over an argument list."""

    def __init__(self, tool: str, environ: Mapping[str, str]) -> None:
        self.tool = tool
        self.letter = TOOLS[tool]
        self.environ = environ
        self.params = CommonParams(tool=tool)
        self.appended: set[str] = set()
        self.no_effect: dict[str, list[str]] = {}
        for dest, value in TOOL_DEFAULTS.get(tool, {}).items():
            self.store(dest, value)

    def parse(self, argv: Sequence[str]) -> CommonParams:
        """Apply environment and arguments, check the result."""
        for name, value in pairwise(argv):
            if normalize_name(name) == "--rpc":  # what is said of options for GPUs depends on it
                self.params.model.rpc = to_hosts(value, self.add_warning)
        self.apply_config(argv)
        self.apply_environment()
        self.appended.clear()
        self.apply_arguments(argv)
        if self.params.action != "run":
            return self.params
        if self.tool == "server":
            self.apply_environment()
        self.report_unknown_variables()
        self.report_no_effect()
        merge(self.params)
        check(self.params)
        finish_text(self.params)
        return self.params

    def apply_config(self, argv: Sequence[str]) -> None:
        """Options of the file of --config (or of the environment), which everything else overrides."""
        from ikpy.cli.config import config_arguments

        names = [i for i, argument in enumerate(argv[:-1]) if normalize_name(argument) == "--config"]
        path = argv[names[-1] + 1] if names else self.environ.get("IKPY_CONFIG")
        if path:
            self.apply_arguments(config_arguments(path, self.tool))
            self.appended.clear()
            self.params.given.clear()

    def apply_environment(self) -> None:
        for row in all_options():
            name = next((name for name in self.variables(row) if self.environ.get(name)), None)
            if name is None or self.letter not in row.used:
                continue
            text = self.environ[name]
            if row.kind.const is None or text.lower() in row.kind.optional:
                self.take(row, name, text)
            elif self.is_set(name, text):
                self.take(row, name, None)
            elif row.kind.opposite is not None and row.dest:
                self.store(row.dest, row.kind.opposite)

    def report_unknown_variables(self) -> None:
        """Warn of variables that stand for no option: most are misspelled."""
        known = self.known_variables()
        for name in self.unknown_variables():
            self.add_warning(f"{name}: no option has this variable{suggest(name, known)}")

    def unknown_variables(self) -> list[str]:
        """Variables of the environment that look like options and stand for none."""
        known = self.known_variables()
        return [name for name in sorted(self.environ) if name.startswith(VARIABLES) and name not in known]

    def known_variables(self) -> set[str]:
        """Environment variables of all options."""
        return {name for row in all_options() for name in self.variables(row)}

    def is_set(self, name: str, text: str) -> bool:
        """Whether the variable of a switch asks for it; a word that is neither yes nor no does not."""
        if text.lower() not in SWITCH_WORDS:
            self.add_warning(f"{name}={text}: expected on, off, 1 or 0; read as off")
        return SWITCH_WORDS.get(text.lower(), False)

    def variables(self, row: Option) -> list[str]:
        """Environment variables of an option: those of the table, and one for each long spelling."""
        spellings = [name for name in row.names if name.startswith("--")]
        return [*row.env.split(), *(VARIABLES + name[2:].replace("-", "_").upper() for name in spellings)]

    def apply_arguments(self, argv: Sequence[str]) -> None:
        position = 0
        while position < len(argv):
            spelled = argv[position]
            name = normalize_name(spelled)
            if name in HELP_NAMES or name in ACTIONS:
                self.params.action = ACTIONS.get(name, "help")
                return
            row = by_name(self.letter).get(name)
            if row is None:
                raise UsageError(f"unknown argument: {spelled}{self.hint(spelled, name)}")
            position += 1
            self.params.given.append(row.name)
            texts = self.values_of(row, spelled, argv[position:])
            position += len(texts)
            self.take(row, spelled, " ".join(texts) if texts else None)

    def hint(self, spelled: str, name: str) -> str:
        """What may have been meant by an argument that is no option: in brackets, or nothing."""
        if spelled.endswith(".gguf") and not spelled.startswith("-"):
            return " (a model is given with -m)"
        before = by_name(self.letter)[self.params.given[-1]] if self.params.given else None
        if before and before.kind.optional and not spelled.startswith("-"):
            return f" ({before.name} takes {', '.join(before.kind.optional)} or nothing)"
        return suggest(name, by_name(self.letter))

    def uses(self, argv: Sequence[str]) -> Iterator[tuple[Option, list[str]]]:
        """The options of an argument list, each with its words."""
        position = 0
        while position < len(argv):
            row = by_name(self.letter)[normalize_name(argv[position])]
            texts = self.values_of(row, argv[position], argv[position + 1 :])
            yield row, [argv[position], *texts]
            position += 1 + len(texts)

    def values_of(self, row: Option, spelled: str, following: Sequence[str]) -> list[str]:
        following = list(following)
        if row.kind.optional:
            return following[:1] if following and following[0].lower() in row.kind.optional else []
        if len(following) < row.kind.nargs:
            raise UsageError(f"invalid parameter for argument: {spelled} (a value is missing)")
        return following[: row.kind.nargs]

    def take(self, row: Option, spelled: str, text: str | None) -> None:
        """Convert and store one use of an option."""
        if row.effect is Effect.REFUSED and self.letter in row.used:
            raise UsageError(f"{spelled}: {row.reason}")
        value = row.kind.const if text is None else self.convert(row, spelled, text)
        if row.effect is Effect.ALWAYS and value is False:
            self.no_effect.setdefault("it is always on", []).append(spelled)
        if self.letter in row.used:  # what is said to have no effect shall have none
            self.keep(row, value, text)
        self.note_effect(row, spelled, text)

    def keep(self, row: Option, value: Any, text: str | None) -> None:
        """Store the value of an option, and its text if that is wanted too."""
        if row.dest and row.kind.many:
            self.append(row.dest, value)
        elif row.dest:
            self.store(row.dest, value)
        if row.also and text is not None:
            self.store(row.also, text)

    def convert(self, row: Option, spelled: str, text: str) -> Any:
        def warn(message: str) -> None:
            self.add_warning(f"{spelled}: {message}")

        try:
            return row.kind.convert(text, warn)
        except UsageError as error:
            if self.letter not in row.used:  # another tool could not do it
                return None
            raise UsageError(f"{error} [{spelled}]") from error
        except IkpyError:
            raise
        except ValueError as error:
            raise UsageError(f"invalid parameter for argument: {spelled} ({error})") from error

    def store(self, dest: str, value: Any) -> None:
        set_field(self.params, dest, value)

    def append(self, dest: str, value: Any) -> None:
        values = value if isinstance(value, list) else [value]
        present = get_field(self.params, dest) if dest in self.appended else []
        self.appended.add(dest)
        self.store(dest, [*present, *values])

    def note_effect(self, row: Option, spelled: str, text: str | None) -> None:
        if row.effect is Effect.ALWAYS:
            return
        if self.letter not in row.used:
            self.no_effect.setdefault(f"not used by {self.tool}", []).append(spelled)
        elif text in row.quiet.split() or (
            row.reason == NO_GPU and row.effect is Effect.USED and (self.params.model.rpc or has_devices())
        ):
            return
        elif row.name == "-ngl":
            # The wording that scripts know, and what this machine lacks.
            self.add_warning(f"{NO_OFFLOAD}: {why_no_devices()}")
        elif row.reason:
            self.no_effect.setdefault(row.reason, []).append(spelled)

    def add_warning(self, line: str) -> None:
        if line not in self.params.warnings:
            self.params.warnings.append(line)

    def report_no_effect(self) -> None:
        for name, reason in idle_options(self.params, self.letter):
            self.no_effect.setdefault(reason, []).append(name)
        for reason, names in self.no_effect.items():
            self.params.warnings.append(f"no effect: {', '.join(dict.fromkeys(names))} ({reason})")


def merge(params: CommonParams) -> None:
    """Carry over options that stand for others."""
    model, context = params.model, params.context
    if model.load_mode != "auto":
        model.use_mmap = model.load_mode.startswith("mmap")
        model.use_mlock = "mlock" in model.load_mode
    if model.defer_experts:
        context.warmup = False
    if len(model.fit_targets) == 1:
        model.fit_margin = model.fit_targets[0]
    else:
        model.fit_margins |= dict(enumerate(model.fit_targets))
    drafts = params.speculative
    if (model.devices or params.media.device or drafts.devices) and not (model.rpc or has_devices()):
        model.devices = () if model.devices else model.devices
        drafts.devices = () if drafts.devices else drafts.devices
        params.media.device = params.media.device and "none"
    if context.reranking:
        context.embeddings = True
        context.pooling = context.pooling or "rank"


def check(params: CommonParams) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: naming both options.
    """
    model, prompt = params.model, params.prompt
    if model.path is None:
        if model.hf_file is not None and model.hf_repo is None:
            raise UsageError("--hf-file requires --hf-repo")
        if model.url is not None and model.hf_repo is not None:
            raise UsageError("--model-url and --hf-repo exclude each other")
    elif (model.url or model.hf_repo or model.hf_file) and os.path.exists(model.path):
        params.warnings.append("no effect: the model is read from --model, nothing is downloaded")
    if model.fit and (model.tensor_overrides or model.n_cpu_moe):
        other = "-ot | --override-tensor" if model.tensor_overrides else "-ncmoe | --n-cpu-moe"
        raise UsageError(f"{other} cannot be used with --fit")
    if prompt.prompt_cache_all and (prompt.interactive or prompt.interactive_first or prompt.conversation):
        raise UsageError("--prompt-cache-all is not supported in interactive mode: drop one of them")
    modes = [name for name in MODES if getattr(params.perplexity, name)]
    if len(modes) > 1:
        spelled = " and ".join(f"--{name.replace('_', '-')}" for name in modes)
        raise UsageError(f"{spelled} exclude each other")
    if params.sampling.grammar and params.sampling.json_schema is not None:
        raise UsageError("--grammar and --json-schema exclude each other")
    if model.split_mode in ("row", "tensor"):
        from ikpy.graph.placement import layer_warning

        params.warnings.append(layer_warning(model.split_mode))
        model.split_mode = "layer"


def finish_text(params: CommonParams) -> None:
    """Decode escapes in the prompt and in texts around it; a binary file is left alone."""
    prompt = params.prompt
    if not prompt.escape:
        return
    sources = [name for name in params.given if name in ("-p", "-f", "-bf")]
    if not sources or sources[-1] != "-bf":
        prompt.text = unescape(prompt.text)
    prompt.cfg_negative_prompt = unescape(prompt.cfg_negative_prompt)
    prompt.system = None if prompt.system is None else unescape(prompt.system)
    prompt.in_prefix = unescape(prompt.in_prefix)
    prompt.in_suffix = unescape(prompt.in_suffix)
    prompt.reverse_prompts = [unescape(text) for text in prompt.reverse_prompts]
