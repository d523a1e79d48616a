"""Encoders of sound on a device: rows of every family against those of the CPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ikpy.backends.cuda.devices import available
from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.graph.placement import DeviceParams
from ikpy.sound.projector import open_sound_projector
from tests.cpu.media.sound_kinds import TOWERS
from tests.cuda.test_vision import BOUND, assert_rows
from tests.sound_models import tone

SECONDS = 0.5
LAYERS = {"granite_speech": 2, "granite_speech_plus": 3}
"""Where more than one is needed: what the middle layer says, states of earlier layers."""
BOUNDS = {"granite_speech": 1e-4, "granite_speech_plus": 1e-4}
"""Behind several attentions."""

WIDE = {"d": 1024, "heads": 8}
"""Of Nemotron 3 Nano Omni, whose keys have 128 + 1024 elements."""


@pytest.mark.parametrize("name", [*TOWERS, "parakeet_wide"])
def test_rows_are_those_of_the_cpu(name: str, tmp_path: Path, cuda_devices: int) -> None:
    """All on the device: nothing falls back. Pieces of Whisper have 3000 frames, which is long for an emulated one."""
    tower = TOWERS[name.removesuffix("_wide")]
    wide = WIDE if name.endswith("_wide") else {}
    tower = dataclasses.replace(tower, layers=min(tower.layers, LAYERS.get(name, 1)), **wide)
    lines = list[str]()
    device = EncoderRuntime(available()[0], DeviceParams(), lines.append)
    path = str(tower.write(tmp_path / "mmproj.gguf", tower.weights()))
    opened = [
        open_sound_projector(path, n_embd=tower.text, n_threads=1, log=lines.append, device=each)
        for each in (None, device)
    ]
    for each in opened:
        each.pieces = lambda samples, made=each.pieces: (next(iter(made(samples)))[:200],)  # type: ignore[method-assign]
    here, there = (next(p for p in each.encode(tone(SECONDS)) if not isinstance(p, str)).values for each in opened)
    assert_rows(name, there, here, BOUNDS.get(name, BOUND))
    assert not [line for line in lines if line.startswith("note")]
