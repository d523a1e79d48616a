"""The .cu file of every kernel."""

from __future__ import annotations

from collections.abc import Sequence

# Kernel file of every weight type that has kernels of its own.
_WEIGHT_FILES: dict[str, Sequence[str]] = {
    "weights_legacy": ("q4_0", "q4_1", "q5_0", "q5_1", "q6_0", "q8_0", "q8_kv", "iq4_nl", "mxfp4"),
    "weights_small": ("q1_0_g128", "iq1_bn", "iq2_bn", "tq1_0", "tq2_0"),
    "weights_kquants": ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k"),
    "weights_iqk": ("iq4_xs", "iq2_k", "iq3_k", "iq4_k", "iq5_k", "iq6_k"),
    "weights_iqk_rows": ("iq2_ks", "iq3_ks", "iq4_ks", "iq5_ks", "iq4_kss", "iq2_kl"),
    "weights_grids": ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m"),
    "weights_grids_r4": (
        "iq2_xxs_r4",
        "iq2_xs_r4",
        "iq2_s_r4",
        "iq3_xxs_r4",
        "iq3_s_r4",
        "iq1_s_r4",
        "iq1_m_r4",
    ),
    "weights_trellis": ("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt"),
    "weights_legacy_rn": (
        "q4_0_r8",
        "q5_0_r4",
        "q6_0_r4",
        "q8_0_r8",
        "q8_kv_r8",
        "iq4_nl_r4",
        "mxfp4_r8",
        "q4_0_4x4",
        "q4_0_4x8",
        "q4_0_8x8",
        "iq2_bn_r4",
    ),
    "weights_super_r4": ("q2_k_r4", "q3_k_r4", "q4_k_r4", "q5_k_r4", "q6_k_r4", "q8_k_r8", "q8_k_r16"),
    "weights_iqk_r4": ("iq4_xs_r8", "iq2_k_r4", "iq3_k_r4", "iq4_k_r4", "iq5_k_r4", "iq4_ks_r4", "iq5_ks_r4"),
}
_KERNEL_FILES = {
    "unary_f32": "elementwise",
    "binary_f32": "elementwise",
    "copy_f32": "elementwise",
    "attention_temperature": "elementwise",
    "rms_norm": "norm",
    "rms_norm_two": "norm",
    "rms_norm_q8": "norm",
    "layer_norm": "norm",
    "rope_table": "rope",
    "rope": "rope",
    "rope_two": "rope",
    "kq_mask": "kv_cache",
    "kv_store": "kv_cache",
    "kv_store_two": "kv_cache",
    "kv_shift": "kv_cache",
    "hadamard_rows": "kv_cache",
    "copy_to_type": "kv_cache",
    "moe_route": "moe",
    "moe_group": "moe",
    "moe_offsets": "moe",
    "moe_entries": "moe",
    "moe_combine": "moe",
    "act_prepare_q8": "act_prepare",
    "act_prepare_float": "act_prepare",
    "rows_float": "float",
    "attention_any": "attention_any",
    "causal_conv": "recurrent",
    "causal_conv_few": "recurrent",
    "causal_conv_past": "recurrent",
    **dict.fromkeys((f"gated_delta_rule_{n}" for n in (32, 64, 128, 256)), "recurrent"),
    **dict.fromkeys(("index_scores", "choose_cells", "chosen_mask", "gather_cells"), "indexer"),
    "gemm_bf16": "gemm_bf16",
    "gemm_wgmma": "gemm_wgmma",
}
_FILE_OF_TYPE = {name: file for file, names in _WEIGHT_FILES.items() for name in names}


def kernel_file(kernel: str) -> str:
    """Stem of the .cu file that defines a kernel."""
    if kernel in _KERNEL_FILES:
        return _KERNEL_FILES[kernel]
    if kernel.startswith("flash"):
        short = all(f"_{dk}_" not in kernel for dk in (192, 256, 576)) and kernel != "flash_combine"
        return "flash_heads" if short else "flash_long"
    file = _FILE_OF_TYPE.get(kernel.partition("_")[2], "float")
    return file.replace("weights", "wgmma") if kernel.startswith("wgmma_") else file


def family_types() -> dict[str, str]:
    """A middling type of every file of weight kernels, by the file's stem; BF16 for that of floats."""
    return {**{file: names[len(names) // 2] for file, names in _WEIGHT_FILES.items()}, "float": "bf16"}
