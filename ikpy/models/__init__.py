"""Architectures by their GGUF name. Each lives in a file of its own and is imported when a model asks for it."""

from __future__ import annotations

from importlib import import_module

from ikpy.errors import UnsupportedError
from ikpy.models.base import Architecture

# general.architecture -> module:class
ARCHITECTURES = {
    "bailingmoe2": "ikpy.models.bailingmoe2:BailingMoe2",
    "bert": "ikpy.models.bert:Bert",
    "bitnet": "ikpy.models.bitnet:BitNet",
    "bitnet-25": "ikpy.models.bitnet:BitNetB158",
    "bitnet-b1.58": "ikpy.models.bitnet:BitNetB158",
    "cohere2": "ikpy.models.cohere2:Cohere2",
    "command-r": "ikpy.models.command_r:CommandR",
    "deepseek2": "ikpy.models.deepseek2:DeepSeek2",
    "deepseek32": "ikpy.models.deepseek32:DeepSeek32",
    "dots1": "ikpy.models.dots1:Dots1",
    "ernie4_5": "ikpy.models.ernie4_5:Ernie45",
    "ernie4_5-moe": "ikpy.models.ernie4_5:Ernie45Moe",
    "gemma": "ikpy.models.gemma:Gemma",
    "gemma2": "ikpy.models.gemma2:Gemma2",
    "gemma3": "ikpy.models.gemma3:Gemma3",
    "glm4": "ikpy.models.glm4:Glm4",
    "glm4moe": "ikpy.models.glm4moe:Glm4Moe",
    "glm-dsa": "ikpy.models.glm_dsa:GlmDsa",
    "gpt-oss": "ikpy.models.gpt_oss:GptOss",
    "granite": "ikpy.models.granite:Granite",
    "granitemoe": "ikpy.models.granite:Granite",
    "hunyuan-moe": "ikpy.models.hunyuan_moe:HunyuanMoe",
    "llama": "ikpy.models.llama:Llama",
    "llama4": "ikpy.models.llama4:Llama4",
    "minimax-m2": "ikpy.models.minimax_m2:MiniMaxM2",
    "mistral3": "ikpy.models.mistral3:Mistral3",
    "mistral4": "ikpy.models.deepseek2:DeepSeek2",
    "nomic-bert": "ikpy.models.nomic_bert:NomicBert",
    "phi3": "ikpy.models.phi3:Phi3",
    "qwen2": "ikpy.models.qwen2:Qwen2",
    "qwen2moe": "ikpy.models.qwen2moe:Qwen2Moe",
    "qwen3": "ikpy.models.qwen3:Qwen3",
    "qwen3moe": "ikpy.models.qwen3moe:Qwen3Moe",
    "seed_oss": "ikpy.models.seed_oss:SeedOss",
    "smollm3": "ikpy.models.smollm3:SmolLM3",
}


def architecture(name: str) -> type[Architecture]:
    """Class of an architecture; UnsupportedError names the known ones."""
    target = ARCHITECTURES.get(name)
    if target is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"unknown model architecture: '{name}' (this version runs: {known})")
    module, cls = target.split(":")
    return getattr(import_module(module), cls)
