"""Every option does something or is said not to: values are read, what has no effect is named and changes nothing."""

from __future__ import annotations

import ast
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from ikpy.cli.bench_command import parse_bench
from ikpy.cli.bench_options import ROWS as BENCH_ROWS
from ikpy.cli.needs import NEEDS, UNUSED_IN_MODES
from ikpy.cli.options import TOOLS, Effect, Option, all_options, by_name
from ikpy.cli.params import CommonParams, ContextOptions
from ikpy.cli.parser import parse
from ikpy.cli.values import to_text
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams, ModelParams
from ikpy.engine.speculative import SpeculativeParams
from ikpy.errors import UsageError
from ikpy.graph.placement import DeviceParams, PlacementParams
from ikpy.server.settings import ServerSettings
from ikpy.tools.batched_bench import BatchedSettings
from ikpy.tools.bench_tests import BenchParams
from ikpy.tools.imatrix import Settings as ImatrixSettings
from ikpy.tools.sweep_bench import SweepSettings
from tests.shared import DATA, ROOT

PACKAGE = ROOT / "ikpy"
HANDED_ON = {each.name for each in fields(ContextOptions)} & {each.name for each in fields(ContextParams)}
"""Fields of the command line that the engine gets by their names; that it reads its own is looked at below."""


@cache
def sources() -> dict[Path, ast.Module]:
    """All modules of the package but the declarations of options."""
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if "flags" not in path.parts}


