"""Qwen2.5-Omni and Qwen3-Omni: encoders of pictures and of sound in one file; Qwen3-ASR, which only hears."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.qwen_vl import BLOCK, GATED, Qwen3VL, Qwen25VL
from ikpy.convert.projectors.sound import TOWER, SoundProjector
from ikpy.convert.projectors.tensors import Wanted, constant, linear

_LONGEST_WAVE = 10000.0
_SECOND = 13
"""States of Qwen3-Omni in a second."""


def waves(n_positions: int, n: int) -> np.ndarray:
    """Positions f32 [n_positions, n]: sines, then cosines, as transformers computes them."""
    rates = np.exp(-np.log(_LONGEST_WAVE) / max(n // 2 - 1, 1) * np.arange(n // 2))
    angles = np.arange(n_positions)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class OmniSound(SoundProjector):
    """What both have; positions are computed."""

    last_norm = "ln_post"

    def check(self) -> None:
        super().check()
        self.check_value(self.audio, "output_dim", self.n_text)
        self.audio.require(f"d_model {self.n}", self.n % 2 == 0)

    def keys(self) -> Keys:
        return {name: value for name, value in super().keys().items() if name not in ("projector_type", "use_gelu")}

    def positions(self) -> Iterator[Wanted]:
        yield constant("a.position_embd.weight", waves(self.n_positions, self.n))


class Qwen25OmniSound(OmniSound):
    """Means of pairs, a norm and one matrix."""

    kind = "qwen2.5o"
    parts = ("audio_tower.",)
    unused = ("audio_tower.audio_bos_eos_token.",)

    def check(self) -> None:
        super().check()
        self.check_value(self.audio, "n_window", 100)

    def projection(self) -> Iterator[Wanted]:
        yield from linear("mm.a.fc", f"{TOWER}.proj", self.n_text, self.n)


class Qwen3OmniSound(OmniSound):
    """Three convolutions over pitches and time in front, two matrices behind."""

    kind = "qwen3a"
    parts: ClassVar[tuple[str, ...]] = ("audio_tower.",)
    key_bias = True
    n_positions = _SECOND
    defaults: ClassVar[Mapping[str, int | str]] = {**SoundProjector.defaults, "downsample_hidden_size": 480}

    def check(self) -> None:
        super().check()
        for name, known in (("n_window", 50), ("n_window_infer", 800)):
            self.check_value(self.audio, name, known)

    def front(self) -> Iterator[Wanted]:
        n, n_in, pitches = self.audio.count("downsample_hidden_size"), 1, self.n_mel
        for i in (1, 2, 3):
            source = f"{TOWER}.conv2d{i}"
            yield Wanted(f"a.conv2d.{i}.weight", f"{source}.weight", (n, n_in, 3, 3), floats=True)
            yield Wanted(f"a.conv2d.{i}.bias", f"{source}.bias", (n,), lambda bias: bias[:, None, None], exact=True)
            n_in, pitches = n, (pitches + 1) // 2
        yield Wanted("a.conv_out.weight", f"{TOWER}.conv_out.weight", (self.n, n * pitches))

    def projection(self) -> Iterator[Wanted]:
        yield from linear("mm.a.mlp.1", f"{TOWER}.proj1", self.n, self.n)
        yield from linear("mm.a.mlp.2", f"{TOWER}.proj2", self.n_text, self.n)


class Qwen3Asr(Qwen3OmniSound):
    """The encoder of Qwen3-Omni alone, in the names of its repository or in those of transformers."""

    parts = SoundProjector.parts
    renames: ClassVar[Mapping[str, str]] = {
        f"{TOWER}.proj1.": "multi_modal_projector.linear_1.",
        f"{TOWER}.proj2.": "multi_modal_projector.linear_2.",
    }

    def check(self) -> None:
        super().check()
        self.check_value(self.audio, "max_position_embeddings", _SECOND)

    def keys(self) -> Keys:
        return super().keys() | {"audio.projector_type": self.kind}

    def projection(self) -> Iterator[Wanted]:
        yield from self.two_matrices(self.n, self.n, self.n, bias=True)


class Qwen25Omni(Qwen25VL):
    """One type for both encoders."""

    kind = Qwen25OmniSound.kind
    parts = (*Qwen25VL.parts, *Qwen25OmniSound.parts)
    unused = Qwen25OmniSound.unused
    modules: ClassVar[Mapping[str, str]] = {**BLOCK, **{f"attn_{part}": f"attn.{part}" for part in "qkv"}, **GATED}

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.sound = Qwen25OmniSound(checkpoint)

    def check(self) -> None:
        super().check()
        self.sound.check()

    def keys(self) -> Keys:
        return super().keys() | self.sound.keys()

    def tensors(self) -> Iterator[Wanted]:
        yield from super().tensors()
        yield from self.sound.tensors()


class Qwen3Omni(Qwen3VL):
    """Two types. Files of llama.cpp lack the features of layers, and it does not load those that have them."""

    parts = (*Qwen3VL.parts, *Qwen3OmniSound.parts)
    mergers = "merger_list"
    merger_parts = ("ln_q", "mlp.0", "mlp.2")

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.sound = Qwen3OmniSound(checkpoint)

    def check(self) -> None:
        super().check()
        self.sound.check()

    def keys(self) -> Keys:
        keys = super().keys() | self.sound.keys()
        return keys | {"vision.projector_type": keys.pop("projector_type"), "audio.projector_type": self.sound.kind}

    def tensors(self) -> Iterator[Wanted]:
        yield from super().tensors()
        yield from self.sound.tensors()

    def notes(self) -> list[str]:
        if not self.deep_layers:
            return []
        return [
            "the file has the features of layers that the text model takes; llama.cpp, which leaves them out, does not "
            "load it beside the encoder of sound"
        ]
