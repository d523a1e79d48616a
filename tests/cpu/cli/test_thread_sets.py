"""CPUs, priority and waiting of threads: options, what they become, and where threads then run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ikpy.cli import bench, main
from ikpy.cli.params import CommonParams
from ikpy.cli.parser import parse
from ikpy.cli.thread_options import ThreadOptions, place_threads, to_mask, to_range
from ikpy.errors import UsageError
from ikpy.machine import thread_sets, threads
from ikpy.machine.thread_sets import ThreadSet, as_ranges
from tests.shared import ROOT

USABLE = threads.usable_cpus()
needs_binding = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no threads")
needs_two = pytest.mark.skipif(len(USABLE) < 2, reason="one CPU")


def mask(*cpus: int) -> str:
    return hex(sum(1 << cpu for cpu in cpus))


def test_masks_and_ranges() -> None:
    assert to_mask("0x15", lambda _: None) == to_mask("15", lambda _: None) == (0, 2, 4)
    assert to_range("2-4", lambda _: None) == (2, 3, 4) and to_range("-1", lambda _: None) == (0, 1)
    assert to_range(f"{USABLE[-1]}-", lambda _: None) == (USABLE[-1],)
    for text in ("", "0", "0xg", "-1", "1" * 257):
        with pytest.raises(ValueError, match="expected a mask"):
            to_mask(text, lambda _: None)
    for text in ("", "-", "3", "4-2", "a-b", "0-4096"):
        with pytest.raises(ValueError, match="expected a range"):
            to_range(text, lambda _: None)
    assert as_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


@pytest.fixture(name="applied")
def recorded_sets(monkeypatch: pytest.MonkeyPatch) -> list[list[ThreadSet]]:
    """What is applied; nothing is."""
    sets: list[list[ThreadSet]] = []
    monkeypatch.setattr("ikpy.cli.thread_options.use", lambda given, warn: sets.append(list(given)))
    return sets


def placed(line: str, tool: str = "server") -> tuple[CommonParams, list[str]]:
    params, warnings = parse(line.split(), tool, {}), []
    place_threads(params, warnings.append)
    return params, warnings


def test_what_is_not_said_is_as_of_others(applied: list[list[ThreadSet]]) -> None:
    placed(
        "-C f --prio 1 -Crb 0-1 --poll-batch 0 -md d --cpu-strict-draft 1 -Cbd 8 --spec-draft-poll 100 --prio-batch -1"
    )
    assert applied == [
        [
            ThreadSet((0, 1, 2, 3), False, 1, 50),
            ThreadSet((0, 1), False, -1, 0),
            ThreadSet((0, 1, 2, 3), True, 1, 100),
            ThreadSet((3,), True, -1, 100),
        ]
    ]
    placed("-C 1 -Cr 2-3")
    assert applied[-1] == [ThreadSet((0, 2, 3))] * 4
    placed("-t 2")
    assert len(applied) == 2


def test_threads_are_not_more_than_cpus(applied: list[list[ThreadSet]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "physical_cores", lambda: 4)
    params, warnings = placed("-C 3 -Cb 1")
    assert (params.n_threads, params.n_threads_batch, warnings) == (2, 1, [])
    params, warnings = placed("-C 3 -t 3 -tb 2")
    assert (params.n_threads, params.n_threads_batch) == (3, 2)
    assert warnings == ["3 threads share the 2 CPUs of --cpu-mask and --cpu-range"]


def test_cpus_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    beyond = USABLE[-1] + 2
    for option, words in (("-C", mask(USABLE[0], beyond)), ("-Crb", f"{beyond}-{beyond + 3}")):
        ending = "-batch" if option == "-Crb" else ""
        assert main(["cli", option, words]) == 1
        err = capsys.readouterr().err
        wanted = f"error: --cpu-mask{ending}, --cpu-range{ending}: no CPU {beyond}"
        assert wanted in err and f"which may use {as_ranges(USABLE)}\n" in err and "llama_model" not in err, err
    assert main(["bench", "-C", mask(beyond)]) == 1
    assert f"no CPU {beyond} for this process" in capsys.readouterr().err


def test_nodes_place_threads_as_well() -> None:
    for line in ("-C 1", "--cpu-strict 1"):
        with pytest.raises(UsageError, match="--numa distribute and CPUs of threads"):
            placed(f"--numa distribute {line}")


def test_priorities_that_are_not_permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and the usual priority."""
    from ikpy._native import core

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    monkeypatch.setattr(core, "set_thread_set", lambda *given: given_sets.append(given))
    given_sets: list[tuple[object, ...]] = []
    warnings: list[str] = []
    thread_sets.use([ThreadSet(priority=2), ThreadSet(priority=-1, poll=0), ThreadSet(), ThreadSet()], warnings.append)
    assert warnings == [
        "--prio 2: real-time threads are not permitted here (Operation not permitted); the usual priority holds"
    ]
    assert [(number, priority) for number, _, priority, _ in given_sets] == [(0, 0), (1, -1), (2, 0), (3, 0)]
    assert [spins for *_, spins in given_sets] == [core.USUAL_SPINS, 0, core.USUAL_SPINS, core.USUAL_SPINS]


