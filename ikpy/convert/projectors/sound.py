"""Qwen2-Audio, Voxtral, Audio Flamingo 3, Ultravox: encoders like that of Whisper and what leads from them to the
text model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import FileProjector, sound_keys
from ikpy.convert.projectors.tensors import Wanted, linear, norm, table
from ikpy.errors import FileFormatError

MODULES = {
    "ln1": "self_attn_layer_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln2": "final_layer_norm",
    "ffn_up": "fc1",
    "ffn_down": "fc2",
}
TOWER = "audio_tower"
N_POSITIONS = 1500
EPS = 1e-5
"""Of LayerNorm, which configurations do not say."""


def column(bias: np.ndarray) -> np.ndarray:
    """The bias of a convolution, as engines add it."""
    return bias[:, None]


class SoundProjector(FileProjector):
    """config: values of the whole model, those of its text part first; audio: of the encoder. tower: its module.

    modules: of layers. last_norm: module of the norm behind them. key_bias: whether keys have one.
    """

    parts: ClassVar[tuple[str, ...]] = ("audio_tower.", "multi_modal_projector.")
    defaults: ClassVar[Mapping[str, int | str]] = {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "intermediate_size": 5120,
        "num_mel_bins": 128,
        "max_source_positions": N_POSITIONS,
    }
    act: ClassVar[str] = "gelu"  # of the projector
    tower: ClassVar[str] = TOWER
    last_norm: ClassVar[str] = "layer_norm"
    key_bias: ClassVar[bool] = False
    n_positions: ClassVar[int] = N_POSITIONS
    modules: Mapping[str, str] = MODULES

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / "config.json"
        self.checkpoint, self.config = checkpoint, Config(checkpoint.config, path)
        values = self.encoder_values()
        if not isinstance(values, dict):
            raise FileFormatError(f"{path}: there is no 'audio_config'; the model takes no sound")
        self.audio = Config({**self.defaults, **values}, path.with_name("config.json (audio_config)"))
        self.n = self.audio.count("d_model", "hidden_size")
        self.n_head = self.audio.count("encoder_attention_heads", "num_attention_heads")
        self.n_ff = self.audio.count("encoder_ffn_dim", "intermediate_size")
        self.n_layer = self.audio.count("encoder_layers", "num_hidden_layers")
        self.n_mel = self.audio.count("num_mel_bins")
        self.n_text = self.find_text_width()

    def encoder_values(self) -> Any:
        """What config.json says of the encoder."""
        return self.checkpoint.config.get("audio_config")

    def find_text_width(self) -> int:
        """Elements of a token's embedding."""
        return self.config.count("hidden_size")

    @property
    def stack(self) -> int:
        """States that become one row, 0: files do not say it."""
        return 0

    def check(self) -> None:
        """Refuse configurations that a file of this kind cannot express."""
        audio = self.audio
        self.check_value(audio, "activation_function", "gelu")
        self.check_value(audio, "scale_embedding", False)
        self.check_value(audio, "max_source_positions", N_POSITIONS)
        audio.require(f"{self.n_head} heads in {self.n}", 0 < self.n_head <= self.n and self.n % self.n_head == 0)
        audio.require(f"num_mel_bins {self.n_mel}", 0 < self.n_mel <= 256)
        self.check_value(self.config, "projector_hidden_act", self.act)

    def keys(self) -> Keys:
        return {
            "has_audio_encoder": True,
            "projector_type": self.kind,
            "use_gelu": True,
            **sound_keys(self, EPS),
            **({"audio.projector.stack_factor": self.stack} if self.stack else {}),
        }

    def tensors(self) -> Iterator[Wanted]:
        yield from self.front()
        yield from self.positions()
        for il in range(self.n_layer):
            for target, module in self.modules.items():
                yield from self.module(f"a.blk.{il}.{target}", target, f"{self.tower}.layers.{il}.{module}")
        yield from self.last()
        yield from self.projection()

    def last(self) -> Iterator[Wanted]:
        """The norm behind the layers."""
        yield from norm("a.post_ln", f"{self.tower}.{self.last_norm}", self.n)

    def front(self) -> Iterator[Wanted]:
        """What makes states of frames."""
        for i, n_in in ((1, self.n_mel), (2, self.n)):
            source = f"{self.tower}.conv{i}"
            yield Wanted(f"a.conv1d.{i}.weight", f"{source}.weight", (self.n, n_in, 3), floats=True)
            yield Wanted(f"a.conv1d.{i}.bias", f"{source}.bias", (self.n,), column, exact=True)

    def positions(self) -> Iterator[Wanted]:
        """What is added to states."""
        yield table("a.position_embd.weight", f"{self.tower}.embed_positions.weight", self.n_positions, self.n)

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        """Tensors of a module of a layer."""
        if target in ("ln1", "ln2"):
            yield from norm(full, source, self.n)
            return
        n_out = self.n_ff if target == "ffn_up" else self.n
        n_in = self.n_ff if target == "ffn_down" else self.n
        yield from linear(full, source, n_out, n_in, bias=self.key_bias or target != "attn_k")

    def projection(self) -> Iterator[Wanted]:
        """What leads to the text model."""
        raise NotImplementedError

    def two_matrices(self, n_in: int, n_out: int, n_then: int, *, bias: bool) -> Iterator[Wanted]:
        """Matrices from n_in to n_out elements and from n_then to those of the text model."""
        source = "multi_modal_projector.linear_"
        yield from linear("mm.a.mlp.1", f"{source}1", n_out, n_in, bias=bias)
        yield from linear("mm.a.mlp.2", f"{source}2", self.n_text, n_then, bias=bias)


