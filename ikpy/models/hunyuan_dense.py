"""hunyuan-dense: Hunyuan 0.5B to 7B, q/k norms after RoPE; hunyuan_vl: the text part of HunyuanOCR and HunyuanVL."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.media import ReadsPictures
from ikpy.models.transformer import Transformer


class HunyuanDense(Transformer):
    """rope.scaling.alpha, where a file has it, raises the RoPE base (NTK-aware scaling)."""

    qk_norm = "required"
    norms_after_rope = True
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        alpha, size = keys.f32("rope.scaling.alpha", 0.0), hp.n_embd_head_k
        if alpha > 0:
            if size <= 2:
                raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.rope.scaling.alpha needs heads above 2 elements")
            hp.rope_freq_base *= alpha ** (size / (size - 2))
        return hp


class HunyuanVL(ReadsPictures, HunyuanDense):
    """Pictures are rotated by position, column, row and number, in four sections one behind the other.

    llama.cpp leaves the pairs of the fourth section of text as they are, which the published code rotates as all.
    """

    counts_pictures = True
