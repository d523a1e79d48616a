"""Text models that rotate rows of pictures by their places, beside projectors with places of another kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ikpy import LLM
from ikpy.cli import main
from ikpy.errors import UsageError
from tests.cpu.media import media_models as media
from tests.cpu.media.hunyuan_tower import TOWER as HUNYUAN
from tests.cpu.media.hunyuan_tower import HunyuanTower
from tests.cpu.media.tower_kinds import TOWERS
from tests.cpu.media.vision_towers import Tower
from tests.cpu.models.reference_models import RandomModel

M_ROPE, PLAIN = (replace(TOWERS[kind], text=media.D) for kind in ("qwen2vl", "pixtral"))
XD_ROPE = replace(HUNYUAN, text=media.D)


def written(folder: Path, text: Callable[[], RandomModel], tower: Tower | HunyuanTower) -> tuple[Path, Path]:
    """Files of a text model and a projector whose rows are as wide."""
    return text().write(folder / "text.gguf"), tower.write(folder / "mmproj.gguf", tower.weights())


def opened(folder: Path, text: Callable[[], RandomModel], tower: Tower | HunyuanTower) -> LLM:
    path, projector = written(folder, text, tower)
    return LLM(path, mmproj=projector, n_ctx=64, n_threads=1)


@pytest.mark.parametrize(
    ("text", "tower", "message"),
    [
        (media.hunyuan_vl, M_ROPE, r"positions of M-RoPE, the text model \(hunyuan_vl\) wants those of XD-RoPE: it is"),
        (media.qwen2vl, XD_ROPE, r"positions of XD-RoPE, the text model \(qwen2vl\) wants those of M-RoPE: it is"),
    ],
)
def test_other_kinds_are_refused(
    text: Callable[[], RandomModel], tower: Tower | HunyuanTower, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        opened(tmp_path, text, tower)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "tower"),
    [
        (media.hunyuan_vl, XD_ROPE),
        (media.qwen2vl, M_ROPE),
        (media.hunyuan_vl, PLAIN),
        (media.llama, XD_ROPE),  # as older files of HunyuanOCR
    ],
)
def test_kinds_that_fit(text: Callable[[], RandomModel], tower: Tower | HunyuanTower, tmp_path: Path) -> None:
    assert opened(tmp_path, text, tower).model.arch.reads_grids == (text is not media.llama)


def test_one_that_was_found_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = written(tmp_path, media.hunyuan_vl, M_ROPE)
    assert main(["cli", "-m", str(path), "--mmproj-auto", "-p", "a", "-n", "1", "-no-cnv", "-c", "64"]) == 0
    assert "warning: no pictures and sounds: " in (shown := capsys.readouterr().err) and "wants those of XD" in shown
