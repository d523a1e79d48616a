"""Size class of a model ("7B", "8x22B", "671B") from its architecture and dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ikpy.gguf.metadata import integers_or, scalar_or

UNKNOWN = "?B"
BY_LAYERS: dict[str, dict[int, str]] = {
    "deci": {32: "7B", 80: "70B", 162: "405B"},
    "deepseek2": {27: "16B", 36: "119B.A6B", 47: "30B.A3B", 60: "236B", 61: "671B"},
    "deepseek4": {43: "284B.A13B", 61: "1.6T.A49B"},
    "deepseek32": {61: "671B", 62: "671B"},
    "mistral4": {27: "16B", 36: "119B.A6B", 47: "30B.A3B", 60: "236B", 61: "671B"},
    "glm-dsa": {61: "290B", 79: "744B.A40B"},
    "glm5-next": {45: "320B.A18B", 46: "320B.A18B"},
    "kimi-linear": {27: "48B.A3B"},
    "kimi-k3": {93: "2.8T.A50B"},
    "lfm2moe": {24: "8B.A1B", 40: "24B.A2B"},
    "qwen2moe": {24: "A2.7B", 28: "57B.A14B"},
    "qwen3moe": {48: "30B.A3B", 94: "235B.A22B"},
    "qwen3vlmoe": {48: "30B.A3B", 94: "235B.A22B"},
    "qwen3next": {48: "80B.A3B"},
    "qwen4exp": {48: "A3B", 49: "A3B"},
    "qwen35moe": {40: "35B.A3B", 41: "35B.A3B", 48: "122B.A10B", 60: "397B.A17B"},
    "qwen": {32: "7B", 40: "13B"},
    "gemma": {18: "2B", 28: "7B"},
    "gemma2": {26: "2B", 42: "9B", 46: "27B"},
    "gemma3": {26: "2B", 34: "4B", 48: "12B", 62: "27B"},
    "llama-embed": {16: "1B", 32: "8B"},
    "eurobert": {12: "210M", 26: "610M", 32: "2.1B"},
    "gemma-embedding": {24: "0.3B"},
    "gemma3n": {30: "E2B", 35: "E4B"},
    "gemma4": {30: "26B.A4B", 35: "2B", 42: "4B", 60: "31B"},
    "phi2": {24: "1B", 32: "3B"},
    "phi3": {24: "1B", 32: "3B", 40: "14B"},
    "command-r": {40: "35B"},
    "cohere2": {32: "8B"},
    "cohere2moe": {49: "30B.A3B"},
    "glm4": {40: "9B", 61: "32B"},
    "glm4moe": {47: "106B.A12B", 48: "102B.A12B", 93: "355B.A32B"},
    "chatglm": {28: "6B", 40: "9B"},
    "mistral3": {26: "3B", 34: "8B", 40: "14B"},
    "falcon": {32: "7B", 60: "40B"},
    "mpt": {32: "7B", 48: "30B"},
    "starcoder": {24: "1B", 36: "3B", 42: "7B", 40: "15B"},
    "starcoder2": {30: "3B", 32: "7B", 40: "15B", 52: "20B", 88: "34B"},
    "baichuan": {32: "7B", 40: "13B"},
    "internlm2": {32: "7B", 48: "20B"},
    "xverse": {32: "7B", 40: "13B", 80: "65B"},
    "stablelm": {24: "1B", 32: "3B", 40: "12B"},
    "orion": {40: "14B"},
    "plamo": {40: "13B"},
    "plamo3": {24: "2B"},
    "chameleon": {32: "7B", 48: "34B"},
    "pangu-embedded": {26: "1B", 34: "7B"},
    "maincoder": {32: "1B"},
    "jais2": {32: "8B", 68: "70B"},
    "codeshell": {42: "7B"},
    "refact": {32: "1B"},
    "jais": {24: "1.3B", 40: "13B"},
    "olmo2": {16: "1B", 32: "7B", 40: "13B", 64: "32B"},
    "olmoe": {16: "7B.A1B"},
    "deepseek": {28: "16B"},
    "deepseek2-ocr": {12: "3B"},
    "bailingmoe": {28: "16B", 88: "290B"},
    "olmo": {22: "1B", 32: "7B", 80: "70B"},
    "gpt2": {12: "0.1B", 24: "0.4B", 36: "0.8B", 48: "1.5B"},
    "dbrx": {40: "16x12B"},
    "phimoe": {32: "16x3.8B"},
    "grovemoe": {48: "30B.A3B"},
    "openelm": {16: "270M", 20: "450M", 28: "1B", 36: "3B"},
    "plm": {32: "1.8B"},
    "smallthinker": {32: "4B", 52: "20B"},
    "grok": {64: "314B"},
    "arctic": {35: "10B+128x3.66B"},
    "hunyuan-moe": {32: "80B.A13B"},
    "hy_v3": {48: "30B.A3B", 49: "30B.A3B", 80: "295B.A21B", 81: "295B.A21B"},
    "laguna": {40: "33B.A3B", 48: "118B.A8B", 70: "225B.A23B"},
    "hy_v4": {78: "770B.A49B"},
    "dots1": {62: "142B"},
    "dots3note": {46: "288B.A19B"},
    "minimax-m3": {60: "428B.A23B"},
    "minimax-m2": {62: "230B.A10B"},
    "ernie4_5-moe": {18: "0.3B", 28: "21B.A3B", 54: "300B.A47B"},
    "bailingmoe2": {20: "16B.A1B", 21: "16B.A1B", 32: "100B.A6B", 33: "100B.A6B"},
    "mellum": {28: "12B.A2.5B"},
    "bailingmoe3": {24: "7.9B.A1.3B", 42: "124B.A5.1B", 43: "124B.A5.1B"},
    "mimo2": {48: "310B.A15B"},
    "step35": {45: "196B.A11B", 48: "196B.A11B"},
    "exaone": {30: "2.4B", 32: "8B", 64: "32B"},
    "exaone4": {30: "1.2B", 64: "32B"},
    "exaone-moe": {48: "236B.A23B", 49: "236B.A23B"},
    "afmoe": {32: "26B.A3B", 56: "6B.A1B", 60: "400B.A13B"},
    "apertus": {32: "8B", 80: "70B"},
    "arcee": {36: "4B"},
    "seed_oss": {64: "36B"},
    "smollm3": {36: "3B"},
    "falcon-h1": {24: "1.5B", 32: "3B", 36: "0.5B", 44: "7B", 66: "1B", 72: "34B"},
    "nemotron_h": {42: "4B", 52: "8B", 56: "9B", 62: "12B", 98: "47B", 118: "56B"},
    "nemotron_h_moe": {52: "31B.A3.5B", 88: "120B.A12B"},
    "granite_swa": {32: "3B", 40: "3B"},
    "jamba": {28: "3B", 32: "51B.A12B", 72: "398B.A94B"},
    "granitemoe": {32: "3B", 40: "3B"},
    "minicpm": {24: "0.5B", 32: "8B", 40: "2B", 52: "1B"},
    "minicpm3": {62: "4B"},
    "modern-bert": {12: "47M", 22: "149M", 28: "395M"},
    "nomic-bert": {12: "137M"},
    "nomic-bert-moe": {12: "475M"},
    "jina-bert-v2": {4: "33M", 12: "137M"},
    "jina-bert-v3": {24: "558M"},
    "neo-bert": {28: "250M"},
    "bitnet": {26: "3B"},
    "bitnet-25": {30: "2B"},
}


class _Shape:
    """Dimensions that decide a size class."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        tokens = metadata.get("tokenizer.ggml.tokens")
        n_tokens = len(tokens) if isinstance(tokens, Sequence) else 0
        self.layers = scalar_or(metadata, f"{arch}.block_count", 0)
        self.embedding = scalar_or(metadata, f"{arch}.embedding_length", 0)
        self.heads = integers_or(metadata, f"{arch}.attention.head_count", 0)[0]
        self.kv_heads = integers_or(metadata, f"{arch}.attention.head_count_kv", self.heads)[0]
        self.experts = scalar_or(metadata, f"{arch}.expert_count", 0)
        self.network = integers_or(metadata, f"{arch}.feed_forward_length", 0)[0]
        self.vocabulary = scalar_or(metadata, f"{arch}.vocab_size", n_tokens)


