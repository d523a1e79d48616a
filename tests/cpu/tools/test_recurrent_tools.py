"""Tools and logs with a model that has recurrent layers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from ikpy.cli import main
from ikpy.engine.batch import Batch
from ikpy.tools.generation import GrowingSequence
from ikpy.tools.sequence_scores import Alternatives, score_tasks
from tests.cpu.models.recurrent_model import expected, hold, new_context, text, write_model


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), [f"w{i}" for i in range(4, 150)]))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "words.txt"
    file.write_text(" ".join(f"w{i}" for i in text(61, 700) if i < 150))
    return str(file)


def run(capfd: pytest.CaptureFixture[str], line: str) -> tuple[str, str]:
    """Results and logs of a command that must not fail."""
    status = main(line.split())
    out, err = capfd.readouterr()
    assert status == 0, err
    return out, err


def test_perplexity_does_not_depend_on_batches(path: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    found = []
    for sizes in ("-b 64", "-b 256", "-b 256 -ub 16", "-b 16"):
        out, err = run(capfd, f"perplexity -m {path} -f {words} -c 64 -t 2 {sizes}")
        found.append(float(re.search(r"PPL over [0-9]+ chunks for n_ctx=64 = ([0-9.]+)", out).group(1)))
    assert max(found) - min(found) < 1e-3, found
    assert re.search(
        r"llama_memory_recurrent: size = +0\.07 MiB \( +1 cells, +4 layers, +1 seqs\), "
        r"R \(f32\): +0\.01 MiB, S \(f32\): +0\.06 MiB\n",
        err,
    ), err


def test_an_importance_matrix_holds_the_projections(
    path: str, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(capfd, f"imatrix -m {path} -f {words} -c 64 -t 2 -o {tmp_path / 'matrix.dat'}")
    data = (tmp_path / "matrix.dat").read_bytes()
    for name in ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_out"):
        assert f"blk.0.{name}.weight".encode() in data, name
    assert b"conv1d" not in data


@pytest.mark.parametrize(
    "line",
    [
        "sweep-bench -c 128 -ub 32 -ntg 8",
        "bench -p 16 -n 4 -d 0,32 -r 2",
        "batched-bench -c 512 -npp 16 -ntg 4 -npl 1,3",
        "batched-bench -c 512 -npp 16 -ntg 4 -npl 1,3 -pps",
    ],
)
def test_benchmarks_go_back_to_a_depth(path: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capfd, f"{line} -m {path} -t 2")
    assert len(re.findall(r"^\|.*[0-9]", out, re.MULTILINE)) >= 2, out


def test_a_conversation_goes_on_before_the_end_of_its_last_prompt(path: str) -> None:
    context = new_context(Path(path), 1)
    sequence = GrowingSequence(context)
    prompt, answer, other = text(66, 40), text(67, 6), text(68, 12)
    sequence.feed(prompt)
    for token in answer:
        sequence.feed([token])
    following = prompt[:-3] + other
    assert sequence.rewind(following) == 35
    logits = sequence.feed(following[35:])
    hold("next prompt", logits[None], expected(Path(path), following)[-1:])
    assert sequence.rewind(following + other) == len(following)
    assert sequence.rewind(prompt[:30]) == 0


def test_alternatives_share_a_beginning(path: str) -> None:
    beginning, ends = text(62, 10), [text(63, 5), text(64, 7), text(65, 3)]
    sequences = [beginning + end for end in ends]
    spans = [(10, len(sequence)) for sequence in sequences]
    context = new_context(Path(path), 6)
    tasks = [Alternatives(sequences, spans), Alternatives(sequences[::-1], spans[::-1])]
    first, second = score_tasks(context, tasks)
    np.testing.assert_allclose(first, second[::-1], atol=2e-4)
    for score, sequence in zip(first, sequences, strict=True):
        logits = new_context(Path(path), 1).decode(Batch.single(sequence, logits="all")).astype(np.float64)
        rows = logits[9:-1] - np.log(np.exp(logits[9:-1]).sum(axis=1, keepdims=True))
        alone = rows[np.arange(len(rows)), sequence[10:]].mean()
        assert abs(score - alone) < 2e-4, (score, alone)
