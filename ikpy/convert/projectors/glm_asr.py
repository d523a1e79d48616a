"""GLM-ASR, in the names of its first repository (`audio_encoder.whisper.`) and in those of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import rope_pairs
from ikpy.convert.projectors.sound import MODULES, TOWER, SoundProjector
from ikpy.convert.projectors.tensors import Wanted, at, constant, linear, norm, table
from ikpy.errors import FileFormatError

_ENDS = {"boi": "<|begin_of_audio|>", "eoi": "<|end_of_audio|>"}
_LATER: Mapping[str, str] = {
    **MODULES,
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "attn_out": "self_attn.o_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


class GlmAsr(SoundProjector):
    """A norm, four states side by side, two matrices; a row before and one behind those of a sound."""

    kind = "glma"
    parts = (*SoundProjector.parts, "audio_encoder.")
    unused = ("audio_encoder.proj.",)
    renames: ClassVar[Mapping[str, str]] = {
        "audio_encoder.whisper.": "audio_tower.",
        "audio_encoder.layer_norm.": "audio_tower.norm.",
        "audio_encoder.adapting.0.": "multi_modal_projector.linear_1.",
        "audio_encoder.adapting.2.": "multi_modal_projector.linear_2.",
        "language_model.model.": "language_model.",
    }

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.is_first = "whisper_config" in checkpoint.config
        super().__init__(checkpoint)
        self.modules = MODULES if self.is_first else _LATER

    def encoder_values(self) -> Any:
        return self.checkpoint.config.get("whisper_config" if self.is_first else "audio_config")

    @property
    def stack(self) -> int:
        stack = self.config.count("merge_factor", default=self.n_ff // self.n if self.n else 0)
        self.config.require(f"merge_factor {stack}", 0 < stack <= 64)
        return stack

    def check(self) -> None:
        super().check()
        for name, known in (("mlp_adapter_act", "gelu"), ("use_rope", True), ("adapter_type", "mlp")):
            self.check_value(self.config, name, known)
        self.check_value(self.audio, "hidden_act", "gelu")
        self.check_value(self.audio, "num_key_value_heads", self.n_head)
        self.audio.require(f"heads of {self.n // self.n_head}", self.n // self.n_head % 4 == 0)
        rope, fraction = self.audio.rope(), self.audio.rotary_fraction(0.5)
        self.audio.require(f"partial_rotary_factor {fraction:g}", fraction == 0.5)
        self.audio.require(f"rope_theta {rope['rope_theta']:g}", rope["rope_theta"] == 10000)

    def positions(self) -> Iterator[Wanted]:
        """Not used: queries and keys rotate. llama.cpp wants them."""
        name = f"{TOWER}.embed_positions.weight"
        if any(each.endswith("embed_positions.weight") for each in self.checkpoint.tensors):
            yield table("a.position_embd.weight", name, self.n_positions, self.n)
        else:
            yield constant("a.position_embd.weight", np.zeros((self.n_positions, self.n), np.float32))

    def module(self, full: str, target: str, source: str) -> Iterator[Wanted]:
        turned = target in ("attn_q", "attn_k") and not self.is_first
        for wanted in super().module(full, target, source):
            yield Wanted(wanted.target, wanted.source, wanted.shape, self.pairs) if turned else wanted

    def pairs(self, rows: np.ndarray) -> np.ndarray:
        """Rows of q or k, whose rotated elements go from halves to neighbours."""
        heads = rows.reshape(self.n_head, -1, *rows.shape[1:])
        n = heads.shape[1] // 2
        turned = rope_pairs(self.n_head)(heads[:, :n].reshape(self.n_head * n, *rows.shape[1:]))
        first = turned.reshape(self.n_head, n, *rows.shape[1:])
        return np.concatenate([first, heads[:, n:]], axis=1).reshape(rows.shape)

    def last(self) -> Iterator[Wanted]:
        return iter(())

    def projection(self) -> Iterator[Wanted]:
        yield from norm("mm.a.norm_pre", f"{TOWER}.norm", self.n)
        wide, source = 2 * self.n_text, "multi_modal_projector.linear_"
        yield from linear("mm.a.mlp.1", f"{source}1", wide, self.n * self.stack)
        yield from linear("mm.a.mlp.2", f"{source}2", self.n_text, wide)
        for i, (name, token) in enumerate(_ENDS.items()):
            if self.is_first:
                source, shape, row = "audio_encoder.audio_bos_eos_token.weight", (2, self.n_text), i
            else:
                source, row = "language_model.embed_tokens.weight", self.token(token)
                shape = self.config.count("vocab_size"), self.n_text
                self.config.require(f"token {row} of {shape[0]}", row < shape[0])
            yield table(f"v.{name}", source, *shape, view=at(0, row))

    def token(self, text: str) -> int:
        """The number of a special token."""
        added = self.checkpoint.json("tokenizer.json").get("added_tokens") or []
        found = [int(token["id"]) for token in added if token.get("content") == text]
        if not found:
            raise FileFormatError(
                f"{self.checkpoint.folder}: the tokenizer has no {text}, whose embedding a projector file holds"
            )
        return found[0]

    def notes(self) -> list[str]:
        return ["llama.cpp adds positions that the model does not use instead of rotating queries and keys"]
