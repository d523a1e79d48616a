"""The Python examples and configuration files of the documentation work on small models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import ikpy
from ikpy.cli.parser import parse
from ikpy.convert.families import FAMILIES
from ikpy.models import ARCHITECTURES
from ikpy.sound.projector import FAMILIES as SOUND_PROJECTORS
from ikpy.vision.projector import FAMILIES as PROJECTORS
from tests.cpu.convert.seeded_kinds import KINDS
from tests.cpu.media.sound_kinds import GOLDENS
from tests.picture_models import png, write_projector, write_text
from tests.shared import DATA, ROOT
from tests.sound_models import tone, wav, write_hearing_model

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NEEDS_SERVER = ("server.md",)
SMALLER = {"n_threads=8": "n_threads=2", "n_ctx=8192": "n_ctx=1024", "100)": "20)", "200,": "20,"}


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python") and page.name not in NEEDS_SERVER],
    ids=lambda page: page.name,
)
def test_python_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a page run one behind the other, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    model = DATA / "zoo" / "llama-ropefreqs.gguf" if page.name == "gguf.md" else ikpy.default_model_path()
    if page.name == "vision.md":
        model = write_text(tmp_path / "text.gguf")
        write_projector(tmp_path / "mmproj.gguf")
        for name in ("a.png", "b.png", "photo.jpg"):
            (tmp_path / name).write_bytes(png(1))
    if page.name == "audio.md":
        write_hearing_model(tmp_path)
        model = tmp_path / "text.gguf"
        (tmp_path / "speech.wav").write_bytes(wav(tone(0.5)))
        (tmp_path / "speech.flac").write_bytes((GOLDENS / "tone.flac").read_bytes())
    for name in ("model.gguf", "draft.gguf"):
        (tmp_path / name).symlink_to(model)
    namespace = {"text": ikpy.demo_text_path().read_text()}
    pattern = re.compile("|".join(map(re.escape, SMALLER)))
    for block in blocks(page, "python"):
        code = pattern.sub(lambda match: SMALLER[match[0]], block)
        exec(compile(code, page.name, "exec"), namespace)


@pytest.mark.parametrize(("page", "known"), [("vision.md", PROJECTORS), ("audio.md", SOUND_PROJECTORS)])
def test_all_projectors_are_listed(page: str, known: dict[str, str]) -> None:
    rows = (ROOT / "docs" / page).read_text().partition("## Projectors")[2].partition("\n## ")[0]
    types = re.findall(r"^\| `([\w.]+)` \|", rows, re.MULTILINE)
    assert sorted(types) == sorted(["clip.projector_type", *known])


def test_configuration_files_are_read(tmp_path: Path) -> None:
    texts = [text for page in PAGES for text in blocks(page, "toml")]
    assert texts
    for text in texts:
        path = tmp_path / "server.toml"
        path.write_text(text)
        assert parse(["--config", str(path)], "server", {}) != parse([], "server", {})


def without_blanks(text: str) -> str:
    """Text without white space and without commas that a formatter may put before a bracket."""
    return re.sub(r",(?=[)\]}])", "", re.sub(r"\s+", "", text))


def test_the_example_of_adding_a_type_is_the_code() -> None:
    """Every piece of the worked example stands in the sources as it is shown."""
    example = (ROOT / "docs" / "quant-types.md").read_text().partition("## Adding a type")[2]
    sources = "\n".join(
        without_blanks(path.read_text())
        for path in (ROOT / "ikpy").rglob("*")
        if path.suffix in (".py", ".hpp", ".cuh")
    )
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", example, re.MULTILINE)
    pieces = [piece for block in blocks for piece in re.split(r"\n\s*\n", block) if piece.strip()]
    rows, *code = pieces
    assert len(code) == 6
    assert [piece for piece in (*rows.splitlines(), *code) if without_blanks(piece) not in sources] == []


def test_counts_of_the_changelog() -> None:
    """Architectures and model types that the list of changes counts are those of the tables."""
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"- {len(ARCHITECTURES)} architectures (" in text
    assert f"checkpoints of {len(FAMILIES)} model types:" in text


def test_every_architecture_has_a_row() -> None:
    """Names in the first column of the tables of models, each once."""
    table = (ROOT / "docs" / "models.md").read_text().partition("## What runs")[2].partition("\n\nMulti-token")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert sorted(re.findall("`([^`]+)`", " ".join(rows))) == sorted(ARCHITECTURES)


def test_every_model_type_of_checkpoints_is_accounted_for() -> None:
    """Those without a checkpoint whose logits transformers recorded are named as such where the others are counted."""
    configs = [json.loads(path.read_text()) for path in (DATA / "convert").glob("*/config.json")]
    recorded = [*configs, *(kind.config for kind in KINDS)]
    golden = {part.get("model_type") for config in recorded for part in (config, config.get("text_config", {}))}
    text = (ROOT / "docs" / "models.md").read_text()
    paragraph = text[text.index(f"Converted checkpoints of {len(configs)} tiny random models") :].partition("\n\n")[0]
    named = set(re.findall("`([^`]+)`", paragraph))
    of_text = {name for name in FAMILIES if name.endswith("_text")}  # parts of other types
    assert sorted({*FAMILIES} - of_text - golden - named) == [] and not named & golden
