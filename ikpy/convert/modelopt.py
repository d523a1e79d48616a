"""What checkpoints of NVIDIA's ModelOpt say of their quantization, in config.json or hf_quant_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ikpy.errors import UnsupportedError

METHOD, OWN_FILE = "modelopt", "hf_quant_config.json"
# Of weights in NVFP4 or FP8 alone; what is done with activations does not matter.
_ALGORITHMS = (
    "NVFP4",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MIXED_PRECISION",
)
CACHE_SCALES = (".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def check_algorithms(values: dict[str, Any], path: Path) -> None:
    """UnsupportedError for weights in other forms than NVFP4 and FP8."""
    layers = values.get("quantized_layers") or {}
    for algorithm in (values.get("quant_algo"), *(layer.get("quant_algo") for layer in layers.values())):
        if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
            raise UnsupportedError(f"{path}: weights in {algorithm} of ModelOpt cannot be converted")