def _llama(shape: _Shape) -> str:
    if shape.experts == 8:
        return {32: "8x7B", 56: "8x22B"}.get(shape.layers, UNKNOWN)
    if shape.layers == 32:
        if shape.vocabulary == 49152:
            return "3B"
        return "7B" if shape.vocabulary < 40000 else "8B"
    if shape.layers == 80:
        return "65B" if shape.heads == shape.kv_heads else "70B"
    return {22: "1B", 26: "3B", 36: "8B", 40: "13B", 48: "34B", 60: "30B"}.get(shape.layers, UNKNOWN)


def _llama4(shape: _Shape) -> str:
    return {16: "17Bx16E (Scout)", 128: "17Bx128E (Maverick)"}.get(shape.experts, UNKNOWN)


def _qwen2(shape: _Shape) -> str:
    if shape.layers == 24:
        return "0.5B" if shape.embedding == 1024 else "1B"
    if shape.layers == 40:
        return "4B" if shape.heads == 20 else "13B"
    return {32: "7B", 80: "70B"}.get(shape.layers, UNKNOWN)


def _qwen2vl(shape: _Shape) -> str:
    if shape.layers == 28:
        return {1536: "2B", 3584: "7B"}.get(shape.embedding, UNKNOWN)
    return {36: "3B", 64: "32B", 80: "70B"}.get(shape.layers, UNKNOWN)


