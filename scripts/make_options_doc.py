"""Writes docs/options.md from the option tables. Run it after changing a table: python scripts/make_options_doc.py"""

from __future__ import annotations

import sys
from pathlib import Path

from ikpy.cli.bench_options import ROWS as BENCH_ROWS
from ikpy.cli.help import default_text, spelling
from ikpy.cli.options import NO_GPU, TOOLS, Effect, Option, all_options

TARGET = Path(__file__).parent.parent / "docs" / "options.md"
INTRODUCTION = """# Options

This page is written by `scripts/make_options_doc.py` from the tables the programs are driven by.

The common tools (`perplexity`, `imatrix`, `server`, `sweep-bench`, `batched-bench`, `cli`) share one table: each
accepts every option below, so that a command line can be moved from one tool to another. Rules:

- an option is matched as a whole; a value is always the next argument (`-c 4096`, not `-c=4096`);
- `_` is read as `-` in options that start with `--`;
- integers have 32 bits, those of `--override-kv` 64; what follows a number, as in `4k`, is left out with a warning;
- the last use of an option wins, except for options that are repeatable;
- switches whose value is shown in brackets, such as `-fa` and `-rtr`, may stand alone or be followed by a value;
- environment variables are read before the command line (by the server also after it); those of switches take `on`,
  `off`, `1`, `0`, `true` and `false`. There is one for every long spelling: `LLAMA_ARG_CTX_SIZE` for
  `--ctx-size`. A tool reads those of the options that it uses; `bench`, `quantize`, `tokenize`, `gguf` and `convert`
  read none;
- an option that cannot have an effect (the tool does not use it, the model or the machine has nothing for it, or
  another option that it needs is not given) is accepted with a warning on standard error and changes nothing; one that
  would change results but cannot be met is an error.

Letters of the column *used by*: P perplexity, I imatrix, S server, W sweep-bench, B batched-bench, C cli.
"""

ENVIRONMENT = """
## Environment variables

Those of single options are named in the tables. The others:

| variable | meaning |
|---|---|
| `IKPY_ISA` | native core: `avx512`, `avxvnni`, `avx2` or `portable`; default: the best one of this build and CPU |
| `IKPY_AMX` | `0`: no use of the tile unit; `bf16`: no products of halves; `fp16`: F16 weights as halves, too |
| `IKPY_VBMI` | `0`: no kernels that permute bytes (VBMI and GFNI) |
| `IKPY_MAKER` | `amd` or `intel`: whose CPUs the kernels suit; default: what the CPU says |
| `IKPY_GATHERS` | `fast` or `slow`: whether Intel's CPUs gather points and seeds from tables; default: measured |
| `IKPY_FETCH` | `pages`: weights are fetched from eight pages in turn, as on Intel's CPUs without tiles; `lines`: not |
| `HF_HOME`, `HF_ENDPOINT` | cache and address of the Hugging Face hub (`-hf`) |
| `LLAMA_CACHE` | where `-mu` keeps models; default: `~/.cache/ikpy/models` |
| `XDG_CACHE_HOME` | in place of `~/.cache`, for compiled kernels of GPUs, too |
| `NVCC`, `CUDA_HOME`, `CUDA_VISIBLE_DEVICES` | compiler, toolkit and devices ([gpu.md](gpu.md)) |

`ikpy info` shows what the first six lead to. Those of the build and of tests are in
[architecture.md](architecture.md#the-executor) and [gpu-testing.md](gpu-testing.md).
"""


def cell(text: str) -> str:
    """Text that is safe in a table cell."""
    return text.replace("|", "\\|").replace("\n", "\\n")


def no_effect(reason: str) -> str:
    """Sentence on an option that does nothing, always or on machines without a GPU."""
    return "No effect without a CUDA device." if reason == NO_GPU else f"No effect: {reason}."


def effect_text(row: Option) -> str:
    """What giving the option does, when it is not simply used."""
    if row.effect is Effect.USED:
        return f" {no_effect(row.reason)}" if row.reason else ""
    if row.effect is Effect.ALWAYS:
        return " Always on."
    return f" {row.effect.value.capitalize()}: {row.reason}."


def common_section() -> list[str]:
    """Tables of the common options, one per group."""
    lines = []
    group = ""
    for row in all_options():
        if row.group != group:
            group = row.group
            lines += [f"\n## {group}\n", "| option | used by | meaning |", "|---|---|---|"]
        environment = f" Environment: {', '.join(f'`{name}`' for name in row.env.split())}." if row.env else ""
        meaning = f"{row.help}{default_text(row)}.{effect_text(row)}{environment}"
        used = row.used if row.effect in (Effect.USED, Effect.ALWAYS) else "-"
        lines.append(f"| `{cell(spelling(row))}` | {used} | {cell(meaning)} |")
    return lines


def bench_section() -> list[str]:
    """Table of the options of bench."""
    lines = [
        "\n## ikpy bench\n",
        "Values of the options marked *list* are comma lists, and these options may be repeated; all combinations are",
        "measured. Of a switch (`0|1`) the value may be left out before another option. Numbers of tokens, batches,",
        "threads and layers may be ranges: `1-4`, `512-2048+512`, `512-8192*2`.\n",
        "| option | list | meaning |",
        "|---|---|---|",
    ]
    for row in BENCH_ROWS:
        names = f"{', '.join(row.names)} {row.metavar}".rstrip()
        effect = f" {no_effect(row.no_effect)}" if row.no_effect else ""
        lines.append(f"| `{cell(names)}` | {'yes' if row.many else 'no'} | {cell(row.help)}.{effect} |")
    return lines


def render() -> str:
    """The whole page."""
    assert set(TOOLS.values()) == set("PISWBC")
    return INTRODUCTION + "\n".join([*common_section(), *bench_section()]) + "\n" + ENVIRONMENT


def main() -> int:
    """Write the page, or with --check report whether it is up to date."""
    text = render()
    if "--check" in sys.argv:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
