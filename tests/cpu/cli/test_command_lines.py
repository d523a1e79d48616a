"""Command lines of users and of the documentation: every tool takes them, and what the documentation names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import typer

from ikpy.cli import COMMANDS, convert, cuda, gguf, main, quantize_arguments, rpc_server, tokenize
from ikpy.cli.bench_command import parse_bench
from ikpy.cli.bench_options import BY_NAME
from ikpy.cli.options import TOOLS, by_name
from ikpy.cli.parser import Parser, parse
from ikpy.convert.families import FAMILIES
from ikpy.errors import UsageError
from ikpy.models import ARCHITECTURES
from tests.command_lines import invocations, joined_lines
from tests.shared import ROOT, SHARED

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = rf"ikpy ({'|'.join(sorted(COMMANDS, key=len, reverse=True))})"
USERS_PROGRAM = r"llama-(server|cli|sweep-bench|batched-bench|perplexity|imatrix|bench|quantize|tokenize)(?:\.exe)?"
DEMO_TEXT = ROOT / "ikpy" / "assets" / "demo-text.txt"


def take(tool: str, arguments: list[str]) -> None:
    """Parse the arguments as the tool does. UsageError or a usage error of click if it refuses them."""
    if {"--help", "--version"} & set(arguments):
        return
    if tool in TOOLS:
        parse(arguments, tool, {})
    elif tool == "bench":
        parse_bench(arguments)
    elif tool == "quantize":
        quantize_arguments.parse(arguments)
    elif tool == "tokenize":
        tokenize.parse_options(arguments)
    elif tool == "rpc-server":
        rpc_server.parse_options(arguments)
    elif tool == "cuda" and arguments[:1] == ["build"]:
        cuda._build_options(arguments[1:])
    elif tool in ("convert", "gguf"):
        command = typer.main.get_command(convert.app if tool == "convert" else gguf.app)
        if tool == "gguf":
            command, arguments = command.commands[arguments[0]], arguments[1:]  # type: ignore[attr-defined]
        command.make_context(tool, arguments)


PLACEHOLDERS = {"N": "2", "MODE": "distribute", "TYPE": "Q4_0", "NTHREADS": "2"}


def documented() -> list[tuple[str, str, tuple[str, ...]]]:
    """Page, tool and arguments of every command line with arguments in the documentation."""
    found = {}
    for page in PAGES:
        for tool, arguments in invocations(page.read_text(), PROGRAM):
            words = [word.strip("[]") for word in arguments if not re.fullmatch(r"\[?(?:\.\.\.|options)\]?", word)]
            is_prose = tool in (*TOOLS, "bench") and not " ".join(words).startswith("-")
            if words and not is_prose and not (tool == "gguf" and len(words) == 1):
                found[page.name, tool, tuple(PLACEHOLDERS.get(word, word) for word in words)] = None
    return list(found)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in with the text files that command lines name."""
    monkeypatch.chdir(tmp_path)
    for name in ("wiki.test.raw", "calibration_data_v5_rc.txt", "calibration.txt", "text.txt", "hellaswag_val_full.txt",
                 "winogrande.csv", "tasks.bin"):  # fmt: skip
        (tmp_path / name).write_text("x")
    (tmp_path / "recipe.txt").write_text("ffn=q8_0\n")
    return tmp_path


@pytest.mark.parametrize(("page", "tool", "arguments"), documented())
def test_documented_command_lines_are_taken(page: str, tool: str, arguments: tuple[str, ...], files: Path) -> None:
    if (
        tool == "quantize"
        and not {"INPUT", "FILE"} & set(arguments)
        and not any(word.endswith("gguf") for word in arguments)
    ):
        arguments = (*arguments, "INPUT", "Q4_0")  # an option is named, not a command line
    take(tool, list(arguments))


def test_the_documentation_shows_command_lines() -> None:
    tools = {tool for _, tool, _ in documented()}
    assert len(documented()) > 60 and tools >= {*TOOLS, "bench", "quantize", "convert", "gguf", "cuda"}


