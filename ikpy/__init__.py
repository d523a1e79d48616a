"""ikpy: run and make quantized GGUF language models.

Public names are imported on first use, so that `import ikpy` stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Batch": "ikpy.engine.batch",
    "Context": "ikpy.engine.context",
    "ContextParams": "ikpy.engine.params",
    "DeviceParams": "ikpy.graph.placement",
    "GGUFFile": "ikpy.gguf.reader",
    "KVCacheFullError": "ikpy.engine.kv_cache",
    "LLM": "ikpy.llm",
    "Model": "ikpy.engine.model",
    "ModelParams": "ikpy.engine.params",
    "PlacementParams": "ikpy.graph.placement",
    "Sampler": "ikpy.engine.sampling",
    "SamplingParams": "ikpy.engine.sampling",
    "Vocab": "ikpy.vocab",
}

__all__ = [
    "LLM",
    "Batch",
    "Context",
    "ContextParams",
    "DeviceParams",
    "GGUFFile",
    "KVCacheFullError",
    "Model",
    "ModelParams",
    "PlacementParams",
    "Sampler",
    "SamplingParams",
    "Vocab",
    "__version__",
    "default_model_path",
    "demo_text_path",
]


def default_model_path() -> Path:
    """The bundled tiny-mla-moe model (deepseek2, 12.5 M parameters, F16), used when no model is named."""
    return Path(__file__).parent / "assets" / "tiny-mla-moe-f16.gguf"


def demo_text_path() -> Path:
    """The bundled English text, for a first perplexity of the bundled model."""
    return default_model_path().parent / "demo-text.txt"


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'ikpy' has no attribute '{name}'")
