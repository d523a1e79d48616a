"""The command line of `ikpy quantize`: usage, options, checks."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from ikpy.cli.quantize_types import type_lists
from ikpy.cli.values import MAX_THREADS
from ikpy.errors import UsageError
from ikpy.quants import registry
from ikpy.quants.mixture import TypeOptions
from ikpy.quants.name_pattern import compile_pattern
from ikpy.quants.recipe import Rule, SizeTarget, make_rule, parse_rules, read_recipe, rule_items

SYNOPSIS = "usage: ikpy quantize [options] INPUT [OUTPUT] TYPE [NTHREADS]"
USAGE = f"""{SYNOPSIS}

Makes a quantized copy of a GGUF model. INPUT may be the first file of a split model. Without OUTPUT the result is
ggml-model-TYPE.gguf next to INPUT. TYPE is a file type name in any case, its number, or COPY. A run
that was killed is continued by the same command.

    --allow-requantize         convert tensors that are already quantized
    --leave-output-tensor      keep output.weight as it is
    --pure                     give every tensor the type of TYPE, without a mixture
    --imatrix FILE             importance matrix (.dat or GGUF)
    --hide-imatrix             do not name the importance matrix in the output
    --ignore-imatrix-rules     allow very low-bit types without an importance matrix
    --include-weights NAME     use only importance entries whose name contains NAME (repeatable)
    --exclude-weights NAME     do not use importance entries whose name contains NAME (repeatable)
    --dry-run                  show what would be done; read no data, write nothing
    --custom-q RULES           regex=type,... or a file of such rules, also YAML; the first match decides (repeatable)
    --tensor-type REGEX=TYPE   the same for one rule (repeatable); --tensor-type-file FILE for a file of them
    --target-size SIZE         choose types for an output of at most this size, such as 24GiB; TYPE may be left out
    --target-bpw BPW           the same for the bits per weight of all tensors, such as 4.2
    --target-types T1,T2,...   tensor types to choose from
    --save-recipe FILE         write the type of every tensor as rules for --custom-q
    --output-tensor-type T     type of output.weight
    --token-embedding-type T   type of token_embd.weight
    --per-layer-token-embedding-type T, --ffn-gate-inp-type T
    --attn-q-type T, --attn-k-type T, --attn-v-type T, --attn-qkv-type T, --attn-output-type T
    --ffn-gate-type T, --ffn-down-type T, --ffn-up-type T
                               type of the tensors in that role
    --extra-output-tensor T    add a second copy of the output matrix in type T
    --repack                   change the row layout to the interleaved types; no requantization; TYPE may be left out
    --prune-layers N1,N2,...   leave these blocks out; the others are numbered anew (repeatable)
    --repack-pattern R1,R2     repack only tensors whose name matches one of the regular expressions
    --keep-split               one output file per input file
    --partial-requant          skip output files that exist
    --override-kv KEY=T:VALUE  change metadata; T is int, float, bool or str (repeatable)
    --symmetric-q40            Q4_0 with levels -7..7
    --slow-iq2ks               accepted; the IQ2_KS search is always the thorough one
    --help                     print this help

Options come before INPUT or anywhere else; T is one of the tensor types at the end.

