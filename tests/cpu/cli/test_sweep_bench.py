"""Sweep benchmark: rows, procedure and output forms against golden captures."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sweep_plot
from ikpy.cli import main
from ikpy.cli.parser import parse
from ikpy.cli.sweep_bench import make_settings
from ikpy.errors import UsageError
from ikpy.tools.sweep_bench import PRINTERS, Row, Sweep, SweepSettings
from tests.shared import DATA

GOLDEN = DATA / "cli"


class FakeDecoder:
    """Notes what is asked of the context."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.length = 0

    def decode(self, tokens: np.ndarray, position: int) -> None:
        assert position == self.length, f"tokens at {position}, cache holds {self.length}"
        self.length += len(tokens)
        self.calls.append(("decode", len(tokens), position))

    def trim(self, length: int) -> None:
        assert length <= self.length
        self.length = length
        self.calls.append(("trim", length))


def settings(line: str = "", n_ctx: int = 512) -> SweepSettings:
    return make_settings(parse(line.split(), "sweep-bench", {}), n_ctx)


def run_sweep(line: str, n_ctx: int) -> tuple[list[Row], FakeDecoder]:
    decoder = FakeDecoder()
    rows: list[Row] = []
    sweep = Sweep(settings(line, n_ctx), decoder, n_vocab=50, bos=3)
    sweep.warm_up()
    sweep.run(rows.append)
    return rows, decoder


def test_generation_comes_before_the_prompt_of_a_row():
    rows, decoder = run_sweep("-ub 4 -n 2 -b 3", 8)
    assert [(row.pp, row.tg, row.n_kv) for row in rows] == [(4, 2, 0), (4, 2, 4)]
    first = [("trim", 0), ("decode", 1, 0), ("decode", 1, 1), ("trim", 0), ("decode", 3, 0), ("decode", 1, 3)]
    second = [("trim", 4), ("decode", 1, 4), ("decode", 1, 5), ("trim", 4), ("decode", 3, 4), ("decode", 1, 7)]
    assert decoder.calls == [("decode", 1, 0), ("trim", 0), *first, *second]


def test_stride_repetitions_and_warmup_batch():
    rows, decoder = run_sweep("-ub 128 -wb -nrep 2 --sweep-stride 2 --no-warmup", 1024)
    assert [row.n_kv for row in rows] == [0, 256, 512, 768]
    decoded = [call for call in decoder.calls if call[0] == "decode"]
    # Counts of the golden timings block: 1152 prompt and 160 generated tokens, and the batch before.
    assert sum(count for _, count, _ in decoded if count > 1) == 1152 + 128
    assert sum(count for _, count, _ in decoded if count == 1) == 160


def test_rows_that_do_not_fit_are_left_out():
    assert list(settings("-ub 300", 1024).depths()) == [0, 300, 600]
    assert list(settings("-ub 256 -n 400", 1024).depths()) == [0, 256, 512]
    assert settings("-ub 256", 1024).n_generate == 64
    with pytest.raises(UsageError, match="-ub 512 is larger than the context"):
        settings("-ub 512", 256)
    with pytest.raises(UsageError, match="-n 600 is larger"):
        settings("-ub 128 -n 600", 512)


def test_no_physical_batch_is_what_fits_of_the_logical_one():
    """-ub 0 stands for -b, which is at most the context; the banner shows -b as given."""
    made = settings("-ub 0", 512)
    assert (made.n_batch, made.n_ubatch, made.n_generate, list(made.depths())) == (2048, 512, 128, [0])
    assert settings("-ub 0 -b 128", 512).n_ubatch == 128


def masked(text: str) -> list[str]:
    """Lines with times and speeds masked, widths kept."""
    lines = []
    for line in text.splitlines():
        if line.startswith("|") and "---" not in line and "PP" not in line:
            cells = line.split("|")
            lines.append("|".join([*cells[:4], *("#" * len(cell) for cell in cells[4:])]))
        else:
            lines.append(re.sub(r'("(t|speed)_\w+|"rss_hwm_mib)": [\d.]+', r"\1: #", line))
    return lines