def last_name(node: ast.expr) -> str:
    """`c` of `a.b.c`, `a` of `a`, empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def aliases(function: ast.AST) -> dict[str, str]:
    """Names that a function gives to attributes: `options = params.model` makes options mean model."""
    found = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            found |= {left.id: last_name(right) for left, right in pairs if isinstance(left, ast.Name)}
        elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and isinstance(node.iter, ast.Tuple):
            found[node.target.id] = last_name(node.iter.elts[0])
    return found


@cache
def read_fields() -> frozenset[str]:
    """`section.field` of every attribute that any function reads, and `.text` of texts, which getattr may use."""
    found = set()
    for path, module in sources().items():
        in_cli = path.parent.name == "cli"
        for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
            names = aliases(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    base = last_name(node.value)
                    found |= {f"{base}.{node.attr}", f"{names.get(base, base)}.{node.attr}"}
                elif in_cli and isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(f".{node.value}")
    return frozenset(found)


def is_read(dest: str) -> bool:
    section, _, name = dest.rpartition(".")
    if section == "sampling":  # the sampler and the server have it as `params`, `base` or `s`
        return bool({f"{base}.{name}" for base in ("params", "self", "s", "sampling")} & read_fields())
    if section == "context" and name in HANDED_ON:
        return True
    return f"{section}.{name}" in read_fields() or f".{name}" in read_fields()


DESTINATIONS = sorted({dest for row in all_options() for dest in (row.dest, row.also) if "." in dest})


@pytest.mark.parametrize("dest", DESTINATIONS)
def test_values_are_read(dest: str) -> None:
    assert is_read(dest), f"no code reads {dest}"


def test_the_search_finds_what_is_not_read() -> None:
    assert not is_read("model.no_such_field") and not is_read("sampling.no_such_field")


@cache
def read_outside_of_the_command_line() -> tuple[set[str], set[str]]:
    """Attributes that modules outside of the command line read, and the texts of all modules."""
    read, texts = set(), set()
    for path, module in sources().items():
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif path.parent.name != "cli" and isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
    return read, texts


@pytest.mark.parametrize(
    "kind",
    [
        ContextParams,
        ModelParams,
        PlacementParams,
        DeviceParams,
        SpeculativeParams,
        ServerSettings,
        ImatrixSettings,
        SweepSettings,
        BatchedSettings,
        BenchParams,
    ],
    ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}",
)
def test_what_options_become_is_read(kind: type) -> None:
    """Fields that the command line fills are read as attributes outside of the command line."""
    assert is_dataclass(kind)
    read, texts = read_outside_of_the_command_line()
    by_text = {f.name for f in fields(kind)} & texts if kind is BenchParams else set()  # columns of the results
    assert not {field.name for field in fields(kind)} - read - by_text


def test_options_of_bench_have_a_field_or_a_reason() -> None:
    known = {field.name for field in fields(BenchParams)} | {
        "hf_repos",
        "hf_files",
        "hf_token",
        "offline",
        "list_devices",
        "mask",
        "strict",
        "priority",
        "poll",
    }
    for row in BENCH_ROWS:
        assert row.dest in known or (not row.dest and row.no_effect), row.names


VALUES = (
    "3", "0.5", "on", "yarn", "q8_0", "mean", "non-causal", "a=int:3", "rank", "27,0", "none", "json", "md", "gguf",
    "deepseek", "dk", "top_k", "15+1", "mtp", "n_max=4", "0-1", '{"a": 1}', "3,1",
)  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_not_used_changes_nothing(tool: str, tmp_path: Path) -> None:
    """An option with the warning `not used by` leaves all parameters as they are."""
    file = tmp_path / "file"
    file.write_text('{"a": 1}')
    plain, letter = parse([], tool, {}), TOOLS[tool]
    n = 0
    for row in all_options():
        if row is not by_name(letter)[row.name] or letter in row.used or not row.dest:
            continue
        for text in (str(file), *VALUES):
            words = [text] * max(1, row.kind.nargs) if row.kind.metavar else []
            try:
                params = parse([row.name, *words], tool, {})
            except UsageError:  # not a value of this option
                continue
            n += 1
            assert vars(params) | {"given": [], "warnings": []} == vars(plain) | {"warnings": []}, row.name
            assert any("not used by" in line for line in params.warnings), row.name
            break
        else:
            pytest.fail(f"no value fits {row.name}")
    assert n > 5


@pytest.mark.parametrize("row", [*NEEDS, *UNUSED_IN_MODES], ids=lambda row: row.names[0])
def test_options_that_need_another_one(row) -> None:
    """The tables name options that the tools use; without the other one needs do not hold, exclusions do."""
    for letter in row.tools:
        tool = next(tool for tool, sign in TOOLS.items() if sign == letter)
        plain = parse(["-cram", "0"] if "-crs" in row.names else [], tool, {})
        for name in row.names:
            option = by_name(letter)[name]
            assert option.name == name and letter in option.used and option.effect is Effect.USED
        assert bool(row.holds(plain)) == (row in UNUSED_IN_MODES)


@pytest.mark.parametrize(
    ("tool", "line", "idle"),
    [
        ("cli", "--prompt-cache-all", ["--prompt-cache-all"]),
        ("cli", "--prompt-cache f --prompt-cache-all", []),
        ("cli", "--mirostat-lr 0.2 --dry-base 2", ["--mirostat-lr", "--dry-base"]),
        ("cli", "--mirostat 2 --mirostat-lr 0.2 --dry-multiplier 1 --dry-base 2", []),
        ("server", "--mirostat-lr 0.2 --dry-base 2", []),
        ("cli", "--in-prefix x", ["--in-prefix"]),
        ("cli", "-i --in-prefix x", []),
        ("cli", "-cnv --in-prefix x -mli", ["--in-prefix"]),
        ("cli", "--cfg-negative-prompt x", ["--cfg-negative-prompt"]),
        ("cli", "--cfg-negative-prompt x --cfg-scale 2", []),
        ("server", "--draft 8 -lcd f", ["--draft", "-lcd"]),
        ("server", "-md d.gguf --draft 8", []),
        ("server", "--spec-type ngram-cache:n_max=4 -lcd f", []),
        ("server", "-mmdev none -tm 2", ["-tm", "-mmdev"]),
        ("cli", "-mmdev none --mmproj p.gguf", []),
        ("server", "-mmdev none --image-max-tokens 9 --models-preset p.ini", []),
        ("perplexity", "-np 4", ["-np"]),
        ("perplexity", "-np 4 --hellaswag", []),
        ("perplexity", "--hellaswag --ppl-stride 8 --chunks 1", ["--ppl-stride", "--chunks"]),
        ("perplexity", "--winogrande --save-all-logits b", ["--kl-divergence-base"]),
        ("perplexity", "--kl-divergence --kl-divergence-base b --chunks 1 -p x --ppl-stride 8", ["--ppl-stride", "-p"]),
        ("perplexity", "--multiple-choice -p x -bf /dev/null", ["-p"]),
        ("perplexity", "-p x --ppl-stride 8 --ppl-output-type 1 --chunks 1", []),
        ("server", "--models-ttl 5 --pooling mean", ["--models-ttl", "--pooling"]),
        ("server", "--reranking --pooling mean", []),
        ("server", "--models-preset m.ini --models-ttl 5", []),
    ],
)
def test_options_without_their_partner(tool: str, line: str, idle: list[str]) -> None:
    lines = [line for line in parse(line.split(), tool, {}).warnings if line.startswith("no effect: ")]
    named = [name for line in lines for name in line.removeprefix("no effect: ").partition(" (")[0].split(", ")]
    assert named == idle


@pytest.mark.parametrize(
    ("model", "params", "line"),
    [
        ("qwen3", {"smart_expert_reduction": (6, 1.0)}, "-ser has no effect: the model has no experts"),
        ("qwen3moe", {"smart_expert_reduction": (2, 1.0)}, ""),
        ("qwen3moe", {"smart_expert_reduction": (9, 0.0)}, ""),
        (
            "qwen3moe",
            {"smart_expert_reduction": (3, 0.5)},
            "-ser has no effect: the model uses 3 experts for a token",
        ),
        ("qwen3moe", {"grouped_experts": True}, "-ger has no effect: the model has no groups of experts"),
        ("qwen3", {"swa_full": True}, "--swa-full has no effect: the model attends to all tokens in every layer"),
        ("qwen3", {"yarn_beta_fast": 3.0}, "--yarn-... has no effect: --rope-scaling is linear, not yarn"),
        ("qwen2-yarn", {"yarn_beta_fast": 3.0}, ""),
        ("qwen3", {"yarn_beta_fast": 3.0, "rope_scaling": "yarn"}, ""),
        (
            "qwen2-yarn",
            {"rope_freq_scale": 0.5, "rope_scaling": "none"},
            "--rope-scale has no effect: --rope-scaling is none",
        ),
        ("qwen2-yarn", {"rope_freq_scale": 0.5}, ""),
        ("qwen3", {"rope_freq_scale": 0.25, "rope_scaling": "yarn"}, ""),
        (
            "deepseek2-v3-mla",
            {"type_v": "q8_0"},
            "-ctv has no effect: the cache holds latents, whose type is that of -ctk",
        ),
        ("deepseek2-v3-mla", {"type_v": "q8_0", "mla": 0}, ""),
        ("deepseek2-v3-mla", {"v_hadamard": True}, "-vhad has no effect: the cache holds latents"),
    ],
)
def test_options_without_effect_on_a_model(model: str, params: dict, line: str) -> None:
    log: list[str] = []
    loaded = Model.load(DATA / "zoo" / f"{model}.gguf", ModelParams(header_only=True))
    Context(loaded, ContextParams(n_ctx=64, n_threads=1, **params), log=log.append)
    assert [text for text in log if "has no effect" in text] == ([f"warning: {line}"] if line else [])


OUT_OF_RANGE = {
    "cli": "--keep -2, -ptc -2, -mg -1, -ncmoe -1, --yarn-orig-ctx -1, -cd -1",
    "perplexity": "--chunks -2, --ppl-stride -1, --hellaswag-tasks 0, --winogrande-tasks -1",
    "imatrix": "-ofreq -1, --save-frequency -1, --chunk -1",
    "server": "-to 0, --queue-limit 0, --models-max -1, --models-ttl -1, --models-memory -1, -cram -2, -cram-n-min -1, "
    "--reasoning-budget -2, --banned-n -2",
}


@pytest.mark.parametrize(
    ("tool", "line"), [(tool, use) for tool, uses in OUT_OF_RANGE.items() for use in uses.split(", ")]
)
def test_numbers_out_of_range_are_refused(tool: str, line: str) -> None:
    with pytest.raises(UsageError, match=r"invalid parameter for argument: .* \(expected at least"):
        parse(line.split(), tool, {})


def tool_of(row: Option) -> str:
    """A tool that uses the option."""
    return next((tool for tool, letter in TOOLS.items() if letter in row.used), "cli")


def takes_numbers(row: Option) -> bool:
    """Whether the option refuses words. Rows that another row of the tool hides, and refused ones, do not count."""
    is_number = row.kind.metavar in ("N", "F", "MiB", "MiB,MiB,...") and row.kind.convert is not to_text
    return is_number and row.effect is not Effect.REFUSED and by_name(TOOLS[tool_of(row)])[row.name] is row


@pytest.mark.parametrize("row", list(filter(takes_numbers, all_options())), ids=lambda row: row.name)
def test_numbers_that_are_none_are_refused(row: Option) -> None:
    with pytest.raises(UsageError, match=r"invalid parameter for argument: .* \(expected (an integer|a number)"):
        parse([row.name, "abc"], tool_of(row), {})


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--delay 1000000000000", "--delay (expected 0..3600, got 1000000000000)"),
        ("-p 1-1000000000000", "-p ('1-1000000000000' is a range of more than 10000 numbers; give a step such as"),
        ("-ncmoe -1", "-ncmoe (expected at least 0, got -1)"),
        ("-mg -1", "-mg (expected at least 0, got -1)"),
        ("-ts 1/-1", "-ts (shares cannot be negative, got '1/-1')"),
    ],
)
def test_numbers_of_bench_out_of_range_are_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"invalid parameter for argument: {message}")):
        parse_bench(line.split())


def test_what_bench_does_not_know_of_devices_is_named() -> None:
    assert "-cuda: invalid parameter abc -> ignored" in parse_bench(["-cuda", "abc,graphs=0"]).warnings
    assert "no effect: -rcache (the angles are always computed once)" in parse_bench(["-rcache", "0"]).warnings


def test_defaults_hold_without_options() -> None:
    assert vars(parse([], "cli", {})) == vars(CommonParams(tool="cli"))


def test_batches_that_are_too_small_are_raised_with_a_warning() -> None:
    log: list[str] = []
    loaded = Model.load(DATA / "zoo" / "qwen3.gguf", ModelParams(header_only=True))
    assert Context(loaded, ContextParams(n_ctx=64, n_batch=4), log=log.append).n_batch == 16
    assert "warning: -b: 4 is too small, using 16" in log