@cache
def known_options() -> set[str]:
    """Spellings of all options of all subcommands."""
    names = {
        *by_name(),
        *BY_NAME,
        *quantize_arguments.FLAGS,
        *quantize_arguments.VALUE_OPTIONS,
        *tokenize.FLAGS,
        *tokenize.VALUE_OPTIONS,
        *rpc_server.FLAGS,
        *rpc_server.VALUE_OPTIONS,
        *re.findall(r"--[a-z-]+", cuda.USAGE),
    }
    for app in (convert.app, gguf.app):
        command = typer.main.get_command(app)
        for each in getattr(command, "commands", {"": command}).values():
            names |= {name for parameter in each.params for name in parameter.opts}
    return names | {"--help", "--version", "--list-devices", "--verbose", "--slow-iq2ks", "--completion-bash"}


ABOUT_SCRIPTS = ("performance", "quants", "cuda-kernels")
"""How the names of pages begin that are about scripts."""
EXPLAINED = {
    "gpu-testing.md": {"--budget", "--no-cone", "--sections"},
    "bench.md": {"--peer-bin"},
}
"""Options of scripts and other programs that a page names apart from them."""
OTHER_PROGRAMS = re.compile(
    r"benchmarks\.|scripts/|pytest|pip |docker|numactl|cmake|compute-sanitizer|nvcc|curl|gdb|ldd|lm_eval"
)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not page.stem.startswith(ABOUT_SCRIPTS)], ids=lambda page: page.name
)
def test_documented_options_exist(page: Path) -> None:
    """Long options in code are some tool's, but in lines about other programs. `--yarn-...` stands for several."""
    unknown = set()
    in_block = False
    for line in joined_lines(page.read_text()):
        in_block ^= line.startswith("```")
        is_code = in_block or line.startswith("    ")
        for code in [line] if is_code else re.findall(r"`([^`]+)`", line):
            if not OTHER_PROGRAMS.search(line if is_code else code):
                unknown |= {name for name in re.findall(r"(?<![\w-])--[a-z][\w.-]*\w(?![\w-])", code)} - known_options()
    assert not unknown - EXPLAINED.get(page.name, set())


