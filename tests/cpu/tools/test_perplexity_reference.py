"""`ikpy perplexity` against recorded runs of the reference, on the bundled model and WikiText-2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ikpy.cli import main
from tests.shared import DATA, SHARED

WIKI = SHARED / "public" / "wiki.test.raw"
CASES = json.loads((DATA / "ppl.json").read_text())["cases"]
pytestmark = pytest.mark.skipif(not WIKI.exists(), reason=f"WikiText-2 test text not found at {WIKI}")


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]):
    """Runs `ikpy perplexity` on WikiText-2; returns status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["perplexity", "-f", str(WIKI), "-c", "512", "-t", "1", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def running(out: str) -> list[float]:
    """The values behind [i]."""
    return [float(value) for value in re.findall(r"\[\d+\]([\d.]+),", out)]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_running_values(tool, case: dict) -> None:
    model = SHARED / "models" / Path(case["model"]).name
    if not model.exists():
        pytest.skip(f"model not found at {model}")
    _, out, _ = tool("-m", str(model), *case["args"], "--chunks", "4")
    for i, (ours, theirs) in enumerate(zip(running(out), case["running"], strict=False), 1):
        assert ours == pytest.approx(theirs, rel=1e-3), f"chunk {i}"
    assert len(running(out)) == 4


def test_final_estimate_over_16_chunks(tool) -> None:
    status, out, err = tool("--chunks", "16")
    case = next(case for case in CASES if case["name"] == "tiny-mla-moe-f16:mla3-fa1")
    final = re.fullmatch(
        r"Final estimate: PPL over 16 chunks for n_ctx=512 = (\d+\.\d{4}) \+/- (\d\.\d{5})", out.splitlines()[-1]
    )
    assert status == 0 and final, out
    assert float(final[1]) == pytest.approx(case["ppl"], rel=5e-4)
    assert float(final[2]) == pytest.approx(5.718, abs=0.01)
    assert "perplexity: calculating perplexity over 16 chunks, n_ctx=512, batch_size=2048, n_seq=4" in err
    assert re.search(r"perplexity: \d+\.\d\d seconds per pass - ETA \d+\.\d\d minutes", err)
    assert re.search(r"llama_print_timings: prompt eval time = .* /  8192 tokens", err)


@pytest.mark.parametrize(("arguments", "recorded", "line"), [
    (["-c", "128", "-b", "512", "--chunks", "8"],
     [70.5425, 91.9999, 85.8508, 89.4035, 85.4440, 86.4675, 84.7031, 90.7492], "n_ctx=128, batch_size=512, n_seq=4"),
    (["--ppl-stride", "256", "--chunks", "2"], [190.5104, 185.9174], "have 433573 tokens. Calculation chunk = 2304"),
])  # fmt: skip
def test_other_settings(tool, arguments: list[str], recorded: list[float], line: str) -> None:
    _, out, err = tool(*arguments)
    assert running(out) == pytest.approx(recorded, rel=1e-3)
    assert line in err


def test_output_type_1(tool) -> None:
    _, out, _ = tool("--ppl-output-type", "1", "--chunks", "2")
    rows = [[float(value) for value in line.split()] for line in out.splitlines()[:2]]
    assert rows[0] == pytest.approx([0, 134.8597, 4.904235, 0.160735], rel=1e-3)
    assert rows[1] == pytest.approx([0, 115.8045, 4.751904, 0.114226], rel=1e-3)


def test_kl_divergence_against_itself_and_q8_cache(tool, tmp_path: Path) -> None:
    base = str(tmp_path / "base.kld")
    status, out, err = tool("--chunks", "2", "--kl-divergence-base", base)
    assert status == 0 and f"perplexity: saving all logits to {base}" in err
    assert running(out) == pytest.approx([134.8597, 115.8045], rel=1e-3)
    assert (tmp_path / "base.kld").stat().st_size == 20 + 4 * 1024 + 2 * 255 * 2 * (4096 + 4)
    status, out, _ = tool("--kl-divergence-base", base, "--kl-divergence")
    values = dict(re.findall(r"^(.+?) *: +(-?[\d.]+)", out, re.MULTILINE))
    assert status == 0 and abs(float(values["Mean    KLD"])) < 1e-5 and float(values["Same top p"]) > 99
    _, out, _ = tool("--kl-divergence-base", base, "--kl-divergence", "-ctk", "q8_0", "-mla", "1")
    values = dict(re.findall(r"^(.+?) *: +(-?[\d.]+)", out, re.MULTILINE))
    assert 1e-7 < float(values["Mean    KLD"]) < 2e-3 and float(values["Same top p"]) > 95


def test_multiple_choice_modes_run_on_a_real_model(tool, tmp_path: Path) -> None:
    hellaswag = tmp_path / "hellaswag.txt"
    hellaswag.write_text("The old man\n1\nqqx zzj\nlooked at the sea\nkxv\nwvu wvu\n" * 5)
    _, out, err = tool("-f", str(hellaswag), "--hellaswag")
    assert out.splitlines()[1] == "task\tacc_norm" and out.splitlines()[-2] == "5\t100.00000000"
    assert "loaded 5 tasks from prompt." in err
    winogrande = tmp_path / "winogrande.csv"
    winogrande.write_text("0,He opened the door and _ out of the house.,went,zqx,1\n")
    _, out, _ = tool("-f", str(winogrande), "--winogrande")
    assert out.startswith("1\t100.0000\t") and out.split()[-2:] == ["1", "1"]


@pytest.mark.parametrize(("arguments", "message"), [
    (["-c", "0"], "perplexity tool requires '--ctx-size' > 0"),
    (["--kl-divergence"], "you must provide a name of a file containing the log probabilities of the base model"),
    (["--kl-divergence", "--kl-divergence-base", "none.kld"], "failed to open none.kld: No such file"),
    (["-f", "none.txt"], "failed to open file 'none.txt'"),
    (["--multiple-choice"], "--multiple-choice needs its task file"),
])  # fmt: skip
def test_errors(tool, arguments: list[str], message: str) -> None:
    status, out, err = tool(*arguments)
    assert status == 1 and out == "" and message in "".join(err.splitlines()[-2:])


def test_text_too_short(tool, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short\n")
    status, out, err = tool("-f", str(short))
    assert status == 1 and out == ""
    assert "you need at least 1024 tokens to evaluate perplexity with a context of 512" in err


@pytest.mark.parametrize("test", ["--hellaswag", "--winogrande", "--multiple-choice"])
def test_wrong_tasks_are_named_before_the_model_is_read(tool, test: str) -> None:
    status, out, err = tool("-bf", str(WIKI), test, "-m", "none.gguf")
    assert (status, out) == (1, "")
    lines = [line for line in err.splitlines() if not line.startswith("warning: no effect: -f ")]
    assert len(lines) == 1 and "none.gguf" not in err


def test_results_in_a_folder(tool, tmp_path: Path) -> None:
    text = tmp_path / 'a: "b" # c.txt'
    text.write_text("The old man looked at the sea. " * 40)
    for _ in range(2):
        assert tool("-f", str(text), "-c", "64", "--chunks", "2", "--logdir", str(tmp_path / "runs"))[0] == 0
    first, second = (tmp_path / "runs").iterdir()
    values = dict(line.split(": ", 1) for line in first.read_text().splitlines())
    assert json.loads(values["file"]) == str(text) and values["ctx_size"] == "64" and values["mode"] == "perplexity"
    assert re.fullmatch(r"\d+\.\d{6}", values["ppl_value"])
    assert first.read_text() == second.read_text()


TASK = "He opened the door and\n1\n zqx vbn\n went out of the house\n zzz qqq\n xx yy\n"


def written(folder: Path) -> dict[str, str]:
    """The values of the only file in the folder."""
    (path,) = folder.iterdir()
    return dict(line.split(": ", 1) for line in path.read_text().splitlines())


def test_results_of_other_modes_in_a_folder(tool, tmp_path: Path) -> None:
    """Every mode writes its file, without a perplexity; options of the first mode are named and do nothing."""
    tasks, base = tmp_path / "tasks.txt", tmp_path / "base.kld"
    tasks.write_text(TASK)
    idle = ["--ppl-stride", "64", "--ppl-output-type", "1"]
    choice = ["--hellaswag", "-f", str(tasks), "--kl-divergence-base", str(base), "-ld", str(tmp_path / "choice")]
    status, _, err = tool(*choice, *idle)
    assert status == 0 and "strided" not in err
    assert "no effect: --ppl-stride, --ppl-output-type (unused with --kl-divergence, --hellaswag, " in err
    assert not base.exists()
    values = written(tmp_path / "choice")
    assert (values["mode"], json.loads(values["file"])) == ("hellaswag", str(tasks))
    assert "ppl_value" not in values
    assert tool("--chunks", "2", "-c", "64", "--kl-divergence-base", str(base))[0] == 0
    status, _, err = tool(
        "--kl-divergence", "--kl-divergence-base", str(base), "-c", "64", "-ld", str(tmp_path / "kl"), *idle
    )
    assert status == 0 and "strided" not in err
    values = written(tmp_path / "kl")
    assert (values["mode"], json.loads(values["kl_divergence_base"])) == ("kl_divergence", str(base))
    assert "ppl_value" not in values
