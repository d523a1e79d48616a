"""RWKV-6 and RWKV-7 World, QRWKV6 and ARWKV."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ikpy.convert.config import Config
from ikpy.convert.families.base import ATTENTION, DENSE, Family, Keys, Modules, Targets, View, flat
from ikpy.models.rwkv_layers import GROUP_EPS

ANY_LENGTH = 1 << 20  # of a text, as llama.cpp writes it
SHARES = "time_mix_lerp_fused"
"""Shares of the token before, stacked."""
_HEADS = "num_attention_heads"


def turned(values: np.ndarray) -> np.ndarray:
    """Matrices [.., n_in, n_out] as files have them."""
    return values.swapaxes(-1, -2)


def one_share(values: np.ndarray) -> np.ndarray:
    """One of the shares of a stack."""
    return values.reshape(1, 1, -1)


class RwkvFamily(Family):
    """What the four have in common: no heads, no positions, stacked shares."""

    biases = frozenset({"token_embd_norm", "output_norm", "attn_norm", "attn_norm_2", "time_mix_ln"})
    shares: ClassVar[Mapping[str, str]]
    """Modules of a layer that hold them, behind a common beginning, by the letters of the stack in its order."""
    transposed: ClassVar[frozenset[str]] = frozenset()
    """Tensors that checkpoints hold as [n_in, n_out]."""

    def __init__(self, config: Config) -> None:
        config.values = {_HEADS: 0, **config.values}
        super().__init__(config)

    @property
    def share_modules(self) -> list[str]:
        """Modules of the stacked shares in their order."""
        return list(self.shares.values())

    def place(self, module: str) -> int | None:
        return self.share_modules.index(module) if module in self.share_modules else None

    def n_parts(self, target: str) -> int:
        return len(self.share_modules)

    def view(self, target: str, source: str) -> View | None:
        if target == SHARES:
            return one_share
        if target in self.transposed:
            return turned
        return flat if target in self.flattened else None

    flattened: ClassVar[frozenset[str]] = frozenset()
    """Tensors of one dimension that checkpoints hold with more."""

    def common_keys(self, head_size: int, n_ff: int) -> Keys:
        """Keys of all four."""
        return {
            "block_count": self.config.n_layer,
            "context_length": ANY_LENGTH,
            "embedding_length": self.config.integer("hidden_size"),
            "feed_forward_length": n_ff,
            "attention.head_count": 0,
            "wkv.head_size": head_size,
        }

    def check_group_norm(self, epsilon: float) -> None:
        """FileFormatError for norms of heads with another epsilon than files can have."""
        self.config.require(f"an epsilon {epsilon:g} of norms of heads", math.isclose(epsilon, GROUP_EPS, rel_tol=1e-3))

    def check_width(self, n_heads: int, head_size: int) -> None:
        """FileFormatError unless heads are together as wide as the model."""
        width = self.config.integer("hidden_size")
        self.config.require(f"{n_heads} heads of {head_size} in {width}", n_heads * head_size == width)


def low_rank(prefix: str, letters: str) -> dict[str, Targets]:
    """Matrices and biases of low rank by their own names."""
    return {f"{prefix}.{letter}{i}": f"time_mix_{letter}{i}" for letter in letters for i in range(3)}


KEY_WEIGHTS = frozenset({"time_mix_k_k", "time_mix_k_a", "time_mix_r_k"})
RWKV7_LETTERS = ("r", "w", "k", "v", "a", "g")


class Rwkv7Family(RwkvFamily):
    """Values of the first layer are mixed with nothing: of what its files have for that only the names count."""

    def first_layer(self, targets: Targets) -> Targets:
        """Targets of a module in the first layer: llama.cpp wants something under the names, which it does not read."""
        if not isinstance(targets, str):
            return targets
        if targets.startswith("time_mix_v") and targets[-1] in "012":
            return ()
        is_rate = targets.startswith("time_mix_a") and targets[-1] in "012"
        return (targets, f"time_mix_v{targets[-1]}") if is_rate else targets

    def targets(self, module: str, layer: int) -> Targets | None:
        found = super().targets(module, layer)
        return self.first_layer(found) if found is not None and layer == 0 else found

    def rank_keys(self, decay: int, iclr: int, values: int, gate: int) -> Keys:
        """Ranks of the matrices of low rank."""
        names = ("decay", "iclr", "value_residual_mix", "gate")
        return {f"attention.{n}_lora_rank": rank for n, rank in zip(names, (decay, iclr, values, gate), strict=True)}


class Rwkv7(Rwkv7Family):
    """RWKV-7 as flash-linear-attention has it."""

    arch = "rwkv7"
    norm_key = "attention.layer_norm_epsilon"
    template = "rwkv-world"
    activations = ("sqrelu",)
    outer: ClassVar[Mapping[str, str]] = {
        "model.embeddings": "token_embd",
        "model.layers.0.pre_norm": "token_embd_norm",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    shares: ClassVar[Mapping[str, str]] = {letter: f"attn.x_{letter}" for letter in RWKV7_LETTERS}
    modules: ClassVar[Modules] = {
        "attn_norm": "attn_norm",
        "ffn_norm": "attn_norm_2",
        **dict.fromkeys(shares.values(), SHARES),
        "attn.x_x": SHARES,
        **{f"attn.{name}": f"time_mix_{name}" for name in ("k_k", "k_a", "r_k")},
        **{f"attn.{letter}_lora.lora.0": f"time_mix_{letter}1" for letter in "wavg"},
        **{f"attn.{letter}_lora.lora.2": f"time_mix_{letter}2" for letter in "wavg"},
        **{f"attn.{letter}_lora.lora.2.bias": f"time_mix_{letter}0" for letter in "wav"},
        "attn.r_proj": "time_mix_receptance",
        "attn.k_proj": "time_mix_key",
        "attn.v_proj": "time_mix_value",
        "attn.o_proj": "time_mix_output",
        "attn.g_norm": "time_mix_ln",
        "ffn.x_k": "channel_mix_lerp_k",
        "ffn.key": "channel_mix_key",
        "ffn.value": "channel_mix_value",
    }
    flattened = KEY_WEIGHTS | {"channel_mix_lerp_k"}

    def view(self, target: str, source: str) -> View | None:
        stacked = source == "attn.x_x"  # of the first checkpoints
        return (lambda values: values.reshape(-1, 1, 1, values.shape[-1])) if stacked else super().view(target, source)

    def check(self) -> None:
        config = self.config
        activation = config.get("hidden_act", default="sqrelu")
        config.require(f"activation '{activation}'", activation in self.activations)
        config.require("layers that attend", config.get("attn", default=None) is None)
        for name in ("norm_first", "norm_bias"):
            config.require(f"{name} false", bool(config.get(name, default=True)))
        width, size = config.integer("hidden_size"), config.integer("head_dim", default=64)
        widths = config.get("value_dim", default=width)
        config.require("values of another width", set(widths if isinstance(widths, list) else [widths]) == {width})
        self.check_group_norm(size * config.epsilon("norm_eps", default=1e-5))

    @property
    def n_ff(self) -> int:
        """Width of the network: four times that of the model unless config.json says so, in steps of 32."""
        ratio = self.config.number("hidden_ratio", default=4.0)
        usual = -(-int(self.config.integer("hidden_size") * ratio) // 32) * 32
        return self.config.integer("intermediate_size", default=usual)

    def keys(self) -> Keys:
        config = self.config
        ranks = ("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim")
        return {
            **self.common_keys(config.integer("head_dim", default=64), self.n_ff),
            self.norm_key: config.epsilon("norm_eps", default=1e-5),
            **self.rank_keys(*(config.integer(name) for name in ranks)),
        }


QWEN2: dict[str, Targets] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": ATTENTION["post_attention_layernorm"],
    **DENSE,
}


class Arwkv7(Rwkv7Family):
    """Every layer has a time mix; sizes of its low-rank matrices are always these."""

    arch = "arwkv7"
    n_ranks: ClassVar[tuple[int, int, int, int]] = (64, 64, 32, 128)
    shares: ClassVar[Mapping[str, str]] = {letter: f"self_attn.time_mixer.x_{letter}" for letter in RWKV7_LETTERS}
    modules: ClassVar[Modules] = {
        **QWEN2,
        **dict.fromkeys(shares.values(), SHARES),
        **low_rank("self_attn.time_mixer", "wavg"),
        **{f"self_attn.time_mixer.{n}": f"time_mix_{n}" for n in ("k_k", "k_a", "r_k")},
        **{f"self_attn.time_mixer.{n}": f"time_mix_{n}" for n in ("receptance", "key", "value", "output")},
        "self_attn.time_mixer.ln_x": "time_mix_ln",
    }
    transposed = frozenset(f"time_mix_{letter}{i}" for letter in "wavg" for i in (1, 2))
    flattened = KEY_WEIGHTS | {f"time_mix_{letter}0" for letter in "wav"}

    @property
    def has_gate(self) -> bool:
        """Whether what a time mix gives is gated."""
        return bool(self.config.get("wkv_has_gate"))

    @property
    def share_modules(self) -> list[str]:
        return super().share_modules[: 6 if self.has_gate else 5]

    @property
    def has_group_norm(self) -> bool:
        """Whether heads of a time mix are normed."""
        return bool(self.config.get("wkv_has_group_norm", default=True))

    def targets(self, module: str, layer: int) -> Targets | None:
        name = module.rpartition(".")[2]
        is_unknown = (name in ("x_g", "g1", "g2") and not self.has_gate) or (name == "ln_x" and not self.has_group_norm)
        return None if is_unknown else super().targets(module, layer)

    def needed_tensors(self) -> frozenset[str]:
        return frozenset({"time_mix_ln.weight"} if self.has_group_norm else ())

    def check(self) -> None:
        config = self.config
        config.require(f"wkv_version {config.integer('wkv_version')}", config.integer("wkv_version") == 7)
        size = config.integer("head_size")
        n_heads = config.integer("num_wkv_heads", default=config.integer("hidden_size") // max(1, size))
        self.check_width(n_heads, size)
        if self.has_group_norm:
            self.check_group_norm(1e-5 * config.integer("head_size_divisor", default=8) ** 2)

    def keys(self) -> Keys:
        config = self.config
        ranks = self.n_ranks if self.has_gate else (*self.n_ranks[:3], 0)
        return {
            **self.common_keys(config.integer("head_size"), config.integer("intermediate_size")),
            self.norm_key: config.epsilon("rms_norm_eps"),
            "token_shift_count": 1,
            **self.rank_keys(*ranks),
        }


RWKV6_LETTERS = ("w", "k", "v", "r", "g")


def rwkv6_modules(prefix: str) -> dict[str, Targets]:
    """What RWKV-6 and QRWKV6 call alike in a time mix."""
    names = {"time_maa_w1": "w1", "time_maa_w2": "w2", "time_maa_x": "lerp_x", "time_decay": "decay", "gate": "gate"}
    names |= {"time_decay_w1": "decay_w1", "time_decay_w2": "decay_w2"}
    found: dict[str, Targets] = {f"{prefix}.{name}": f"time_mix_{target}" for name, target in names.items()}
    return found | {f"{prefix}.time_maa_{letter}": SHARES for letter in RWKV6_LETTERS}


class Rwkv6(RwkvFamily):
    """RWKV-6 World. Its residual stream is not halved every few layers, nor are the matrices divided that write to it:
    that is for numbers of half precision, and changes nothing else.
    """

    arch = "rwkv6"
    norm_key = "attention.layer_norm_epsilon"
    template = "rwkv-world"
    outer: ClassVar[Mapping[str, str]] = {
        "rwkv.embeddings": "token_embd",
        "rwkv.blocks.0.pre_ln": "token_embd_norm",
        "rwkv.ln_out": "output_norm",
        "head": "output",
    }
    shares: ClassVar[Mapping[str, str]] = {letter: f"attention.time_maa_{letter}" for letter in RWKV6_LETTERS}
    modules: ClassVar[Modules] = {
        "ln1": "attn_norm",
        "ln2": "attn_norm_2",
        **rwkv6_modules("attention"),
        "attention.time_faaaa": "time_mix_first",
        **{f"attention.{name}": f"time_mix_{name}" for name in ("receptance", "key", "value", "output")},
        "attention.ln_x": "time_mix_ln",
        "feed_forward.time_maa_k": "channel_mix_lerp_k",
        "feed_forward.time_maa_r": "channel_mix_lerp_r",
        **{f"feed_forward.{name}": f"channel_mix_{name}" for name in ("key", "value", "receptance")},
    }
    transposed = frozenset({"time_mix_w1", "time_mix_w2", "time_mix_decay_w1", "time_mix_decay_w2"})
    flattened = frozenset({"time_mix_lerp_x", "time_mix_decay", "channel_mix_lerp_k", "channel_mix_lerp_r"})

    @property
    def ranks(self) -> tuple[int, int]:
        """Of the matrices that mix and those of decays: the published ones, of which config.json tells nothing."""
        return (64, 128) if self.config.integer("hidden_size") == 4096 else (32, 64)

    def check(self) -> None:
        config, size = self.config, self.config.integer("head_size")
        width = config.integer("attention_hidden_size", default=config.integer("hidden_size"))
        config.require(f"attention_hidden_size {width}", width == config.integer("hidden_size"))
        self.check_width(width // max(1, size), size)
        self.check_group_norm(1e-5 * config.integer("head_size_divisor", default=8) ** 2)

    def keys(self) -> Keys:
        config = self.config
        usual = int(config.integer("hidden_size") * 3.5) // 32 * 32
        return {
            **self.common_keys(config.integer("head_size"), config.integer("intermediate_size", default=usual)),
            self.norm_key: config.epsilon("layer_norm_epsilon", default=1e-5),
            "time_mix_extra_dim": self.ranks[0],
            "time_decay_extra_dim": self.ranks[1],
        }


class Rwkv6Qwen2(RwkvFamily):
    """QRWKV6. Shares that a token chooses come in another order than in files, where those of RWKV-6 are."""

    arch = "rwkv6qwen2"
    biases = frozenset({f"time_mix_{name}" for name in ("receptance", "key", "value")})
    shares: ClassVar[Mapping[str, str]] = {letter: f"self_attn.time_maa_{letter}" for letter in RWKV6_LETTERS}
    modules: ClassVar[Modules] = {
        **QWEN2,
        **rwkv6_modules("self_attn"),
        "self_attn.q_proj": "time_mix_receptance",
        "self_attn.k_proj": "time_mix_key",
        "self_attn.v_proj": "time_mix_value",
        "self_attn.o_proj": "time_mix_output",
    }
    transposed = frozenset({"time_mix_decay_w1", "time_mix_decay_w2"})
    flattened = frozenset({"time_mix_lerp_x", "time_mix_decay"})
    order: ClassVar[tuple[int, ...]] = (3, 1, 2, 0, 4)  # of w, k, v, r, g among r, k, v, w, g

    def view(self, target: str, source: str) -> View | None:
        order = list(self.order)
        if target == "time_mix_w2":
            return lambda values: turned(values)[order]
        if target == "time_mix_w1":
            return lambda values: turned(values).reshape(5, -1, values.shape[0])[order].reshape(-1, values.shape[0])
        return super().view(target, source)

    def check(self) -> None:
        config = self.config
        activation = config.get("hidden_act", default="silu")
        config.require(f"activation '{activation}'", activation in self.activations)
        for name, value in (("use_rope", False), ("groupnorm_att", False)):
            config.require(f"{name} true", bool(config.get(name, default=value)) == value)
        for name in ("balance_state", "use_tokenshift"):
            config.require(f"{name} false", bool(config.get(name, default=True)))
        config.require("gates of low rank", config.integer("gate_rank_type", default=1) == 1)
        self.check_width(self.n_head, config.head_dim)

    def keys(self) -> Keys:
        config = self.config
        is_wide = config.integer("hidden_size") >= 4096
        return {
            **self.common_keys(config.head_dim, config.integer("intermediate_size")),
            self.norm_key: config.epsilon("rms_norm_eps"),
            "token_shift_count": 1,
            "attention.head_count_kv": self.n_head_kv,
            "time_mix_extra_dim": config.integer("lora_rank_tokenshift", default=64 if is_wide else 32),
            "time_decay_extra_dim": config.integer("lora_rank_decay", default=128 if is_wide else 64),
        }
