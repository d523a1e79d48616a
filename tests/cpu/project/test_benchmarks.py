"""The benchmark report: peers, ceilings, tables from JSON and the time limit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ikpy
from benchmarks import (
    attention,
    ceiling,
    compare,
    engine_step,
    expert_reads,
    matmul,
    operations,
    overhead,
    peer_commands,
    report,
    synthetic,
    tables,
)
from benchmarks.encoder_draws import Matrix, by_ikpy, decoded
from benchmarks.peers import LlamaBench, open_peers, types_of_cache
from benchmarks.quantize import errors, whole_groups
from ikpy._native import core
from ikpy.gguf.reader import GGUFFile
from ikpy.quants import registry


def entry(pp: float, tg: float, depth: int = 0, threads: int = 2) -> dict[str, Any]:
    """Three samples per engine around the given speeds of ikpy; the peer runs at half of it."""
    rates = {"pp": pp, "tg": tg}
    samples = {t: {"ikpy": [v - 1, v, v + 9], "ik": [v / 2 - 1, v / 2, v / 2 + 9]} for t, v in rates.items()}
    return {"samples": samples, "macs": 1e9, "bytes": 1e9, "depth": depth, "threads": threads}


def report_data() -> dict[str, Any]:
    rates = {"int8": 1000.0, "bf16": 500.0, "amx_bf16": 0.0, "fp32": 250.0, "read": 40.0}
    machine = {"cpu": "CPU", "cores": 2, "threads": 2, "memory_gib": 24, "tier": "avx2", "tiles": False}
    settings = {"prompt": 512, "generate": 64, "depth": 4096, "repeats": 3, "layers": 4, "threads": 2}
    return {
        "machine": machine | {"compiler": "g++ 12", "ikpy": "0.1.0", "date": "2026-01-01", "load": 0.0},
        "engines": ["ikpy", "ik"],
        "settings": settings | {"no_mmap": True},
        "ceilings": {"1": rates, "2": rates},
        "types": {"q4_0": entry(300.0, 30.0)},
        "shapes": {
            "llama-8b": [
                entry(300.0, 30.0),
                entry(100.0, 20.0, depth=4096),
                entry(330.0, 10.0) | {"prompt": 2048},
            ]
        },
        "threads": {"llama-1b": [entry(150.0, 20.0, threads=1), entry(300.0, 30.0)]},
        "batches": {"llama-1b": {"ikpy": {"1": [5.0], "32": [90.0]}, "ik": {"1": [4.0], "32": [50.0]}}},
        "sweep": {"llama-1b": [{"depth": 0, "pp": 300.0, "tg": 30.0}]},
        "attention": {"f16": {"bytes": 2e9, "seconds": 0.1, "depth": 8192}},
        "skipped": ["attention q8_0"],
    }


def test_tables_show_medians_ratios_and_shares() -> None:
    text = tables.markdown(report_data())
    assert "| q4_0 | pp512 | 300.0 | 150.0 | 2.00 | 60% |" in text
    assert "| q4_0 | tg64 | 30.0 | 15.0 | 2.00 | 75% |" in text
    assert "| llama-8b | tg64 @ 4096 | 20.0 | 10.0 | 2.00 | - |" in text
    assert "| llama-8b | pp2048 | 330.0 | 165.0 | 2.00 | 66% |" in text
    assert text.count("| llama-8b |") == 4
    assert "| 2 | 300.0 | 2.00 | 30.0 | 1.50 |" in text
    assert "| 32 | 90.0 | 50.0 |" in text
    assert "| f16 | 20.0 | 50% |" in text
    assert "Not measured for lack of time: attention q8_0." in text
    assert "tiles" not in text


def test_tables_replace_only_what_is_between_the_markers() -> None:
    first = tables.insert("# Title\n\nBefore.\n", "old")
    second = tables.insert(first + "\nAfter.\n", "new")
    assert second.startswith("# Title\n\nBefore.\n")
    assert second.endswith("\nAfter.\n")
    assert "new" in second and "old" not in second


def test_batches_of_several_types_have_a_row_per_type() -> None:
    data = report_data()
    data["batches"] = {"q4_0": {"ikpy": {"2": [6.0]}, "ik": {"2": [4.0]}}, "bf16_r16": {"ikpy": {"2": [8.0]}, "ik": {}}}
    text = tables.markdown(data)
    assert "| q4_0 | 6.0 (1.50) |" in text
    assert "| bf16_r16 | 8.0 |" in text


def test_depths_show_what_cached_tokens_add() -> None:
    data = report_data()
    at = [
        {"pp": {"ikpy": [100.0], "ik": [50.0]}, "tg": {"ikpy": [40.0], "ik": [20.0]}},
        {"pp": {"ikpy": [50.0], "ik": [25.0]}, "tg": {"ikpy": [20.0], "ik": [16.0]}},
    ]
    data["depths"] = {"llama-1b q8_0": {"0": at[0], "4096": at[1]}}
    text = tables.markdown(data)
    assert "| llama-1b | q8_0 | 0 | 100.0 (2.00) | - | 40.0 (2.00) | - |" in text
    assert "| llama-1b | q8_0 | 4096 | 50.0 (2.00) | 2.00 | 20.0 (1.25) | 0.50 |" in text


class Filled:
    """An engine that remembers what it evaluated."""

    def __init__(self) -> None:
        self.name, self.cached, self.calls = "ikpy", 0, []

    def prompt(self, n_tokens: int) -> float:
        self.cached = n_tokens
        return 2.0

    def extend(self, n_tokens: int, depth: int) -> float:
        assert depth == self.cached
        self.cached += n_tokens
        self.calls.append((n_tokens, depth))
        return 1.0


def test_depths_are_filled_without_gaps() -> None:
    engine = Filled()
    found = compare.alternate_depths([engine], [0, 64, 100], 16, 2, 1)
    assert list(found) == ["0", "64", "100"]
    assert found["0"] == {"pp": {"ikpy": [8.0]}, "tg": {"ikpy": [1.0]}}
    assert found["64"]["pp"] == {"ikpy": [16.0]}
    assert [depth for n, depth in engine.calls if n == 1] == [16, 17, 80, 81, 116, 117]


def test_batches_leave_out_the_first_round() -> None:
    assert compare.alternate_batches([Filled()], [2, 4], 2) == {"ikpy": {"2": [1.0, 1.0], "4": [2.0, 2.0]}}


def test_caches_of_two_types() -> None:
    assert types_of_cache("q8_KV:f16") == ("q8_KV", "f16")
    assert types_of_cache("q8_0") == ("q8_0", "q8_0")


def test_an_engine_without_samples_has_an_empty_cell() -> None:
    data = report_data()
    del data["types"]["q4_0"]["samples"]["pp"]["ik"]
    assert "| q4_0 | pp512 | 300.0 | - | - | 60% |" in tables.markdown(data)


def test_one_disturbed_ceiling_sample_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([40.0, 20.0, 41.0])
    monkeypatch.setattr(ceiling.core, "ceiling", lambda kind, n: next(rates))
    ceilings = ceiling.Ceilings([2])
    for _ in range(3):
        ceilings.sample(("read",))
    assert ceilings.best[2]["read"] == 41.0
    assert ceilings.samples[2]["read"] == [40.0, 20.0, 41.0]


def test_tile_ceiling_exists_exactly_where_the_unit_does() -> None:
    assert (core.ceiling("amx_bf16", 1) > 0) == core.has_tiles()


def executable(folder: Path, script: str) -> str:
    path = folder / "llama-bench"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_llama_bench_is_run_with_its_own_options(tmp_path: Path) -> None:
    program = executable(tmp_path, f'echo "$@" >> {tmp_path}/calls; echo \'[{{"avg_ts": 8.0}}]\'')
    peer = LlamaBench(program, "model.gguf", 2)
    assert peer.prompt(16) == 2.0
    assert peer.generate(4) == 0.5
    assert peer.generate(4, depth=32) == 0.5
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].endswith("-p 16 -n 0") and "-ub 512" in calls[0]
    assert calls[1].endswith("-p 0 -n 4")
    assert calls[2].endswith("-p 0 -n 0 -gp 32,4")


def test_failing_llama_bench_names_its_error(tmp_path: Path) -> None:
    program = executable(tmp_path, "echo no such model >&2; exit 1")
    with pytest.raises(RuntimeError, match="no such model"):
        LlamaBench(program, "model.gguf", 2).prompt(16)


def test_peer_that_cannot_load_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    class Broken:
        @staticmethod
        def runs(type_name: str) -> bool:
            return True

        def __init__(self, *args: object) -> None:
            raise RuntimeError("no model")

    monkeypatch.setattr("benchmarks.peers.PEERS", {"ik": Broken})
    assert open_peers(["ik"], [], "q4_0", "model.gguf", 64, 1) == []
    assert "ik is left out: no model" in capsys.readouterr().err


def test_long_prompts_of_shapes_are_one_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape: the usual tests at both depths, then the long prompt."""
    opened, layers = [], []
    monkeypatch.setattr(report, "write_model", lambda *_, **options: layers.append(options["layers"]))
    monkeypatch.setattr(report, "active_work", lambda path: (1.0, 1.0))
    monkeypatch.setattr(report, "open_peers", lambda *args: opened.append(args[-3::2]) or [])
    monkeypatch.setattr(Path, "unlink", lambda self: None)
    made = report.Report(report.arguments(["--depth", "100", "--generate", "8"]))
    entries = [made.shape(model) for model in report.SHAPE_MODELS]
    assert layers == 4 * [4]
    assert opened == 4 * [(512 + 8 + 64, 512), (612 + 8 + 64, 512), (2048 + 1 + 64, 2048)]
    assert [[e["depth"] for e in group] for group in entries] == 4 * [[0, 100, 0]]
    assert [e.get("prompt") for e in entries[0]] == [None, None, 2048]