@cache
def documented_words() -> set[str]:
    """What looks like an option anywhere on the pages."""
    return {name for page in PAGES for name in re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", page.read_text())}


@pytest.mark.parametrize(
    "command", [*COMMANDS, *(f"gguf {name}" for name in ("split", "merge", "hash", "dump", "set"))]
)
def test_options_are_documented(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What the help of a command names stands on a page as well."""
    assert main([*command.split(), "--help"]) == 0
    shown = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w", capsys.readouterr().out))
    assert not shown - documented_words()


def test_architectures_and_families_are_documented() -> None:
    """Each has a row in the table of its page."""
    for page, names in (("models", ARCHITECTURES), ("convert", FAMILIES)):
        rows = [line for line in (ROOT / "docs" / f"{page}.md").read_text().splitlines() if line.startswith("| `")]
        assert not names.keys() - {name for row in rows for name in re.findall(r"`([\w.-]+)`", row)}


def script_source(path: Path) -> str:
    """Text of a script or module, with those of the benchmarks' modules that it imports."""
    text = path.read_text()
    for package, names in re.findall(r"^from (benchmarks[\w.]*) import ([\w, ]+)", text, re.M):
        folder = ROOT / package.replace(".", "/")
        for module in [folder.with_suffix(".py"), *(folder / f"{name}.py" for name in names.split(", "))]:
            text += module.read_text() if module.exists() and module != path else ""
    return text


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_documented_options_of_scripts_exist(page: Path) -> None:
    """Long options behind a module of the benchmarks or a script stand in its source."""
    unknown = []
    for line in joined_lines(page.read_text()):
        for name, rest in re.findall(r"(-m benchmarks[\w.]*|scripts/\w+(?:\.py)?)((?: +[^`\s(|]+)+)", line):
            path = ROOT / name.removeprefix("-m ").replace(".", "/") if name.startswith("-m") else ROOT / name
            candidates = [path, path.with_suffix(".py"), path / "__main__.py"]
            source = next(script_source(each) for each in candidates if each.is_file())
            for option in re.findall(r"(?<=\s)\[?(--[a-z][\w-]*)", rest.partition(" # ")[0]):
                if not re.search(rf"{option}(?![\w-])", source):
                    unknown.append(f"{name} {option}")
    assert not unknown


PATH = re.compile(r"(?:ikpy|tests|scripts|docs|benchmarks|packaging)/[\w./*<>-]+")


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_named_files_exist(page: Path) -> None:
    """Links, paths in code and modules of the benchmarks."""
    text = page.read_text()
    missing = [link for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text) if not (page.parent / link).exists()]
    for code in re.findall(r"`([^`\n]+)`", text):
        path = code.split("::")[0]
        if PATH.fullmatch(path) and "<" not in path and not list(ROOT.glob(path.rstrip("/"))):
            missing.append(path)
    for module in re.findall(r"-m (benchmarks[\w.]*)", text):
        stem = ROOT / module.replace(".", "/")
        if not (stem.with_suffix(".py").exists() or (stem / "__main__.py").exists()):
            missing.append(module)
    assert not missing


VARIABLE = re.compile(r"(?<![A-Z_])IKPY_[A-Z_]+\b")
READ = re.compile(
    rf"environ\S*?[\[(]\"({VARIABLE.pattern})|getenv\(\"({VARIABLE.pattern})|\$\{{({VARIABLE.pattern})[:}}]"
)
NAMED = re.compile(rf"^[A-Z_]+ = \"({VARIABLE.pattern})\"$", re.M)
INTERNAL = {"IKPY_WORKER", "IKPY_NUMA_MODEL"}
"""Variables by which programs of ours call each other."""


def variables_read() -> set[str]:
    """Names of environment variables that programs, scripts and tests read."""
    found: set[str] = set()
    for folder in ("ikpy", "benchmarks", "scripts", "tests", "setup.py"):
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]:
            if path.is_file() and path.suffix in (".py", ".cpp", ".hpp", ".pyx", ""):
                text = path.read_text(errors="replace")
                found |= {name for match in READ.findall(text) for name in match if name}
                found |= set(NAMED.findall(text))
    return found - INTERNAL


def test_documented_variables_are_those_that_are_read() -> None:
    documented = {name for page in PAGES for name in VARIABLE.findall(page.read_text())}
    assert documented == variables_read()


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        n = sum(name == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", name) is not None for name in found)
        found.add(f"{anchor}-{n}" if n else anchor)
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_to_headings_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text())
    missing = [
        f"{link}#{anchor}" for link, anchor in links if anchor not in anchors(page.parent / link if link else page)
    ]
    assert not missing


def test_headings_become_anchors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page, `with` code\n## Twice\n```\n# no heading\n```\n## Twice\n### See [x](y.md)\n")
    assert anchors(page) == {"a-page-with-code", "twice", "twice-1", "see-x"}


# the users' own


def of_users() -> list[tuple[str, list[str]]]:
    """Tool and arguments of the command lines in the users' discussions, each once."""
    found = {}
    for path in sorted((SHARED / "seeds").glob("*.txt")):
        for tool, arguments in invocations(path.read_text(errors="replace"), USERS_PROGRAM):
            if arguments and arguments[0].startswith("-") and "..." not in arguments:
                found[tool, tuple(arguments)] = None
    return [(tool, list(arguments)) for tool, arguments in found]


needs_users = pytest.mark.skipif(not (SHARED / "seeds").exists(), reason="the users' discussions are not here")
MISTAKES = (
    "unknown argument: model",  # a blank in the name of a file
    "unknown argument: n_kv_max",  # output of the program behind the command
    "invalid parameter for argument: your_tensor_splits",
    "unknown argument: ‚",  # a picture of a table of processes
    "unknown option --quantize-q",  # named with a mistake
)


