"""Which type each tensor of a model gets for a file type (tools 2.5-2.7).

``TypePolicy.choose`` is called once per tensor in file order, because some rules count the tensors decided so
far. The tables are in `ikpy.quants.policy_tables`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from ikpy.errors import UnsupportedError
from ikpy.quants import policy_tables as tables
from ikpy.quants import registry
from ikpy.quants.registry import FileType

TOKEN_EMBEDDING = "token_embd.weight"
PER_LAYER_TOKEN_EMBEDDING = "per_layer_token_embd.weight"
OUTPUT = "output.weight"
EMBEDDINGS = (TOKEN_EMBEDDING, PER_LAYER_TOKEN_EMBEDDING)

_NEVER_QUANTIZED = ("ssm_conv1d", "ssm_x.weight", "ssm_dt.weight", "attn_rel_b.weight")
_POSITION_EMBEDDINGS = ("position_embd.weight", "token_types.weight")
_INTEGER_TYPES = ("i8", "i16", "i32", "i64")
_FLOAT_TYPES = ("f32", "f16", "bf16", "bf16_r16")

# tools 2.7
REFUSED_WITHOUT_IMATRIX = frozenset(
    ["IQ1_S", "IQ1_S_R4", "IQ1_M", "IQ1_M_R4", "IQ2_XXS", "IQ2_XXS_R4", "IQ2_XS", "IQ2_XS_R4", "IQ2_S", "Q2_K_S"]
)
_NEED_IMATRIX = frozenset(
    "iq2_xxs iq2_xs iq2_s iq1_s iq1_m iq2_xxs_r4 iq2_xs_r4 iq2_s_r4 iq1_s_r4 iq1_m_r4 iq1_kt iq2_kt".split()
)


@dataclass(frozen=True)
class ModelShape:
    """What the policy needs to know of a model. ``n_head_kv`` is that of the first layer."""

    architecture: str
    n_layer: int
    n_head: int
    n_head_kv: int
    n_expert: int
    n_vocab: int
    n_embd: int
    has_output: bool
    n_attn_v: int

    @property
    def gqa_ratio(self) -> int:
        """Attention heads per key-value head; 1 where a model has no key-value heads."""
        return self.n_head // self.n_head_kv if self.n_head_kv else 1

    @property
    def size_class(self) -> str:
        """ "8B", "70B" or "" - the only classes a rule asks for (tools 2.5.2)."""
        arch, layers = self.architecture, self.n_layer
        if arch == "llama" and self.n_expert != 8:
            if layers == 36 or (layers == 32 and self.n_vocab >= 40000 and self.n_vocab != 49152):
                return "8B"
            return "70B" if layers == 80 and self.n_head != self.n_head_kv else ""
        if layers == 80 and arch in ("qwen2", "qwen2vl", "deci", "olmo"):
            return "70B"
        if layers == 36 and arch in ("qwen3", "qwen3vl") and self.n_embd != 2560:
            return "8B"
        return "8B" if (arch, layers) in (("cohere2", 32), ("mistral3", 34)) else ""

    @property
    def big_vocabulary(self) -> bool:
        """Large vocabulary with a rather small model: attention then deserves more bits."""
        return self.n_vocab >= 127999 and self.size_class in ("8B", "70B")

    @classmethod
    def of(cls, metadata: Mapping[str, Any], tensor_shapes: Mapping[str, Sequence[int]]) -> ModelShape:
        """From a model's metadata and its tensor shapes (ne0 first)."""
        arch = str(metadata.get("general.architecture", ""))

        def number(key: str, default: int = 0) -> int:
            value = metadata.get(f"{arch}.{key}")
            first = value[0] if isinstance(value, np.ndarray) and len(value) else value
            return int(first) if isinstance(first, int | np.integer) else default

        embedding = tensor_shapes.get(TOKEN_EMBEDDING, (0, 0))
        n_head = number("attention.head_count")
        return cls(
            architecture=arch,
            n_layer=number("block_count"),
            n_head=n_head,
            n_head_kv=number("attention.head_count_kv", n_head),
            n_expert=number("expert_count"),
            n_vocab=number("vocab_size", embedding[1] if len(embedding) > 1 else 0),
            n_embd=number("embedding_length"),
            has_output=OUTPUT in tensor_shapes,
            n_attn_v=sum("attn_v.weight" in name for name in tensor_shapes),
        )


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


@dataclass
class Choice:
    """The type of one tensor. ``custom`` is the rule's type if one matched; ``fallback_from`` the type whose
    block did not fit the row; ``embedding_from`` the interleaved type an embedding cannot have; ``forced`` the type an
    option for this very tensor asked for."""

    type: str
    custom: str = ""
    forced: str = ""
    fallback_from: str = ""
    embedding_from: str = ""


@dataclass
class _Counters:
    attn_v: int = 0
    ffn: dict[str, int] = field(default_factory=lambda: {"ffn_down": 0, "ffn_gate": 0, "ffn_up": 0})


def is_eligible(name: str, shape: Sequence[int], type_name: str, *, leave_output: bool, router_type: str) -> bool:
    """Whether a tensor may be converted at all (tools 2.5.1); ``router_type`` is ``--ffn-gate-inp-type``."""
    is_vector = all(n == 1 for n in shape[1:])  # the reference does not count trailing ones as dimensions
    if not name.endswith("weight") or is_vector or type_name in _INTEGER_TYPES or "_norm.weight" in name:
        return False
    if name == OUTPUT and leave_output:
        return False
    if "ffn_gate_inp.weight" in name and router_type in ("", type_name):
        return False
    return name not in _POSITION_EMBEDDINGS and not any(part in name for part in _NEVER_QUANTIZED)