PROBE = """
import json, os, sys
from pathlib import Path
from ikpy.cli.start import start
from ikpy.engine.batch import Batch
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import DRAFT_THREAD_SETS, ModelParams
import ikpy

params = start("cli", sys.argv[1:], "")
model = Model.load(ikpy.default_model_path(), ModelParams())
first = os.sched_getaffinity(0)
main = Context(model, params.context_params(n_ctx=256))
draft = Context(model, params.context_params(n_ctx=256, thread_sets=DRAFT_THREAD_SETS))

def places():
    return {int(task): (sorted(os.sched_getaffinity(int(task))), os.sched_getscheduler(int(task)) & 255)
            for task in os.listdir("/proc/self/task")}

def after(context, n):
    start = positions[id(context)]
    positions[id(context)] += n
    context.decode(Batch.single(list(range(5, 5 + n)), start))
    return places()[os.getpid()]

positions = {id(main): 0, id(draft): 0}
print(json.dumps([after(main, 4), after(main, 1), after(draft, 4), after(draft, 1), after(main, 1)]))
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-c", code, *arguments]
    return subprocess.run(line, check=False, capture_output=True, text=True, cwd=ROOT, timeout=60)


@needs_binding
@needs_two
def test_threads_run_where_they_are_told() -> None:
    """The first thread of prompts and of single tokens, of a model and of its drafter."""
    a, b = USABLE[:2]
    line = ["-C", mask(a), "-Cb", mask(b), "-md", "d", "-Cd", mask(a, b), "-t", "1", "-tb", "1", "--prio-batch", "-1"]
    run = run_python(PROBE, *line)
    assert run.returncode == 0, run.stderr
    usual, background = os.SCHED_OTHER, os.SCHED_BATCH
    found = [tuple(each) for each in json.loads(run.stdout.splitlines()[-1])]
    assert found == [([b], background), ([a], usual), ([a, b], background), ([a, b], usual), ([a], usual)], run.stderr


@needs_binding
def test_the_answer_is_the_same(capfd: pytest.CaptureFixture[str]) -> None:
    """Threads in turn on single CPUs that give up their core at once."""
    line = ["cli", "-p", "The sea", "-n", "4", "-c", "64", "-t", "2", "--temp", "0", "--log-disable"]
    texts = []
    for options in ([], ["--cpu-strict", "1", "--poll", "0"], ["--poll", "100"]):
        code = f"import sys; from ikpy.cli import main; sys.exit(main({[*line, *options]!r}))"
        run = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT, timeout=60
        )
        assert run.returncode == 0, run.stderr
        texts.append(run.stdout)
    assert texts[0] == texts[1] == texts[2] and "The sea" in texts[0]


def test_values_of_the_benchmark(applied: list[list[ThreadSet]]) -> None:
    values = {"mask": (0, 1), "strict": True, "priority": 0, "poll": 10}
    assert bench.place_bench_threads(values) == 2 and applied == [[ThreadSet((0, 1), True, 0, 10)] * 4]
    assert bench.place_bench_threads({"threads": [(8, 8)], **values}) > 8
    assert bench.place_bench_threads({}) > 8 and len(applied) == 2
    assert ThreadOptions().as_set() == ThreadSet()
