"""What files of conformers of sound have in common, whose norms over batches are folded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import FileProjector, floats_of, sound_keys
from ikpy.convert.projectors.tensors import Wanted, constant, linear, norm
from ikpy.errors import FileFormatError

EPS = 1e-5
"""Of LayerNorm and of norms over batches, which configurations do not say."""
STATISTICS = ("weight", "bias", "running_mean", "running_var")


class Conformer(FileProjector):
    """encoder_key: where config.json has the values of the encoder. batch_norm: its module within a layer; layer: the
    layers."""

    encoder_key: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]] = {}
    layer: ClassVar[str]
    batch_norm: ClassVar[str]
    modules: ClassVar[Mapping[str, str]]

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / "config.json"
        self.checkpoint, self.config = checkpoint, Config(checkpoint.config, path)
        values = checkpoint.config.get(self.encoder_key)
        if not isinstance(values, dict):
            raise FileFormatError(f"{path}: there is no '{self.encoder_key}'; the model takes no sound")
        self.audio = Config({**self.defaults, **values}, path.with_name(f"config.json ({self.encoder_key})"))
        self.n = self.audio.count("hidden_dim", "d_model")
        self.n_head = self.audio.count("num_heads", "n_heads")
        self.n_layer = self.audio.count("num_layers", "n_layers")
        self.taps = self.audio.count("conv_kernel_size")
        self.n_text = self.find_text_width()

    def find_text_width(self) -> int:
        """Elements of a token's embedding."""
        return self.config.count("hidden_size")

    @property
    def n_mel(self) -> int:
        """Elements of a frame."""
        raise NotImplementedError

    @property
    def n_ff(self) -> int:
        """Width of the networks."""
        raise NotImplementedError

    @property
    def n_inner(self) -> int:
        """Elements that are convolved."""
        return self.n

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        audio = self.audio
        audio.require(f"{self.n_head} heads in {self.n}", 0 < self.n_head <= self.n and self.n % self.n_head == 0)
        audio.require(f"frames of {self.n_mel}", 0 < self.n_mel <= 256)
        audio.require(f"conv_kernel_size {self.taps}", 0 < self.taps <= 63 and self.taps % 2 == 1)

    def keys(self) -> Keys:
        return {
            "has_audio_encoder": True,
            "projector_type": self.kind,
            "use_gelu": True,
            **sound_keys(self, EPS),
        }

    def left_out(self) -> tuple[str, ...]:
        folded = (f"{self.layer}.{il}.{self.batch_norm}." for il in range(self.n_layer))
        return (*self.unused, *folded)

    def layers(self) -> Iterator[Wanted]:
        """The layers of the encoder."""
        for il in range(self.n_layer):
            for target, module in self.modules.items():
                yield from self.module(f"a.blk.{il}.{target}", target, f"{self.layer}.{il}.{module}")
            yield from self.folded(f"a.blk.{il}.conv_norm", f"{self.layer}.{il}.{self.batch_norm}")

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        """Tensors of a module of a layer."""
        n, wide = self.n, self.n_inner
        sizes = {"conv_pw1": (2 * wide, n), "conv_pw2": (n, wide)}
        base = target.removesuffix("_1")
        if "norm" in target or target in ("ln1", "ln2"):
            yield from norm(full, source, n)
        elif target in sizes:
            rows, columns = sizes[target]
            yield Wanted(f"{full}.weight", f"{source}.weight", (rows, columns, 1), lambda taps: taps[..., 0])
            yield Wanted(f"{full}.bias", f"{source}.bias", (rows,))
        elif target == "conv_dw":
            yield Wanted(
                f"{full}.weight", f"{source}.weight", (wide, 1, self.taps), lambda taps: taps[:, 0], exact=True
            )
        else:
            n_out, n_in = {"ffn_up": (self.n_ff, n), "ffn_down": (n, self.n_ff)}.get(base, (n, n))
            yield from linear(full, source, n_out, n_in, bias=self.has_bias(target))

    def has_bias(self, target: str) -> bool:
        """Whether a matrix of a layer has one."""
        return True

    def folded(self, target: str, source: str) -> Iterator[Wanted]:
        """A norm over batches as factors and addends."""
        weight, bias, mean, variance = (
            floats_of(self.checkpoint, f"{source}.{part}", (self.n_inner,)).astype(np.float64) for part in STATISTICS
        )
        if not (variance >= 0).all():
            raise FileFormatError(f"{self.checkpoint.folder}: tensor '{source}.running_var' has a variance below 0")
        factors = weight / np.sqrt(variance + EPS)
        yield constant(f"{target}.weight", factors.astype(np.float32))
        yield constant(f"{target}.bias", (bias - mean * factors).astype(np.float32))


def fast_front(sources: tuple[str, str], channels: int, n_mel: int, n: int) -> Iterator[Wanted]:
    """The convolutions in front of a FastConformer, and the matrix behind them; sources: their modules."""
    pitches = n_mel
    for _ in range(3):
        pitches = (pitches + 1) // 2
    for i, (n_in, size) in {0: (1, 3), 2: (1, 3), 3: (channels, 1), 5: (1, 3), 6: (channels, 1)}.items():
        name, source = f"a.conv1d.{i}", f"{sources[0]}.{i}"
        yield Wanted(f"{name}.weight", f"{source}.weight", (channels, n_in, size, size), floats=True)
        yield Wanted(f"{name}.bias", f"{source}.bias", (channels,), lambda bias: bias[:, None, None], exact=True)
    yield from linear("a.pre_encode.out", sources[1], n, channels * pitches)