File types:
"""

FLAGS = {
    "--allow-requantize": "allow_requantize",
    "--leave-output-tensor": "leave_output_tensor",
    "--pure": "pure",
    "--hide-imatrix": "hide_imatrix",
    "--ignore-imatrix-rules": "ignore_imatrix_rules",
    "--dry-run": "dry_run",
    "--repack": "repack",
    "--keep-split": "keep_split",
    "--partial-requant": "partial_requant",
    "--symmetric-q40": "symmetric_q4_0",
}
ROLE_OPTIONS = {TypeOptions.option(f.name): f.name for f in fields(TypeOptions)}


class CommandLineError(UsageError):
    """A mistake in the arguments."""


@dataclass
class Arguments:
    """The parsed command line."""

    source: str = ""
    output: str = ""
    type_name: str = ""
    ftype: registry.FileType | None = None
    n_threads: int = 0
    imatrix: str = ""
    flags: set[str] = field(default_factory=set)
    roles: dict[str, str] = field(default_factory=dict)
    recipe_roles: dict[str, str] = field(default_factory=dict)
    extra_output: str = ""
    include: list[str] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)
    recipe_paths: list[str] = field(default_factory=list)
    patterns: list[re.Pattern[str]] = field(default_factory=list)
    overrides: dict[str, object] = field(default_factory=dict)
    target: SizeTarget = field(default_factory=SizeTarget)
    save_recipe: str = ""
    prune_layers: set[int] = field(default_factory=set)
    ignored: list[str] = field(default_factory=list)
    """Arguments that never have an effect, each with the reason."""


def parse(argv: Sequence[str]) -> Arguments:
    """Arguments of the tool; CommandLineError if they are wrong."""
    arguments = Arguments()
    positional: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            if is_misspelled(word):
                raise CommandLineError(f"unknown option {word}; options of this tool begin with --")
            positional.append(word)
            continue
        name = word.replace("_", "-")
        if name in FLAGS:
            arguments.flags.add(FLAGS[name])
        elif name in VALUE_OPTIONS:
            if not rest:
                raise CommandLineError(f"{name} needs a value")
            _take(arguments, name, rest.pop(0))
        elif name == "--slow-iq2ks":
            arguments.ignored.append(f"{name} (the IQ2_KS search is always the thorough one)")
        else:
            raise CommandLineError(f"unknown option {word}{_hint(word)}")
    if arguments.include and arguments.exclude:
        raise CommandLineError("--include-weights and --exclude-weights cannot be given together")
    if arguments.target.nbytes and arguments.target.bits_per_weight:
        raise CommandLineError("--target-size and --target-bpw cannot be given together")
    if arguments.target.types and not arguments.target.is_given:
        raise CommandLineError("--target-types needs --target-size or --target-bpw")
    _take_positional(arguments, positional)
    return arguments


def _hint(word: str) -> str:
    name, equals, value = word.partition("=")
    close = difflib.get_close_matches(name.replace("_", "-"), [*FLAGS, *VALUE_OPTIONS], n=1, cutoff=0.7)
    if not close:
        return ""
    if equals and close[0] in VALUE_OPTIONS:
        return f"; the value is a word of its own: {close[0]} {value}"
    return f"; did you mean {close[0]}?"


def _take(arguments: Arguments, name: str, value: str) -> None:
    """Keep the value of an option; CommandLineError if it is wrong."""
    if name in ROLE_OPTIONS:
        arguments.roles[ROLE_OPTIONS[name]] = _tensor_type(name, value)
    else:
        TAKERS[name](arguments, name, value)


def _take_extra_output(arguments: Arguments, name: str, value: str) -> None:
    arguments.extra_output = _tensor_type(name, value)


def _take_file(arguments: Arguments, name: str, value: str) -> None:
    if not value:
        raise CommandLineError(f"{name}: the name of the file is empty")
    if name == "--imatrix":
        arguments.imatrix = value
    else:
        arguments.save_recipe = value


def _take_weights(arguments: Arguments, name: str, value: str) -> None:
    (arguments.include if name == "--include-weights" else arguments.exclude).append(value)


def _take_tensor_types(arguments: Arguments, name: str, value: str) -> None:
    arguments.rules += _tensor_types(name, value)
    if name == "--tensor-type-file":
        arguments.recipe_paths.append(value)


def _take_pruned_layers(arguments: Arguments, _: str, value: str) -> None:
    arguments.prune_layers |= _blocks(value)


def _take_target(arguments: Arguments, name: str, value: str) -> None:
    if name == "--target-size":
        arguments.target.nbytes = _size(value)
    elif name == "--target-bpw":
        arguments.target.bits_per_weight = _bits_per_weight(value)
    else:
        arguments.target.types = tuple(_tensor_type(name, part.strip()) for part in value.split(","))


def _take_patterns(arguments: Arguments, name: str, value: str) -> None:
    for pattern in rule_items(value):
        try:
            arguments.patterns.append(compile_pattern(pattern))
        except re.error as error:
            raise CommandLineError(f"invalid regular expression {pattern} in {name}: {error}") from None


def _take_override(arguments: Arguments, _: str, value: str) -> None:
    from ikpy.cli.values import to_kv_override

    try:
        key, override = to_kv_override(value, lambda text: None)
    except ValueError as error:
        raise CommandLineError(f"string_parse_kv_override: malformed KV override '{value}' ({error})") from None
    arguments.overrides[key] = override


def _tensor_type(option: str, value: str) -> str:
    try:
        row = registry.by_name(value)
    except UsageError as error:
        raise CommandLineError(f"{option}: {error}") from None
    if row.activation_only:
        raise CommandLineError(f"{option}: {row.name} cannot be stored in a file")
    return row.name


def _take_rules(arguments: Arguments, _: str, value: str) -> None:
    """Rules given as text, or in a file when the value is no rule itself; options of the file yield to earlier ones."""
    try:
        # A pipe of the shell, <(...), is a file too.
        if "=" in value or os.path.isdir(value) or not os.path.exists(value):
            arguments.rules += parse_rules(value)
            return
        recipe = read_recipe(value)
        arguments.recipe_paths.append(value)
    except UsageError as error:
        raise CommandLineError(str(error)) from None
    arguments.rules += recipe.rules
    for key, text in recipe.options.items():
        name = f"--{key}"
        if name not in ROLE_OPTIONS:
            known = ", ".join(option.removeprefix("--") for option in ROLE_OPTIONS)
            raise CommandLineError(f"{value}: unknown key {key!r}; a recipe may have 'rules' and {known}")
        arguments.recipe_roles.setdefault(ROLE_OPTIONS[name], _tensor_type(f"{value}: {key}", text))


def _tensor_types(name: str, value: str) -> list[Rule]:
    """One rule, whose regular expression may contain commas, or those of a file, which blanks separate."""
    items = [value]
    if name == "--tensor-type-file":
        try:
            items = Path(value).read_text(encoding="utf-8-sig").split()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandLineError(f"{name} {value}: {getattr(error, 'strerror', None) or error}") from None
        if not items:
            raise CommandLineError(f"{name} {value}: the file is empty")
    rules = []
    for item in items:
        pattern, equals, type_name = item.rpartition("=")
        if not (pattern and equals and type_name):
            raise CommandLineError(f"{name}: expected REGEX=TYPE, got '{item}'")
        try:
            rules.append(make_rule(pattern, type_name))
        except UsageError as error:
            raise CommandLineError(f"{name}: {error}") from None
    return rules


def _blocks(text: str) -> set[int]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not re.fullmatch(r"[0-9]{1,6}", part):
            raise CommandLineError(f"--prune-layers: '{part}' is no number of a block")
    return {int(part) for part in parts}


def _size(text: str) -> int:
    """Bytes; K, M, G and T with or without iB count in powers of 1024, with B in powers of 1000."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) == 0:
        raise CommandLineError(f"--target-size: '{text}' is no size such as 24GiB or 800MiB")
    base = 1000 if match[2] and (match[3] or "").lower() == "b" else 1024
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))


