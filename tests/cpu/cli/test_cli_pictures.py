"""`ikpy cli` and LLM with pictures, on a tiny random model and projector."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ikpy import LLM
from ikpy.backends.cuda import devices
from ikpy.cli import main
from ikpy.errors import FileFormatError, IkpyError, UsageError
from tests.picture_models import IMAGE, N_ROWS, data_uri, png, write_projector, write_text

N = 8


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model, projector and pictures."""
    folder = tmp_path_factory.mktemp("pictures")
    write_text(folder / "text.gguf")
    write_projector(folder / "mmproj.gguf")
    for i in (1, 2):
        (folder / f"{i}.png").write_bytes(png(i))
    (folder / "broken.png").write_bytes(png(1)[:100])
    return folder


@pytest.fixture
def cli(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs `ikpy cli` on the model in its folder, greedily; returns status, standard output and standard error."""

    def run(*arguments: str, stdin: str = "", mmproj: bool = True) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        monkeypatch.chdir(files)
        line = ["cli", "-m", "text.gguf", "-c", "512", "-t", "1", "-n", str(N), "--temp", "0", "--log-disable"]
        line += ["--mmproj", "mmproj.gguf"] if mmproj else []
        status = main([*line, *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def llm(files: Path) -> LLM:
    return LLM(files / "text.gguf", mmproj=files / "mmproj.gguf", n_ctx=512, n_threads=1)


def user(*parts: Any) -> list[dict[str, Any]]:
    """A message of the user; parts that are no texts are pictures."""
    found = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return [{"role": "user", "content": found}]


def said(out: str) -> str:
    """The answer behind the message that is repeated."""
    return out.split("\n", 2)[2].removesuffix("\n")


def test_machines_without_gpus(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """One command line serves them too."""
    monkeypatch.setattr(devices, "_open", lambda *_: ([], "there is no CUDA GPU"))
    want = cli("--image", "1.png", "-p", "describe")[1]
    for arguments in (("-mmdev", "CUDA0"), ("--mmproj-offload",), ("--no-mmproj-offload",)):
        status, out, err = cli("--image", "1.png", "-p", "describe", *arguments)
        assert (status, out) == (0, want)
        assert ("no effect" in err) == (arguments[0] != "--no-mmproj-offload")


def test_one_message(cli, llm: LLM, files: Path) -> None:
    one, two = files / "1.png", files / "2.png"
    status, out, _ = cli("--image", "1.png", "-p", "describe")
    assert (status, said(out)) == (0, llm.chat(user(one, "describe"), N, temperature=0))
    _, out, _ = cli("--image", "1.png,2.png", "-p", "a<__media__>b<__media__>c")
    assert said(out) == llm.chat(user("a", one, "b", two, "c"), N, temperature=0)
    _, out, _ = cli("--image", "2.png", "--image", "1.png", "-p", "describe")
    assert said(out) == llm.chat(user(two, one, "describe"), N, temperature=0)


def test_plain_text(cli, llm: LLM, files: Path) -> None:
    status, out, _ = cli("--image", "1.png", "-p", "a<__media__>b", "-no-cnv")
    want = llm.generate("a<__media__>b", N, images=[files / "1.png"], temperature=0)
    assert (status, out) == (0, "ab" + want)
    assert cli("--image", "1.png", "-p", "a<__media__>b", "-no-cnv", "--verbose-prompt")[0] == 0


@pytest.mark.parametrize("mode", [["-no-cnv"], []])
def test_a_prompt_cache_with_pictures(cli, tmp_path: Path, mode: list[str]) -> None:
    """The second run goes on from the file, another picture or a run without a projector does not."""
    cache = str(tmp_path / "cache")
    line = ["-p", "a<__media__>b", *mode]
    want = {name: cli("--image", name, *line)[1] for name in ("1.png", "2.png")}
    for name in ("1.png", "1.png", "2.png", "1.png"):
        status, out, errors = cli("--image", name, *line, "--prompt-cache", cache)
        assert (status, out) == (0, want[name]), errors
    status, _, errors = cli("-p", "a", *mode, "--prompt-cache", cache, mmproj=False)
    assert status == 1 and "was made with another projector" in errors and "Traceback" not in errors


def test_a_conversation(cli, llm: LLM, files: Path) -> None:
    lines = "/image none.png\n/image broken.png\n/image 1.png\nwhat\nand\n/image 2.png\nthis\n/exit\n"
    status, out, errors = cli("-cnv", stdin=lines)
    assert status == 0 and "1.png loaded\n" in out and "2.png loaded\n" in out
    assert "error: none.png: No such file" in errors and "error: broken.png cannot be decoded" in errors
    turns = user(files / "1.png", "what")
    for message in (user("and"), user(files / "2.png", "this"), None):
        answer = llm.chat(turns, N, temperature=0)
        assert answer in out
        if message:
            turns += [{"role": "assistant", "content": answer}, *message]


def test_a_picture_waits_for_the_first_message(cli, llm: LLM, files: Path) -> None:
    _, out, _ = cli("--image", "1.png", stdin="what\n")
    assert llm.chat(user(files / "1.png", "what"), N, temperature=0) in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--image none.png", "--image, --audio none.png: No such file"),
        ("--image broken.png", "broken.png cannot be decoded"),
        ("--image text.gguf", "text.gguf is no picture or sound of a known format"),
        (
            "--image 1.png -p <__media__><__media__>",
            "number of markers <__media__> (2) and of pictures or sounds (1) differ",
        ),
        ("--image 1.png -ub 8", f"the {N_ROWS} tokens of a picture do not fit a micro-batch of 8: raise -ub"),
        (f"--image 1.png -c 256 -p {'x' * 300}", "message is too long"),
        ("--video x.mp4", "video is not supported"),
    ],
)
def test_errors_of_one_line(cli, line: str, message: str) -> None:
    status, _, errors = cli(*line.split(), *([] if "-p" in line else ["-p", "x"]))
    assert status == 1 and message in errors and "Traceback" not in errors


def test_without_a_projector(cli) -> None:
    status, _, errors = cli("--image", "1.png", "-p", "x", mmproj=False)
    assert status == 1 and "--image and --audio need a projector: give its file with --mmproj" in errors
    _, _, errors = cli("-cnv", stdin="/image 1.png\n", mmproj=False)
    assert "error: /image needs a projector: start with --mmproj" in errors


def test_small_batches(cli) -> None:
    """Pictures are not cut by batches that could hold a part of them."""
    line = "--image", "1.png,2.png", "-p", "abc<__media__>defghijk<__media__>lmn"
    want = cli(*line)[1]
    assert cli(*line, "-b", "16", "-ub", "16")[1] == want
    assert cli(*line, "-b", "40", "-ub", "20")[1] == want
    assert cli(*line, "--spec-type", "ngram-simple:n_max=4")[1] == want


def test_a_full_context(cli) -> None:
    """Old tokens go, and the picture as a whole."""
    line = "--image", "1.png", "-p", "x", "-c", "256", "-n", "400", "--ignore-eos"
    (status, out, _), (_, ended, _) = cli(*line), cli(*line, "--no-context-shift")
    print(len(out), len(ended))
    assert status == 0 and out.startswith(ended.removesuffix("\n")) and len(out) > len(ended) + 100


# LLM


def test_kinds_of_pictures(llm: LLM, files: Path) -> None:
    want = llm.generate("what", N, images=[str(files / "1.png")], temperature=0)
    pixels = np.array(Image.open(io.BytesIO(png(1))))
    assert llm.generate("what", N, images=files / "1.png", temperature=0) == want
    for image in (files / "1.png", png(1), Image.open(io.BytesIO(png(1))), pixels, data_uri(png(1))):
        assert llm.generate("what", N, images=[image], temperature=0) == want
        assert llm.generate("<__media__>what", N, images=[image], temperature=0) == want
    assert "".join(llm.stream("what", N, images=[pixels], temperature=0)) == want
    answer = llm.chat(user(pixels, "what"), N, temperature=0)
    for part in ({"image_url": {"url": data_uri(png(1))}}, {"url": str(files / "1.png")}, {"path": files / "1.png"}):
        kind = {"type": "image_url" if "image_url" in part else "image"}
        message = {"role": "user", "content": [part | kind, {"type": "text", "text": "what"}]}
        assert llm.chat([message], N, temperature=0) == answer


def test_a_longer_text_goes_on(llm: LLM) -> None:
    """What the cache holds of a text with a picture serves the next one."""
    first = llm.chat(user(png(1), "what"), N, temperature=0)
    turns = [*user(png(1), "what"), {"role": "assistant", "content": first}, *user("and")]
    again = llm.chat(turns, N, temperature=0)
    llm.generate("x", 1)
    assert llm.chat(turns, N, temperature=0) == again


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        ([5], UsageError, "a picture is a file, bytes of one"),
        ([np.zeros((4, 4), np.uint8)], UsageError, "a picture is a file, bytes of one"),
        ([np.zeros((0, 4, 3), np.uint8)], UsageError, "a picture is a file, bytes of one"),
        ([b"nonsense"], FileFormatError, "no picture of a known format"),
        (["none.png"], UsageError, "none.png: No such file"),
        ([png(1), png(2)], UsageError, "markers"),
    ],
)
def test_pictures_that_cannot_be_used(llm: LLM, images: Any, error: type[IkpyError], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate("a<__media__>b", N, images=images)


def test_texts_that_cannot_have_pictures(llm: LLM) -> None:
    with pytest.raises(UsageError, match="not to token ids"):
        llm.generate([1, 2], N, images=[png(1)])
    with pytest.raises(UsageError, match="mmproj"):
        LLM(n_threads=1).generate("x", N, images=[png(1)])
    with pytest.raises(UsageError, match="outside the vocabulary"):
        llm.generate([400], N)


def test_sizes_of_pictures(llm: LLM) -> None:
    """Any size is brought to that of the encoder."""
    for size in ({"width": 1, "height": 1}, {"width": 3 * IMAGE, "height": 7}):
        assert llm.generate("x", N, images=[png(3, **size)], temperature=0)
