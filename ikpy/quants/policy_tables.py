"""Tables of the type policy: what file types make of the tensors of a role.

Keys are file types in capitals, tensor types in small letters.
"""

from __future__ import annotations

from typing import NamedTuple

# What rows get whose length is no multiple of 256 (of nvfp4: 64).
_FALLBACK = {
    "iq4_nl": "iq1_s iq1_m iq1_kt iq2_xxs iq2_xs iq2_s iq2_ks iq2_k iq2_kt iq2_kl iq3_xxs iq3_s iq3_ks iq3_k iq3_kt "
    "iq4_xs iq4_xs_r8 iq4_ks iq4_kss iq4_kt q2_K q3_K iq2_xxs_r4 iq2_xs_r4 iq2_s_r4 iq2_k_r4 "
    "iq3_xxs_r4 iq3_s_r4 iq3_k_r4 iq4_ks_r4 q2_k_r4 q3_k_r4 nvfp4",
    "q5_0": "iq4_k iq4_k_r4 q4_K q4_k_r4 iq5_ks iq5_ks_r4",
    "q6_0": "iq5_k iq5_k_r4 q5_K q5_k_r4",
    "q8_0": "iq6_k q6_K q6_k_r4 q8_k_r8 q8_k_r16",
}
ROW_SIZE_FALLBACK = {wanted: used for used, names in _FALLBACK.items() for wanted in names.split()}

# Output matrix.
OUTPUT_LOW = frozenset(
    (
        "IQ1_S IQ1_M IQ1_S_R4 IQ1_M_R4 IQ1_KT IQ2_XXS IQ2_XS IQ2_S IQ2_M IQ2_M_R4 IQ2_KS IQ2_K IQ2_K_R4 IQ2_KT IQ2_KL "
        "IQ3_XXS IQ3_XXS_R4 IQ3_K IQ3_K_R4 IQ3_KS IQ3_KT"
    ).split()
)
OUTPUT_TIED_MEDIUM = frozenset("IQ3_S IQ3_S_R4 IQ3_M IQ3_KL IQ4_XS IQ4_KS IQ4_KS_R4 IQ4_KSS".split())
OUTPUT_KEPT = frozenset("q8_0 q8_0_r8 iq6_k q6_k_r4 q8_k_r8 q8_KV q8_KV_r8".split())

# Token embedding.
EMBEDDING = dict.fromkeys(
    ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ1_S_R4", "IQ1_M_R4", "IQ2_XXS_R4", "IQ2_XS_R4"], "q2_K"
)
EMBEDDING |= dict.fromkeys(["IQ2_S", "IQ2_M", "IQ2_M_R4", "IQ3_XXS", "IQ3_KT"], "iq3_s")
EMBEDDING |= {"IQ3_XXS_R4": "iq3_k"}
EMBEDDING |= dict.fromkeys(["IQ1_BN", "IQ2_BN", "IQ2_BN_R4"], "iq4_nl")


class Lowest(NamedTuple):
    """Types by role for one of the lowest file types.

    ``attn_v``: with experts or g >= 4, g >= 2, else; ``attn_k_and_q`` and ``first_ffn`` with 8 experts, ``attn_qkv``
    without; ``ffn_down`` of the first layers; ``attn_output``: with experts, without.
    """

    attn_v: tuple[str, str, str]
    attn_k_and_q: str
    first_ffn: str
    attn_qkv: str
    shared_expert: str
    ffn_down: str
    attn_output: tuple[str, str]


_ONE_BIT_INTERLEAVED = Lowest(
    attn_v=("iq4_k_r4", "iq3_k_r4", "q2_k_r4"),
    attn_k_and_q="q4_k_r4",
    first_ffn="iq3_k_r4",
    attn_qkv="iq2_k_r4",
    shared_expert="iq4_k_r4",
    ffn_down="q2_k_r4",
    attn_output=("q5_k_r4", "iq2_k_r4"),
)
_TWO_BIT_TRELLIS = Lowest(
    attn_v=("iq4_k", "iq3_k", "q2_K"),
    attn_k_and_q="q4_K",
    first_ffn="iq3_k",
    attn_qkv="iq3_k",
    shared_expert="iq4_k",
    ffn_down="iq3_k",
    attn_output=("q5_K", "iq3_k"),
)
LOWEST = {"IQ1_S_R4": _ONE_BIT_INTERLEAVED, "IQ1_M_R4": _ONE_BIT_INTERLEAVED, "IQ2_KT": _TWO_BIT_TRELLIS}

# File types with helpers of their own; those of the medium group are better.
VERY_LOW = frozenset("IQ2_XXS IQ2_XS IQ1_S IQ2_S IQ2_M IQ1_M IQ2_KS IQ2_XXS_R4 IQ2_XS_R4 IQ2_M_R4".split())
VERY_LOW_MEDIUM = frozenset("IQ2_S IQ2_M IQ2_M_R4".split())

