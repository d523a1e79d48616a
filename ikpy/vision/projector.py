"""Opens projector files (mmproj) and turns pictures into rows of the text model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ikpy.backends.cuda.encoder_runtime import EncoderRuntime
from ikpy.errors import FileFormatError, UnsupportedError, UsageError
from ikpy.gguf.reader import GGUFFile
from ikpy.graph.ir import Value
from ikpy.models.keys import Keys
from ikpy.vision.graphs import PictureGraph
from ikpy.vision.grids import MAX_PATCHES, Limits
from ikpy.vision.images import Pixels
from ikpy.vision.on_device import OnDevice, check_width, unknown_kind
from ikpy.vision.params import VisionParams
from ikpy.vision.patches import cut, normalized
from ikpy.vision.plans import PicturePlans
from ikpy.vision.rows import MediaRows
from ikpy.vision.weights import ProjectorWeights

FAMILIES = {
    "adapter": "glm_edge.GlmEdgeProjector",
    "cohere2v": "cohere2.Cohere2Projector",
    "deepseekocr": "deepseekocr.DeepseekOcrProjector",
    "deepseekocr2": "deepseekocr2.DeepseekOcr2Projector",
    "dots3note_v": "dots3note.Dots3NoteProjector",
    "dots_ocr": "dots_ocr.DotsOcrProjector",
    "exaone4_5": "qwen2vl.Exaone45Projector",
    "gemma3": "gemma3.Gemma3Projector",
    "gemma3nv": "gemma3n.Gemma3nProjector",
    "gemma4uv": "gemma4.Gemma4UnifiedProjector",
    "gemma4v": "gemma4.Gemma4Projector",
    "glm4v": "glm4v.Glm4vProjector",
    "glm5v": "glm4v.Glm5vProjector",
    "granite4_vision": "granite4.Granite4Projector",
    "hunyuanocr": "hunyuan.HunyuanProjector",
    "hunyuanvl": "hunyuan.HunyuanProjector",
    "idefics3": "idefics3.Idefics3Projector",
    "internvl": "internvl.InternVLProjector",
    "janus_pro": "siglip_mlp.JanusProjector",
    "kimik25": "kimi.KimiK25Projector",
    "kimivl": "kimi.KimiVLProjector",
    "ldp": "ldp.LdpProjector",
    "ldpv2": "ldp.LdpV2Projector",
    "lfm2": "lfm2.Lfm2Projector",
    "lightonocr": "pixtral.LightOnOcrProjector",
    "ling3vl": "qwen3vl.Ling3Projector",
    "llama4": "llama4.Llama4Projector",
    "mimovl": "mimovl.MiMoVLProjector",
    "minicpmv4_6": "minicpmv46.MiniCPMV46Projector",
    "minimax_m3": "minimax_m3.MiniMaxM3Projector",
    "mlp": "llava.LlavaProjector",
    "nemotron_v2_vl": "nemotron.NemotronProjector",
    "paddleocr": "paddleocr.PaddleOcrProjector",
    "phi4": "siglip_mlp.Phi4Projector",
    "pixtral": "pixtral.PixtralProjector",
    "qwen2.5o": "qwen2vl.Qwen25OmniProjector",
    "qwen2.5vl_merger": "qwen2vl.Qwen25VLProjector",
    "qwen2vl_merger": "qwen2vl.Qwen2VLProjector",
    "qwen3vl_merger": "qwen3vl.Qwen3VLProjector",
    "resampler": "minicpmv.MiniCPMVProjector",
    "step3vl": "step3vl.Step3VLProjector",
    "youtuvl": "youtuvl.YoutuVLProjector",
}
"""Class of every projector type, in the modules of this package."""


@dataclass(frozen=True)
class Source:
    """What a projector is made of. min_tokens, max_tokens: rows that the user wants of a picture at least and at most,
    for families whose pictures keep their proportions. has_token: whether the text model knows a special token, which
    families ask whose projectors serve several vocabularies. device: where pictures are encoded, None: on the CPU."""

    keys: Keys
    params: VisionParams
    weights: ProjectorWeights
    min_tokens: int | None = None
    max_tokens: int | None = None
    has_token: Callable[[str], bool] = lambda token: False
    device: EncoderRuntime | None = None

    def limits(self, usual: tuple[int, int], side: int) -> Limits:
        """Pixels of a picture, a square of a side being a row of the text; as usual where the user says nothing."""
        least, most = self.min_tokens or usual[0], self.max_tokens or usual[1]
        return Limits(least * side**2, most * side**2)


class Projector(OnDevice):
    """A family of projectors. Subclasses load their tensors, say what surrounds a picture and build its graph.

    begin, end: text around every picture. both_ways: its rows see each other. n_deep: further parts of a row. counted:
    its rows are those of a text model that tells pictures apart by their number (`MediaRows.counted`).
    """

    begin: str = ""
    end: str = ""
    both_ways: ClassVar[bool] = False
    counted: ClassVar[bool] = False

    def __init__(self, source: Source, n_threads: int) -> None:
        self.name = str(source.keys.gguf.get("general.name", ""))
        self.path = source.keys.gguf.path
        self.n_deep = 0
        self.params = source.params
        self._device = source.device
        self.load(source)
        rows, columns = self.largest
        if rows * columns > MAX_PATCHES:
            raise FileFormatError(
                f"{self.path}: pictures of {columns} x {rows} patches (clip.vision.image_size, patch_size); at most "
                f"{MAX_PATCHES} are possible"
            )
        self._plans = PicturePlans(self.build, self.n_patch_elements, n_threads, source.device)

    @abstractmethod
    def load(self, source: Source) -> None:
        """Takes the tensors and keys of the family."""

    @property
    @abstractmethod
    def n_out(self) -> int:
        """Elements of a row."""

    @abstractmethod
    def build(self, b: PictureGraph) -> Value:
        """The rows of a picture, f32 [n_out, n]."""

    @abstractmethod
    def tiles(self, image: Pixels) -> list[str | Pixels]:
        """Pictures that are encoded one by one, in their final size, and the text around them."""

    @property
    def largest(self) -> tuple[int, int]:
        """Rows and columns of patches of the largest picture, or tile of one; narrow ones may have a few more."""
        return self.params.grid_size, self.params.grid_size

    @property
    def n_patch_elements(self) -> int:
        """Elements of a patch."""
        return 3 * self.params.patch_size**2

    def patches(self, image: Pixels) -> tuple[NDArray[np.float32], int, int]:
        """Patches of a picture in the order in which the graph wants them, and how many rows and columns they are."""
        size = self.params.patch_size
        rows, columns = image.shape[0] // size, image.shape[1] // size
        return cut(normalized(image, self.params), size), rows, columns

    def grid(self, rows: int, columns: int) -> tuple[int, int] | None:
        """Rows and columns of the rows of a picture of so many patches, for rotation; None: they count on like text."""
        return None

    @property
    def has_grids(self) -> bool:
        """Whether rotation tells rows and columns of its pictures apart."""
        return self.grid(*self.largest) is not None

    def rows(self, image: Pixels) -> MediaRows:
        """The rows of a picture in its final size."""
        patches, rows, columns = self.patches(image)
        return MediaRows(self.evaluated(patches, rows, columns), self.grid(rows, columns), self.both_ways)

    def encode(self, image: Pixels) -> list[str | MediaRows]:
        """Rows of a picture uint8 [h, w, 3] and the text between them, in order.

        Every piece of text is tokenized by itself, special tokens in it being known, and without a space in front.
        """
        pieces: list[str | MediaRows] = [self.begin] if self.begin else []
        pieces += [tile if isinstance(tile, str) else self.rows(tile) for tile in self.tiles(image)]
        return [*pieces, self.end] if self.end else pieces


def open_projector(
    path: str,
    *,
    n_embd: int,
    n_threads: int,
    log: Callable[[str], None],
    min_tokens: int | None = None,
    max_tokens: int | None = None,
    has_token: Callable[[str], bool] = lambda token: False,
    device: EncoderRuntime | None = None,
) -> Projector:
    """The projector of a file, for a text model of n_embd.

    The other arguments are those of `Source`. What it takes of a device is measured; it is taken by `take_memory`, or
    with the first picture. Raises FileFormatError, UnsupportedError or UsageError with one line.
    """
    if min_tokens and max_tokens and min_tokens > max_tokens:
        raise UsageError(f"at least {min_tokens} and at most {max_tokens} tokens of a picture: exchange the two")
    gguf = GGUFFile.open(path)
    kind = projector_type(gguf)
    keys = Keys(gguf)
    weights = ProjectorWeights(gguf, log)
    source = Source(keys, VisionParams.read(keys), weights, min_tokens, max_tokens, has_token, device)
    module, name = FAMILIES[kind].split(".")
    projector: Projector = getattr(import_module(f"ikpy.vision.{module}"), name)(source, n_threads)
    check_width(path, projector.n_out // (1 + projector.n_deep), n_embd)
    log(f"vision: {path}: projector {kind}, {projector.params.n_layer} layers of {projector.params.n_embd}")
    log(f"clip_ctx: CLIP using {device.device.name if device else 'CPU'} backend")
    projector.measure(gguf)
    return projector


def projector_type(gguf: GGUFFile) -> str:
    """The projector type of the encoder of pictures in a file, one that is known."""
    kind = encoder_kind(gguf, "vision")
    if kind is None or kind not in FAMILIES:
        raise UnsupportedError(unknown_kind(gguf, "pictures", kind, FAMILIES))
    return kind


def encoder_kind(gguf: GGUFFile, part: str) -> str | None:
    """The projector type of the "vision" or "audio" encoder of a file; None if it has no such encoder."""
    arch = gguf.get("general.architecture", "")
    if not isinstance(arch, str) or arch != "clip":
        raise UsageError(f"{gguf.path} is no projector file: its architecture is '{arch}', not 'clip'")
    is_there = gguf.get(f"clip.has_{part}_encoder", False)
    if np.ndim(is_there) or not is_there:
        return None
    kinds = (gguf.get(f"clip.{name}projector_type", "") for name in ("", f"{part}."))
    kind = next((kind for kind in kinds if isinstance(kind, str) and kind), None)
    if kind is None:
        raise FileFormatError(f"{gguf.path}: key clip.projector_type not found")
    return kind
