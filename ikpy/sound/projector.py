"""Opens the encoders of sound in projector files (mmproj), which turn sounds into rows of the text model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.errors import UnsupportedError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.ir import Value
from ikpy.models.keys import Keys
from ikpy.sound.params import SoundParams
from ikpy.sound.samples import Samples
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.on_device import OnDevice, check_width, unknown_kind
from ikpy.vision.plans import PicturePlans
from ikpy.vision.projector import FAMILIES as PICTURE_FAMILIES
from ikpy.vision.projector import encoder_kind
from ikpy.vision.rows import MediaRows
from ikpy.vision.weights import ProjectorWeights

FAMILIES = {
    "dots3note_a": "dots3note.Dots3NoteAudioProjector",
    "gemma3na": "gemma3n.Gemma3nAudioProjector",
    "gemma4a": "gemma4.Gemma4AudioProjector",
    "gemma4ua": "gemma4.Gemma4UnifiedAudioProjector",
    "glma": "whisper.GlmaProjector",
    "granite_speech": "granite.GraniteSpeechProjector",
    "lfm2a": "fastconformer.Lfm2AudioProjector",
    "meralion": "whisper.MeralionProjector",
    "musicflamingo": "whisper.MusicFlamingoProjector",
    "parakeet": "fastconformer.ParakeetProjector",
    "qwen2.5o": "whisper.Qwen25OmniProjector",
    "qwen2a": "whisper.Qwen2AudioProjector",
    "qwen3a": "qwen3.Qwen3AudioProjector",
    "ultravox": "whisper.UltravoxProjector",
    "voxtral": "whisper.VoxtralProjector",
}
"""Class of every projector type, in the modules of this package."""


@dataclass(frozen=True)
class SoundSource:
    """What a projector of sound is made of."""

    keys: Keys
    params: SoundParams
    weights: ProjectorWeights
    has_token: Callable[[str], bool] = lambda token: False
    device: EncoderRuntime | None = None


class SoundProjector(OnDevice):
    """A family of projectors of sound. Subclasses load their tensors, cut spectrograms and build the graph.

    begin, end: text around every sound.
    """

    kind: ClassVar[str] = "audio"
    what: ClassVar[str] = "sound"
    begin: str = ""
    end: str = ""
    most_frames: ClassVar[int] = 3000
    """Of a piece."""

    def __init__(self, source: SoundSource, n_threads: int) -> None:
        self.path = source.keys.gguf.path
        self.params = source.params
        self._device = source.device
        self.load(source)
        self._plans = PicturePlans(self.build, self.n_frame_elements, n_threads, source.device)

    @property
    def largest(self) -> tuple[int, int]:
        return 1, self.most_frames

    @abstractmethod
    def load(self, source: SoundSource) -> None:
        """Takes the tensors and keys of the family."""

    @property
    @abstractmethod
    def n_out(self) -> int:
        """Elements of a row."""

    @abstractmethod
    def build(self, b: PictureGraph) -> Value:
        """The rows of a piece, f32 [n_out, n]; its frames are the graph's patches."""

    @property
    @abstractmethod
    def n_frame_elements(self) -> int:
        """Elements of what the graph reads of a frame."""

    @abstractmethod
    def pieces(self, samples: Samples) -> Iterable[NDArray[np.float32]]:
        """Frames [n, n_frame_elements] of the pieces of a sound, which are encoded one by one."""

    @abstractmethod
    def n_rows(self, n_samples: int) -> int:
        """Rows of a sound of so many samples, all pieces together."""

    def encode(self, samples: Samples) -> list[str | MediaRows]:
        """Rows of a sound and the text around them, in order, as `Projector.encode` of pictures."""
        return list(self.encoded(samples))

    def encoded(self, samples: Samples) -> Iterator[str | MediaRows]:
        """What `encode` gives, one piece after the other."""
        if self.begin:
            yield self.begin
        for frames in self.pieces(samples):
            yield MediaRows(self.evaluated(frames, 1, len(frames)))
        if self.end:
            yield self.end


def known_encoders(gguf: GGUFFile, log: Callable[[str], None] = lambda line: None) -> set[str]:
    """Those of the encoders of a file, "vision" and "audio", whose types are known; another beside one is logged.

    Raises UnsupportedError if there is none.
    """
    families = {"vision": PICTURE_FAMILIES, "audio": FAMILIES}
    named = {"vision": "pictures", "audio": "sound"}
    kinds = {part: kind for part in families if (kind := encoder_kind(gguf, part)) is not None}
    if not kinds:
        raise UnsupportedError(f"{gguf.path} holds no encoder of pictures or sound")
    unknown = [
        unknown_kind(gguf, named[part], kind, families[part])
        for part, kind in kinds.items()
        if kind not in families[part]
    ]
    if len(unknown) == len(kinds):
        raise UnsupportedError(unknown[0])
    for line in unknown:
        log(f"warning: {line}")
    return {part for part, kind in kinds.items() if kind in families[part]}


def open_sound_projector(
    path: str,
    *,
    n_embd: int,
    n_threads: int,
    log: Callable[[str], None],
    has_token: Callable[[str], bool] = lambda token: False,
    device: EncoderRuntime | None = None,
) -> SoundProjector:
    """The encoder of sound of a file, for a text model of n_embd.

    has_token: whether the text model knows a special token. Raises FileFormatError, UnsupportedError or UsageError with
    one line.
    """
    gguf = GGUFFile.open(path)
    kind = encoder_kind(gguf, "audio")
    if kind not in FAMILIES:
        raise UnsupportedError(unknown_kind(gguf, "sound", kind, FAMILIES))
    keys = Keys(gguf)
    source = SoundSource(keys, SoundParams.read(keys), ProjectorWeights(gguf, log), has_token, device)
    module, name = FAMILIES[kind].split(".")
    projector: SoundProjector = getattr(import_module(f"ikpy.sound.{module}"), name)(source, n_threads)
    check_width(path, projector.n_out, n_embd)
    projector.measure(gguf)
    log(f"audio: {path}: projector {kind}, {projector.params.n_layer} layers of {projector.params.n_embd}")
    return projector
