"""Nemotron Nano VL 2 and Nemotron 3 Nano Omni: C-RADIO, squares of patches side by side, a norm and two matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.base import Projector, floats_of
from ikpy.convert.projectors.internvl import joined_side
from ikpy.convert.projectors.nemotron_audio import NemotronAudio
from ikpy.convert.projectors.tensors import Wanted, constant, norm, table
from ikpy.errors import FileFormatError
from ikpy.vision.grids import resampled

_TOWER = "vision_model.radio_model"
_PATCHES = f"{_TOWER}.model.patch_generator"
_HEADS = {"vit_base_patch16_224": 12}
"""Of encoders by their names in timm; the larger ones have 16."""
_BEHIND = ("vision_projector.", "vision_final_layernorm.")
"""A norm behind the encoder, which files have no place for."""
_USUAL_HEADS = 16
_USUAL_SIZE = 512


class Nemotron(Projector):
    """Pictures, and sound where the configuration has an encoder of it. config.json has no sizes of the encoder of
    pictures; the tensors tell. Positions are those of the one size of pictures that the file says."""

    kind = "nemotron_v2_vl"
    parts = ("vision_model.", "mlp1.", *_BEHIND, *NemotronAudio.parts)
    unused = (
        f"{_TOWER}.input_conditioner.",
        f"{_TOWER}.summary_idxs",
        f"{_PATCHES}.video_embedder.",
        f"{_PATCHES}.pos_embed",  # made smaller
    )
    layer = f"{_TOWER}.model.blocks"
    modules: ClassVar[Mapping[str, str]] = {
        "ln1": "norm1",
        **dict.fromkeys(("attn_q", "attn_k", "attn_v"), "attn.qkv"),
        "attn_out": "attn.proj",
        "ln2": "norm2",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    }
    activations = ("gelu",)
    defaults: ClassVar[Mapping[str, int | float]] = {"patch_size": 16}

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        for part in ("mean", "std"):  # files of this model call them otherwise
            value = self.processor.get(f"norm_{part}", default=self.config.get(f"norm_{part}", default=None))
            if value is not None:
                self.processor.values.setdefault(f"image_{part}", value)
        values = next((v for name in ("sound_config", "audio_config") if (v := checkpoint.config.get(name))), None)
        self.sound = NemotronAudio(checkpoint, values, self.n_text) if isinstance(values, dict) else None

    # sizes

    def find_width(self) -> int:
        return self.stored(f"{_PATCHES}.cls_token.token", 2)[1]

    def find_heads(self) -> int:
        args = self.vision.get("args", default=None)
        name = args.get("model") if isinstance(args, dict) else None
        usual = _HEADS.get(name, _USUAL_HEADS) if isinstance(name, str) else _USUAL_HEADS
        return self.vision.count("num_attention_heads", default=usual)

    def find_ff(self) -> int:
        return self.stored(f"{self.layer}.0.mlp.fc1.weight", 2)[0]

    def find_layers(self) -> int:
        return self.count_under(self.layer)

    @property
    def image_size(self) -> int:
        size = self.config.count("force_image_size", default=_USUAL_SIZE)
        self.config.require(f"force_image_size {size}", size > 0 and size % self.patch_size == 0)
        return size

    @property
    def grid(self) -> int:
        """Patches of the side of a picture."""
        return self.image_size // self.patch_size

    # checks

    def check(self) -> None:
        super().check()
        self.check_value(self.vision, "use_swiglu_ffn", False)
        self.check_value(self.vision, "qkv_bias", True)
        self.check_value(self.config, "ps_version", "v2")
        self.check_value(self.config, "select_layer", -1)
        if self.sound:
            self.sound.check()

    # what a file has

    def keys(self) -> Keys:
        keys = super().keys() | {"vision.projector.scale_factor": joined_side(self.config, self.grid)}
        if self.sound is None:
            return keys
        return {"vision.projector_type": keys.pop("projector_type"), **keys, **self.sound.keys()}

    def left_out(self) -> tuple[str, ...]:
        return (*self.unused, *(self.sound.left_out() if self.sound else NemotronAudio.parts))

    def notes(self) -> list[str]:
        side = self.image_size
        found = [f"pictures are brought to {side} x {side} pixels, as in llama.cpp; the model takes larger ones, too"]
        if self.sound and not self.sound.has_filters:
            found.append("llama.cpp does not load the file: the checkpoint has no filters of sound, which it asks for")
        return found

    def tensors(self) -> Iterator[Wanted]:
        n, size = self.n, self.patch_size

        def filters(rows: np.ndarray) -> np.ndarray:
            return rows.reshape(n, 3, size, size)

        name = f"{_PATCHES}.embedder.weight"
        yield Wanted("v.patch_embd.weight", name, (n, 3 * size * size), filters, floats=True)
        yield table("v.class_embd", f"{_PATCHES}.cls_token.token", *self.stored(f"{_PATCHES}.cls_token.token", 2))
        yield self.positions()
        yield from self.layers()
        joined, inner = n * joined_side(self.config, self.grid) ** 2, self.stored("mlp1.1.weight", 2)[0]
        yield from norm("mm.model.mlp.0", "mlp1.0", joined, bias=False)
        yield from self.two_layers(
            ("mm.model.mlp.1", "mm.model.mlp.3"), ("mlp1.1", "mlp1.3"), (joined, inner, self.n_text), bias=False
        )
        if self.sound:
            yield from self.sound.tensors()

    def positions(self) -> Wanted:
        """Those of the grid, which lie between those of the largest one, that the checkpoint has."""
        name = f"{_PATCHES}.pos_embed"
        n_stored, grid = self.stored(name, 3)[1], self.grid
        side = math.isqrt(n_stored)
        if side * side != n_stored:
            raise FileFormatError(f"{self.checkpoint.folder}: tensor '{name}' has {n_stored} positions, no square")

        stored = floats_of(self.checkpoint, name, (1, n_stored, self.n)).reshape(side, side, self.n)
        return constant("v.position_embd.weight", resampled(stored, grid, grid, "linear"))
