"""Tests and measurements in sections (scripts/test_cuda real, bench): limits of time, failures, what is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu import results as results_module
from benchmarks.gpu import session
from benchmarks.gpu.commands import (
    CUT_OFF,
    DEVICE_LOST,
    FAILED,
    HUNG,
    KEPT_CHARACTERS,
    LINE_CHARACTERS,
    OK,
    run,
)
from benchmarks.gpu.results import Results, failures_by_kernel, generation_kept
from benchmarks.gpu.sections import MODES, Choice, Section, Step
from ikpy.cli import main
from tests.cuda.models import emulated
from tests.cuda.reporting import FATAL_TESTS, Reporter, fatal_kernels
from tests.shared import ROOT


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def steps(*codes: str, **more: object) -> Sequence[Step]:
    return [Step(python(code), **more) for code in codes]  # type: ignore[arg-type]


def test_output_comes_line_by_line_and_is_kept() -> None:
    lines: list[str] = []
    outcome = run(python("print('one'); print('two'); raise SystemExit(4)"), lines.append, limit=60)
    assert (outcome.status, outcome.code, outcome.lines) == (FAILED, 4, ["one", "two"])
    assert lines[1:3] == ["one", "two"]
    assert run(["/no/such/program"], lines.append, limit=60).status == FAILED


def test_what_takes_too_long_is_ended_with_all_that_it_started() -> None:
    child = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)"
    )
    began = time.monotonic()
    outcome = run(python(f"{child}; import time; time.sleep(600)"), lambda _: None, limit=5)
    assert outcome.status == CUT_OFF and time.monotonic() - began < 300
    with pytest.raises(ProcessLookupError):
        for _ in range(300):  # a moment until its parent has noticed
            os.kill(int(outcome.lines[0]), 0)
            if Path(f"/proc/{outcome.lines[0]}/stat").read_text().split()[2] == "Z":
                raise ProcessLookupError
            time.sleep(0.1)


def test_what_says_nothing_hangs() -> None:
    outcome = run(python("print('x', flush=True); import time; time.sleep(600)"), lambda _: None, limit=500, silence=5)
    assert (outcome.status, outcome.lines) == (HUNG, ["x"])


def test_a_failure_ends_its_own_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results.open(tmp_path)
    sections = [Section("first", 1, steps("raise SystemExit(1)", "print('on')")), Section("second", 1, steps("pass"))]
    assert session.run_sections(sections, results, 600, again=False) == 1
    found = json.loads((tmp_path / "results.json").read_text())
    assert {name: section["status"] for name, section in found["sections"].items()} == {"first": FAILED, "second": OK}
    assert [step["lines"] for step in found["sections"]["first"]["steps"]] == [[], ["on"]]
    assert "| first | failed |" in (tmp_path / "results.md").read_text()
    assert "first: failed" in capsys.readouterr().out


def test_sections_without_time_are_left_and_done_ones_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counter = tmp_path / "count"
    count = f"open({str(counter)!r}, 'a').write('x')"
    sections = [Section("short", 1, steps(count)), Section("long", 10_000, steps(count))]
    results = Results.open(tmp_path / "results")
    assert session.run_sections(sections, results, 600, again=False) == 0
    assert "left: --sections long" in capsys.readouterr().out and counter.read_text() == "x"
    later = Results.open(tmp_path / "results")
    assert session.run_sections(sections, later, 100_000, again=False) == 0
    assert counter.read_text() == "xx" and not later.left
    assert session.run_sections(sections[:1], later, 600, again=True) == 0
    assert counter.read_text() == "xxx"


def test_a_section_that_is_cut_off_is_left(tmp_path: Path) -> None:
    results = Results.open(tmp_path)
    long = Section("long", 1, steps("import time; time.sleep(600)", "print('not reached')"))
    assert session.run_sections([long], results, session.RESERVE + 3, again=False) == 1
    assert results.left == ["long"] and results.sections["long"]["status"] == CUT_OFF
    assert len(results.sections["long"]["steps"]) == 1


@pytest.mark.parametrize(
    "end", [f"raise SystemExit({DEVICE_LOST})", "import time; time.sleep(600)", "import os; os.abort()"]
)
def test_what_a_kernel_ends_goes_on_in_a_new_process(end: str, tmp_path: Path) -> None:
    """The command keeps what it has done."""
    kept = tmp_path / "kept"
    code = f"""
from pathlib import Path
path = Path({str(kept)!r})
if not path.exists():
    path.touch()
    print("begun", flush=True)
    {end}
