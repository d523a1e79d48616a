"""Mixtures: the type that each tensor gets for a file type by its role and layer, as llama-quantize chooses.

The tables are in `ikpy.quants.policy_tables`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ikpy.errors import UnsupportedError
from ikpy.quants import policy_tables as tables
from ikpy.quants.model_shape import EMBEDDINGS, OUTPUT, TOKEN_EMBEDDING, ModelShape


@dataclass(frozen=True)
class TypeOptions:
    """Types asked for by role ("" = not set): options ``--output-tensor-type`` ... ``--ffn-up-type``."""

    output: str = ""
    token_embedding: str = ""
    per_layer_token_embedding: str = ""
    ffn_gate_inp: str = ""
    attn_q: str = ""
    attn_k: str = ""
    attn_v: str = ""
    attn_qkv: str = ""
    attn_output: str = ""
    ffn_gate: str = ""
    ffn_down: str = ""
    ffn_up: str = ""

    @staticmethod
    def option(role: str) -> str:
        """Name of the option of a role."""
        return f"--{role.replace('_', '-')}{'-tensor' if role == 'output' else ''}-type"


@dataclass
class _Counters:
    attn_v: int = 0
    ffn: dict[str, int] = field(default_factory=lambda: {"ffn_down": 0, "ffn_gate": 0, "ffn_up": 0})


class Mixture:
    """The mixture of a file type. Tensors come in file order, because some rules count those decided so far.

    ftype: name of the file type; default: the type of tensors that no rule concerns. ``role`` is the option that
    decided the last tensor ("" = none).
    """

    def __init__(self, ftype: str, default: str, model: ModelShape, options: TypeOptions, *, has_imatrix: bool) -> None:
        # Q3_K, Q4_K and Q5_K are other names of the medium mixes.
        self.ftype = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(ftype, ftype)
        self.default = default
        self.model = model
        self.options = options
        self.has_imatrix = has_imatrix
        self.role = ""
        self._counters = _Counters()

    def type_of(self, name: str, shape: Sequence[int]) -> str:
        """Type of the next tensor (shape ne0 first), in the order of llama-quantize's branches.

        Raises UnsupportedError for tensors of experts outside the model's layers.
        """
        self.role = ""
        model = self.model
        if name == OUTPUT or (name == TOKEN_EMBEDDING and not model.has_output):
            return self._output(shape)
        if name in EMBEDDINGS:
            return tables.EMBEDDING.get(self.ftype, self.default)
        if self.ftype in tables.LOWEST:
            return self._lowest(name, tables.LOWEST[self.ftype])
        if self.ftype in tables.VERY_LOW:
            return self._very_low(name)
        if "attn_v.weight" in name:
            return self._attn_v()
        if "attn_k" in name:
            return self._attn_k()
        if "attn_q" in name:
            return self._attn_q(name)
        if "ffn_down" in name:
            return self._ffn_down(self._layer(name, "ffn_down"))
        if "attn_output.weight" in name:
            return self._attn_output()
        if "ffn_gate" in name:
            return self._asked("ffn_gate") or self._ffn_gate_up(self._layer(name, "ffn_gate"))
        if "ffn_up" in name:
            return self._asked("ffn_up") or self._ffn_gate_up(self._layer(name, "ffn_up"))
        return self.default

    def _asked(self, role: str) -> str:
        """The type that an option gives to a role, "" without it."""
        wanted: str = getattr(self.options, role)
        self.role = role if wanted else self.role
        return wanted

    def _layer(self, name: str, kind: str) -> int:
        """Position of an ffn tensor: its block number in models with experts, else a count in file order."""
        count = self._counters.ffn[kind]
        self._counters.ffn[kind] += 1
        if self.model.n_expert <= 1:
            return count
        block = re.match(r"blk\.(\d{1,9})\.", name)
        number = int(block[1]) if block else -1
        if not 0 <= number < self.model.n_layer:
            raise UnsupportedError(f"Bad layer {number} for tensor {name}. Must be in [0, {self.model.n_layer})")
        return number

    @staticmethod
    def _more(i: int, n: int) -> bool:
        """Layers that get more bits: the outer eighths and every third in between."""
        middle = i - n // 8
        return i < n // 8 or i >= 7 * n // 8 or middle % 3 == 2

    def _output(self, shape: Sequence[int]) -> str:
        tied = not self.model.has_output
        if self.model.architecture == "falcon" or shape[0] % 256:
            return "q8_0"
        if self.ftype in tables.OUTPUT_LOW:
            return "iq4_k" if tied else "q5_K"
        if self.ftype in ("IQ2_XXS_R4", "IQ2_XS_R4"):
            return "iq4_k_r4" if tied else "q5_k_r4"
        if tied and self.ftype in tables.OUTPUT_TIED_MEDIUM:
            return "iq5_k"
        return self.default if self.default in tables.OUTPUT_KEPT else "q6_K"

    def _next_attn_v(self) -> int:
        self._counters.attn_v += 1
        return self._counters.attn_v - 1

    def _lowest(self, name: str, types: tables.Lowest) -> str:
        """Table C."""
        model = self.model
        if "attn_v.weight" in name:
            self._next_attn_v()
            if model.n_expert >= 4 or model.gqa_ratio >= 4:
                return types.attn_v[0]
            return types.attn_v[1 if model.gqa_ratio >= 2 else 2]
        down_layer = self._layer(name, "ffn_down") if "ffn_down" in name else -1
        if model.n_expert >= 8:
            if "attn_k" in name or "attn_q" in name:
                return types.attn_k_and_q
            if name.startswith(("blk.0.ffn_down", "blk.0.ffn_gate", "blk.0.ffn_up")):
                return types.first_ffn
        elif "attn_qkv.weight" in name:
            return types.attn_qkv
        if "_shexp.weight" in name:
            return types.shared_expert
        if "ffn_down" in name:
            return self._asked("ffn_down") or (types.ffn_down if down_layer < model.n_layer // 8 else self.default)
        if "attn_output.weight" in name:
            return types.attn_output[0 if model.n_expert >= 4 else 1]
        return self.default

    def _very_low(self, name: str) -> str:
        """Table D."""
        model, medium = self.model, self.ftype in tables.VERY_LOW_MEDIUM
        if "attn_v.weight" in name:
            self._next_attn_v()
            if model.gqa_ratio >= 4 or model.n_expert >= 4:
                return "iq4_k"
            if model.gqa_ratio >= 2 or model.n_expert >= 2:
                return "iq3_k"
            return "iq3_s" if medium else "q2_K"
        if model.n_expert >= 8 and ("attn_k" in name or "attn_q" in name):
            return "q4_K"
        if model.n_expert < 8 and "attn_qkv.weight" in name:
            return "iq3_xxs" if medium else "iq2_k"
        if "ffn_down" in name:
            count = self._counters.ffn["ffn_down"]
            self._counters.ffn["ffn_down"] += 1
            if count < model.n_layer // 8:
                return "iq3_s" if medium else "q2_K"
            return self.default
        if "attn_output.weight" in name:
            if wanted := self._asked("attn_output"):
                return wanted
            if model.n_expert >= 4:
                return "q5_K"
            if self.ftype in ("IQ1_S", "IQ1_M"):
                return "iq2_k"
            return "iq3_s" if medium else self.default
        return self.default

    def _attn_v(self) -> str:
        """Table E; rows of one file type fall through to the last rows unless they say otherwise."""
        model, ftype, g = self.model, self.ftype, self.model.gqa_ratio
        i = self._next_attn_v()
        if wanted := self._asked("attn_v"):
            return wanted
        if model.n_expert >= 4:
            return "q8_0"
        if model.size_class == "70B":
            return tables.ATTN_V_70B.get(self.default, self.default)
        if ftype in tables.ATTN_V_BY_GQA:
            return tables.ATTN_V_BY_GQA[ftype][0 if g >= 4 else 1 if g >= 2 else 2]
        if ftype in ("IQ3_XXS", "IQ3_XXS_R4"):
            return self._attn_v_iq3_xxs(g, "_r4" if ftype == "IQ3_XXS_R4" else "")
        if g >= 4 and ftype in ("Q2_K_S", "Q2_K_R4"):
            return "q4_K" if ftype == "Q2_K_S" else "q4_k_r4"
        if g >= 2 and ftype in tables.ATTN_V_GQA_2:
            return tables.ATTN_V_GQA_2[ftype]
        if ftype in ("Q3_K_M", "Q3_K_L"):
            return "q5_K" if ftype == "Q3_K_L" or i < 2 else "q4_K"
        if ftype in ("Q4_K_M", "Q5_K_M") and self._more(i, model.n_attn_v):
            return "q6_K"
        if ftype in ("Q4_K_S", "Q4_K_R4") and i < 4:
            return "q5_K"
        if ftype in ("Q5_K_S", "IQ5_K", "IQ5_KS"):
            return ("q6_K" if ftype == "Q5_K_S" else "iq6_k") if model.big_vocabulary else self.default
        draft = model.architecture == "dflash-draft" and ftype in ("Q4_K_M", "Q5_K_M")
        return tables.ATTN_V_BUMP.get(self.default, self.default) if g >= 4 and not draft else self.default

    def _attn_v_iq3_xxs(self, g: int, suffix: str) -> str:
        if g >= 4:
            return "q4_k_r4" if suffix else "q4_K"
        if g >= 2:
            return "iq3_k" + suffix
        if self.has_imatrix:
            return "iq3_xxs" + suffix
        return "iq3_k_r4" if suffix else "iq3_s"

    def _attn_k(self) -> str:
        if wanted := self._asked("attn_k"):
            return wanted
        return "q8_0" if self.model.n_expert >= 4 else self._attn_k_or_q()

    def _attn_q(self, name: str) -> str:
        """Table F; of fused matrices too, which their own option names first."""
        wanted = self._asked("attn_qkv") if "attn_qkv.weight" in name else ""
        if wanted := wanted or self._asked("attn_q"):
            return wanted
        if self.model.big_vocabulary and self.ftype in ("Q5_K_S", "IQ5_K", "IQ5_KS"):
            return {"Q5_K_S": "q4_K", "IQ5_K": "iq4_k", "IQ5_KS": "iq4_ks"}[self.ftype]
        return self._attn_k_or_q()

    def _attn_k_or_q(self) -> str:
        if self.ftype == "IQ3_XS":
            return "iq3_xxs"
        return "iq2_s" if self.ftype in ("IQ3_XXS", "IQ3_XXS_R4") else self.default

    def _ffn_down(self, i: int) -> str:
        """Table G."""
        model, ftype, n = self.model, self.ftype, self.model.n_layer
        falcon, first = model.architecture == "falcon", i < n // 8
        if wanted := self._asked("ffn_down"):
            return wanted
        if ftype == "Q2_K":
            return "q3_K"
        if ftype in ("Q2_K_S", "Q2_K_R4"):
            return ("q4_K" if ftype == "Q2_K_S" else "q4_k_r4") if first else self.default
        if ftype in tables.DOWN_WITHOUT_IMATRIX and not self.has_imatrix:
            return tables.DOWN_WITHOUT_IMATRIX[ftype][0 if first else 1]
        if ftype == "Q3_K_M":
            if i < n // 16:
                return "q5_K"
            return "q3_K" if falcon and not self._more(i, n) else "q4_K"
        if ftype == "IQ3_M":
            return "iq4_k" if first or (model.n_expert >= 4 and self._more(i, n)) else self.default
        if ftype == "Q3_K_L":
            return "q4_K" if falcon else "q5_K"
        if ftype == "IQ3_KL":
            return "iq4_ks" if self._more(i, n) else "iq3_k"
        if ftype == "Q4_K_M":
            if falcon:
                return "q6_K" if i < n // 16 else "q5_K" if self._more(i, n) else "q4_K"
            return "q6_K" if self._more(i, n) else self.default
        if first and not self.has_imatrix and ftype in tables.DOWN_FIRST_WITHOUT_IMATRIX:
            return tables.DOWN_FIRST_WITHOUT_IMATRIX[ftype]
        if ftype == "Q5_K_M" and self._more(i, n):
            return "q6_K"
        if ftype in ("Q4_K_S", "Q4_K_R4") and first and not falcon:
            return "q5_K"
        if first and self.has_imatrix and ftype in tables.DOWN_FIRST_WITH_IMATRIX:
            return tables.DOWN_FIRST_WITH_IMATRIX[ftype]
        return self.default

    def _attn_output(self) -> str:
        """Table H."""
        model = self.model
        if wanted := self._asked("attn_output"):
            return wanted
        if model.architecture == "falcon":
            return "q4_K" if self.ftype == "Q3_K_L" else self.default
        if model.n_expert >= 4:
            if self.ftype in tables.ATTN_OUTPUT_EXPERTS:
                return "q5_K"
            return "iq4_ks" if self.ftype == "IQ2_KL" else self.default
        if self.ftype == "IQ3_KT" and model.gqa_ratio >= 4:
            return "iq3_k"
        return tables.ATTN_OUTPUT_DENSE.get(self.ftype, self.default)

    def _ffn_gate_up(self, i: int) -> str:
        """Table I."""
        n = self.model.n_layer
        if self.ftype == "IQ3_XS" and n // 8 <= i < 7 * n // 8:
            return "iq3_xxs"
        return "iq4_ks" if self.ftype == "IQ3_KL" and self._more(i, n) else self.default