def test_no_piece_starts_after_the_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceiling.core, "ceiling", lambda kind, n: 1.0)
    target = tmp_path / "report.json"
    words = ["--minutes", "0", "--json", str(target), "--sections", "types,sweep", "--types", "q4_0"]
    report.Report(report.arguments([*words, "--peers", "ikpy"])).run()
    data = json.loads(target.read_text())
    assert data["skipped"] == ["types q4_0", "sweep llama-1b"]
    assert "types" not in data
    assert "Not measured" in tables.markdown(data)


def test_a_report_goes_on_with_the_pieces_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.Report, "weight_type", lambda self, name: entry(1.0, 2.0))
    target = tmp_path / "report.json"
    for name, rate, more in (("q4_0", 3.0, []), ("q8_0", 1.0, ["--add"])):
        monkeypatch.setattr(ceiling.core, "ceiling", lambda kind, n, rate=rate: rate)
        words = ["--json", str(target), "--sections", "types", "--types", name, "--peers", "ikpy", *more]
        report.Report(report.arguments(words)).run()
    data = json.loads(target.read_text())
    assert list(data["types"]) == ["q4_0", "q8_0"]
    assert data["ceilings"]["1"]["read"] == 3, (
        "the shares of what was kept are of the ceilings that it was measured with"
    )
    assert data["ceiling_samples"]["1"]["read"] == [3, 3, 1, 1]