def print_rows(form: str, line: str, n_ctx: int) -> str:
    stream = io.StringIO()
    sweep = settings(line, n_ctx)
    printer = PRINTERS[form](sweep, stream)
    printer.begin()
    for n_kv in sweep.depths():
        printer.row(Row(sweep.n_ubatch, sweep.n_generate, n_kv, 0.25, 0.5, 213.9 if sweep.memory else None))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "form", "line", "n_ctx"),
    [
        ("basic", "md", "-c 2048 -ub 256 -t 2", 2048),
        ("memory", "md", "-c 1024 -ub 256 -t 2 --sweep-memory", 1024),
        ("jsonl", "jsonl", "-c 2048 -ub 256 -t 2", 2048),
        ("memory-jsonl", "jsonl", "-c 1024 -ub 256 -t 2 --sweep-memory", 1024),
    ],
)
def test_output_has_the_form_of_the_golden_capture(name, form, line, n_ctx):
    golden = (GOLDEN / f"llama-sweep-bench-{name}.err").read_text()
    start = golden.index("\nmain: n_kv_max") if form == "md" else golden.index('{"n_kv_max"')
    end = golden.index("\nllama_print_timings")
    assert masked(print_rows(form, line, n_ctx)) == masked(golden[start:end].rstrip("\n"))


def test_csv():
    lines = print_rows("csv", "-c 512 -ub 256 -t 1 --sweep-memory", 512).splitlines()
    assert lines[0] == "pp,tg,n_kv,t_pp,speed_pp,t_tg,speed_tg,rss_hwm_mib,vram_delta_mib"
    assert lines[1] == "256,64,0,0.250000,1024.000000,0.500000,128.000000,213.900,"


def test_program_on_the_bundled_model(capfd):
    line = "sweep-bench -c 256 -ub 64 -n 2 -t 1 --output-format jsonl --sweep-memory -fa 1 -fmoe --minilog"
    assert main(line.split()) == 0
    out, err = capfd.readouterr()
    rows = [json.loads(text) for text in out.splitlines()]
    assert [row["n_kv"] for row in rows] == [0, 64, 128, 192]
    assert all(row["speed_pp"] > 0 and row["speed_tg"] > 0 and row["rss_hwm_mib"] > 0 for row in rows)
    assert re.search(r"prompt eval time = +[\d.]+ ms / +256 tokens", err)
    assert re.search(r":        eval time = +[\d.]+ ms / +8 runs", err)


def test_missing_model(capfd):
    assert main(["sweep-bench", "-m", "NOFILE.gguf"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: NOFILE.gguf")
    assert len(err.splitlines()) == 1


TABLE_ROWS = """llama_init_from_model: graph splits = 1

main: n_kv_max = 1024, n_batch = 2048, n_ubatch = 512, flash_attn = 1, n_gpu_layers = 63, n_threads = 24

|    PP |     TG |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |
|-------|--------|--------|----------|----------|----------|----------|
|   512 |    128 |      0 |    4.466 |   114.64 |   10.403 |    12.30 |
|   512 |    128 |    512 |    4.371 |   117.14 |   10.425 |    12.28 |
llama_print_timings:        load time =  102.11 ms
"""
CSV_ROWS = (
    "pp,tg,n_kv,t_pp,speed_pp,t_tg,speed_tg\n512,128,0,4.5,114.64,10.4,12.30\n512,128,512,4.4,117.14,10.4,12.28\n"
)
JSON_ROWS = (
    '{"n_kv_max": 1024, "pp": 512, "tg": 128, "n_kv": 0, "t_pp": 4.5, "speed_pp": 114.64, "speed_tg": 12.30 }\n'
    'a log line, between the rows\n{"n_kv": 512, "speed_pp": 117.14, "speed_tg": 12.28 }\n'
)


@pytest.mark.parametrize("text", [TABLE_ROWS, CSV_ROWS, JSON_ROWS], ids=["table", "csv", "jsonl"])
def test_rows_are_found_in_what_was_printed(text: str) -> None:
    curve = sweep_plot.read_curve(text.splitlines())
    assert (curve.n_kv, curve.speed_pp, curve.speed_tg) == ([0, 512], [114.64, 117.14], [12.30, 12.28])
    with pytest.raises(ValueError, match="no rows of sweep-bench"):
        sweep_plot.read_curve(["main: nothing", "| a | b |", "", "{}", "{"])


def test_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "a.txt").write_text(TABLE_ROWS)
    (tmp_path / "b.txt").write_text(JSON_ROWS)
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    monkeypatch.setattr("sys.argv", ["sweep_plot", *files, "--folder", str(tmp_path)])
    assert sweep_plot.main() == 0
    paths = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [path.name for path in paths] == ["performance_comparison_pp.png", "performance_comparison_tg.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    monkeypatch.setattr("sys.argv", ["sweep_plot", str(tmp_path / "none.txt")])
    assert sweep_plot.main() == 1 and "none.txt" in capsys.readouterr().err
