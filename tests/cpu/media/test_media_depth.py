"""Text models whose first layers take features of pictures, beside projectors with features for other layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ikpy import LLM
from ikpy.errors import UsageError
from tests.cpu.media.tower_kinds import TOWERS
from tests.picture_models import write_grid_text

TOWER = TOWERS["qwen3vl"]
PICTURE = np.random.default_rng(2).integers(0, 256, (64, 96, 3), dtype=np.uint8)


def opened(folder: Path, deep: tuple[int, ...]) -> LLM:
    """A text model that takes features for two layers, and pictures with those of some layers."""
    tower = replace(TOWER, deep=deep)
    write_grid_text(folder / "text.gguf")
    tower.write(folder / "mmproj.gguf", tower.weights())
    return LLM(folder / "text.gguf", mmproj=folder / "mmproj.gguf", n_ctx=256, n_threads=1)


def test_pictures_without_features(tmp_path: Path) -> None:
    """Add nothing to the layers: Qwen3-Omni's files of llama.cpp are so."""
    llm = opened(tmp_path, ())
    assert llm.model.arch.n_deep == 2
    assert llm.generate("<__media__>x", 2, images=[PICTURE], temperature=0)
    rows = llm.context_params.media.rows(llm.model.hparams.n_vocab)
    n = llm.model.hparams.n_embd
    assert rows.shape[1] == 3 * n and rows[:, :n].any() and not rows[:, n:].any()


def test_pictures_with_features_for_other_layers(tmp_path: Path) -> None:
    assert opened(tmp_path, TOWER.deep).model.arch.n_deep == len(TOWER.deep)
    with pytest.raises(UsageError, match=r"features for 1 layers, the text model takes those for 2 .* one checkpoint"):
        opened(tmp_path, TOWER.deep[:1])