def needs_imatrix(name: str, type_name: str, ftype: str) -> bool:
    """Whether quantizing this tensor to this type without importance data is refused (tools 2.7)."""
    if name in (TOKEN_EMBEDDING, OUTPUT):
        return False
    return type_name in _NEED_IMATRIX or (type_name == "q2_K" and ftype == "Q2_K_S")


class TypePolicy:
    """Decides types tensor by tensor.

    ``custom_rule`` maps a name to a type or "" (see ``ikpy.quants.recipe``); ``assigned`` holds types by tensor name
    that replace the mixture of the file type.
    """

    def __init__(
        self,
        ftype: FileType,
        model: ModelShape,
        *,
        has_imatrix: bool = False,
        options: TypeOptions = TypeOptions(),
        pure: bool = False,
        custom_rule: Callable[[str], str] = lambda name: "",
        assigned: Mapping[str, str] = MappingProxyType({}),
    ):
        # Q3_K, Q4_K and Q5_K are other names of the medium mixes.
        self.ftype = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(ftype.name, ftype.name)
        self.default = ftype.base_type
        self.model = model
        self.has_imatrix = has_imatrix
        self.options = options
        self.pure = pure
        self.custom_rule = custom_rule
        self.assigned = assigned
        self._counters = _Counters()

    def choose(self, name: str, shape: Sequence[int]) -> Choice:
        """Type of the next tensor (shape ne0 first); UnsupportedError if its row length fits no type."""
        choice = Choice(self.default)
        if not self.pure and self.default not in _FLOAT_TYPES:
            choice.type = self.assigned.get(name) or self._mixed_type(name, shape)
            choice.custom = self.custom_rule(name)
            choice.type = choice.custom or choice.type
        self._fit_row(choice, name, shape)
        if name in EMBEDDINGS:
            self._plain_embedding(choice)
        forced = self._forced_type(name)
        if forced:
            choice.type = choice.forced = forced
            choice.fallback_from = ""
            self._fit_row(choice, name, shape)
        row = registry.by_name(choice.type)
        if row.interleave > 1 and (len(shape) < 2 or shape[1] % row.interleave):
            choice.type = row.plain_partner
            # Blocks of iq1_s and iq1_m are longer than those of their interleaved types.
            self._fit_row(choice, name, shape)
        return choice

    def _forced_type(self, name: str) -> str:
        if name == OUTPUT:
            return self.options.output
        if name == TOKEN_EMBEDDING:
            tied_output = "" if self.model.has_output else self.options.output
            return self.options.token_embedding or tied_output
        if name == PER_LAYER_TOKEN_EMBEDDING:
            return self.options.per_layer_token_embedding
        return self.options.ffn_gate_inp if "ffn_gate_inp.weight" in name else ""

    @staticmethod
    def _plain_embedding(choice: Choice) -> None:
        """Rows of an embedding are looked up one by one, which interleaved types do not allow."""
        row = registry.by_name(choice.type)
        if row.interleave > 1:
            choice.embedding_from = choice.type
            choice.type = row.plain_partner

    @staticmethod
    def _fit_row(choice: Choice, name: str, shape: Sequence[int]) -> None:
        row = registry.by_name(choice.type)
        if row.block_elements < 64 or row.name == "q1_0_g128" or shape[0] % row.block_elements == 0:
            fits = shape[0] % row.block_elements == 0
        else:
            used = tables.ROW_SIZE_FALLBACK.get(row.name, "")
            fits = bool(used) and shape[0] % 32 == 0
            if fits:
                choice.fallback_from, choice.type = row.name, used
        if not fits:
            raise UnsupportedError(
                f"Unsupported tensor size encountered: rows of {name} have {shape[0]} values, "
                f"which fit neither {row.name} nor a substitute"
            )

    def _mixed_type(self, name: str, shape: Sequence[int]) -> str:
        """The branch order of tools 2.5.3."""
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
            return self._attn_q()
        if "ffn_down" in name:
            return self._ffn_down(self._layer(name, "ffn_down"))
        if "attn_output.weight" in name:
            return self._attn_output()
        if "ffn_gate" in name:
            return self.options.ffn_gate or self._ffn_gate_up(self._layer(name, "ffn_gate"))
        if "ffn_up" in name:
            return self.options.ffn_up or self._ffn_gate_up(self._layer(name, "ffn_up"))
        return self.default

    def _layer(self, name: str, kind: str) -> int:
        """Position of an ffn tensor: its block number in models with experts, else a count in file order."""
        count = self._counters.ffn[kind]
        self._counters.ffn[kind] += 1
        if self.model.n_expert <= 1:
            return count
        block = re.match(r"blk\.(\d+)\.", name)
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
            return self.options.ffn_down or (types.ffn_down if down_layer < model.n_layer // 8 else self.default)
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
            if self.options.attn_output:
                return self.options.attn_output
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
        if self.options.attn_v:
            return self.options.attn_v
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
        if self.options.attn_k:
            return self.options.attn_k
        return "q8_0" if self.model.n_expert >= 4 else self._attn_k_or_q()

    def _attn_q(self) -> str:
        if self.options.attn_q:
            return self.options.attn_q
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
        if self.options.ffn_down:
            return self.options.ffn_down
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
        if self.options.attn_output:
            return self.options.attn_output
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
