"""The .cu file of every kernel."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_KERNELS = Path(__file__).parent.parent / "kernels"
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
    **dict.fromkeys((f"ssm_scan_{n}" for n in (32, 64, 128, 256)), "ssm_scan"),
    **dict.fromkeys((f"channel_scan_{n}" for n in (16, 64)), "ssm_scan"),
    **dict.fromkeys((f"wkv_{n}" for n in (32, 64, 128, 256)), "wkv"),
    **dict.fromkeys(("index_scores", "choose_cells", "chosen_mask", "chosen_list"), "indexer"),
    **dict.fromkeys(("stretch_cells", "gather_cells"), "indexer"),
    **dict.fromkeys(("clear_blocks", "block_scores", "choose_blocks"), "block_choice"),
    **dict.fromkeys(("hyper_weights", "hyper_collapse", "hyper_expand"), "hyper_connections"),
    "compress_cells": "compress",
    "gemm_bf16": "gemm_bf16",
    "gemm_wgmma": "gemm_wgmma",
}


@cache
def _weight_files() -> dict[str, list[str]]:
    """Weight types (small letters) that have kernels of their own, by the stem of the .cu file that lists them."""
    found = ((path, path.read_text(encoding="utf-8")) for path in sorted(_KERNELS.glob("weights_*.cu")))
    return {path.stem: re.findall(r"^IKPY_WEIGHT_TYPE\((\w+),", text, re.MULTILINE) for path, text in found}


@cache
def weight_file(name: str) -> str | None:
    """Stem of the .cu file with the kernels of a weight type, None if it has none of its own."""
    return next((file for file, names in _weight_files().items() if name.lower() in names), None)


def kernel_file(kernel: str) -> str:
    """Stem of the .cu file that defines a kernel."""
    if kernel in _KERNEL_FILES:
        return _KERNEL_FILES[kernel]
    if kernel.endswith(("_biased", "_table")):
        return "flash_biased"
    if kernel.startswith("flash"):
        short = all(f"_{dk}_" not in kernel for dk in (192, 256, 576)) and kernel != "flash_combine"
        return "flash_heads" if short else "flash_long"
    file = weight_file(kernel.partition("_")[2]) or "float"
    return file.replace("weights", "wgmma") if kernel.startswith("wgmma_") else file


def family_types() -> dict[str, str]:
    """A middling type of every file of weight kernels, by the file's stem; BF16 for that of floats."""
    return {**{file: names[len(names) // 2] for file, names in _weight_files().items()}, "float": "bf16"}