print("rest")
"""
    results = Results.open(tmp_path / "results")
    section = Section("tests", 1, steps(code, keeps=kept, silence=10))
    session.run_sections([section], results, 600, again=False)
    assert [step["lines"] for step in results.sections["tests"]["steps"]] == [["begun"], ["rest"]]


def test_what_gets_no_further_is_not_begun_again(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "results")
    section = Section("tests", 1, steps(f"raise SystemExit({DEVICE_LOST})", keeps=tmp_path / "none"))
    session.run_sections([section], results, 600, again=False)
    assert len(results.sections["tests"]["steps"]) == 1


def test_one_command_that_hangs_leaves_time_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It prints, so that silence does not show it; a section's time is a measure."""
    monkeypatch.setattr(session, "SHORTEST", 3.0)
    results = Results.open(tmp_path)
    busy = "import time\nwhile True: print('.', flush=True); time.sleep(0.2)"
    sections = [Section("busy", 0, steps(busy, "print('on')")), Section("next", 1, steps("print('reached')"))]
    assert session.run_sections(sections, results, 600, again=False) == 1
    assert results.sections["busy"]["status"] == HUNG and results.sections["next"]["status"] == OK
    assert not results.left and results.sections["busy"]["steps"][1]["lines"] == ["on"]


def test_every_step_is_kept_as_it_ends(tmp_path: Path) -> None:
    """The second one finds the first one in the file: what ends everything then loses nothing."""
    found = f"import json; print(json.load(open({str(tmp_path / 'results.json')!r}))['sections'])"
    results = Results.open(tmp_path)
    session.run_sections([Section("two", 1, steps("print('first')", found))], results, 600, again=False)
    (line,) = results.sections["two"]["steps"][1]["lines"]
    assert "first" in line and CUT_OFF in line and results.sections["two"]["status"] == OK


def test_what_is_ended_takes_its_command_along(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = f"""
import signal, sys
from pathlib import Path
from benchmarks.gpu import session
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import Section, Step
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
step = "import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
sections = [Section("one", 1, [Step((sys.executable, "-c", "print(1)")), Step((sys.executable, "-c", step))])]
session.run_sections(sections, Results.open(Path({str(tmp_path)!r})), 600, again=False)
"""
    process = subprocess.Popen(python(code), cwd=ROOT, stdout=subprocess.DEVNULL)
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.05)
    assert os.getsid(int(pid.read_text())) == os.getsid(0)  # a loan's end finds it
    process.terminate()
    assert process.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert len(json.loads((tmp_path / "results.json").read_text())["sections"]["one"]["steps"]) == 1


def test_half_of_a_file_is_not_left(tmp_path: Path) -> None:
    path = tmp_path / "model"
    code = f"open({str(path)!r}, 'w').write('x'); raise SystemExit(1)"
    section = Section("model", 1, steps(code, makes=path))
    session.run_sections([section], Results.open(tmp_path / "results"), 600, again=False)
    assert not path.exists()


def test_results_stay_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "LOG_BYTES", 1000)
    results = Results.open(tmp_path)
    outcome = run(python("for i in range(1000): print(f'{i} ' + 3000 * 'x')"), results.log, limit=60)
    assert 0 < sum(map(len, outcome.lines)) <= KEPT_CHARACTERS and outcome.lines[-1].startswith("999 ")
    assert (tmp_path / "log.txt").stat().st_size < 1000 + LINE_CHARACTERS + 2


def test_kernels_that_are_fatal_again_and_again_are_left_out(tmp_path: Path) -> None:
    def entry(name: str, status: str, *kernels: str, **more: object) -> dict[str, object]:
        return {"id": name, "status": status, "kernels": kernels, **more}

    bad = [entry(f"a{i}", "hung", "common", "endless") for i in range(FATAL_TESTS)]
    bad += [entry(f"b{i}", "failed", "common", "wild", fatal=True) for i in range(FATAL_TESTS)]
    others = [entry("c", "passed", "common"), *(entry(f"d{i}", "failed", "wrong") for i in range(FATAL_TESTS))]
    assert fatal_kernels([*bad, *others]) == {"endless", "wild"} and not fatal_kernels(bad[1:3] + others)
    path = tmp_path / "tests.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in [*bad, *others]) + '{"id": "cut o')
    reporter = Reporter(path, lambda: True)
    reporter.launching("common")
    with pytest.raises(pytest.skip.Exception, match="endless hung, or took the device along, in 3 tests"):
        reporter.launching("endless")


def test_what_is_there_is_not_made_again(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "results")
    section = Section("model", 1, [*steps("raise SystemExit(1)", makes=tmp_path), *steps("print('used')")])
    assert session.run_sections([section], results, 600, again=False) == 0