def test_weights_of_generate_exceed_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the last-level cache, unless memory is short."""
    cache = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    monkeypatch.setattr(matmul.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    assert matmul.generate_bytes() >= min(4 * cache, 2**31) // 4096 * 4096
    assert matmul.generate_bytes() >= 2**28
    monkeypatch.setattr(matmul.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 26))
    assert matmul.generate_bytes() == 1 << 24


def test_rows_of_encoder_errors_fill_whole_groups(monkeypatch):
    rng = np.random.default_rng(3)
    samples = [(rng.standard_normal((n, 256)).astype(np.float32), None) for n in (40, 20, 5)]
    for name, sizes in (("q8_0", [4, 4, 4]), ("q8_k_r8", [8, 8]), ("q8_k_r16", [16, 16])):
        row = registry.by_name(name)
        taken = whole_groups(samples, row, 4)
        assert [len(values) for values, _ in taken] == sizes
        monkeypatch.setattr(
            "benchmarks.reference_quantizer.quantize", lambda x, n, w: core.quantize(x, registry.by_name(n).id, w, 1)
        )
        ours, theirs = errors(row, taken, weighted=True)
        assert 0 < ours == theirs < 0.02


def test_draws_undo_their_permutation():
    rng = np.random.default_rng(4)
    values = rng.standard_normal((2, 3, 512)).astype(np.float32)
    matrix = Matrix(values, rng.gamma(8.0, 1.0, (2, 512)).astype(np.float32), 0)
    row = registry.by_name("q4_K")
    plain, moved = (decoded(matrix, row, by_ikpy, order) for order in (np.arange(512), rng.permutation(512)))
    assert not np.array_equal(plain, moved)  # another draw
    for result in (plain, moved):
        assert np.corrcoef(result.ravel(), values.ravel())[0, 1] > 0.99


@pytest.mark.parametrize("n", [1, 8])
def test_parts_of_the_overhead_add_up_to_the_steps(n: int) -> None:
    model = ikpy.Model.load(ikpy.default_model_path())
    context = ikpy.Context(model, ikpy.ContextParams(n_ctx=512, n_seq_max=8, n_threads=1))
    steps = 3
    began = time.perf_counter()
    found = np.array(overhead.parts(context, n, steps))
    assert found.shape == (steps, len(overhead.PARTS)) and (found > 0).all()
    assert found.sum() < 1e6 * (time.perf_counter() - began)
    assert context.kv.used_cells == n * (overhead.N_PROMPT + steps)
    assert overhead.report("name", context, n, steps).count("|") == len(overhead.PARTS) + 4


def test_steps_of_the_engine_are_those_of_answers() -> None:
    """As many slots, each of which gets one token per step."""
    engine = engine_step.engine(str(ikpy.default_model_path()), 2, 1)
    for sampling in engine_step.CHOICES.values():
        before = engine.metrics.totals.predicted_n
        found = engine_step.overheads(engine, sampling, 5)
        assert len(found) == 5 and min(found) > 0
        assert engine.metrics.totals.predicted_n - before == 2 * (5 + 2 * engine_step.N_WARM)


@pytest.mark.parametrize("shape", attention.SHAPES.values(), ids=attention.SHAPES)
def test_attention_cases_fill_their_memory_and_have_the_error_of_their_type(shape):
    """The error is that of the op on the cache's own values: of f32 sums, or of 16-bit queries and weights."""
    for name, limit in (("f16", 2e-5), ("q8_0", 2.5e-4)):
        case = attention.Case(shape, 1, attention.TYPES[name], cells=64, nbytes=2 << 20)
        assert (2 << 20) - case.layers[0].nbytes < case.work(case.layers) <= 2 << 20
        assert 0 < case.error(shape, attention.TYPES[name]) < limit


