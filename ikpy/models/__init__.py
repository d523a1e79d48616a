"""Architectures by their GGUF name. Each lives in a file of its own and is imported when a model asks for it."""

from __future__ import annotations

from importlib import import_module

from ikpy.errors import UnsupportedError
from ikpy.models.base import Architecture

# general.architecture -> module:class
ARCHITECTURES = {
    "afmoe": "ikpy.models.afmoe:Afmoe",
    "apertus": "ikpy.models.apertus:Apertus",
    "arcee": "ikpy.models.arcee:Arcee",
    "bailingmoe": "ikpy.models.deepseek:BailingMoe",
    "bailingmoe2": "ikpy.models.bailingmoe2:BailingMoe2",
    "bailingmoe3": "ikpy.models.bailingmoe3:BailingMoe3",
    "bert": "ikpy.models.bert:Bert",
    "bitnet": "ikpy.models.bitnet:BitNet",
    "bitnet-25": "ikpy.models.bitnet:BitNetB158",
    "bitnet-b1.58": "ikpy.models.bitnet:BitNetB158",
    "cohere2": "ikpy.models.cohere2:Cohere2",
    "cohere2moe": "ikpy.models.cohere2moe:Cohere2Moe",
    "command-r": "ikpy.models.command_r:CommandR",
    "deci": "ikpy.models.deci:Deci",
    "deepseek": "ikpy.models.deepseek:DeepSeek",
    "deepseek2": "ikpy.models.deepseek2:DeepSeek2",
    "deepseek4": "ikpy.models.deepseek4:DeepSeek4",
    "deepseek32": "ikpy.models.deepseek32:DeepSeek32",
    "dots1": "ikpy.models.dots1:Dots1",
    "dots3note": "ikpy.models.dots3note:Dots3Note",
    "ernie4_5": "ikpy.models.ernie4_5:Ernie45",
    "ernie4_5-moe": "ikpy.models.ernie4_5:Ernie45Moe",
    "exaone": "ikpy.models.exaone:Exaone",
    "exaone-moe": "ikpy.models.exaone_moe:ExaoneMoe",
    "exaone4": "ikpy.models.exaone4:Exaone4",
    "falcon-h1": "ikpy.models.falcon_h1:FalconH1",
    "gemma": "ikpy.models.gemma:Gemma",
    "gemma-embedding": "ikpy.models.gemma_embedding:GemmaEmbedding",
    "gemma2": "ikpy.models.gemma2:Gemma2",
    "gemma3": "ikpy.models.gemma3:Gemma3",
    "gemma4": "ikpy.models.gemma4:Gemma4",
    "glm4": "ikpy.models.glm4:Glm4",
    "glm4moe": "ikpy.models.glm4moe:Glm4Moe",
    "glm-dsa": "ikpy.models.glm_dsa:GlmDsa",
    "glm5-next": "ikpy.models.glm5_next:Glm5Next",
    "gpt-oss": "ikpy.models.gpt_oss:GptOss",
    "granite": "ikpy.models.granite:Granite",
    "granite_swa": "ikpy.models.granite_swa:GraniteSwa",
    "granitehybrid": "ikpy.models.granite_hybrid:GraniteHybrid",
    "granitemoe": "ikpy.models.granite:Granite",
    "hunyuan-dense": "ikpy.models.hunyuan_dense:HunyuanDense",
    "hunyuan-moe": "ikpy.models.hunyuan_moe:HunyuanMoe",
    "hy_v3": "ikpy.models.hy_v3:HyV3",
    "hy_v4": "ikpy.models.hy_v4:HyV4",
    "internlm2": "ikpy.models.internlm2:InternLM2",
    "jamba": "ikpy.models.jamba:Jamba",
    "jina-bert-v3": "ikpy.models.nomic_bert:JinaBertV3",
    "kimi-k3": "ikpy.models.kimi_k3:KimiK3",
    "kimi-linear": "ikpy.models.kimi_linear:KimiLinear",
    "laguna": "ikpy.models.laguna:Laguna",
    "lfm2": "ikpy.models.lfm2:Lfm2",
    "lfm2moe": "ikpy.models.lfm2:Lfm2Moe",
    "llama": "ikpy.models.llama:Llama",
    "llama4": "ikpy.models.llama4:Llama4",
    "mamba": "ikpy.models.mamba:MambaModel",
    "mamba2": "ikpy.models.mamba2:Mamba2Model",
    "mellum": "ikpy.models.mellum:Mellum",
    "mimo2": "ikpy.models.mimo2:Mimo2",
    "minicpm": "ikpy.models.minicpm:MiniCPM",
    "minicpm3": "ikpy.models.minicpm:MiniCPM3",
    "minimax-m2": "ikpy.models.minimax_m2:MiniMaxM2",
    "minimax-m3": "ikpy.models.minimax_m3:MiniMaxM3",
    "mistral3": "ikpy.models.mistral3:Mistral3",
    "mistral4": "ikpy.models.deepseek2:DeepSeek2",
    "modern-bert": "ikpy.models.modern_bert:ModernBert",
    "nemotron": "ikpy.models.nemotron:Nemotron",
    "nemotron_h": "ikpy.models.nemotron_h:NemotronH",
    "nemotron_h_moe": "ikpy.models.nemotron_h:NemotronHMoe",
    "nomic-bert": "ikpy.models.nomic_bert:NomicBert",
    "nomic-bert-moe": "ikpy.models.nomic_bert:NomicBertMoe",
    "olmo2": "ikpy.models.olmo2:Olmo2",
    "olmoe": "ikpy.models.olmoe:Olmoe",
    "paddleocr": "ikpy.models.ernie4_5:PaddleOcr",
    "phi3": "ikpy.models.phi3:Phi3",
    "qwen2": "ikpy.models.qwen2:Qwen2",
    "qwen2moe": "ikpy.models.qwen2moe:Qwen2Moe",
    "qwen2vl": "ikpy.models.qwen2vl:Qwen2VL",
    "qwen3": "ikpy.models.qwen3:Qwen3",
    "qwen35": "ikpy.models.qwen35:Qwen35",
    "qwen35moe": "ikpy.models.qwen35:Qwen35Moe",
    "qwen3moe": "ikpy.models.qwen3moe:Qwen3Moe",
    "qwen3next": "ikpy.models.qwen3next:Qwen3Next",
    "qwen3vl": "ikpy.models.qwen3vl:Qwen3VL",
    "qwen3vlmoe": "ikpy.models.qwen3vl:Qwen3VLMoe",
    "seed_oss": "ikpy.models.seed_oss:SeedOss",
    "smollm3": "ikpy.models.smollm3:SmolLM3",
    "step35": "ikpy.models.step35:Step35",
}


def architecture(name: str) -> type[Architecture]:
    """Class of an architecture; UnsupportedError names the known ones."""
    target = ARCHITECTURES.get(name)
    if target is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedError(f"unknown model architecture: '{name}' (this version runs: {known})")
    module, cls = target.split(":")
    return getattr(import_module(module), cls)