# Attention value; what few key-value heads (g >= 4) turn a type into
_BUMP_SOURCES = {
    "iq3_s": "q2_K iq3_xxs",
    "iq3_k_r4": "q2_k_r4 iq3_xxs_r4",
    "q4_K": "q3_K iq3_s",
    "iq4_k": "iq3_k",
    "iq4_ks": "iq3_ks iq2_kl",
    "q4_k_r4": "iq3_s_r4 q3_k_r4",
    "q5_K": "q4_K iq4_xs iq4_nl iq4_nl_r4 iq4_xs_r8",
    "iq5_k": "iq4_k iq4_ks",
    "q6_K": "q5_K",
    "iq6_k": "iq5_k iq5_ks",
}
ATTN_V_BUMP = {source: target for target, sources in _BUMP_SOURCES.items() for source in sources.split()}
ATTN_V_70B = {"q3_K": "q5_K", "q4_K": "q5_K", "iq3_k": "iq5_k"}
# type -> (g >= 4, g >= 2, else)
ATTN_V_BY_GQA = {
    "Q2_K": ("q4_K", "q3_K", "q3_K"),
    "IQ2_K": ("iq4_k", "iq4_k", "iq3_k"),
    "IQ2_K_R4": ("iq4_k_r4", "iq4_k_r4", "iq3_k_r4"),
    "IQ3_KT": ("iq4_k", "iq3_k", "iq3_k"),
    "IQ4_KT": ("iq5_k", "iq4_k", "iq4_k"),
    "IQ3_KL": ("iq5_k", "iq5_k", "iq4_k"),
    "IQ3_M": ("iq5_k", "iq5_k", "iq4_k"),
}
ATTN_V_GQA_2 = {"IQ3_S_R4": "iq4_k_r4", "IQ3_K_R4": "iq4_k_r4", "IQ3_KS": "iq4_ks", "IQ2_KL": "iq4_ks"}
ATTN_V_GQA_2 |= dict.fromkeys(["IQ3_XS", "IQ3_S", "IQ3_K"], "iq4_k")
ATTN_V_GQA_2 |= dict.fromkeys(
    ["IQ4_NL", "IQ4_XS", "IQ4_NL_R4", "IQ4_XS_R8", "IQ4_KS", "IQ4_KSS", "IQ4_K", "IQ4_K_R4"], "iq5_k"
)
ATTN_V_GQA_2 |= {"IQ4_KS_R4": "iq5_k_r4"}

# File types whose first layers' ffn_down is better without an importance matrix
DOWN_FIRST_WITHOUT_IMATRIX = dict.fromkeys(["IQ4_NL", "IQ4_XS", "IQ4_KS", "IQ4_KSS", "IQ4_NL_R4", "IQ4_XS_R8"], "q5_K")
DOWN_FIRST_WITHOUT_IMATRIX |= {"IQ4_KS_R4": "q5_k_r4"}
DOWN_FIRST_WITH_IMATRIX = {"Q4_0": "q4_1", "Q5_0": "q5_1", "Q4_0_R8": "iq4_nl_r4"}
# first layers, others; all without importance matrix
DOWN_WITHOUT_IMATRIX = {
    "IQ3_XXS": ("q4_K", "q3_K"),
    "IQ3_KT": ("iq4_k", "iq3_k"),
    "IQ3_XXS_R4": ("q4_k_r4", "iq3_k_r4"),
}

# Attention output.
ATTN_OUTPUT_EXPERTS = frozenset(
    (
        "Q2_K Q2_K_R4 Q3_K_S Q3_K_M Q3_K_R4 Q4_K_S Q4_K_M Q4_K_R4 IQ2_K IQ2_K_R4 IQ3_XS IQ3_XXS IQ3_XXS_R4 IQ3_S "
        "IQ3_S_R4 IQ3_M IQ3_K IQ3_K_R4 IQ3_KL IQ3_KS IQ3_KT IQ4_NL IQ4_NL_R4 IQ4_XS IQ4_XS_R8 IQ4_K IQ4_K_R4 IQ4_KS "
        "IQ4_KS_R4 IQ4_KSS IQ5_KS IQ5_KS_R4"
    ).split()
)
ATTN_OUTPUT_DENSE = {
    "Q2_K": "q3_K",
    "IQ3_XXS": "iq3_s",
    "IQ3_XXS_R4": "iq3_k_r4",
    "Q3_K_M": "q4_K",
    "Q3_K_L": "q5_K",
    "IQ3_M": "iq4_k",
    "IQ2_K": "iq3_k",
    "IQ2_K_R4": "iq3_k_r4",
    "IQ3_KL": "iq4_ks",
}
