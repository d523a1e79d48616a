"""What a family of projectors declares: where its tensors come from, and metadata keys."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Protocol

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys, View
from ikpy.convert.projectors.processor import Processor
from ikpy.convert.projectors.tensors import Wanted, linear, norm, third
from ikpy.convert.weights import Weights
from ikpy.convert.words import to_float32
from ikpy.errors import FileFormatError

_ACTIVATIONS = {"gelu": "use_gelu", "gelu_pytorch_tanh": "use_gelu", "silu": "use_silu", "quick_gelu": ""}

# Names of GGUF files within a layer -> modules of the checkpoint, as SigLIP and CLIP have them.
SIGLIP = {
    "ln1": "layer_norm1",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_NORMS = frozenset({"ln1", "ln2", "attn_post_norm", "ffn_post_norm"})
_HEAD_NORMS = frozenset({"attn_q_norm", "attn_k_norm"})


def pixel_keys(least: int, most: int) -> Keys:
    """Between how many pixels a picture is brought."""
    return {"vision.image_min_pixels": least, "vision.image_max_pixels": most}


def floats_of(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of floats of this shape, f32. FileFormatError if there is none."""
    weights = Weights(checkpoint)
    full = next((each for each in (f"model.{name}", name) if each in checkpoint.tensors), None)
    if full is None:
        raise FileFormatError(f"{checkpoint.folder}: tensor '{name}' is missing; the checkpoint is incomplete")
    if (found := weights.shape(full)) != shape:
        raise FileFormatError(
            f"{checkpoint.folder}: tensor '{full}' has shape {list(found)}, not {list(shape)} as config.json says"
        )
    return to_float32(weights.load(full, "f32"), weights.kind(full))


