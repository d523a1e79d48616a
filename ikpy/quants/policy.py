"""Which type each tensor of a model gets for a file type, as llama-quantize chooses.

Mixtures by role and layer are in `ikpy.quants.mixture`; here is what stands above them: tensors that keep their type,
options for single tensors, rows that no block fits, and types that need importance data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ikpy.errors import UnsupportedError
from ikpy.quants import registry
from ikpy.quants.mixture import Mixture, TypeOptions
from ikpy.quants.model_shape import (
    OUTPUT,
    OWN_EMBEDDING,
    PER_LAYER_TOKEN_EMBEDDING,
    TOKEN_EMBEDDING,
    ModelShape,
    is_looked_up,
)
from ikpy.quants.policy_tables import ROW_SIZE_FALLBACK
from ikpy.quants.registry import FileType, TensorType

_NEVER_QUANTIZED = (
    "ssm_conv1d",
    "shortconv.conv.weight",
    "ple_conv1d.weight",
    "ssm_x.weight",
    "ssm_dt.weight",
    "attn_rel_b.weight",
    # RWKV: small, and what they decide is multiplied through all tokens.
    *(f"time_mix_{part}{i}.weight" for part in "wavg" for i in range(3)),
    *(f"time_mix_{name}.weight" for name in ("first", "decay_w1", "decay_w2", "lerp_fused")),
    # Behind pooling, where no importance matrix sees them.
    "dense_2.weight",
    "dense_3.weight",
    # DeepSeek V4, Qwen4-Exp: small, and what they decide is multiplied through all layers.
    "hc_attn_fn.weight",
    "hc_ffn_fn.weight",
    "output_hc_fn.weight",
    "hc_attn_inject.weight",
    "hc_ffn_inject.weight",
    "_compressor_ape.weight",
    # Gemma 3n: what mixes the residual streams, and the low-rank residual.
    "altup_",
    "laurel_",
    # Gemma 3n, 4 and Qwen4-Exp: small, outside the layers, whose inputs alone importance matrices know.
    "per_layer_model_proj.weight",
    "output_hc_down.weight",
    "output_hc_up.weight",
)
_POSITION_EMBEDDINGS = ("position_embd.weight", "token_types.weight")
_INTEGER_TYPES = ("i8", "i16", "i32", "i64")
_FLOAT_TYPES = ("f32", "f16", "bf16", "bf16_r16")
_NO_OPTIONS = TypeOptions()
_BY_RULE = "name another type, such as f16, for it with --tensor-type"
_WITHOUT_PURE = f"--pure uses no rules: leave it out and {_BY_RULE}"

REFUSED_WITHOUT_IMATRIX = frozenset(
    ["IQ1_S", "IQ1_S_R4", "IQ1_M", "IQ1_M_R4", "IQ2_XXS", "IQ2_XXS_R4", "IQ2_XS", "IQ2_XS_R4", "IQ2_S", "Q2_K_S"]
)
_NEED_IMATRIX = frozenset(
    "iq2_xxs iq2_xs iq2_s iq1_s iq1_m iq2_xxs_r4 iq2_xs_r4 iq2_s_r4 iq1_s_r4 iq1_m_r4 iq1_kt iq2_kt".split()
)


@dataclass
class Choice:
    """The type of one tensor. ``custom`` is the rule's type if one matched; ``fallback_from`` the type whose
    block did not fit the row; ``embedding_from`` the interleaved type an embedding cannot have, ``joined_from`` that
    a tensor of several matrices cannot have; ``forced`` the type an option for this very tensor asked for; ``remedy``
    what to do where no type fits the rows."""

    type: str
    custom: str = ""
    forced: str = ""
    fallback_from: str = ""
    embedding_from: str = ""
    joined_from: str = ""
    remedy: str = _BY_RULE


def is_eligible(name: str, shape: Sequence[int], type_name: str, *, leave_output: bool, router_type: str) -> bool:
    """Whether a tensor may be converted at all; ``router_type`` is ``--ffn-gate-inp-type``."""
    is_vector = all(n == 1 for n in shape[1:])  # the reference does not count trailing ones as dimensions
    if not name.endswith("weight") or is_vector or type_name in _INTEGER_TYPES or "_norm.weight" in name:
        return False
    if name == OUTPUT and leave_output:
        return False
    if "ffn_gate_inp.weight" in name and router_type in ("", type_name):
        return False
    return name not in _POSITION_EMBEDDINGS and not keeps_type(name)


def keeps_type(name: str) -> bool:
    """Whether a tensor stays in the type it has."""
    return any(part in name for part in _NEVER_QUANTIZED)


def needs_imatrix(name: str, type_name: str, ftype: str) -> bool:
    """Whether quantizing this tensor to this type without importance data is refused."""
    if name in (TOKEN_EMBEDDING, OUTPUT) or name.endswith(OWN_EMBEDDING):
        return False
    return type_name in _NEED_IMATRIX or (type_name == "q2_K" and ftype == "Q2_K_S")


class TypePolicy:
    """Decides types tensor by tensor, in file order.

    ``custom_rule`` maps a name to a type or "" (see ``ikpy.quants.recipe``); ``assigned`` holds types by tensor name
    that replace the mixture of the file type. ``used_roles`` are the options for roles that decided a tensor so far.
    """

    def __init__(
        self,
        ftype: FileType,
        model: ModelShape,
        *,
        has_imatrix: bool = False,
        options: TypeOptions = _NO_OPTIONS,
        pure: bool = False,
        custom_rule: Callable[[str], str] = lambda name: "",
        assigned: Mapping[str, str] = MappingProxyType({}),
    ):
        self.default = ftype.base_type
        self.model = model
        self.options = options
        self.pure = pure
        self.custom_rule = custom_rule
        self.assigned = assigned
        self.used_roles: set[str] = set()
        self._mixture = Mixture(ftype.name, ftype.base_type, model, options, has_imatrix=has_imatrix)

    def choose(self, name: str, shape: Sequence[int]) -> Choice:
        """Type of the next tensor (shape ne0 first); UnsupportedError if its row length fits no type."""
        choice = Choice(self.default, remedy=_WITHOUT_PURE if self.pure else _BY_RULE)
        if not self.pure and self.default not in _FLOAT_TYPES:
            choice.type = self.assigned.get(name) or self._mixture.type_of(name, shape)
            choice.custom = self.custom_rule(name)
            if self._mixture.role and not choice.custom and name not in self.assigned:
                self.used_roles.add(self._mixture.role)
            choice.type = choice.custom or choice.type
        role = self._single_role(name, has_rule=bool(choice.custom))
        if role and (wanted := getattr(self.options, role)):
            self.used_roles.add(role)
            choice.type = choice.forced = wanted
        if role and (choice.forced or self.pure):
            choice.remedy = _by_option(TypeOptions.option(role))
        fit_row(choice, name, shape)
        if is_looked_up(name):
            self._plain_embedding(choice)
            fit_row(choice, name, shape)  # blocks of iq1_s and iq1_m are longer than those of their interleaved types
        fit_groups(choice, name, shape)
        return choice

    @staticmethod
    def of_option(type_name: str, name: str, shape: Sequence[int]) -> Choice:
        """What becomes of a type that an option asks for outside the tensors of the model; raises as ``choose``."""
        choice = Choice(type_name, forced=type_name, remedy=_by_option("--extra-output-tensor"))
        fit_row(choice, name, shape)
        fit_groups(choice, name, shape)
        return choice

    def _single_role(self, name: str, *, has_rule: bool) -> str:
        """The role whose option is for this very tensor; "" where there is none.

        A tied embedding takes the type of the output matrix unless its own option or a rule says more of it.
        """
        roles = {TOKEN_EMBEDDING: "token_embedding", PER_LAYER_TOKEN_EMBEDDING: "per_layer_token_embedding"}
        role = roles.get(name, "ffn_gate_inp" if "ffn_gate_inp.weight" in name else "")
        is_output = name == OUTPUT or (name == TOKEN_EMBEDDING and not self.model.has_output)
        if is_output and not (role and (has_rule or getattr(self.options, role))):
            role = "output"
        return role

    @staticmethod
    def _plain_embedding(choice: Choice) -> None:
        """Rows of an embedding are looked up one by one, which interleaved types do not allow."""
        row = registry.by_name(choice.type)
        if row.interleave > 1:
            choice.embedding_from = choice.type
            choice.type = plain_type(row)


def _by_option(option: str) -> str:
    return f"name another type, such as f16, with {option}"


def fit_row(choice: Choice, name: str, shape: Sequence[int]) -> None:
    """Falls back to a type whose block fits the row; UnsupportedError if there is none."""
    row = registry.by_name(choice.type)
    if row.name == "bf16_r16" and shape[0] % row.block_elements:
        choice.type = row.plain_partner
        return
    if row.block_elements < 64 or row.name == "q1_0_g128" or shape[0] % row.block_elements == 0:
        fits = shape[0] % row.block_elements == 0
    else:
        used = ROW_SIZE_FALLBACK.get(row.name, "")
        fits = bool(used) and shape[0] % 32 == 0
        if fits:
            choice.fallback_from, choice.type = row.name, used
    if not fits:
        raise UnsupportedError(
            f"Unsupported tensor size encountered: rows of {name} have {shape[0]} values, "
            f"which fit neither {row.name} nor a substitute; {choice.remedy}"
        )


def plain_type(row: TensorType) -> str:
    """The type in whose rows the weights of an interleaved one can be kept."""
    return row.plain_partner or "q8_0"  # q8_k_r16 has no partner of its own


def fit_groups(choice: Choice, name: str, shape: Sequence[int]) -> None:
    """Takes the plain type where the rows fill no whole groups of an interleaved one."""
    row = registry.by_name(choice.type)
    if row.interleave > 1 and (len(shape) < 2 or shape[1] % row.interleave):
        choice.type = plain_type(row)
        # Blocks of iq1_s and iq1_m are longer than those of their interleaved types.
        fit_row(choice, name, shape)


def fit_parts(choice: Choice, name: str, shape: Sequence[int], parts: Sequence[int]) -> None:
    """Takes the plain type where a row group of an interleaved one would cross the matrices that a tensor joins."""
    row = registry.by_name(choice.type)
    if not row.keeps_apart(parts):
        choice.joined_from, choice.type = row.name, plain_type(row)
        fit_row(choice, name, shape)
