"""Families by the `model_type` of config.json (that of `text_config` for models with images)."""

from __future__ import annotations

from importlib import import_module

from ikpy.convert.config import Config
from ikpy.convert.families.base import Family
from ikpy.errors import UnsupportedError, similar_names

_FOLDER = "ikpy.convert.families"
FAMILIES = {
    "PanguEmbedded": "llama:PanguEmbedded",
    "afmoe": "windowed_moe:Afmoe",
    "apertus": "llama:Apertus",
    "arcee": "llama:Arcee",
    "arctic": "older_moe:Arctic",
    "baichuan": "older:Baichuan",
    "bailing_hybrid": "bailing_hybrid:BailingHybrid",
    "bailing_moe": "moe:BailingMoe",
    "bailing_moe_v2": "moe:BailingMoe2",
    "bloom": "alibi:Bloom",
    "chameleon": "older:Chameleon",
    "chatglm": "glm:ChatGlm",
    "codeshell": "gpt2:CodeShell",
    "cohere": "cohere:CommandR",
    "cohere2": "cohere:Cohere2",
    "cohere2_moe": "cohere:Cohere2Moe",
    "dbrx": "older_moe:Dbrx",
    "deci": "deci:Deci",
    "deepseek_v2": "deepseek:DeepSeekV2",
    "deepseek_v3": "deepseek:DeepSeekV3",
    "deepseek_v32": "deepseek:DeepSeekV32",
    "deepseek_v4": "deepseek4:DeepSeekV4",
    "dflash": "dflash:DFlash",
    "dots1": "moe:Dots1",
    "dots3_note": "dots3note:Dots3Note",
    "dots3_note_text": "dots3note:Dots3Note",
    "dots_ocr": "qwen:Qwen2",
    "eagle3": "eagle3:Eagle3",
    "ernie4_5": "ernie:Ernie45",
    "ernie4_5_moe": "ernie:Ernie45Moe",
    "eurobert": "llama:EuroBert",
    "exaone": "llama:Exaone",
    "exaone4": "olmo:Exaone4",
    "exaone4_5_text": "olmo:Exaone4",
    "exaone_moe": "windowed_moe:ExaoneMoe",
    "falcon": "plain:Falcon",
    "falcon_h1": "falcon_h1:FalconH1",
    "falcon_mamba": "jamba:FalconMamba",
    "gemma": "gemma:Gemma",
    "gemma2": "gemma:Gemma2",
    "gemma3_text": "gemma:Gemma3",
    "gemma3n_text": "gemma3n:Gemma3n",
    "gemma4_assistant": "gemma4_assistant:Gemma4Assistant",
    "gemma4_text": "gemma4:Gemma4",
    "glm": "glm:Glm",
    "glm4": "glm:Glm4",
    "glm4_moe": "glm:Glm4Moe",
    "glm4_moe_lite": "deepseek:DeepSeekV3",
    "glm4v": "glm:Glm4v",
    "glm4v_moe_text": "glm:Glm4vMoe",
    "glm4v_text": "glm:Glm4v",
    "glm5_next": "glm5_next:Glm5Next",
    "glm5_next_text": "glm5_next:Glm5Next",
    "glm_moe_dsa": "deepseek:GlmMoeDsa",
    "glmasr": "llama:Llama",
    "gpt2": "gpt2:Gpt2",
    "gpt_bigcode": "gpt2:GptBigCode",
    "gpt_neox": "plain:GptNeoX",
    "gpt_oss": "gpt_oss:GptOss",
    "gpt_refact": "alibi:Refact",
    "granite": "granite:Granite",
    "granite4_vision_text": "granite:Granite",
    "granite_swa": "granite_swa:GraniteSwa",
    "granitemoe": "granite:GraniteMoe",
    "granitemoe_swa": "granite_swa:GraniteMoeSwa",
    "granitemoehybrid": "granite_hybrid:GraniteHybrid",
    "grove_moe": "qwen:GroveMoe",
    "grok": "older_moe:Grok",
    "grok-1": "older_moe:Grok",
    "hunyuan_v1_dense": "moe:HunyuanDense",
    "hunyuan_v1_moe": "moe:HunyuanMoe",
    "hunyuan_vl": "hunyuan_vl:HunyuanVL",
    "hunyuan_vl_text": "hunyuan_vl:HunyuanVL",
    "hy_v3": "hy_v3:HyV3",
    "hy_v4": "hy_v4:HyV4",
    "iquestcoder": "llama:IQuestCoder",
    "jais": "alibi:Jais",
    "jais2": "nemotron:Jais2",
    "jamba": "jamba:Jamba",
    "jina_bert_v2": "alibi_encoders:JinaBertV2",
    "jina_embeddings_v3": "jina:JinaEmbeddingsV3",
    "kimi_k2": "deepseek:DeepSeekV3",
    "kimi_k3": "kimi_k3:KimiK3",
    "kimi_linear": "kimi_linear:KimiLinear",
    "laguna": "laguna:Laguna",
    "lfm2": "lfm2:Lfm2",
    "lfm2_moe": "lfm2:Lfm2Moe",
    "llama": "llama:Llama",
    "llama_bidirec": "llama:LlamaEmbed",
    "llama4_text": "llama4:Llama4",
    "maincoder": "llama:Maincoder",
    "mamba": "jamba:Mamba",
    "mamba2": "mamba2:Mamba2",
    "mellum": "qwen:Mellum",
    "mimo_v2_flash": "mimo2:Mimo2",
    "minicpm": "minicpm:MiniCPM",
    "minicpm3": "minicpm:MiniCPM3",
    "minimax_m2": "moe:MiniMaxM2",
    "minimax_m3_vl": "minimax_m3:MiniMaxM3",
    "minimax_m3_vl_text": "minimax_m3:MiniMaxM3",
    "ministral": "llama:Llama",
    "ministral3": "llama:Ministral3",
    "mistral": "llama:Llama",
    "mistral4": "mistral4:Mistral4",
    "mixtral": "llama:Mixtral",
    "modernbert": "modern_bert:ModernBert",
    "mpt": "alibi:Mpt",
    "mt5": "t5:T5",
    "neobert": "alibi_encoders:NeoBert",
    "nemotron": "nemotron:Nemotron",
    "nemotron-nas": "deci:Deci",
    "nemotron_h": "nemotron_h:NemotronH",
    "olmo": "olmo:Olmo",
    "olmo2": "olmo:Olmo2",
    "olmo3": "olmo:Olmo3",
    "olmoe": "olmo:Olmoe",
    "openelm": "older_moe:OpenElm",
    "orion": "older:Orion",
    "phi": "plain:Phi",
    "phi3": "phi3:Phi3",
    "phimoe": "phi3:PhiMoe",
    "plamo": "older:Plamo",
    "plamo2": "plamo:Plamo2",
    "plamo3": "plamo:Plamo3",
    "plm": "older_moe:Plm",
    "qwen": "older:Qwen",
    "qwen2": "qwen:Qwen2",
    "qwen2_5_omni_text": "qwen_vl:Qwen2VL",
    "qwen2_5_vl": "qwen_vl:Qwen2VL",
    "qwen2_5_vl_text": "qwen_vl:Qwen2VL",
    "qwen2_moe": "qwen:Qwen2Moe",
    "qwen2_vl": "qwen_vl:Qwen2VL",
    "qwen2_vl_text": "qwen_vl:Qwen2VL",
    "qwen3": "qwen:Qwen3",
    "qwen3_5_moe_text": "qwen_next:Qwen35Moe",
    "qwen3_5_text": "qwen_next:Qwen35",
    "qwen3_asr_text": "qwen_vl:Qwen3VL",
    "qwen3_moe": "qwen:Qwen3Moe",
    "qwen3_omni_moe_text": "qwen_vl:Qwen3VLMoe",
    "qwen3_next": "qwen_next:Qwen3Next",
    "qwen3_vl_moe_text": "qwen_vl:Qwen3VLMoe",
    "qwen3_vl_text": "qwen_vl:Qwen3VL",
    "qwen4_exp": "qwen4_exp:Qwen4Exp",
    "qwen4_exp_text": "qwen4_exp:Qwen4Exp",
    "rwkv6": "rwkv:Rwkv6",
    "rwkv6qwen2": "rwkv:Rwkv6Qwen2",
    "rwkv7": "rwkv:Rwkv7",
    "rwkv7_fla": "rwkv:Rwkv7",
    "rwkv_hybrid": "rwkv:Arwkv7",
    "sarvam_mla": "sarvam:SarvamMla",
    "sarvam_moe": "sarvam:SarvamMoe",
    "seed_oss": "llama:SeedOss",
    "smallthinker": "older_moe:SmallThinker",
    "smollm3": "llama:SmolLM3",
    "solar_open": "glm:SolarOpen",
    "stablelm": "plain:StableLM",
    "starcoder2": "plain:StarCoder2",
    "step3p5": "step35:Step35",
    "step3p7": "step35:Step35",
    "t5": "t5:T5",
    "umt5": "t5:T5",
    "xverse": "older:Xverse",
}
# Classes whose checkpoints carry the model type of an older relative.
_MODEL_TYPES = {
    **dict.fromkeys(("JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"), "jina_bert_v2"),
    "BailingMoeV2ForCausalLM": "bailing_moe_v2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "Gemma4AssistantForCausalLM": "gemma4_assistant",
    "Gemma4UnifiedAssistantForCausalLM": "gemma4_assistant",
    "MiniMaxM2ForCausalLM": "minimax_m2",
}