class SoundEncoder(Protocol):
    """Sizes of an encoder of sound. n: width; n_text: of its rows; n_ff: of the networks; n_mel: pitches of a frame."""

    @property
    def n(self) -> int: ...
    @property
    def n_text(self) -> int: ...
    @property
    def n_ff(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_mel(self) -> int: ...


def sound_keys(encoder: SoundEncoder, eps: float) -> Keys:
    """Metadata that all encoders of sound have. eps: of the norms."""
    return {
        "audio.projection_dim": encoder.n_text,
        "audio.embedding_length": encoder.n,
        "audio.feed_forward_length": encoder.n_ff,
        "audio.block_count": encoder.n_layer,
        "audio.attention.head_count": encoder.n_head,
        "audio.attention.layer_norm_epsilon": eps,
        "audio.num_mel_bins": encoder.n_mel,
    }


class FileProjector:
    """Projectors of one kind. parts: what the names of its tensors begin with, "model." in front not counted. unused:
    those that are left out. renames: beginnings of names in some checkpoints, as the others have them.
    """

    kind: ClassVar[str]
    parts: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()
    renames: ClassVar[Mapping[str, str]] = {}

    def __init__(self, checkpoint: Checkpoint) -> None:
        raise NotImplementedError

    @classmethod
    def chosen(cls, checkpoint: Checkpoint) -> type[FileProjector]:
        """The class of a checkpoint, where models of one type have several kinds of projectors."""
        return cls

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        raise NotImplementedError

    def keys(self) -> Keys:
        """Metadata under "clip.": int is u32, float f32, lists are arrays of the same."""
        raise NotImplementedError

    def tensors(self) -> Iterator[Wanted]:
        """All tensors, in file order."""
        raise NotImplementedError

    def left_out(self) -> tuple[str, ...]:
        """What the names of tensors begin with that are of no use here."""
        return self.unused

    def check_value(self, config: Config, name: str, *known: object) -> None:
        """Refuse a value, if it is there, other than these."""
        value = config.get(name, default=None)
        config.require(f"{name} {value}", value is None or value in known)

    def two_layers(
        self, targets: tuple[str, str], sources: tuple[str, str], sizes: tuple[int, int, int], *, bias: bool = True
    ) -> Iterator[Wanted]:
        """Two matrices, from sizes[0] by sizes[1] to sizes[2] elements."""
        for i, (target, source) in enumerate(zip(targets, sources, strict=True)):
            yield from linear(target, source, sizes[i + 1], sizes[i], bias=bias)

    def notes(self) -> list[str]:
        """What the user should know about the result."""
        return []


class Projector(FileProjector):
    """Projectors of pictures. config: values of the whole model, those of its text part first; vision: of the
    encoder."""

    parts: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")
    layer: ClassVar[str] = "vision_tower.encoder.layers"
    modules: ClassVar[Mapping[str, str]] = SIGLIP
    norm_bias: ClassVar[bool] = True  # of the norms of layers
    activations: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)  # the first is transformers' default
    usual_image_size: ClassVar[int] = 0  # of encoders that take pictures of any size
    eps: ClassVar[float] = 1e-6  # where the configuration does not say
    # Values of transformers' configuration class that published files leave out.
    defaults: ClassVar[Mapping[str, int | float]] = {}

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / "config.json"
        values = checkpoint.config.get("vision_config")
        if not isinstance(values, dict):
            raise FileFormatError(f"{path}: there is no 'vision_config'; the model takes no pictures")
        self.checkpoint, self.model_type = checkpoint, str(checkpoint.config.get("model_type", ""))
        self.config, self.processor = Config(checkpoint.config, path), Processor(checkpoint)
        # What errors call it.
        self.vision = Config({**self.defaults, **values}, path.with_name("config.json (vision_config)"))
        self.n = self.find_width()
        self.n_head = self.find_heads()
        self.n_ff = self.find_ff()
        self.n_layer = self.find_layers()
        self.patch_size = self.side("patch_size")
        self.n_text = self.find_text_width()

    # sizes

    def find_text_width(self) -> int:
        """Elements of a token's embedding."""
        return self.config.count("hidden_size")

    def find_width(self) -> int:
        """Elements of a patch's state."""
        return self.vision.count("hidden_size")

    def find_heads(self) -> int:
        """Attention heads of the encoder."""
        return self.vision.count("num_attention_heads", "num_heads")

    def find_ff(self) -> int:
        """Width of the networks of the encoder."""
        return self.vision.count("intermediate_size")

    def find_layers(self) -> int:
        """Layers of the encoder that the file has."""
        return self.vision.count("num_hidden_layers", "depth")

    def side(self, name: str) -> int:
        """Pixels of the side of a square, which may be given as height and width."""
        value = self.vision.integer(name)
        self.vision.require(f"{name} {value}", value > 0)
        return self.vision.bounded(name, value)

    @property
    def image_size(self) -> int:
        """Pixels of the side of a picture."""
        return self.usual_image_size or self.side("image_size")

    @property
    def n_patches(self) -> int:
        """Patches of a picture of image_size."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def head_dim(self) -> int:
        """Size of an attention head."""
        return self.n // max(1, self.n_head)

    @property
    def activation(self) -> str:
        """Of the networks of the encoder."""
        return str(self.vision.get("hidden_act", "hidden_activation", default=self.activations[0]))

    def count_under(self, prefix: str) -> int:
        """Parts that names of tensors number from 0 on behind a prefix."""
        numbered = re.compile(rf"(?:model\.)?{re.escape(prefix)}\.(\d{{1,9}})\.")
        return max((int(found[1]) + 1 for found in map(numbered.match, self.checkpoint.tensors) if found), default=0)

    def stored(self, name: str, n_axes: int) -> tuple[int, ...]:
        """The shape of a tensor. FileFormatError if it is missing or has another number of axes."""
        found = self.checkpoint.tensors.get(f"model.{name}") or self.checkpoint.tensors.get(name)
        if found is None or len(found.shape) != n_axes:
            raise FileFormatError(f"{self.checkpoint.folder}: there is no tensor '{name}' of {n_axes} dimensions")
        return tuple(found.shape)

    # checks

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        vision = self.vision
        vision.require(f"activation '{self.activation}'", self.activation in self.activations)
        self.processor.check()
        vision.require(f"{self.n_head} heads in {self.n}", 0 < self.n_head <= self.n and self.n % self.n_head == 0)
        colours = vision.integer("num_channels", "in_channels", "in_chans", default=3)
        vision.require(f"pictures of {colours} colours", colours == 3)
        self.check_value(vision, "head_dim", self.head_dim)

    def check_rope(self, base: float) -> None:
        """Refuse another base of the rotation in the encoder."""
        rope = self.vision.rope()
        theta = float(self.vision.get("rope_theta", default=rope["rope_theta"]))
        given = "rope_theta" in self.vision.get("rope_parameters", "rope_scaling", default={}) or (
            self.vision.get("rope_theta", default=None) is not None
        )
        self.vision.require(f"rope_theta {theta:g} instead of {base:g}", not given or math.isclose(theta, base))
        self.vision.require(f"RoPE '{rope['rope_type']}'", rope["rope_type"] in ("default", "axial"))

    # what a file has

    def keys(self) -> Keys:
        """Metadata under "clip.": int is u32, float f32, lists are arrays of the same."""
        keys: Keys = {
            "has_vision_encoder": True,
            "projector_type": self.kind,
            "use_gelu": False,
            "vision.projection_dim": self.n_text,
            "vision.image_size": self.image_size,
            "vision.patch_size": self.patch_size,
            "vision.embedding_length": self.n,
            "vision.feed_forward_length": self.n_ff,
            "vision.block_count": self.n_layer,
            "vision.attention.head_count": self.n_head,
            "vision.attention.layer_norm_epsilon": self.vision.epsilon(
                "layer_norm_eps", "rms_norm_eps", "norm_eps", default=self.eps
            ),
            "vision.image_mean": self.processor.mean,
            "vision.image_std": self.processor.std,
        }
        flag = _ACTIVATIONS[self.activation]
        return keys | ({flag: True} if flag else {})

    def layers(self) -> Iterator[Wanted]:
        """The layers of the encoder."""
        for il in range(self.n_layer):
            for target, module in self.modules.items():
                yield from self.module(f"v.blk.{il}.{target}", target, f"{self.layer}.{il}.{module}")

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        """Tensors of a module of a layer."""
        if target in _NORMS:
            yield from norm(full, source, self.n, bias=self.has_norm_bias())
        elif target in _HEAD_NORMS:
            yield from norm(full, source, self.head_dim, bias=False)
        elif target in ("ls1", "ls2"):
            yield Wanted(f"{full}.weight", source, (self.n,))
        else:
            rows, columns = self.shape(target)
            view = self.view(target)
            fused = 3 if self.is_fused(source) and target != "attn_qkv" else 1
            yield Wanted(f"{full}.weight", f"{source}.weight", (fused * rows, columns), view)
            if self.has_bias(target):
                yield Wanted(f"{full}.bias", f"{source}.bias", (fused * rows,), view)

    def is_fused(self, source: str) -> bool:
        """Whether a module holds q, k and v."""
        return source.endswith(("qkv", "wqkv"))

    def shape(self, target: str) -> tuple[int, int]:
        """Rows and columns of a matrix of a layer."""
        n, n_ff = self.n, self.n_ff
        return {"attn_qkv": (3 * n, n), "ffn_up": (n_ff, n), "ffn_gate": (n_ff, n), "ffn_down": (n, n_ff)}.get(
            target, (n, n)
        )

    def view(self, target: str) -> View | None:
        """Change of layout of a matrix of a layer and its bias."""
        if target in ("attn_q", "attn_k", "attn_v") and self.is_fused(self.modules[target]):
            return third(("attn_q", "attn_k", "attn_v").index(target))
        return None

    def has_norm_bias(self) -> bool:
        """Whether norms of layers have one."""
        return self.norm_bias

    def has_bias(self, target: str) -> bool:
        """Whether a matrix of a layer has one."""
        return True
