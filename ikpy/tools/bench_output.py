"""Tables and records of the benchmark: markdown, CSV, JSON, JSON lines, SQL."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TextIO

from ikpy.backends.cuda.devices import local_devices
from ikpy.machine.threads import physical_cores
from ikpy.tools import machine
from ikpy.tools.bench import Result
from ikpy.tools.bench_tests import BenchParams, bench_tests

GIB = 1 << 30
MIB = 1 << 20
# Name and kind of every field: string, integer, boolean, float.
FIELDS = (
    ("build_commit", "S"),
    ("build_number", "I"),
    ("cuda", "B"),
    ("vulkan", "B"),
    ("metal", "B"),
    ("sycl", "B"),
    ("rpc", "S"),
    ("gpu_blas", "B"),
    ("blas", "B"),
    ("cpu_info", "S"),
    ("gpu_info", "S"),
    ("model_filename", "S"),
    ("model_type", "S"),
    ("model_size", "I"),
    ("model_n_params", "I"),
    ("n_batch", "I"),
    ("n_ubatch", "I"),
    ("n_threads", "I"),
    ("type_k", "S"),
    ("type_v", "S"),
    ("n_gpu_layers", "I"),
    ("split_mode", "S"),
    ("main_gpu", "I"),
    ("no_kv_offload", "B"),
    ("flash_attn", "B"),
    ("mla_attn", "I"),
    ("attn_max_batch", "I"),
    ("ser", "S"),
    ("reuse", "B"),
    ("tensor_split", "S"),
    ("use_mmap", "B"),
    ("embeddings", "B"),
    ("repack", "B"),
    ("mqkv", "B"),
    ("muge", "B"),
    ("defer_experts", "B"),
    ("fused_moe", "B"),
    ("grouped_er", "B"),
    ("no_fused_up_gate", "B"),
    ("use_thp", "B"),
    ("no_ooae", "B"),
    ("rcache", "B"),
    ("sas", "B"),
    ("max_gpu", "I"),
    ("cuda_params", "S"),
    ("override_tensor", "S"),
    ("n_prompt", "I"),
    ("n_gen", "I"),
    ("test_time", "S"),
    ("avg_ns", "I"),
    ("stddev_ns", "I"),
    ("avg_ts", "F"),
    ("stddev_ts", "F"),
    ("test", "S"),
)
SINGLE_FIELDS = (
    "mqkv",
    "muge",
    "defer_experts",
    "fused_moe",
    "grouped_er",
    "no_fused_up_gate",
    "use_thp",
    "no_ooae",
    "rcache",
    "sas",
    "max_gpu",
    "cuda_params",
    "override_tensor",
)
SWEPT_FIELDS = (
    "n_batch",
    "n_ubatch",
    "type_k",
    "type_v",
    "n_gpu_layers",
    "split_mode",
    "main_gpu",
    "no_kv_offload",
    "flash_attn",
    "mla_attn",
    "attn_max_batch",
    "reuse",
    "use_mmap",
    "repack",
    "embeddings",
)
SQL_TYPES = {"S": "TEXT", "I": "INTEGER", "B": "INTEGER", "F": "REAL"}
# Field, heading, width (negative = left-aligned) of the columns between `threads` and `test`.
OPTIONAL_COLUMNS = (
    ("n_batch", "n_batch", 7),
    ("n_ubatch", "n_ubatch", 8),
    ("type_k", "type_k", 6),
    ("type_v", "type_v", 6),
    ("main_gpu", "main_gpu", 10),
    ("split_mode", "sm", 5),
    ("no_kv_offload", "nkvo", 13),
    ("flash_attn", "fa", 2),
    ("mla_attn", "mla", 3),
    ("attn_max_batch", "amb", 5),
    ("reuse", "gr", 2),
    ("ser", "ser", 10),
    ("tensor_split", "ts", -12),
    ("use_mmap", "mmap", 4),
    ("embeddings", "embd", 10),
    ("cuda_params", "cuda", -11),
    ("override_tensor", "ot", -15),
    ("repack", "rtr", 3),
    ("mqkv", "mqkv", 4),
    ("sas", "sas", 3),
    ("max_gpu", "max_gpu", 7),
    ("muge", "muge", 4),
    ("defer_experts", "defer", 5),
    ("use_thp", "thp", 3),
    ("fused_moe", "fmoe", 4),
    ("grouped_er", "ger", 3),
    ("rcache", "rcache", 6),
    ("no_fused_up_gate", "no-fug", 6),
    ("no_ooae", "no-ooae", 7),
)


def fields(params: BenchParams) -> tuple[tuple[str, str], ...]:
    """Names and kinds of a record's fields; the depth is one where depths are asked for."""
    if params.n_depth == [0]:
        return FIELDS
    place = next(index for index, (name, _) in enumerate(FIELDS) if name == "test_time")
    return (*FIELDS[:place], ("n_depth", "I"), *FIELDS[place:])