@needs_users
def test_command_lines_of_users_are_taken(files: Path) -> None:
    taken, refused = 0, []
    for tool, arguments in of_users():
        if "--custom-q" in arguments:  # built with a variable, which is not known here
            arguments[arguments.index("--custom-q") + 1] = "ffn=q8_0"
        try:
            take(tool, arguments)
            taken += 1
        except UsageError as error:
            if not str(error).startswith(MISTAKES):
                refused.append(f"{error}: {tool} {arguments}")
    assert not refused
    assert taken >= 90


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("$ ./llama-cli -m a.gguf -p \"x y\" | tee log", [("cli", ["-m", "a.gguf", "-p", "x y"])]),
        ("> > X=0 numactl -N 0 ./llama-server \\\n> > -c 4096 \\\n> > -fa 2>&1", [("server", ["-c", "4096", "-fa"])]),
        (".\\bin\\llama-server.exe ^\n -c 1 ^\n -ngl 9", [("server", ["-c", "1", "-ngl", "9"])]),
        ("PS> .\\llama-bench.exe `\n -p 1 `\n  -n 2", [("bench", ["-p", "1", "-n", "2"])]),
        ("./llama-server -c $((2*1024)) \\\n#  -fa \\\n -m $MODEL # note", [("server", ["-c", "1", "-m", "1"])]),
        ("use `llama-server -fa` and `llama-cli -i`", [("server", ["-fa"]), ("cli", ["-i"])]),
        ("I can't say, llama-server -fa isn't here", []),
    ],
)  # fmt: skip
def test_command_lines_are_found(text: str, found: list) -> None:
    assert list(invocations(text, USERS_PROGRAM)) == found


SMALLER = {
    "-c": "256", "-b": "64", "-ub": "32", "-n": "4", "-t": "1", "-tb": "1", "--chunks": "1", "-f": str(DEMO_TEXT),
    "-npp": "8", "-ntg": "4", "-npl": "2", "-o": "OUT.dat",
}  # fmt: skip
"""Values for the bundled model, by the first spelling of options."""
DROPPED = {"-m", "-md", "-s", "-np", "--numa", "-i", "-cnv", "--lora", "-ot", "--prompt-cache", "-if", "--dry-run"}
ALWAYS = {
    "cli": ["-p", "Once", "-n", "4", "-c", "256"],
    "sweep-bench": ["-c", "256", "-ub", "64", "-b", "64"],
    "batched-bench": ["-npp", "8", "-ntg", "4", "-npl", "2", "-c", "256"],
    "perplexity": ["-f", str(DEMO_TEXT), "--chunks", "1", "-c", "256"],
    "imatrix": ["-f", str(DEMO_TEXT), "--chunks", "1", "-c", "256", "-o", "OUT.dat"],
}


def made_small(tool: str, arguments: list[str]) -> list[str]:
    """A user's options with the sizes of the bundled model in place of theirs."""
    kept = [*ALWAYS[tool], "-t", "1"]
    for row, words in Parser(tool, {}).uses(arguments):
        if row.name not in DROPPED:
            kept += [words[0], SMALLER[row.name]] if row.name in SMALLER else words
    return kept


@needs_users
@pytest.mark.parametrize("tool", ALWAYS)
def test_command_lines_of_users_run(tool: str, files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two of each tool, those with most options, on the bundled model."""
    lines = sorted((words for name, words in of_users() if name == tool and words[-1] != "model"), key=len)[::-1]
    n = 0
    for words in lines[:8]:
        try:
            small = made_small(tool, words)
        except (KeyError, UsageError):  # a mistake of the user
            continue
        assert main([tool, *small]) == 0, f"{small}: {capfd.readouterr().err[-500:]}"
        n += 1
        if n == 2:
            break
    assert n
