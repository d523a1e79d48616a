"""The encoder of sound of dots3 note, which is in the same file as that of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import sound_keys
from ikpy.convert.projectors.tensors import Wanted, linear, norm

_TOWER = "audio_encoder.speech_encoder"
_ADAPTER = "audio_encoder.audio_adapter.proj"
_MATRICES = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_out": "out_proj"}


class Dots3NoteAudio:
    """Names of its repository. values, sizes: `audio_config` and `whisper_config` in it. n_text: elements of a token's
    embedding."""

    kind = "dots3note_a"
    parts = ("audio_encoder.",)
    renames: ClassVar[Mapping[str, str]] = {
        "audio_encoder.dots_encoder.": "audio_encoder.",
        "audio_adapter.": "audio_encoder.audio_adapter.",
    }
    defaults: ClassVar[Mapping[str, Any]] = {
        "d_model": 1280,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
        "encoder_attention_heads": 20,
        "num_mel_bins": 128,
        "downsample_hidden_size": 480,
    }

    def __init__(self, checkpoint: Checkpoint, values: dict[str, Any], sizes: dict[str, Any], n_text: int) -> None:
        path = checkpoint.folder / "config.json (audio_config)"
        self.audio, self.n_text = Config({**self.defaults, **values, **sizes}, path), n_text
        self.n = self.audio.count("d_model")
        self.n_head = self.audio.count("encoder_attention_heads")
        self.n_layer = self.audio.count("encoder_layers")
        self.n_ff = self.audio.count("encoder_ffn_dim")
        self.n_mel = self.audio.count("num_mel_bins")

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        audio = self.audio
        audio.require(f"{self.n_head} heads in {self.n}", 0 < self.n_head <= self.n and self.n % self.n_head == 0)
        audio.require(f"heads of {self.n // self.n_head}", self.n // self.n_head % 4 == 0)
        audio.require(f"num_mel_bins {self.n_mel}", 0 < self.n_mel <= 256)
        fixed = {"hidden_act": "silu", "hop_length": 160, "sampling_rate": 16000, "partial_rotary_factor": 0.5}
        fixed |= {"attention_bias": True, "whisper_adapter_in_dim": self.n, "whisper_adapter_out_dim": self.n_text}
        for name, usual in fixed.items():
            value = audio.get(name, default=usual)
            audio.require(f"{name} {value}", value == usual)
        theta = audio.rope()["rope_theta"]
        audio.require(f"rope_theta {theta:g}", theta == 10000)

    def keys(self) -> Keys:
        """Metadata under "clip."."""
        return {
            "has_audio_encoder": True,
            "audio.projector_type": self.kind,
            **sound_keys(self, 1e-6),
        }

    def tensors(self) -> Iterator[Wanted]:
        """All tensors, in file order."""
        n, n_in, pitches = self.audio.count("downsample_hidden_size"), 1, self.n_mel
        for i in (1, 2, 3):
            source = f"{_TOWER}.conv2d{i}"
            yield Wanted(f"a.conv2d.{i}.weight", f"{source}.weight", (n, n_in, 3, 3), floats=True)
            yield Wanted(f"a.conv2d.{i}.bias", f"{source}.bias", (n,))
            n_in, pitches = n, (pitches + 1) // 2
        yield Wanted("a.conv_out.weight", f"{_TOWER}.conv_out.weight", (self.n, n * pitches))
        for il in range(self.n_layer):
            yield from self.layer(f"a.blk.{il}", f"{_TOWER}.layers.{il}")
        yield from norm("a.post_ln", f"{_TOWER}.layer_norm", self.n, bias=False)
        yield from norm("mm.a.norm_pre", f"{_ADAPTER}.0", self.n)
        yield from linear("mm.a.mlp.1", f"{_ADAPTER}.1", self.n_text, self.n)
        yield from linear("mm.a.mlp.3", f"{_ADAPTER}.3", self.n_text, self.n_text)

    def layer(self, target: str, source: str) -> Iterator[Wanted]:
        """A layer of the encoder, whose gates and what they weigh are one matrix."""
        n, n_ff = self.n, self.n_ff
        yield from norm(f"{target}.ln1", f"{source}.self_attn_layer_norm", n, bias=False)
        for name, module in _MATRICES.items():
            yield from linear(f"{target}.{name}", f"{source}.self_attn.{module}", n, n, bias=name != "attn_k")
        yield from norm(f"{target}.ln2", f"{source}.final_layer_norm", n, bias=False)
        for i, name in enumerate(("ffn_gate", "ffn_up")):

            def half(rows: np.ndarray, start: int = i * n_ff) -> np.ndarray:
                return rows[start : start + n_ff]

            yield Wanted(f"{target}.{name}.weight", f"{source}.fc1.weight", (2 * n_ff, n), half)
            yield Wanted(f"{target}.{name}.bias", f"{source}.fc1.bias", (2 * n_ff,), half)
        yield from linear(f"{target}.ffn_down", f"{source}.fc2", n, n_ff)
