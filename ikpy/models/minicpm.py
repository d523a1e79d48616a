"""minicpm and minicpm3: MiniCPM 1, 2 and 4, and MiniCPM 3 with latent attention (arXiv:2404.06395).

Embeddings, branches and logits are scaled.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ikpy.errors import UnsupportedError
from ikpy.graph.ir import Value
from ikpy.models.batch import BatchGraph
from ikpy.models.deepseek2 import DeepSeek2
from ikpy.models.deepseek2 import Layer as LatentLayer
from ikpy.models.granite import Granite
from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.long_rope import LongRope
from ikpy.models.rope import RopeParams
from ikpy.models.weights import Presence

# Of all published models; files of minicpm3, and the first ones of minicpm, do not say them.
EMBEDDING_SCALE, DEPTH_SCALE, BASE_WIDTH = 12.0, 1.4, 256


class MiniCPM(LongRope, Granite):
    """Blocks of llama; scales that a file lacks are those of the published models."""

    needs_scales = False

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        if not keys.has("logit_scale"):
            hp.logit_scale = BASE_WIDTH / hp.n_embd
        hp.residual_scale = keys.f32("residual_scale", DEPTH_SCALE / math.sqrt(hp.n_layer))
        hp.embedding_scale = keys.f32("embedding_scale", EMBEDDING_SCALE)
        self.knows_positions = True
        return hp


class MiniCPM3(LongRope, DeepSeek2):
    """Latent attention, dense; the rotated part of heads turns in halves and has no magnitude in the scores."""

    output_weight: ClassVar[Presence] = "optional"
    rope_neox = True

    def read_hparams(self, keys: Keys) -> HParams:
        hp = super().read_hparams(keys)
        hp.embedding_scale = EMBEDDING_SCALE
        hp.residual_scale = DEPTH_SCALE / math.sqrt(hp.n_layer)
        hp.logit_scale = BASE_WIDTH / hp.n_embd
        return hp

    def read_experts(self, keys: Keys, hp: HParams) -> None:
        if hp.n_expert:
            raise UnsupportedError(f"{keys.gguf.path}: {keys.arch} with experts is not supported")

    def _scales(self, rope: RopeParams, k: int) -> tuple[float, RopeParams]:
        return 1.0 / math.sqrt(k), rope

    def _behind_attention(self, b: BatchGraph, layer: LatentLayer, attended: Value, x: Value) -> Value:
        g, scale = b.graph, self.hp.residual_scale
        x = g.add(x, g.scale(g.mul_mat(layer.attn.out, attended), scale))
        return g.add(x, g.scale(self._ffn(b, layer.ffn, self.norm(b, x, layer.ffn_norm)), scale))