def ser_text(value: tuple[int, float]) -> str:
    """`6,1`."""
    return f"{value[0]},{value[1]:g}"


def split_text(value: tuple[float, ...]) -> str:
    """Shares with two decimals joined by `/`, without zeros at the end."""
    kept = list(value)
    while len(kept) > 1 and kept[-1] == 0:
        kept.pop()
    return "/".join(f"{share:.2f}" for share in kept)


def gpu_names() -> list[str]:
    """What the GPUs of this machine are."""
    return [device.description for device in local_devices()]


def record(params: BenchParams, result: Result) -> dict[str, Any]:
    """Value of every field, in their order."""
    test = result.test
    values: dict[str, Any] = {
        "build_commit": machine.build_commit(),
        "build_number": machine.build_number(),
        "cuda": bool(gpu_names()),
        "vulkan": False,
        "metal": False,
        "sycl": False,
        "rpc": ",".join(params.hosts) or "0",
        "gpu_blas": False,
        "blas": False,
        "cpu_info": machine.cpu_name(),
        "gpu_info": "/".join(gpu_names()),
        "model_filename": test.model,
        "model_type": result.model_type,
        "model_size": result.model_size,
        "model_n_params": result.model_n_params,
        "n_threads": test.n_threads,
        "ser": ser_text(test.values["ser"]),
        "tensor_split": split_text(test.values["tensor_split"]),
        "n_prompt": test.n_prompt,
        "n_gen": test.n_gen,
        "n_depth": test.depth,
        "test_time": result.test_time,
        "avg_ns": result.avg_ns,
        "stddev_ns": result.stddev_ns,
        "avg_ts": result.avg_ts,
        "stddev_ts": result.stddev_ts,
        "test": test.label,
    }
    values |= {name: test.values[name] for name in SWEPT_FIELDS}
    values |= {name: getattr(params, name) for name in SINGLE_FIELDS}
    return {name: values[name] for name, _ in fields(params)}


def plain(value: Any) -> str:
    """Text of a value in CSV, SQL and tables: 0/1 for booleans, 6 decimals for floats."""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:f}" if isinstance(value, float) else str(value)


class Printer:
    """Writes results as they come; subclasses give the form."""

    def __init__(self, params: BenchParams, stream: TextIO) -> None:
        self.params = params
        self.stream = stream

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()

    def begin(self) -> None:
        """Before the first test."""

    def result(self, result: Result) -> None:
        """After each test."""

    def end(self) -> None:
        """After the last test."""


class CsvPrinter(Printer):
    """One header line, every value in double quotes."""

    def begin(self) -> None:
        self.write(",".join(name for name, _ in fields(self.params)) + "\n")

    def result(self, result: Result) -> None:
        cells = (plain(value).replace('"', '""') for value in record(self.params, result).values())
        self.write(",".join(f'"{cell}"' for cell in cells) + "\n")


def json_value(value: Any) -> str:
    """JSON text of a value; floats with 6 decimals."""
    return f"{value:f}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def json_members(params: BenchParams, result: Result) -> list[tuple[str, str]]:
    """Names and JSON texts of a result, samples included."""
    members = [(name, json_value(value)) for name, value in record(params, result).items()]
    members.append(("samples_ns", f"[ {', '.join(map(str, result.samples_ns))} ]"))
    members.append(("samples_ts", f"[ {', '.join(f'{value:g}' for value in result.samples_ts)} ]"))
    return members