def test_attention_of_prompts_counts_the_operations_of_both_products():
    shape = attention.SHAPES["gqa64"]
    case = attention.Case(shape, 16, attention.TYPES["f16"], cells=64, nbytes=1)
    assert case.work(case.layers) == 2 * 16 * 32 * 64 * (64 + 64)
    assert min(case.rates(1)) > 0
    assert 0 < case.error(shape, attention.TYPES["f16"]) < 3e-5


def test_rates_of_products_come_from_the_weights_that_a_token_meets(tmp_path: Path) -> None:
    model = operations.written(report.ShapeModel("deepseek-lite", "q8_0"), 2, str(tmp_path))
    context = operations.context_of(model, 32, 1)
    dense, experts = operations.multiply_adds(context.model)
    assert experts == 6 * 3 * 2048 * 1408  # one layer of experts, of which a token uses six
    latent = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    assert dense == 2 * latent + 3 * 2048 * 10944 + 2048 * 64 + 3 * 2048 * 2 * 1408 + 2048 * operations.VOCABULARY
    seconds = operations.seconds_by_kind(context, 32)
    assert {"attention", "rms_norm", *operations.EXPERTS} <= set(seconds)
    both = operations.rates(context.model, 32, seconds)[2]
    spent = sum(seconds[kind] for kind in operations.DENSE + operations.EXPERTS)
    assert both == pytest.approx(2e-9 * 32 * (dense + experts) / spent)
    text = operations.table(32, ["first", "same"], [context.model] * 2, [seconds, seconds])
    assert text.splitlines()[-1].startswith("| same |") and "| 1.00 |" in text.splitlines()[-1]


def test_speed_with_experts_read_ahead(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row per number of readers, in the order of the command line."""
    sizes = ["--prompt", "8", "--tokens", "2", "--rounds", "1", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["expert_reads", str(ikpy.default_model_path()), "--readers", "2,0", *sizes])
    expert_reads.main()
    drive, head, _, *rows = capsys.readouterr().out.splitlines()
    assert drive.endswith("GB/s of the drive") and head.count("|") == 6
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in cells] == ["2", "0"]
    assert all(float(prompt) > 0 and float(generation) > 0 for _, prompt, generation, *_ in cells)


@pytest.mark.parametrize("shape", synthetic.SHAPES)
def test_header_of_every_shape(shape: str, tmp_path: Path) -> None:
    """Rows of any length, also those that are no whole blocks of the type."""
    path = tmp_path / "model.gguf"
    synthetic.write_model(shape, "q4_K", str(path), layers=4, vocab=512, header_only=True)
    with GGUFFile.open(path) as file:
        kinds = {registry.by_id(tensor.type_id).name for tensor in file.tensors.values()}
        assert path.stat().st_size >= max(tensor.offset + tensor.nbytes for tensor in file.tensors.values())
    assert "q4_K" in kinds or shape == "nemotron-nano2-9b"


def test_command_lines_of_comparisons_with_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(line: str, draft: str, **numbers: int) -> dict[str, Any]:
        monkeypatch.setattr("sys.argv", ["peer", *line.split()])
        return vars(peer_commands.arguments(None, draft, **numbers))

    found = read("capture m d --tokens 1,5,9 --out f", "draft")
    assert found == {"command": "capture", "model": "m", "draft": "d", "tokens": [1, 5, 9], "out": "f"}
    found = read("capture m --tokens 7 --out f", "--draft", heads=2)
    assert (found["draft"], found["heads"]) == (None, 2)
    assert read("check m --draft d f", "--draft")["captured"] == "f"
    with pytest.raises(SystemExit):
        read("check m", "draft")
