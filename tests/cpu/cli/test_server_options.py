"""Every option of the server, given on the command line, in the environment and in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ikpy.cli.fields import get_field
from ikpy.cli.options import Effect, Option, all_options
from ikpy.cli.parser import Parser, parse
from ikpy.errors import UsageError

ROWS = [
    row
    for row in all_options()
    if "S" in row.used and row.dest and row.effect is Effect.USED and row.names[-1].startswith("--")
    if row.names[-1] not in ("--config", "--hf-file")  # names the file; needs another option
]
OWN = {
    "--run-time-repack": "1", "--samplers": "top_k;temperature", "--chat-template-kwargs": '{"a": 1}',
    "--draft-params": "n_max=4", "--cpu-range": "0-1", "--cpu-range-batch": "0-1", "--spec-draft-cpu-range": "0-1",
    "--spec-draft-cpu-range-batch": "0-1",
}  # fmt: skip
SAMPLES = (
    "2", "0.75", "on", "off", "none", "yarn", "q8_0", "json", "deepseek", "mean", "layer", "a=int:3", "{}", "3,1",
    "27,0", "q8_0,1", "exps=CPU", "15+1.5", "linear", "distribute", "variance", "graphs=0", "0,512", "dkf", "causal",
    "FILE",
)  # fmt: skip
ON_ALREADY = (
    "--slots", "--cont-batching", "--warmup", "--mmap", "--kv-offload", "--cache-prompt", "--prefill-assistant",
    "--models-autoload", "--escape", "--ui", "--show-timings",
)  # fmt: skip
OFF_ALREADY = (
    "--no-repack", "--no-skip-chat-parsing", "--no-log-jsonl", "--log-enable", "--no-log-prefix", "--no-log-timestamps",
)  # fmt: skip


def sample(row: Option, file: str) -> list[str] | None:
    """Values with which an option is not at its default; none for a flag; None if there are no such."""
    name, default = row.names[-1], get_field(parse([], "server", {}), row.dest)
    if row.kind.const is not None and not row.kind.optional:
        return []
    for text in (OWN[name],) if name in OWN else SAMPLES:
        values = [text.replace("FILE", file)] * max(1, row.kind.nargs)
        try:
            if get_field(parse([name, *values], "server", {}), row.dest) != default:
                return values
        except UsageError:
            continue
    return None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[-1])
def test_options_mean_the_same_wherever_they_are_given(row: Option, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text('{"a": 1}')
    name = row.names[-1]
    values = sample(row, str(file))
    assert values is not None, "no value of SAMPLES fits"

    def value(argv: list[str], environment: dict[str, str]) -> Any:
        return get_field(parse(argv, "server", environment), row.dest)

    wanted = value([name, *values], {})
    assert wanted != value([], {}) or name in ON_ALREADY + OFF_ALREADY
    for variable in Parser("server", {}).variables(row):
        assert value([], {variable: " ".join(values) or "1"}) == wanted, variable
    config = tmp_path / "server.toml"
    text = "true" if not values else json.dumps(values[0] if len(values) == 1 else [values])
    config.write_text(f"[server]\n{name[2:]} = {text}\n", encoding="utf-8-sig")  # as editors of Windows do
    assert value(["--config", str(config)], {}) == wanted
