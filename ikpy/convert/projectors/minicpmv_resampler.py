"""MiniCPM-V 2.5 to 4.5, pictures of MiniCPM-o: SigLIP with positions in shares of a picture, a resampler."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.families.base import Keys
from ikpy.convert.projectors.siglip import SiglipProjector
from ikpy.convert.projectors.tensors import Wanted, constant, linear, norm, patches, table, third
from ikpy.errors import UnsupportedError
from ikpy.vision.minicpmv import HEAD_SIZE, MAX_TILES, POSITIONS, waves

_VERSIONS = {
    ("minicpmv", "2.5"): 2,
    ("minicpmv", "2.6"): 3,
    ("minicpmo", "2.6"): 4,
    ("minicpmv", "4.0"): 5,
    ("minicpmv", "4.5"): 6,
    ("minicpmo", "4.5"): 100045,
}
"""clip.minicpmv_version."""
_EPS = 1e-6
_SIDE = 448


class MiniCpmV(SiglipProjector):
    """Learned queries attend to the patches of a picture."""

    kind = "resampler"
    parts = ("vpm.", "resampler.")
    unused = ("vpm.head.",)
    tower = "vpm"
    layer = "vpm.encoder.layers"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        values = self.processor.values
        for name in ("mean", "std"):
            values.setdefault(f"image_{name}", values.get(f"norm_{name}"))

    def find_layers(self) -> int:
        return super().find_layers() - bool(self.config.get("drop_vision_last_layer", default=False))

    @property
    def version(self) -> int:
        """What files call it. UnsupportedError for another than is known."""
        named = self.model_type, self.config.minicpm_version
        if named not in _VERSIONS:
            known = ", ".join(f"{model_type} {version}" for model_type, version in _VERSIONS)
            raise UnsupportedError(
                f"{self.config.path}: {named[0]} of version {named[1]} is not known (known are {known})"
            )
        return _VERSIONS[named]

    @property
    def n_query(self) -> int:
        """Rows of a picture."""
        return self.config.count("query_num")

    def check(self) -> None:
        super().check()
        vision, processor = self.vision, self.processor
        assert self.version
        self.config.require(f"heads of {HEAD_SIZE} in {self.n_text}", self.n_text % HEAD_SIZE == 0 < self.n_text)
        self.config.require(f"query_num {self.n_query}", self.n_query > 0)
        self.check_value(vision, "layer_norm_eps", _EPS)
        side = self.side("image_size") // self.patch_size if self.patch_size else 0
        vision.require(f"{side} x {side} positions", side == POSITIONS)
        self.check_value(processor, "max_slice_nums", MAX_TILES)
        self.check_value(processor, "slice_mode", True)
        self.check_value(processor, "patch_size", self.patch_size)

    def keys(self) -> Keys:
        side = self.processor.edge("scale_resolution") or _SIDE
        return super().keys() | {
            "minicpmv_version": np.int32(self.version),
            "minicpmv_query_num": self.n_query,
            "vision.image_size": side,
        }

    def embedding(self) -> Iterator[Wanted]:
        yield from patches(f"{self.tower}.embeddings.patch_embedding", self.n, self.patch_size)
        name = f"{self.tower}.embeddings.position_embedding.weight"
        yield table("v.position_embd.weight", name, POSITIONS**2, self.n)

    def tensors(self) -> Iterator[Wanted]:
        n = self.n_text
        yield from self.encoder()
        yield table("resampler.query", "resampler.query", self.n_query, n)
        yield constant("resampler.pos_embed_k", waves(POSITIONS, POSITIONS, n))
        yield from linear("resampler.kv", "resampler.kv_proj", n, self.n, bias=False)
        for i, part in enumerate("qkv"):
            for kind, shape in (("weight", (3 * n, n)), ("bias", (3 * n,))):
                yield Wanted(f"resampler.attn.{part}.{kind}", f"resampler.attn.in_proj_{kind}", shape, third(i))
        yield from linear("resampler.attn.out", "resampler.attn.out_proj", n, n)
        for part in ("q", "kv", "post"):
            yield from norm(f"resampler.ln_{part}", f"resampler.ln_{part}", n)
        yield Wanted("resampler.proj.weight", "resampler.proj", (n, n), np.transpose)