class Qwen2Audio(SoundProjector):
    """One matrix."""

    kind = "qwen2a"

    def projection(self) -> Iterator[Wanted]:
        yield from linear("mm.a.fc", "multi_modal_projector.linear", self.n_text, self.n)


class AudioFlamingo3(SoundProjector):
    """Two matrices."""

    kind = "musicflamingo"

    def projection(self) -> Iterator[Wanted]:
        bias = bool(self.config.get("projector_bias", default=True))
        yield from self.two_matrices(self.n, self.n_text, self.n_text, bias=bias)


class Voxtral(SoundProjector):
    """Two matrices over states side by side."""

    kind = "voxtral"

    @property
    def stack(self) -> int:
        stack = self.n_ff // self.n
        self.audio.require(f"intermediate_size {self.n_ff} of {self.n}", stack > 0 and stack * self.n == self.n_ff)
        return stack

    def projection(self) -> Iterator[Wanted]:
        yield from self.two_matrices(self.n * self.stack, self.n_text, self.n_text, bias=False)


class Ultravox(SoundProjector):
    """Norms before both matrices, gates between them. The text model is another repository's."""

    kind = "ultravox"

    def find_text_width(self) -> int:
        """As the last matrix has it: configurations need not name the text model's."""
        tensors = self.checkpoint.tensors
        name = next((name for name in tensors if name.endswith("multi_modal_projector.linear_2.weight")), None)
        if name is None or not tensors[name].shape:
            raise FileFormatError(
                f"{self.checkpoint.folder}: tensor 'multi_modal_projector.linear_2.weight' is missing; the checkpoint "
                "is incomplete"
            )
        return tensors[name].shape[0]

    @property
    def stack(self) -> int:
        return self.config.count("stack_factor", default=8)

    def check(self) -> None:
        super().check()
        self.check_value(self.config, "projector_act", "swiglu")
        self.config.require("projector_ln_mid false", self.config.get("projector_ln_mid", default=False) is True)
        self.config.require(f"stack_factor {self.stack}", self.stack > 0)
        self.config.require(f"hidden_size {self.width}", self.width > 0 and self.width % 2 == 0)

    @property
    def width(self) -> int:
        """Rows of the first matrix, gates and what they weigh."""
        return Config({k: v for k, v in self.checkpoint.config.items() if k != "text_config"}, self.config.path).count(
            "hidden_size", default=4096
        )

    def projection(self) -> Iterator[Wanted]:
        yield from norm("mm.a.norm_pre", "multi_modal_projector.ln_pre", self.n * self.stack, bias=False)
        yield from norm("mm.a.norm_mid", "multi_modal_projector.ln_mid", self.width // 2, bias=False)
        yield from self.two_matrices(self.n * self.stack, self.width, self.width // 2, bias=False)


class Meralion(SoundProjector):
    """MERaLiON 2: a norm of every state, a matrix over states side by side, a gated network."""

    kind = "meralion"
    parts = ("speech_encoder.", "ln_speech.", "speech_audio_adapter.")
    tower = "speech_encoder"

    def encoder_values(self) -> Any:
        return self.checkpoint.config.get("speech_config")

    @property
    def stack(self) -> int:
        return self.config.count("speech_mlp_scale_factor", default=15)

    def check(self) -> None:
        super().check()
        self.config.require(f"speech_mlp_scale_factor {self.stack}", 0 < self.stack <= N_POSITIONS)
        self.check_value(self.config, "speech_mlp_use_projection", True)

    def projection(self) -> Iterator[Wanted]:
        source, wide = "speech_audio_adapter", 4 * self.n
        yield from norm("mm.a.norm_pre", "ln_speech", self.n)
        yield from linear("mm.a.mlp.0", f"{source}.mlp_adapter.0", self.n, self.n * self.stack)
        yield from linear("mm.a.mlp.1", f"{source}.gate_proj", wide, self.n)
        yield from linear("mm.a.mlp.2", f"{source}.pool_proj", wide, self.n)
        yield from linear("mm.a.mlp.3", f"{source}.out_proj", self.n_text, wide)

    def notes(self) -> list[str]:
        return ["llama.cpp norms the states of a row together, not each by itself as the model does"]
