"""LLaMA 1 to 3, Mistral, Mixtral, Ministral 3 and 8B, IQuest Coder, SmolLM3, Seed-OSS, AFM, Apertus, EXAONE 3,
openPangu, Maincoder, Llama-Embed-Nemotron, EuroBERT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from ikpy.convert.config import Config
from ikpy.convert.families.base import (
    ATTENTION,
    ATTENTION_AND_DENSE,
    DENSE,
    HEAD_NORMS,
    MIXTRAL_EXPERTS,
    QKV,
    Family,
    Keys,
    Modules,
    feed_forward,
    full_window_note,
)
from ikpy.convert.rope import yarn_corners, yarn_magnitude
from ikpy.convert.sentence import dense_matrices, pooling_number
from ikpy.models.hparams import POOLINGS

# As configurations of embedders call them -> as GGUF files do.
_POOLINGS = {"avg": "mean", "cls": "cls", "last": "last"}

_USUAL = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "rms_norm_eps": 1e-6}


class Llama(Family):
    """LLaMA 1 to 3, Mistral and look-alikes."""

    arch = "llama"
    biases = ATTENTION_AND_DENSE
    rotates_pairs = True
    has_windows = True  # told by a note
    rope_scalings = ("llama3",)
    # Of transformers' configuration classes: models with images leave them out of their text_config.
    usual: ClassVar[Mapping[str, Mapping[str, int | float]]] = {
        "llama": {**_USUAL, "intermediate_size": 11008, "max_position_embeddings": 2048},
        "mistral": {
            **_USUAL,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
    }

    def __init__(self, config: Config) -> None:
        if config.has_part:
            config.values = {**self.usual.get(config.model_type, {}), **config.values}
        super().__init__(config)

    def notes(self) -> list[str]:
        return full_window_note(self.config)


class Embedder(Family):
    """Every token sees its text; how states are pooled stands in modules.json or in the configuration."""

    has_output = False
    writes_texts = False
    outer: ClassVar[Mapping[str, str]] = {**Family.outer, "embed_tokens": "token_embd", "norm": "output_norm"}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.pooling = pooling_number(config.path.parent)
        self.has_matrices = bool(dense_matrices(config.path.parent))

    def check(self) -> None:
        super().check()
        pooling = self.config.get("pooling", default="avg")
        self.config.require(f"pooling '{pooling}'", self.pooling is not None or pooling in _POOLINGS)
        self.config.require("matrices behind pooling", not self.has_matrices)

    def keys(self) -> Keys:
        named = _POOLINGS.get(str(self.config.get("pooling", default="avg")), "mean")
        number = POOLINGS.index(named) if self.pooling is None else self.pooling
        return super().keys() | {"attention.causal": False, "pooling_type": number}


class LlamaEmbed(Embedder, Llama):
    """Llama-Embed-Nemotron."""

    arch = "llama-embed"


class EuroBert(Embedder):
    """Without biases, halves of heads rotated."""

    arch = "eurobert"


class IQuestCoder(Llama):
    """IQuest Coder, whose configuration may name a window that is not used."""

    def check(self) -> None:
        super().check()
        clip = self.config.get("clip_qkv", default=None)
        self.config.require(f"clip_qkv {clip}", clip is None)
        windows = bool(self.config.get("use_sliding_window", default=False))
        self.config.require("use_sliding_window true", not windows)

    def notes(self) -> list[str]:
        return []


class Mixtral(Llama):
    """Experts in every layer."""

    modules: ClassVar[Modules] = {**ATTENTION, **MIXTRAL_EXPERTS}


class Ministral3(Llama):
    """Query temperature and YaRN magnitude in keys of their own."""

    arch = "mistral3"
    own_yarn_magnitude = True

    def keys(self) -> Keys:
        rope = self.config.rope()
        keys = super().keys()
        keys["attention.temperature_scale"] = float(rope.get("llama_4_scaling_beta") or 0.0)
        if rope["rope_type"] == "yarn":
            multiplier = float(rope.get("mscale_all_dim") or 0.0)
            is_known = multiplier == 0 or rope.get("mscale") == 1
            self.config.require(f"YaRN with mscale {rope.get('mscale')}", is_known)
            factor, given = float(rope["factor"]), rope.get("attention_factor")
            usual = yarn_magnitude(factor) / yarn_magnitude(factor, multiplier)
            self.config.require(f"YaRN with attention_factor {given}", given is None or math.isclose(given, usual))
            keys |= yarn_corners(rope) | {"rope.scaling.yarn_log_multiplier": multiplier}
        elif keys["attention.temperature_scale"]:
            keys["rope.scaling.original_context_length"] = int(rope["original_max_position_embeddings"])
        return keys


class SmolLM3(Family):
    """Every fourth layer has no RoPE."""

    arch = "smollm3"
    rotates_pairs = True

    def check(self) -> None:
        super().check()
        n_layer = self.config.n_layer
        interval = self.config.integer("no_rope_layer_interval", default=4)
        usual = [(il + 1) % interval for il in range(n_layer)]
        rotated = self.config.get("no_rope_layers", default=None) or usual
        self.config.require(
            "layers without RoPE that are not every fourth", [bool(r) for r in rotated] == is_rotated(n_layer)
        )


class Arcee(Family):
    """Squared ReLU without a gate."""

    arch = "arcee"
    biases = QKV
    rotates_pairs = True
    rope_scalings = ("llama3",)
    activations = ("relu2",)
    modules: ClassVar[Modules] = {**ATTENTION, "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


class Apertus(Family):
    """A norm of every head of q and k; xIELU without a gate, whose parameters are numbers of each layer."""

    arch = "apertus"
    needs_output = True
    rope_scalings = ("llama3",)
    activations = ("xielu",)
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **HEAD_NORMS,
        "attention_layernorm": "attn_norm",
        "feedforward_layernorm": "ffn_norm",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    layer_values: ClassVar[Mapping[str, tuple[str, float | None]]] = {
        "mlp.act_fn.alpha_p": ("xielu.alpha_p", None),
        "mlp.act_fn.alpha_n": ("xielu.alpha_n", None),
        "mlp.act_fn.beta": ("xielu.beta", 0.5),
        "mlp.act_fn.eps": ("xielu.eps", -1e-6),
    }

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.get("rope_parameters", "rope_scaling", default=None) is None and "rope_theta" not in config.values:
            config.values["rope_parameters"] = {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }

    def check(self) -> None:
        super().check()
        self.config.require("qk_norm false", bool(self.config.get("qk_norm", default=True)))
        self.config.require("post_norm true", not self.config.get("post_norm", default=False))


class Exaone(Family):
    """EXAONE 3, 3.5 and Deep: names of GPT-2 in checkpoints, or those of llama."""

    arch = "exaone"
    rope_scalings = ("llama3",)
    aliases: ClassVar[Mapping[str, str]] = {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    }
    defaults: ClassVar[Mapping[str, int | float]] = {
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
    }
    outer: ClassVar[Mapping[str, str]] = {
        **Family.outer,
        "transformer.wte": "token_embd",
        "transformer.ln_f": "output_norm",
    }
    modules: ClassVar[Modules] = {
        **ATTENTION,
        **DENSE,
        "ln_1": "attn_norm",
        "ln_2": "ffn_norm",
        "attn.attention.q_proj": "attn_q",
        "attn.attention.k_proj": "attn_k",
        "attn.attention.v_proj": "attn_v",
        "attn.attention.out_proj": "attn_output",
        "mlp.c_fc_0": "ffn_gate",
        "mlp.c_fc_1": "ffn_up",
        "mlp.c_proj": "ffn_down",
    }


class SeedOss(Family):
    """Optional biases of q, k and v."""

    arch = "seed_oss"
    biases = QKV
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE, "post_attention_layernorm": "post_attention_norm"}


class PanguEmbedded(Family):
    """Biases of attention, where the configuration says so."""

    arch = "pangu-embedded"
    biases = QKV | {"attn_output"}

    def needed_tensors(self) -> frozenset[str]:
        has_biases = bool(self.config.get("bias", default=True))
        return frozenset(f"{name}.bias" for name in self.biases) if has_biases else frozenset()


class Maincoder(Family):
    """Norms of heads behind the rotation of adjacent elements, the network in the names of Llama 4."""

    arch = "maincoder"
    modules: ClassVar[Modules] = {**ATTENTION, **HEAD_NORMS, **feed_forward("feed_forward")}

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        width = config.get("intermediate_size_mlp", default=None)
        if width is not None:
            config.values["intermediate_size"] = width

    def check(self) -> None:
        super().check()
        self.config.require("use_qk_norm false", bool(self.config.get("use_qk_norm", default=True)))


def is_rotated(n_layer: int) -> list[bool]:
    """Layers with RoPE where every fourth has none."""
    return [(il + 1) % 4 != 0 for il in range(n_layer)]
