"""`ikpy cli` and LLM with sound, on a tiny random model and projector."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from ikpy import LLM
from ikpy.cli import main
from ikpy.errors import UsageError
from ikpy.tools.sounds import sound_from
from tests.picture_models import data_uri, png, write_grid_text
from tests.sound_models import tone, wav, write_hearing_model, write_sound_projector

N = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model, projector and sounds."""
    folder = tmp_path_factory.mktemp("sounds")
    write_hearing_model(folder)
    for i in (1, 2):
        (folder / f"{i}.wav").write_bytes(wav(tone(0.5, i)))
    (folder / "1.png").write_bytes(png(1))
    (folder / "broken.wav").write_bytes(wav(tone(0.5))[:30])
    return folder


@pytest.fixture
def cli(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs `ikpy cli` on the model in its folder, greedily; returns status, standard output and standard error."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.chdir(files)
        line = ["cli", "-m", "text.gguf", "-c", "512", "-t", "1", "-n", str(N), "--temp", "0", "--log-disable"]
        status = main([*line, "--mmproj", "mmproj.gguf", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def llm(files: Path) -> LLM:
    return LLM(files / "text.gguf", mmproj=files / "mmproj.gguf", n_ctx=512, n_threads=1)


def answer(llm: LLM, *sounds: object, question: str = "whatis") -> str:
    """To one message with sounds in front."""
    parts = [*({"type": "audio", "audio": sound} for sound in sounds), {"type": "text", "text": question}]
    return llm.chat([{"role": "user", "content": parts}], max_tokens=N, temperature=0)


def test_one_question(cli, llm: LLM, files: Path) -> None:
    """--audio and --image are one option; the file tells what it is."""
    want = answer(llm, files / "1.wav")
    for option in ("--audio", "--image"):
        status, out, _ = cli(option, "1.wav", "-p", "whatis")
        assert status == 0 and want.strip() in out


def test_two_sounds_and_a_marker(cli, llm: LLM, files: Path) -> None:
    want = llm.generate(
        "a<__media__>b<__media__>", audio=[files / "1.wav", files / "2.wav"], max_tokens=N, temperature=0
    )
    status, out, _ = cli("--audio", "1.wav,2.wav", "-p", "a<__media__>b<__media__>", "-no-cnv")
    assert status == 0 and want in out


def test_conversation(cli, llm: LLM, files: Path) -> None:
    want = answer(llm, files / "1.wav")
    status, out, errors = cli("-cnv", stdin="/audio 1.wav\nwhatis\n/exit\n")
    assert status == 0 and "1.wav loaded" in out and want.strip() in out, errors


def test_sounds_that_cannot_be_read_do_not_end_a_conversation(cli) -> None:
    lines = "/audio none.wav", "/audio broken.wav", "/image 1.png", "/exit"
    status, _, errors = cli("-cnv", stdin="\n".join(lines))
    assert status == 0 and "Traceback" not in errors
    assert "none.wav: No such file" in errors and "broken.wav cannot be decoded" in errors
    assert "image input is not supported" in errors


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--audio none.wav", "--image, --audio none.wav: No such file"),
        ("--audio broken.wav", "broken.wav cannot be decoded"),
        ("--audio 1.png", "image input is not supported"),
    ],
)
def test_errors_of_one_line(cli, line: str, message: str) -> None:
    status, _, errors = cli(*line.split(), "-p", "x")
    assert status == 1 and message in errors and "Traceback" not in errors


def test_ways_to_give_a_sound(llm: LLM, files: Path) -> None:
    """Names, contents, addresses with data, samples."""
    data = (files / "1.wav").read_bytes()
    want = answer(llm, str(files / "1.wav"))
    for given in (files / "1.wav", data, data_uri(data, "audio/wav")):
        assert answer(llm, given) == want
    samples = np.frombuffer(data[44:], "<i2").astype(np.float32) / 32768
    assert answer(llm, samples) == want
    text = {"type": "text", "text": "whatis"}
    part = {"type": "input_audio", "input_audio": {"data": data_uri(data).partition(",")[2], "format": "wav"}}
    assert llm.chat([{"role": "user", "content": [part, text]}], max_tokens=N, temperature=0) == want


def test_models_whose_layers_read_pictures(tmp_path: Path) -> None:
    """Sounds have no features for them, and count on like text: logits are those of rows without any."""
    write_grid_text(tmp_path / "text.gguf")
    write_sound_projector(tmp_path / "mmproj.gguf")
    llm = LLM(tmp_path / "text.gguf", mmproj=tmp_path / "mmproj.gguf", n_ctx=256, n_threads=1)
    assert llm.model.arch.n_deep == 2
    tokens = llm._tokens_of(["whatis", sound_from(tone(0.5)), "x"])
    assert llm.context_params.media.turn(tokens) == 0
    rows = llm.context_params.media.rows(llm.model.hparams.n_vocab)
    assert rows.shape[1] == 3 * llm.model.hparams.n_embd and np.abs(rows[:, : rows.shape[1] // 3]).min() > 0
    assert not rows[:, rows.shape[1] // 3 :].any()
    assert len(llm.generate("<__media__>x", N, audio=tone(0.5), temperature=0)) > 0


def test_wrong_sounds(llm: LLM) -> None:
    with pytest.raises(UsageError, match="a sound is a file"):
        llm.generate("x", audio=[5])
    with pytest.raises(UsageError, match="image input is not supported"):
        llm.generate("x", images=png(1))
    with pytest.raises(UsageError, match="belong to a text"):
        llm.generate([1, 2], audio=tone(0.1))
    with pytest.raises(UsageError, match="need a projector"):
        LLM(n_threads=1).generate("x", audio=tone(0.1))