def _qwen3(shape: _Shape) -> str:
    if shape.layers == 28:
        return "0.6B" if shape.embedding == 1024 else "1.7B"
    if shape.layers == 36:
        return "4B" if shape.embedding == 2560 else "8B"
    return {40: "14B", 64: "32B"}.get(shape.layers, UNKNOWN)


def _qwen35(shape: _Shape) -> str:
    if shape.layers == 24:
        return "0.8B" if shape.embedding == 1024 else "2B"
    if shape.layers == 32:
        return "4B" if shape.embedding == 2560 else "9B"
    return {64: "27B"}.get(shape.layers, UNKNOWN)


def _hunyuan_dense(shape: _Shape) -> str:
    return {1024: "0.5B", 2048: "1.8B", 3072: "4B", 4096: "7B"}.get(shape.embedding, UNKNOWN)


def _qwen3vl(shape: _Shape) -> str:
    return "1.7B" if shape.layers == 28 else _qwen3(shape) if shape.layers in (36, 64) else UNKNOWN


def _gptneox(shape: _Shape) -> str:
    sizes = {
        6: {128: "14M", 512: "70M"},
        12: {768: "160M"},
        16: {2048: "1B"},
        24: {1024: "410M", 2048: "1.4B"},
        32: {2560: "2.8B", 4096: "6.9B"},
        36: {5120: "12B"},
        44: {6144: "20B"},
    }
    return sizes.get(shape.layers, {}).get(shape.embedding, UNKNOWN)


def _bloom(shape: _Shape) -> str:
    if shape.layers == 30:
        return {2560: "3B", 4096: "7B"}.get(shape.embedding, UNKNOWN)
    return "1B" if shape.layers == 24 else UNKNOWN


def _lfm2(shape: _Shape) -> str:
    if shape.layers == 16:
        return {1024: "350M", 1536: "700M", 2048: "1.2B"}.get(shape.embedding, UNKNOWN)
    return {30: "2.6B"}.get(shape.layers, UNKNOWN)


