"""internlm2: InternLM 2 and 2.5; llama blocks with an output matrix of their own (arXiv:2403.17297)."""

from __future__ import annotations

from ikpy.models.transformer import Transformer


class InternLM2(Transformer):
    """The plain form."""

    output_weight = "required"
    out_bias = "optional"