def test_kernels_that_always_fail_come_first() -> None:
    def test(name: str, status: str, *kernels: str) -> dict[str, object]:
        return {"id": name, "status": status, "kernels": kernels, "message": f"{name} is wrong\nby a|b"}

    tests = [test("a", "passed", "common"), test("b", "failed", "common", "broken"), test("c", "hung", "endless")]
    rows = [line.split(" | ") for line in failures_by_kernel(tests) if line.startswith("| ") and " of " in line]
    assert [row[0] for row in rows] == ["| broken", "| endless", "| common"]
    assert rows[0][1:3] == ["1 of 1", "b (failed)"] and "by a/b" in rows[0][3] and rows[2][1] == "1 of 2"
    assert "None; 1 tests" in "\n".join(failures_by_kernel(tests[:1]))


def test_the_share_of_its_speed_that_generation_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    with emulated(1):
        line = ["sweep-bench", "-c", "256", "-b", "64", "-ub", "64", "-t", "1", "-mla", "3", "-ngl", "99"]
        assert main(line) == 0
    lines = capsys.readouterr().out.splitlines()
    assert generation_kept(lines).startswith("Generation over 192 cells: ")
    rows = ["|  PP |", "|  512 |  128 |      0 |  0.1 | 1.0 | 0.2 | 159.0 |"]
    last = "|  512 |  128 |  32256 |  0.1 | 1.0 | 0.2 | 113.0 |"
    assert "over 32256 cells: 71% of its speed over 0 (wanted" in generation_kept([*rows, last])
    assert generation_kept(rows) == ""


def test_tests_of_kernels_leave_a_line_each_and_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "tests.jsonl"
    command = [sys.executable, "-m", "pytest", "tests/cuda/test_kernels_ops.py", "-k", "arithmetic or launch_errors"]
    command += ["--results", str(path), "-p", "no:cacheprovider"]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr + second.stdout
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    ended = [entry for entry in entries if entry["status"] == "passed"]
    assert len(ended) == len({entry["id"] for entry in entries}) > 1
    assert any(entry["status"] == "hung" and entry.get("kernels") == ["binary_f32"] for entry in entries)
    assert any("binary_f32" in entry["kernels"] for entry in ended)
    assert "deselected" in second.stdout


def test_a_device_that_is_lost_ends_the_process(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path / "tests.jsonl", lambda: False)
    with pytest.raises(pytest.exit.Exception) as end:
        reporter.pytest_runtest_logfinish()
    assert end.value.returncode == DEVICE_LOST


@pytest.mark.parametrize("mode", MODES)
def test_sections_name_programs_that_exist(mode: str, tmp_path: Path) -> None:
    sections = MODES[mode](Choice(Results.open(tmp_path), ["llama-1b", "deepseek-lite", "own.gguf"], tmp_path))
    assert len({section.name for section in sections}) == len(sections) >= 6
    for section in sections:
        for step in section.steps:
            for file in [word for word in step.command if word.startswith("tests/")]:
                assert (ROOT / file).is_file()
    names = {section.name for section in sections}
    if mode == "bench":
        assert {"speed-llama-1b", "speed-own", "experts-own", "sweep-deepseek-lite"} <= names
        assert "experts-llama-1b" not in names


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """A command on an emulated device."""
    more = ["--results", str(tmp_path), "--small", "--budget", "3000", "--models-folder", str(tmp_path)]
    return [sys.executable, "-m", "benchmarks.gpu", *more]


EMULATED = {**os.environ, "IKPY_CUDA_EMULATE": "1", "IKPY_CUDA_EMULATE_MIB": "1024"}


def test_kernels_of_an_emulated_device_are_tested(small: list[str], tmp_path: Path) -> None:
    command = [*small, "real", "--sections", "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=EMULATED)
    assert done.returncode == 0, done.stdout
    assert "None; " in done.stdout and "rms_norm" in (tmp_path / "tests.jsonl").read_text()


def test_kernels_of_an_emulated_device_are_measured(small: list[str], tmp_path: Path) -> None:
    command = [*small, "bench", "--sections", "table"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=EMULATED)
    assert done.returncode == 0, done.stdout
    rows = {row["name"]: row for row in json.loads((tmp_path / "kernels.json").read_text())["rows"]}
    assert rows["q8_0"]["matvec GB/s"] > 0 and rows["q4_K"]["gemm_bf16 TFLOP/s"] > 0
    assert rows["gqa 32/8 x 64 f16"]["one token GB/s"] > 0 and "error" not in str(rows)