class JsonPrinter(Printer):
    """One array of objects."""

    first = True

    def begin(self) -> None:
        self.write("[\n")

    def result(self, result: Result) -> None:
        members = ",\n".join(f'    "{name}": {text}' for name, text in json_members(self.params, result))
        self.write(("" if self.first else ",\n") + "  {\n" + members + "\n  }")
        self.first = False

    def end(self) -> None:
        self.write("\n]\n")


class JsonLinesPrinter(Printer):
    """One object per line."""

    def result(self, result: Result) -> None:
        members = ", ".join(f'"{name}": {text}' for name, text in json_members(self.params, result))
        self.write("{" + members + "}\n")


class SqlPrinter(Printer):
    """A CREATE TABLE statement and one INSERT per test."""

    def begin(self) -> None:
        columns = ",\n".join(f"  {name} {SQL_TYPES[kind]}" for name, kind in fields(self.params))
        self.write(f"CREATE TABLE IF NOT EXISTS test (\n{columns}\n);\n\n")

    def result(self, result: Result) -> None:
        names = ", ".join(name for name, _ in fields(self.params))
        cells = (plain(value).replace("'", "''") for value in record(self.params, result).values())
        values = ", ".join(f"'{cell}'" for cell in cells)
        self.write(f"INSERT INTO test ({names}) VALUES ({values});\n")


class MarkdownPrinter(Printer):
    """A table with the columns that differ from the default or between tests."""

    def __init__(self, params: BenchParams, stream: TextIO) -> None:
        super().__init__(params, stream)
        self.columns = [("model_type", "model", -30), ("size", "size", 10), ("params", "params", 10)]
        self.columns += [("backend", "backend", -10)]
        if gpu_names():
            self.columns.append(("n_gpu_layers", "ngl", 3))
        if not gpu_names() or params.threads != [(physical_cores(), physical_cores())]:
            self.columns.append(("n_threads", "threads", 7))
        self.columns += [column for column in OPTIONAL_COLUMNS if self.shown(column[0])]
        widest = max((len(test.label) for test in bench_tests(params)), default=0)
        self.columns += [("test", "test", max(13, widest)), ("t/s", "t/s", 16)]

    def shown(self, field: str) -> bool:
        """Whether an optional column appears."""
        if field == "override_tensor":
            return bool(self.params.override_tensor) and self.params.print_overrides
        default = BenchParams(models=[], threads=[])
        return bool(getattr(self.params, field) != getattr(default, field))

    def row(self, text_of: Callable[[str, str], str]) -> str:
        cells = []
        for field, heading, width in self.columns:
            text = text_of(field, heading)
            cells.append(text.ljust(-width) if width < 0 else text.rjust(width))
        return "| " + " | ".join(cells) + " |\n"

    def begin(self) -> None:
        self.write(self.row(lambda _, heading: heading))
        rules = ("-" * -width if width < 0 else "-" * (width - 1) + ":" for _, _, width in self.columns)
        self.write("| " + " | ".join(rules) + " |\n")

    def result(self, result: Result) -> None:
        values = {name: plain(value) for name, value in record(self.params, result).items()}
        size, count = result.model_size, result.model_n_params
        values["size"] = f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.2f} MiB"
        values["params"] = f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
        values["backend"] = ("CUDA" if gpu_names() else "CPU") + "+RPC" * bool(self.params.hosts)
        values["t/s"] = f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}"
        self.write(self.row(lambda field, _: values[field]))

    def end(self) -> None:
        self.write(f"\nbuild: {machine.build_commit()} ({machine.build_number()})\n")


PRINTERS: dict[str, type[Printer]] = {
    "md": MarkdownPrinter,
    "csv": CsvPrinter,
    "json": JsonPrinter,
    "jsonl": JsonLinesPrinter,
    "sql": SqlPrinter,
    "none": Printer,
}
