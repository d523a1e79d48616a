"""Texts end where a model has no embeddings of later positions, whatever the context holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ikpy import LLM
from ikpy.cli import main
from ikpy.cli.parser import parse
from ikpy.cli.server import make_server
from ikpy.cli.session import load
from ikpy.engine.context import Context
from ikpy.engine.model import Model
from ikpy.engine.params import ContextParams
from ikpy.errors import UsageError
from ikpy.server.log import ServerLog
from tests.cpu.models.test_arch_plain import GPT2, STARCODER2
from tests.cpu.quants.plain_blocks import model
from tests.server.harness import greedy_answer

N_POSITIONS = 100


@pytest.fixture
def path(tmp_path: Path) -> Path:
    m = model(GPT2)
    m.keys["context_length"] = N_POSITIONS
    m.weights["position_embd"] = m.weights["position_embd"][:N_POSITIONS]
    return m.write(tmp_path / "model.gguf")


def test_room_of_a_sequence(path: Path, tmp_path: Path) -> None:
    """Several sequences may share a context that is longer than each of them can be."""
    context = Context(Model.load(path), ContextParams(n_ctx=512, n_seq_max=4, n_threads=1))
    assert (context.n_ctx, context.n_ctx_seq) == (512, N_POSITIONS)
    rotated = Model.load(model(STARCODER2).write(tmp_path / "rotated.gguf"))
    assert Context(rotated, ContextParams(n_ctx=1024, n_threads=1)).n_ctx_seq == 1024


def test_texts_end(path: Path) -> None:
    llm = LLM(str(path), n_ctx=512, n_threads=1)
    pieces = list(llm.stream([5, 6, 7], max_tokens=300, temperature=0, ignore_eos=True))
    assert len(llm.tokenize("".join(pieces))) <= N_POSITIONS
    with pytest.raises(UsageError, match=f"the prompt has 120 tokens, the context {N_POSITIONS}"):
        llm.generate([5] * 120)


def test_the_command_line_tells(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["-n", "300", "-c", "512", "-t", "1", "-no-cnv", "--no-warmup", "--ignore-eos", "--temp", "0"]
    assert main(["cli", "-m", str(path), "-p", "word9", *options]) == 0
    log = capfd.readouterr().err
    assert f"the context of {N_POSITIONS} tokens is full" in log and "the model knows no later positions" in log


def test_slots_of_a_server(path: Path) -> None:
    """An answer without a limit ends in time, and the next request finds its slot in order."""
    session = load(parse(["-m", str(path), "-c", "512", "-np", "2", "-t", "1", "--log-disable"], "server"))
    server = make_server(session, ServerLog())
    server.engine.start()
    try:
        assert server.engine.n_ctx_slot == N_POSITIONS
        for _ in range(2):
            greedy_answer(server.engine, [5, 6, 7], session.model.hparams.n_vocab, limit=-1)  # fails for an error
    finally:
        server.engine.stop(10)
