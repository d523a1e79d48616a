"""granite and granitemoe: llama blocks with scaled embeddings, branches, scores and logits."""

from __future__ import annotations

from ikpy.errors import FileFormatError
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.llama import Llama


class Granite(Llama):
    """Each branch is multiplied by residual_scale before it joins the residual stream; layers know positions unless
    rope.scaling.finetuned is false.
    """

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        divisor = keys.f32("logit_scale")
        if not divisor:
            raise FileFormatError(f"{keys.gguf.path}: {keys.arch}.logit_scale is 0, and logits are divided by it")
        hp.logit_scale = 1.0 / divisor
        hp.residual_scale = keys.f32("residual_scale")
        hp.embedding_scale = keys.f32("embedding_scale")
        self.score_scale = keys.f32("attention.scale")
        self.knows_positions = keys.boolean("rope.scaling.finetuned", True)
        hp.n_ff_shared = keys.u32("expert_shared_feed_forward_length", 0)
        return hp

    def is_rotated(self, layer: int) -> bool:
        return self.knows_positions

    def attention_scale(self, layer: int) -> float:
        return self.score_scale
