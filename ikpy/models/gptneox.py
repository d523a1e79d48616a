"""gptneox: GPT-NeoX and Pythia. LayerNorm and biases everywhere, partly rotated heads (arXiv:2204.06745)."""

from __future__ import annotations

from ikpy.models.hparams import HParams
from ikpy.models.keys import Keys
from ikpy.models.transformer import Transformer


class GptNeoX(Transformer):
    """Both branches side by side, each under its own norm, unless the file says that one follows the other."""

    layer_norm = True
    norm_bias = "required"
    fused_qkv = "optional"
    qkv_bias = "required"
    out_bias = "required"
    ffn_bias = "required"
    output_weight = "required"
    rope_neox = True
    rotates_whole_head = False
    activation = "gelu_erf"
    gated_ffn = False

    def read_hparams(self, keys: Keys) -> HParams:
        self.parallel = keys.boolean("use_parallel_residual")
        return super().read_hparams(keys)