# Of the text part, by the version of the whole.
_MINICPM = {"2.5": "llama", "2.6": "qwen2", "4.0": "llama", "4.5": "qwen3"}


def _is_eagle3(config: Config) -> bool:
    """Whether a configuration is that of a drafter: most say that they are a LLaMA of one layer."""
    if "eagle3" in config.class_name.lower():
        return True
    is_drafter = any(config.values.get(name) is not None for name in ("draft_vocab_size", "eagle_config"))
    return is_drafter and "dflash_config" not in config.values and config.values.get("num_hidden_layers") == 1


def _is_dflash(config: Config) -> bool:
    """Whether a configuration is that of a drafter of blocks, most of which say that they are a Qwen 3."""
    name = config.class_name.lower()
    return config.model_type != "deepseek_v4" and (
        "dflash_config" in config.values or "dflash" in name or "dspark" in name
    )


def _model_type(config: Config) -> str:
    """The model type that tells the family."""
    if _is_dflash(config):
        return "dflash"
    if _is_eagle3(config):
        return "eagle3"
    if config.model_type in ("minicpmv", "minicpmo"):
        return _MINICPM.get(config.minicpm_version, config.model_type)
    return _MODEL_TYPES.get(config.class_name, config.model_type)


def family(config: Config) -> Family:
    """The family of a configuration; UnsupportedError names similar ones."""
    name = config.class_name
    model_type = _model_type(config)
    target = FAMILIES.get(model_type)
    if target is None:
        known = similar_names(model_type, FAMILIES)
        raise UnsupportedError(
            f"{config.path}: unknown model architecture: '{model_type}' {name} (docs/models.md lists the known model "
            f"types{known})"
        )
    module, class_name = target.split(":")
    kind: type[Family] = getattr(import_module(f"{_FOLDER}.{module}"), class_name)
    made = kind.chosen(config)(config)
    made.check()
    return made
