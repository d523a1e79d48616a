"""The encoder of sound of Nemotron 3 Nano Omni (Parakeet), which is in the same file as that of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import sound_keys
from ikpy.convert.projectors.conformers import EPS, STATISTICS, fast_front
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table

_N_FFT, _WINDOW, _SUBSAMPLING = 512, 400, 8
_TOWER = "sound_encoder.encoder"
_HEARING = f"{_TOWER}.feature_extractor."
_FILTERS, _HANN = f"{_HEARING}featurizer.fb", f"{_HEARING}featurizer.window"
_BATCH_NORM = dict(zip(STATISTICS, (".weight", ".bias", "_mean", "_var"), strict=True))
# Names of GGUF files within a layer -> modules of the checkpoint.
_NORMS = {
    "ffn_norm": "norm_feed_forward1",
    "ln1": "norm_self_att",
    "norm_conv": "norm_conv",
    "ffn_norm_1": "norm_feed_forward2",
    "ln2": "norm_out",
}
_MATRICES = {
    "ffn_up": "feed_forward1.linear1",
    "ffn_down": "feed_forward1.linear2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "linear_pos": "self_attn.relative_k_proj",
    "ffn_up_1": "feed_forward2.linear1",
    "ffn_down_1": "feed_forward2.linear2",
}


class NemotronAudio:
    """values: `sound_config`. n_text: elements of a token's embedding."""

    kind = "parakeet"
    parts = ("sound_encoder.", "sound_projection.")
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "intermediate_size": 4096,
        "num_mel_bins": 128,
        "conv_kernel_size": 9,
        "subsampling_conv_channels": 256,
    }
    fixed: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "silu",
        "subsampling_factor": _SUBSAMPLING,
        "subsampling_conv_kernel_size": 3,
        "subsampling_conv_stride": 2,
        "sampling_rate": 16000,
        "attention_bias": False,
        "convolution_bias": False,
        "projection_bias": False,
        "scale_input": False,
    }

    def __init__(self, checkpoint: Checkpoint, values: dict[str, Any], n_text: int) -> None:
        path = checkpoint.folder / "config.json (sound_config)"
        self.checkpoint, self.n_text = checkpoint, n_text
        self.audio = Config({**self.defaults, **values}, path)
        self.n = self.audio.count("hidden_size")
        self.n_head = self.audio.count("num_attention_heads")
        self.n_layer = self.audio.count("num_hidden_layers")
        self.n_ff = self.audio.count("intermediate_size")
        self.n_mel = self.audio.count("num_mel_bins")
        self.taps = self.audio.count("conv_kernel_size")

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        audio = self.audio
        for name, usual in self.fixed.items():
            value = audio.get(name, default=usual)
            audio.require(f"{name} {value}", value == usual)
        fits = 0 < self.n_head <= self.n and self.n % self.n_head == 0 and self.n % 2 == 0
        audio.require(f"{self.n_head} heads in {self.n}", fits)
        audio.require(f"num_mel_bins {self.n_mel}", 0 < self.n_mel <= 256)
        audio.require(f"conv_kernel_size {self.taps}", 0 < self.taps <= 63 and self.taps % 2 == 1)

    def keys(self) -> Keys:
        """Metadata under "clip."."""
        return {
            "has_audio_encoder": True,
            "audio.projector_type": self.kind,
            **sound_keys(self, EPS),
            "audio.conv_kernel_size": self.taps,
            "audio.subsampling_factor": _SUBSAMPLING,
        }

    def left_out(self) -> tuple[str, ...]:
        """What the names of tensors begin with that are of no use here."""
        return (_HEARING, *(f"{_TOWER}.layers.{il}.conv.norm.num_batches_tracked" for il in range(self.n_layer)))

    def tensors(self) -> Iterator[Wanted]:
        """All tensors, in file order."""
        yield from self.hearing()
        channels = self.audio.count("subsampling_conv_channels")
        front = (f"{_TOWER}.subsampling.layers", f"{_TOWER}.subsampling.linear")
        yield from fast_front(front, channels, self.n_mel, self.n)
        for il in range(self.n_layer):
            yield from self.layer(f"a.blk.{il}", f"{_TOWER}.layers.{il}")
        yield from norm("mm.a.norm_pre", "sound_projection.norm", self.n, bias=False)
        inner = self.audio.count("projection_hidden_size", default=self.n_ff)
        yield from linear("mm.a.mlp.1", "sound_projection.linear1", inner, self.n, bias=False)
        yield from linear("mm.a.mlp.2", "sound_projection.linear2", self.n_text, inner, bias=False)

    def hearing(self) -> Iterator[Wanted]:
        """The pitches and the window of spectrograms, where the checkpoint has both."""
        if self.has_filters:
            shape = (1, self.n_mel, _N_FFT // 2 + 1)
            yield table("a.mel_filters", _FILTERS, *shape, view=lambda values: values[0])
            yield table("a.window", _HANN, _WINDOW)

    @property
    def has_filters(self) -> bool:
        """Whether the checkpoint has what spectrograms are made with: those saved by transformers do not."""
        return {_FILTERS, _HANN} <= self.checkpoint.tensors.keys()

    def layer(self, target: str, source: str) -> Iterator[Wanted]:
        """A layer of the encoder, with the statistics of its norm over batches."""
        n, n_ff = self.n, self.n_ff
        for name, module in _NORMS.items():
            yield from norm(f"{target}.{name}", f"{source}.{module}", n)
        sizes = {"ffn_up": (n_ff, n), "ffn_down": (n, n_ff)}
        for name, module in _MATRICES.items():
            shape = sizes.get(name.removesuffix("_1"), (n, n))
            yield from linear(f"{target}.{name}", f"{source}.{module}", *shape, bias=False)
        for part in "uv":
            heads = (self.n_head, n // self.n_head)
            yield table(f"{target}.pos_bias_{part}", f"{source}.self_attn.bias_{part}", *heads)
        for name, rows, module in (("conv_pw1", 2 * n, "pointwise_conv1"), ("conv_pw2", n, "pointwise_conv2")):
            full = f"{source}.conv.{module}.weight"
            yield Wanted(f"{target}.{name}.weight", full, (rows, n, 1), lambda taps: taps[..., 0])
        full = f"{source}.conv.depthwise_conv.weight"
        yield Wanted(f"{target}.conv_dw.weight", full, (n, 1, self.taps), lambda taps: taps[:, 0], exact=True)
        for part, tail in _BATCH_NORM.items():
            yield Wanted(f"{target}.conv_norm{tail}", f"{source}.conv.norm.{part}", (n,))
