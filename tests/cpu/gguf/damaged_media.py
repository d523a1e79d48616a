"""Projectors of every kind, pictures, sounds and drafters, damaged at random, and command lines that read them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

from PIL import Image

from tests.cpu.gguf.damage import damage_bytes, damage_gguf, damage_state
from tests.cpu.gguf.original_files import Originals
from tests.cpu.media.deepseek_ocr2_tower import PUBLISHED as OCR2
from tests.cpu.media.deepseek_ocr_tower import OcrTower
from tests.cpu.media.mobilenet_tower import MobileTower
from tests.cpu.media.sound_kinds import TOWERS as SOUNDS
from tests.cpu.media.tile_towers import TOWERS as TILES
from tests.cpu.media.tower_kinds import STEP3VL
from tests.cpu.media.tower_kinds import TOWERS as NATIVE
from tests.cpu.models import eagle3_model
from tests.picture_models import D, png, write_grid_text, write_text
from tests.sound_models import tone, wav

PICTURES = {**TILES, **NATIVE, "step3vl": STEP3VL, "ocr": OcrTower(), "ocr2": OCR2, "mobile": MobileTower()}
KINDS = sorted([*PICTURES, *SOUNDS])
WIDE = {"minicpmv": 128, "minicpmv2": 128}
"""Rows whose heads have this size."""
SIDE = 40
ENCODINGS = ("png", "jpeg", "gif", "bmp", "webp", "tiff")


def _cached(path: Path, write: Callable[[Path], object]) -> Path:
    """A file that is written once."""
    if not path.exists():
        draft = path.with_suffix(".part")
        write(draft)
        draft.rename(path)
    return path


def _text(files: Originals, kind: str) -> Path:
    """A text model that takes the rows of a projector."""
    if kind == "qwen3vl":
        return _cached(files.folder / "grid.gguf", write_grid_text)
    d = WIDE.get(kind, D)
    return _cached(files.folder / f"text-{d}.gguf", lambda path: write_text(path, d))


def _projector(files: Originals, kind: str) -> Path:
    """An intact projector with the width of its text model."""
    tower = replace((SOUNDS if kind in SOUNDS else PICTURES)[kind], text=WIDE.get(kind, D))  # type: ignore[type-var]
    return _cached(files.folder / f"mmproj-{kind}.gguf", lambda path: tower.write(path, tower.weights()))


def _medium(files: Originals, kind: str) -> Path:
    """A picture, or a sound for encoders of these."""
    if kind in SOUNDS:
        return _cached(files.folder / "one.wav", lambda path: path.write_bytes(wav(tone(0.3))))
    return _cached(files.folder / "one.png", lambda path: path.write_bytes(png(1, SIDE, SIDE + 9)))


def _ask(text: Path, projector: Path, medium: Path) -> list[str]:
    """A command line that writes a token about a picture or a sound."""
    return ["cli", "-m", str(text), "--mmproj", str(projector), "--image", str(medium), "-p", "what", "-n", "1",
            "-c", "2048", "-t", "1", "--no-warmup"]  # fmt: skip


def projector_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A projector: asked about a picture or a sound, quantized, shown."""
    kind = random.choice(KINDS)
    data = _projector(files, kind).read_bytes()
    path = folder / "mmproj.gguf"
    path.write_bytes((damage_gguf if random.random() < 0.8 else partial(damage_bytes, end=4000))(random, data))
    ask = _ask(_text(files, kind), path, _medium(files, kind))
    return random.choice([ask] * 6 + [["quantize", str(path), str(folder / "q.gguf"), "q8_0", "1"],
                                      ["gguf", "dump", str(path)]])  # fmt: skip


def _encoded(random: Random) -> tuple[str, bytes]:
    """A small picture in one of the usual encodings, or a sound."""
    name = random.choice([*ENCODINGS, "wav"])
    if name == "wav":
        return name, wav(tone(0.1))
    out = io.BytesIO()
    Image.open(io.BytesIO(png(1, SIDE, SIDE))).save(out, name)
    return name, out.getvalue()


def medium_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A picture or a sound."""
    name, data = _encoded(random)
    kind = "ultravox" if name == "wav" else "gemma3"
    path = folder / f"medium.{name}"
    path.write_bytes(damage_bytes(random, data, 0, random.choice([60, None])))
    return _ask(_text(files, kind), _projector(files, kind), path)


def media_state_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """A prompt cache of a text with a picture."""
    ask = _ask(_text(files, "gemma3"), _projector(files, "gemma3"), _medium(files, "gemma3"))
    intact = files.run(files.folder / "media-state", *ask, "--prompt-cache", str(files.folder / "media-state"))
    path = folder / "state"
    path.write_bytes(damage_state(random, intact.read_bytes()))
    return [*ask, "--prompt-cache", str(path), *random.choice([[], ["--prompt-cache-ro"]])]


def drafter_case(random: Random, files: Originals, folder: Path) -> list[str]:
    """An EAGLE-3 drafter, or a draft model."""
    path = folder / "draft.gguf"
    if random.random() < 0.3:
        path.write_bytes(damage_gguf(random, files.model.read_bytes()))
        return [*files.generate(files.model), "-md", str(path), "--spec-type", "draft", "--draft-p-min", "0"]
    own = random.random() < 0.5
    target = _cached(files.folder / "eagle3-target.gguf", lambda path: eagle3_model.target().write(path))
    intact = _cached(files.folder / f"eagle3-{own}.gguf", lambda path: eagle3_model.drafter(own=own).write(path))
    path.write_bytes(damage_gguf(random, intact.read_bytes()))
    return ["cli", "-m", str(target), "-md", str(path), "--spec-type", "eagle3", "--draft-p-min", "0", "-p",
            "word9 word10", "-n", "4", "--temp", "0", "-t", "1", "-c", "128", "-no-cnv", "--no-warmup"]  # fmt: skip