def _bits_per_weight(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 32:
        raise CommandLineError(f"--target-bpw: '{text}' is no number of bits above 0 and up to 32")
    return value


def _ftype(text: str) -> registry.FileType | None:
    """The file type, None for COPY; UsageError if there is none of that name."""
    return None if text.upper() == "COPY" else registry.ftype_by_name(text)


def _take_positional(arguments: Arguments, words: list[str]) -> None:
    from ikpy.tools.quantize import default_output

    if len(words) < 2:
        raise CommandLineError("INPUT and TYPE are needed")
    arguments.source = words.pop(0)
    if "" in words:
        raise CommandLineError("OUTPUT, TYPE and NTHREADS must not be empty; without OUTPUT leave it out")
    try:
        arguments.ftype = _ftype(words[0])
    except UsageError:
        arguments.output = words.pop(0)
        if arguments.target.is_given and len(words) < 2 and all(word.isdigit() for word in words):
            arguments.type_name = "AUTO"
            _take_threads(arguments, words)
            return
        if not words and "repack" in arguments.flags:
            arguments.type_name = "repacked"
            return
        if not words:
            raise CommandLineError("main: missing ftype") from None
        try:
            arguments.ftype = _ftype(words[0])
        except UsageError as error:
            hint = str(error).partition("; ")[2]
            raise CommandLineError(f"main: invalid ftype '{words[0]}'" + (f" ({hint})" if hint else "")) from None
    arguments.type_name = _shown_name(words.pop(0), arguments.ftype)
    if not arguments.output:
        keep = "keep_split" in arguments.flags
        arguments.output = default_output(arguments.source, arguments.type_name, keep_split=keep)
    if arguments.target.is_given and arguments.ftype is None:
        raise CommandLineError("COPY and a target exclude each other")
    _take_threads(arguments, words)


def is_misspelled(word: str) -> bool:
    """Whether a positional word begins like an option, and is neither a number nor a file."""
    return bool(re.match("-[A-Za-z]", word)) and not Path(word).exists()


def _take_threads(arguments: Arguments, words: list[str]) -> None:
    if words[1:]:
        arguments.ignored.append(f"{' '.join(words[1:])} (nothing follows NTHREADS)")
    if words:
        try:
            arguments.n_threads = int(words[0])
        except ValueError:
            raise CommandLineError(f"main: invalid nthread '{words[0]}' (not a number)") from None
        if arguments.n_threads > MAX_THREADS:
            raise CommandLineError(f"main: invalid nthread '{words[0]}' (at most {MAX_THREADS})")


def _shown_name(text: str, ftype: registry.FileType | None) -> str:
    """TYPE as given, in upper case; a number becomes its name."""
    return text.upper() if ftype is None or not text.isdigit() else ftype.name


def idle_options(arguments: Arguments) -> Iterator[str]:
    """Arguments that change nothing: at all, beside others or without another one, each with the reason."""
    yield from arguments.ignored
    repacks = "repack" in arguments.flags
    if arguments.patterns and not repacks:
        yield "--repack-pattern (it needs --repack)"
    keeps = "--repack changes the row layout only" if repacks else "COPY keeps every tensor as it is"
    if repacks or (arguments.ftype is None and not arguments.target.is_given):
        names = ["--imatrix"] * bool(arguments.imatrix) + ["--extra-output-tensor"] * bool(
            repacks and arguments.extra_output
        )
        names += [name for name, role in ROLE_OPTIONS.items() if role in arguments.roles]
        if names:
            yield f"{', '.join(names)} ({keeps})"
    if arguments.imatrix:
        return
    if arguments.include or arguments.exclude:
        yield f"--{'include' if arguments.include else 'exclude'}-weights (it needs --imatrix)"
    if "hide_imatrix" in arguments.flags:
        yield "--hide-imatrix (it needs --imatrix)"


def usage() -> str:
    """The help text with all file types and tensor types."""
    return USAGE + type_lists()


TAKERS: dict[str, Callable[[Arguments, str, str], None]] = {
    "--imatrix": _take_file,
    "--include-weights": _take_weights,
    "--exclude-weights": _take_weights,
    "--custom-q": _take_rules,
    "--tensor-type": _take_tensor_types,
    "--tensor-type-file": _take_tensor_types,
    "--extra-output-tensor": _take_extra_output,
    "--repack-pattern": _take_patterns,
    "--override-kv": _take_override,
    "--target-size": _take_target,
    "--target-bpw": _take_target,
    "--target-types": _take_target,
    "--save-recipe": _take_file,
    "--prune-layers": _take_pruned_layers,
}
VALUE_OPTIONS = {*TAKERS, *ROLE_OPTIONS}
