"""Projectors by the `model_type` of config.json."""

from __future__ import annotations

from importlib import import_module

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.projectors.base import FileProjector
from ikpy.errors import FileFormatError, UnsupportedError

_FOLDER = "ikpy.convert.projectors"
PROJECTORS = {
    "NemotronH_Nano_Omni_Reasoning_V3": "nemotron:Nemotron",
    "NemotronH_Nano_VL_V2": "nemotron:Nemotron",
    "audioflamingo3": "sound:AudioFlamingo3",
    "deepseek_vl_v2": "deepseek_ocr:DeepseekOcr",
    "dots3_note": "dots3note:Dots3Note",
    "dots_ocr": "dots_ocr:DotsOcr",
    "exaone4_5": "qwen_vl:Exaone45",
    "gemma3": "siglip:Gemma3",
    "gemma3n": "gemma3n:Gemma3n",
    "gemma4": "gemma4:Gemma4",
    "glm": "glm_edge:GlmEdge",
    "glm46v": "glm_v:Glm4v",
    "glm4v": "glm_v:Glm4v",
    "glm4v_moe": "glm_v:Glm4v",
    "glm5_next": "glm_v:Glm5v",
    "glmasr": "glm_asr:GlmAsr",
    "granite4_vision": "granite4:Granite4Vision",
    "granite_speech": "granite_speech:GraniteSpeech",
    "granite_speech_plus": "granite_speech:GraniteSpeech",
    "hunyuan_vl": "hunyuan:HunyuanVL",
    "idefics3": "siglip:Idefics3",
    "internvl": "internvl:InternVL",
    "internvl_chat": "internvl:InternVLChat",
    "kimi_k25": "kimi:KimiK25",
    "kimi_vl": "kimi:KimiVL",
    "lfm2-vl": "siglip:Lfm2",
    "lfm2_audio": "lfm2_audio:Lfm2Audio",
    "lfm2_vl": "siglip:Lfm2",
    "lighton_ocr": "pixtral:LightOnOcr",
    "llama4": "llama4:Llama4",
    "llava": "siglip:Llava",
    "llava_next": "siglip:LlavaNext",
    "meralion2": "sound:Meralion",
    "minicpmo": "minicpmv_resampler:MiniCpmV",
    "minicpmv": "minicpmv_resampler:MiniCpmV",
    "minicpmv4_6": "minicpmv:MiniCpmV46",
    "minimax_m3_vl": "minimax_m3:MiniMaxM3",
    "mistral3": "pixtral:Pixtral",
    "nemotron_h_omni": "nemotron:Nemotron",
    "qwen2_audio": "sound:Qwen2Audio",
    "qwen2_5_omni": "omni:Qwen25Omni",
    "qwen2_5_omni_thinker": "omni:Qwen25Omni",
    "qwen2_5_vl": "qwen_vl:Qwen25VL",
    "qwen2_vl": "qwen_vl:Qwen2VL",
    "qwen3_5": "qwen_vl:Qwen3VL",
    "qwen3_5_moe": "qwen_vl:Qwen3VL",
    "qwen3_asr": "omni:Qwen3Asr",
    "qwen3_omni_moe": "omni:Qwen3Omni",
    "qwen3_omni_moe_thinker": "omni:Qwen3Omni",
    "qwen3_vl": "qwen_vl:Qwen3VL",
    "qwen3_vl_moe": "qwen_vl:Qwen3VL",
    "smolvlm": "siglip:Idefics3",
    "step3p7": "step3:Step3VL",
    "step_robotics": "step3:Step3VL",
    "ultravox": "sound:Ultravox",
    "voxtral": "sound:Voxtral",
}
# Encoders that other models of the type have: model_type of vision_config.
_BY_ENCODER = {("llava", "pixtral"): "pixtral:Pixtral"}


def has_projector(checkpoint: Checkpoint) -> bool:
    """Whether a model of this type may have a projector that is known."""
    model_type = checkpoint.config.get("model_type")
    parts = "vision", "audio", "whisper", "speech"
    names = *(f"{part}_config" for part in parts), "encoder_config", "encoder"
    has_encoder = any(isinstance(checkpoint.config.get(name), dict) for name in names)
    return has_encoder and isinstance(model_type, str) and model_type in PROJECTORS


def projector(checkpoint: Checkpoint) -> FileProjector:
    """The projector of a checkpoint; UnsupportedError names the known model types."""
    model_type = checkpoint.config.get("model_type", "")
    encoder = checkpoint.config.get("vision_config")
    path = checkpoint.folder / "config.json"
    if not isinstance(model_type, str):
        raise FileFormatError(f"{path}: 'model_type' is {model_type!r}, not a name")
    encoder_type = encoder.get("model_type") if isinstance(encoder, dict) else None
    target = _BY_ENCODER.get((model_type, encoder_type)) if isinstance(encoder_type, str) else None
    target = target or PROJECTORS.get(model_type)
    if target is None:
        known = ", ".join(sorted(PROJECTORS))
        raise UnsupportedError(f"{path}: no known projector of a model of type '{model_type}' (known types: {known})")
    module, class_name = target.split(":")
    kind: type[FileProjector] = getattr(import_module(f"{_FOLDER}.{module}"), class_name)
    made = kind.chosen(checkpoint)(checkpoint)
    made.check()
    return made
