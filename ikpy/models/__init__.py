"""Architectures by their GGUF name. Each lives in a file of its own and is imported when a model asks for it."""

from __future__ import annotations

from importlib import import_module

from ikpy.errors import UnsupportedError
from ikpy.models.base import Architecture

# general.architecture -> module:class
ARCHITECTURES = {
    "deepseek2": "ikpy.models.deepseek2:DeepSeek2",
    "llama": "ikpy.models.llama:Llama",
    "qwen2": "ikpy.models.qwen2:Qwen2",
    "qwen3": "ikpy.models.qwen3:Qwen3",
    "qwen3moe": "ikpy.models.qwen3moe:Qwen3Moe",
}


def architecture(name: str) -> type[Architecture]:
    """Class of an architecture; UnsupportedError names the known ones."""
    target = ARCHITECTURES.get(name)
    if target is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"unknown model architecture: '{name}' (this version runs: {known})")
    module, cls = target.split(":")
    return getattr(import_module(module), cls)
