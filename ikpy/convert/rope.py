"""RoPE scaling of config.json as GGUF keys and frequency factors (YaRN: arXiv:2309.00071)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ikpy.convert.config import Config

Value = int | float | bool | str


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """1 + 0.1 m ln(factor), 1 without stretching."""
    return 1.0 + 0.1 * multiplier * math.log(factor) if factor > 1 else 1.0


def scaling_keys(config: Config, *, own_magnitude: bool = False) -> dict[str, Value]:
    """Keys `rope.*` without the architecture prefix. own_magnitude: the family writes the YaRN magnitude itself."""
    rope = config.rope()
    keys: dict[str, Value] = {"rope.freq_base": float(rope["rope_theta"])}
    kind = rope["rope_type"]
    if kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    elif kind == "yarn":
        keys |= _yarn(config, rope, own_magnitude)
    return keys


def _yarn(config: Config, rope: dict[str, Any], own_magnitude: bool) -> dict[str, Value]:
    factor = float(rope["factor"])
    original = rope.get("original_max_position_embeddings") or config.n_context
    keys: dict[str, Value] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(original),
    }
    if own_magnitude:
        return keys
    betas = tuple(yarn_corners(rope).values())
    config.require(f"YaRN with beta_fast {betas[0]:g} and beta_slow {betas[1]:g} instead of 32 and 1", betas == (32, 1))
    magnitude = rope.get("attention_factor")
    if magnitude is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        magnitude = yarn_magnitude(factor, rope["mscale"]) / yarn_magnitude(factor, rope["mscale_all_dim"])
    if magnitude is not None and not math.isclose(magnitude, yarn_magnitude(factor)):
        keys["rope.scaling.attn_factor"] = float(magnitude) / yarn_magnitude(factor)
    return keys


def yarn_corners(rope: dict[str, Any]) -> dict[str, float]:
    """Keys of the rotations between which YaRN fades, for architectures that have them."""
    betas = {"fast": rope.get("beta_fast") or 32, "slow": rope.get("beta_slow") or 1}
    return {f"rope.scaling.yarn_beta_{name}": float(beta) for name, beta in betas.items()}


def scaling_notes(config: Config) -> list[str]:
    """What GGUF files cannot say about the scaling of any architecture."""
    rope = config.rope()
    if rope["rope_type"] != "yarn" or rope.get("truncate", True):
        return []
    return ["the YaRN ramp is rounded to whole dimensions when the file is run, the model's is not"]


def section_keys(config: Config, n_rot: int) -> dict[str, list[int]]:
    """Pairs of elements that turn by time, row and column; the fourth part is not used."""
    sections = config.rope().get("mrope_section")
    fits = isinstance(sections, list) and len(sections) == 3 and 2 * sum(sections) == n_rot
    config.require(f"mrope_section {sections} of {n_rot} rotated elements", fits)
    return {"rope.dimension_sections": [*(sections or []), 0]}


def dynamic_notes(config: Config) -> list[str]:
    """What is left out of dynamic scaling, which sets in beyond the context."""
    if config.rope()["rope_type"] != "dynamic":
        return []
    length = config.n_context
    return [f"beyond {length} tokens the model scales RoPE by the length of the text, which no file can say"]


def llama3_factors(rope: dict[str, Any], n_rot: int) -> np.ndarray:
    """Divisors of the frequencies, f32 [n_rot/2]: 1 for short waves, `factor` for long ones, between them a ramp.

    ValueError for numbers that give no such divisors.
    """
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    original = float(rope["original_max_position_embeddings"])
    wavelength = 2 * np.pi * float(rope["rope_theta"]) ** (np.arange(0, n_rot, 2) / n_rot)
    # Llama 4 Scout has low = high: a step instead of a ramp.
    smooth = np.clip((original / wavelength - low) / max(high - low, 1e-30), 0, 1)
    with np.errstate(all="ignore"):
        divisors = (1 / ((1 - smooth) / np.float64(factor) + smooth)).astype(np.float32)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise ValueError(f"RoPE scaling 'llama3' by {factor:g}, from {low:g} to {high:g} of {original:g} positions")
    return divisors
