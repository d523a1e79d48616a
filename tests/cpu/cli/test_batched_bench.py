"""Batched benchmark: what is decoded, what is left out, and the table as users publish it."""

from __future__ import annotations

import csv
import json
import re
from types import SimpleNamespace

import pytest

from ikpy.cli import main
from ikpy.cli.batched_bench import make_settings
from ikpy.cli.parser import parse
from ikpy.engine.batch import Batch
from ikpy.errors import UsageError
from ikpy.tools.batched_bench import FORMS, BatchedBench, BatchedRow, BatchedSettings
from ikpy.tools.run_logs import Timings


class FakeContext:
    """Notes what is asked of it; positions of a sequence must follow one another."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(hparams=SimpleNamespace(n_vocab=50))
        self.kv = self
        self.lengths: dict[int, int] = {}
        self.calls: list[tuple[list[int], list[int], list[bool]]] = []

    def clear(self) -> None:
        self.lengths.clear()

    def seq_cp(self, source: int, target: int) -> None:
        self.lengths[target] = self.lengths[source]

    def decode(self, batch: Batch, *, copy: bool) -> None:
        sequences = [ids[0] for ids in batch.seq_ids]
        for sequence, position in zip(sequences, batch.pos.tolist(), strict=True):
            assert position == self.lengths.get(sequence, 0)
            self.lengths[sequence] = position + 1
        self.calls.append((sequences, batch.pos.tolist(), batch.logits.tolist()))


def settings(line: str) -> BatchedSettings:
    return make_settings(parse(line.split(), "batched-bench", {}))


def calls(line: str) -> tuple[BatchedRow, FakeContext]:
    """The first row of a command line."""
    context, found = FakeContext(), settings(line)
    return BatchedBench(found, context, Timings()).measure(*next(iter(found.rows()))), context


def test_prompts_then_a_token_of_each_sequence_per_step() -> None:
    row, context = calls("-npp 3 -ntg 2 -npl 2 -b 4")
    assert (row.pp, row.tg, row.pl, row.n_kv, row.n_prompt) == (3, 2, 2, 10, 6)
    assert context.calls == [
        ([0, 0, 0, 1], [0, 1, 2, 0], [False, False, True, False]),
        ([1, 1], [1, 2], [False, True]),
        ([0, 1], [3, 3], [True, True]),
        ([0, 1], [4, 4], [True, True]),
    ]


def test_a_shared_prompt_is_evaluated_once() -> None:
    row, context = calls("-npp 3 -ntg 1 -npl 3 -pps")
    assert (row.n_kv, row.n_prompt) == (6, 3)
    assert context.calls == [([0] * 3, [0, 1, 2], [False, False, True]), ([0, 1, 2], [3] * 3, [True] * 3)]


def test_sequences_one_after_the_other() -> None:
    _, context = calls("-npp 2 -ntg 2 -npl 2 -tgs")
    steps = [(sequences, positions) for sequences, positions, _ in context.calls[1:]]
    assert steps == [([0], [2]), ([0], [3]), ([1], [2]), ([1], [3])]
    assert "is_pp_shared = 0, is_tg_separate = 1, n_gpu_layers" in settings("-npl 2 -tgs").banner()


def test_ranges() -> None:
    found = settings("-npp 64-256*2,300 -ntg 8-16+8 -npl 1-3")
    assert (found.n_prompt, found.n_generate, found.n_sequences) == ((64, 128, 256, 300), (8, 16), (1, 2, 3))
    with pytest.raises(UsageError, match=r"expected first-last, first-last\+step or first-last\*factor, got '4-2'"):
        settings("-npl 4-2")


def test_records_as_llama_batched_bench_writes_them() -> None:
    found, row = settings("-c 1024 -t 2 -npp 512 -ntg 128 -npl 1"), BatchedRow(512, 128, 1, 640, 512, 2.0, 8.0)
    assert FORMS["jsonl"].head(found) == ()
    assert FORMS["jsonl"].row(found, row) == (
        '{"n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": 1, "is_pp_shared": 0, "n_gpu_layers": -1, '
        '"n_threads": 2, "n_threads_batch": 2, "pp": 512, "tg": 128, "pl": 1, "n_kv": 640, "t_pp": 2.000000, '
        '"speed_pp": 256.000000, "t_tg": 8.000000, "speed_tg": 16.000000, "t": 10.000000, "speed": 64.000000}'
    )
    assert FORMS["csv"].head(found) == ("pp,tg,pl,n_kv,t_pp,speed_pp,t_tg,speed_tg,t,speed",)
    assert FORMS["csv"].row(found, row) == "512,128,1,640,2.000000,256.000000,8.000000,16.000000,10.000000,64.000000"


def test_rows_and_context() -> None:
    found = settings("-npp 8,16 -ntg 4 -npl 1,2")
    assert list(found.rows()) == [(8, 4, 1), (8, 4, 2), (16, 4, 1), (16, 4, 2)]
    assert found.n_kv_max == 40, "without -c everything fits"
    assert settings("-npp 8,16 -ntg 4 -npl 1,2 -c 12").n_kv_max == 12
    with pytest.raises(UsageError, match="the smallest needs 12 cells"):
        settings("-npp 8,16 -ntg 4 -npl 1,2 -c 11")
    with pytest.raises(UsageError, match=r"invalid parameter for argument: -npl \(expected at least 1, got 0\)"):
        settings("-npl 0")


def test_lines_as_published() -> None:
    line = "--numa numactl --threads 32 --ctx-size 163840 --flash-attn -npp 512 -ntg 128 -npl 1 --prio 3"
    assert settings(line).banner() == (
        "main: n_kv_max = 163840, n_batch = 2048, n_ubatch = 512, flash_attn = 1, is_pp_shared = 0, n_gpu_layers = -1, "
        "n_threads = 32, n_threads_batch = 32"
    )
    assert BatchedRow(512, 128, 1, 640, 512, 24.441, 5.973).line() == (
        "|   512 |    128 |    1 |    640 |   24.441 |    20.95 |    5.973 |    21.43 |   30.414 |    21.04 |"
    )


def test_program_on_the_bundled_model(capfd: pytest.CaptureFixture[str]) -> None:
    line = "batched-bench -npp 16,400 -ntg 2 -npl 1,3 -c 500 -t 1 --minilog"
    assert main(line.split()) == 0
    out, err = capfd.readouterr()
    head, rule, *rows = [text for text in out.splitlines() if text.startswith("|")]
    assert head == (
        "|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |"
    )
    assert len(rule) == len(head) and [len(part) for part in rule.split("|")] == [len(p) for p in head.split("|")]
    assert [tuple(map(int, row.split("|")[1:5])) for row in rows] == [(16, 2, 1, 18), (16, 2, 3, 54), (400, 2, 1, 402)]
    assert "PP 400, TG 2, B 3 needs 1206 cells: it does not fit into -c 512" in err
    assert re.search(r"prompt eval time = +[\d.]+ ms / +470 tokens", err), "both prompts and the steps of 3 sequences"


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_records_on_the_bundled_model(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    line = f"batched-bench -npp 8 -ntg 2 -npl 1,2 -t 1 --minilog -pps -tgs --output-format {form}"
    assert main(line.split()) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = [json.loads(text) for text in lines] if form == "jsonl" else list(csv.DictReader(lines))
    assert [(int(row["pl"]), int(row["n_kv"])) for row in rows] == [(1, 10), (2, 12)]
    assert all(float(row["speed_tg"]) > 0 for row in rows)
