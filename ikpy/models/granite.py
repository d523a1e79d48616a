"""granite and granitemoe: llama blocks with scaled embeddings, branches, scores and logits."""

from __future__ import annotations

from typing import ClassVar

from ikpy.errors import FileFormatError
from ikpy.models.hparams import HParams
from ikpy.models.keys import REQUIRED, Keys
from ikpy.models.llama import Llama


def deep_parts(keys: Keys, n_layer: int) -> dict[int, int]:
    """Parts of rows of pictures by the layers behind which they are added (Granite 4 Vision). Files have them by the
    layers before which they are added: deepstack_mapping, -1 for none."""
    parts = keys.optional_integers("deepstack_mapping", n_layer)
    used = sorted({part for part in parts if part != -1})
    if parts and (parts[0] != -1 or used != list(range(1, len(used) + 1))):
        raise FileFormatError(
            f"{keys.gguf.path}: {keys.arch}.deepstack_mapping {parts} does not number further parts of pictures' rows "
            "from 1 on, none being added before the first layer"
        )
    return {layer - 1: part for layer, part in enumerate(parts) if part != -1}


class Granite(Llama):
    """Each branch is multiplied by residual_scale before it joins the residual stream; layers know positions unless
    rope.scaling.finetuned is false.
    """

    needs_scales: ClassVar[bool] = True
    """Whether files must say all scales."""

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        one, none = (REQUIRED, REQUIRED) if self.needs_scales else (1.0, 0.0)
        divisor = keys.f32("logit_scale", one)
        if not divisor:
            raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.logit_scale is 0, and logits are divided by it")
        hp.logit_scale = 1.0 / divisor
        hp.residual_scale = keys.f32("residual_scale", one)
        hp.embedding_scale = keys.f32("embedding_scale", one)
        self.score_scale = keys.f32("attention.scale", none)
        self.knows_positions = keys.boolean("rope.scaling.finetuned", True)
        self.deep_parts = deep_parts(keys, hp.n_layer)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0)
        return hp

    def is_rotated(self, layer: int) -> bool:
        return self.knows_positions

    def attention_scale(self, layer: int) -> float:
        return self.score_scale or super().attention_scale(layer)