def _granite_hybrid(shape: _Shape) -> str:
    if shape.embedding == 1536:
        return "7B.A1B" if shape.experts else "1B"
    return {768: "350M", 2048: "3B", 4096: "32B.A9B"}.get(shape.embedding, UNKNOWN)


def _mamba2(shape: _Shape) -> str:
    sizes = {768: "0.1B", 1024: "0.3B", 1536: "0.7B", 2048: "1.3B", 2560: "2.7B", 4096: "7B"}
    return sizes.get(shape.embedding, UNKNOWN)


def _nemotron(shape: _Shape) -> str:
    return {3072: "4B", 4096: "8B", 6144: "15B"}.get(shape.embedding, UNKNOWN)


def _mamba(shape: _Shape) -> str:
    sizes = {768: "0.1B", 1024: "0.4B", 1536: "0.8B", 2048: "1.4B", 2560: "2.8B", 4096: "7B"}
    return sizes.get(shape.embedding, UNKNOWN)


def _bert(shape: _Shape) -> str:
    if shape.layers == 12:
        return {384: "33M", 768: "109M"}.get(shape.embedding, UNKNOWN)
    return {3: "17M", 6: "22M", 24: "335M"}.get(shape.layers, UNKNOWN)


def _plamo2(shape: _Shape) -> str:
    if shape.layers == 32:
        return {2048: "2B", 4096: "8B"}.get(shape.embedding, UNKNOWN)
    return "1B" if shape.layers == 16 else UNKNOWN


def _rwkv6(shape: _Shape) -> str:
    if shape.layers == 32:
        return {2560: "3B", 4096: "7B"}.get(shape.embedding, UNKNOWN)
    return {24: "1.6B", 61: "14B", 64: "32B"}.get(shape.layers, UNKNOWN)


def _rwkv7(shape: _Shape) -> str:
    sizes = {
        12: {768: "190M"},
        24: {1024: "450M", 2048: "1.5B"},
        28: {1536: "1.5B", 3584: "7B"},
        32: {2560: "2.9B", 4096: "7B"},
        61: {4096: "14B"},
    }
    return sizes.get(shape.layers, {}).get(shape.embedding, UNKNOWN)


def _t5(shape: _Shape) -> str:
    sizes = {
        6: {2048: "60M"},
        8: {1024: "80M"},
        12: {2048: "250M", 3072: "220M"},
        24: {2816: "780M", 4096: "770M", 5120: "3B", 10240: "11B", 16384: "3B", 65536: "11B"},
    }
    return sizes.get(shape.layers, {}).get(shape.network, UNKNOWN)


BY_SHAPE: dict[str, Callable[[_Shape], str]] = {
    "llama": _llama,
    "llama4": _llama4,
    "qwen2": _qwen2,
    "qwen2vl": _qwen2vl,
    "qwen3": _qwen3,
    "qwen3vl": _qwen3vl,
    "qwen35": _qwen35,
    **dict.fromkeys(("hunyuan-dense", "hunyuan_vl"), _hunyuan_dense),
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron": _nemotron,
    "bloom": _bloom,
    "gptneox": _gptneox,
    "bert": _bert,
    "plamo2": _plamo2,
    **dict.fromkeys(("rwkv6", "rwkv6qwen2"), _rwkv6),
    **dict.fromkeys(("rwkv7", "arwkv7"), _rwkv7),
    "t5": _t5,
}


def size_class(metadata: Mapping[str, Any]) -> str:
    """Size class of the model a GGUF file describes, "?B" if it is none of the known ones."""
    arch = str(metadata.get("general.architecture", ""))
    shape = _Shape(metadata, arch)
    if arch in BY_SHAPE:
        return BY_SHAPE[arch](shape)
    return BY_LAYERS.get(arch, {}).get(shape.layers, UNKNOWN)
