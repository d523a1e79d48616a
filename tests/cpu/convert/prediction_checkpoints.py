"""Tiny checkpoints with layers that predict further tokens, and the same layers as the only ones of a checkpoint.

A prediction layer is a layer of the model with other inputs. So its logits are those of a model that has this layer
alone, whose token embeddings are the joined inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.cpu.convert import checkpoints as made
from tests.cpu.convert import deepseek4_checkpoints as v4
from tests.cpu.convert import glm5_next_checkpoints as glm5
from tests.cpu.convert import ling_checkpoints as ling
from tests.cpu.convert import qwen4_exp_checkpoints as qwen4
from tests.cpu.convert import seeded_checkpoints as tiny
from tests.cpu.convert import tencent_checkpoints as tencent
from tests.cpu.convert.checkpoints import Tensors
from tests.cpu.convert.seeded_checkpoints import Tiny
from tests.cpu.convert.seeded_kinds import KINDS
from tests.cpu.models import reference_models as ref

D, V, STREAMS = tiny.D, tiny.V, 4
N_TOKENS = 40
TEXT = "model.language_model"
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "embed.weight")


@dataclass(frozen=True)
class Kind:
    """A checkpoint and the layer of it that its prediction layer is made like.

    model: name of a checkpoint in tests/data, or one made from a seed; None: DeepSeek V4. prefix, outer: of the tensors
    of the prediction layer, and of those that join its inputs, if that is another. joined, token, state, norm: what
    joins the inputs, their norms, and the one behind the layer. alone: config.json of the layer alone. own_ends:
    embedding and output matrix of the layer. mixer: module of the last mixer of residual streams. ties: whether
    embeddings are tied.
    """

    name: str
    model: str | Tiny | None
    layer: int
    prefix: str
    alone: dict[str, Any]
    outer: str = ""
    joined: tuple[str, ...] = ("eh_proj",)
    token: str = "enorm"
    state: str = "hnorm"
    norm: str = "shared_head.norm"
    config: dict[str, Any] = field(default_factory=dict)
    own_ends: tuple[str, str] | None = None
    offset: float = 0.0
    layer_norm: bool = False
    streams: int = 1
    epsilon: float = 1e-5
    text: str = "model"
    first_alone: int = 0
    mixer: str = ""
    ties: bool = False

    @property
    def layer_prefix(self) -> str:
        """Of the layer that the prediction layer is made like."""
        return f"{self.text}.layers.{self.layer}." if self.text else f"layers.{self.layer}."


def _kind(name: str) -> Tiny:
    return next(kind for kind in KINDS if kind.name == name)


def write_base(kind: Kind, folder: Path) -> Path:
    """The checkpoint without prediction layers."""
    if kind.model is None:
        return v4.write(folder)
    if isinstance(kind.model, str):
        made.copy(kind.model, folder.parent).rename(folder)
        return folder
    return tiny.write(kind.model, folder)


def _rolled(entry: tuple[str, tuple[int, ...], bytes], name: str) -> tuple[str, tuple[int, ...], bytes]:
    """Another tensor of the same kind: rows move by one, scales of blocks stay."""
    kind, shape, data = entry
    if "scale" in name or len(shape) == 0:
        return entry
    array = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
    return kind, shape, np.roll(array, 1, axis=0).tobytes()


def values(entry: tuple[str, tuple[int, ...], bytes]) -> np.ndarray:
    """Numbers f64 of a tensor in bf16 or f32."""
    kind, shape, data = entry
    if kind == "F32":
        return np.frombuffer(data, "<f4").reshape(shape).astype(np.float64)
    assert kind == "BF16", kind
    return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").reshape(shape).astype(np.float64)


@dataclass
class Made:
    """folder: with the prediction layer, alone: this layer as a model; states [T, W] and tokens [T] that it reads."""

    folder: Path
    alone: Path
    tokens: np.ndarray
    states: np.ndarray
    layer: Tensors
    inputs: Tensors


def layer_tensors(kind: Kind, tensors: Tensors) -> Tensors:
    """Of the prediction layer, by their names within a layer."""
    prefix = kind.layer_prefix
    found = {
        name.removeprefix(prefix): _rolled(entry, name) for name, entry in tensors.items() if name.startswith(prefix)
    }
    if found.pop(v4_table := "ffn.gate.tid2eid", None):  # prediction layers choose experts by their inputs
        bias = v4_table.replace("tid2eid", "bias")
        found[bias] = tensors[f"layers.1.{bias}"]
    return found


def input_tensors(kind: Kind) -> Tensors:
    """What joins the inputs, the norms and the ends."""
    random = np.random.default_rng(11)
    n = len(kind.joined)
    matrices = {name: random.normal(0, 0.1, (D, 2 * D // n)) for name in kind.joined}
    widths = {kind.token: D, kind.state: D, kind.norm: D}
    norms = {name: 1 - kind.offset + 0.2 * random.normal(size=width) for name, width in widths.items() if name}
    if kind.mixer:  # norms of several streams
        norms[kind.state] = np.tile(norms[kind.state], STREAMS)
    matrices |= {name: random.normal(0, 0.3, (V, D)) for name in kind.own_ends or ()}
    return {f"{name}.weight": made.bf16(np.asarray(a, np.float32)) for name, a in {**matrices, **norms}.items()}


def joined(kind: Kind, tensors: Tensors, inputs: Tensors, tokens: np.ndarray, states: np.ndarray) -> np.ndarray:
    """What the layer reads [T, D], by its definition."""
    w = {name.removesuffix(".weight"): values(entry) for name, entry in inputs.items()}
    table = w[kind.own_ends[0]] if kind.own_ends else values(tensors[_name(tensors, *EMBEDDINGS)])

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        weight = weight[:D] + kind.offset
        return ref.layer_norm(x, weight, kind.epsilon) if kind.layer_norm else ref.rms_norm(x, weight, kind.epsilon)

    parts = np.concatenate([norm(table[tokens], w[kind.token]), norm(states, w[kind.state])], axis=1)
    return parts @ np.concatenate([w[name] for name in kind.joined], axis=1).T


def _name(tensors: Tensors, *ends: str) -> str:
    return next(name for end in ends for name in tensors if name.endswith(end) and ".layers." not in name)


def make(kind: Kind, folder: Path) -> Made:
    """Both checkpoints, and what the prediction layer reads."""
    whole = write_base(kind, folder / "whole")
    alone = write_base(kind, folder / "alone")
    tensors = made.read_tensors(whole / "model.safetensors")
    layer, inputs = layer_tensors(kind, tensors), input_tensors(kind)
    random = np.random.default_rng(5)
    tokens = random.integers(0, V, N_TOKENS).astype(np.int32)
    states = random.normal(size=(N_TOKENS, D))

    more = {f"{kind.prefix}.{name}": entry for name, entry in layer.items()}
    more |= {f"{kind.outer or kind.prefix}.{name}": entry for name, entry in inputs.items()}
    table = np.zeros((V, D), np.float32)
    table[:N_TOKENS] = joined(kind, tensors, inputs, tokens, states)
    outer = {
        name: entry for name, entry in tensors.items() if ".layers." not in name and not name.startswith("layers.")
    }
    if kind.own_ends:
        outer[_name(outer, "lm_head.weight", "head.weight")] = inputs[f"{kind.own_ends[1]}.weight"]
    if kind.norm:
        outer[_name(outer, "norm.weight")] = inputs[f"{kind.norm}.weight"]
    for name in [name for name in outer if kind.mixer and kind.mixer in name]:
        outer[name] = _rolled(outer[name], name)
        more[name.replace(kind.text, kind.outer, 1)] = outer[name]
    embedding = _name(outer, *EMBEDDINGS)
    if kind.ties:
        outer["lm_head.weight"] = outer[embedding]
    outer[embedding] = ("F32", (V, D), table.tobytes())
    if kind.model is None:
        more |= {f"{kind.prefix}.{n}": _rolled(entry, n) for n, entry in tensors.items() if n.startswith("hc_head_")}
    made.amend(whole, **kind.config)
    made.write_tensors(whole / "model.safetensors", {**tensors, **more})
    first = kind.layer_prefix.replace(f".{kind.layer}.", f".{kind.first_alone}.")
    _amend_text(alone, kind.alone)
    made.write_tensors(alone / "model.safetensors", {**outer, **{f"{first}{n}": entry for n, entry in layer.items()}})
    return Made(whole, alone, tokens, np.tile(states, (1, kind.streams)).astype(np.float32), layer, inputs)


def _amend_text(folder: Path, config: dict[str, Any]) -> None:
    """Changes config.json, also within its text_config."""
    old = made.read_json(folder / "config.json")
    inner = {"text_config": {**old["text_config"], **config}} if "text_config" in old else {}
    made.amend(folder, **config, **inner)


ONE = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
BEHIND_2, BEHIND_3 = "model.layers.2", "model.layers.3"
LATENT = {**ONE, "mlp_layer_types": ["sparse"], "layer_types": ["indexed_attention"]}
APART: dict[str, Any] = {
    "outer": "mtp",
    "prefix": "mtp.layers.0",
    "joined": ("fc",),
    "token": "pre_fc_norm_embedding",
    "state": "pre_fc_norm_hidden",
    "norm": "norm",
}
QWEN: dict[str, Any] = {
    **APART,
    "layer": 3,
    "alone": {"num_hidden_layers": 1, "layer_types": ["full_attention"], "full_attention_interval": 1},
    "offset": 1.0,
    "epsilon": 1e-6,
    "config": {"mtp_num_hidden_layers": 1},
}
OWN_ENDS = ("embed_tokens", "shared_head.head")
Maker = Callable[[], Kind]
KINDS_OF_LAYERS = (
    Kind("deepseek-v3", "deepseek-v3", 1, BEHIND_3, ONE, own_ends=OWN_ENDS, epsilon=1e-6),
    Kind("glm4-moe-lite", "glm4-moe-lite", 2, BEHIND_3, {**ONE, "mlp_layer_types": ["sparse"]}),
    Kind("deepseek-v32", "deepseek-v32", 1, BEHIND_3, LATENT, own_ends=OWN_ENDS, epsilon=1e-6),
    Kind("glm-dsa", "glm-dsa", 2, BEHIND_3, {**LATENT, "indexer_types": ["full"]}),
    Kind("glm4moe", "glm4moe", 1, BEHIND_2, ONE, own_ends=OWN_ENDS),
    Kind(
        "exaone-moe",
        "exaone-moe",
        0,
        **APART,
        alone={"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
    ),
    Kind("qwen3next", "qwen3next", **QWEN),
    Kind("qwen35", "qwen35", **QWEN),
    Kind("qwen35moe", "qwen35moe", **QWEN),
    Kind(
        "sarvam-moe",
        _kind("sarvam-moe"),
        2,
        BEHIND_3,
        ONE,
        norm="final_layernorm",
        epsilon=1e-6,
        config={"num_nextn_predict_layers": 1},
    ),
    Kind(
        "bailing-hybrid",
        ling.BAILING_HYBRID,
        3,
        "model.layers.4",
        {**ONE, "layer_group_size": 1},
        norm="final_layernorm",
        epsilon=1e-6,
    ),
    Kind(
        "step37",
        _kind("step37"),
        0,
        "model.layers.4",
        {
            **ONE,
            "moe_layers_enum": [],
            "layer_types": ["full_attention"],
            "partial_rotary_factors": [0.5],
            "rope_theta": [5000000.0],
            "swiglu_limits": [0.0],
            "swiglu_limits_shared": [0.0],
        },
        norm="transformer.shared_head.norm",
        own_ends=None,
        offset=1.0,
    ),
    Kind("hy-v3", tencent.HY_V3, 2, BEHIND_3, ONE, norm="final_layernorm"),
    Kind(
        "cohere2-moe",
        _kind("cohere2-moe"),
        4,
        "model.layers.5",
        # Prediction layers know positions, as dense layers and those with a window do.
        {
            **ONE,
            "layer_types": ["sliding_attention"],
            "sliding_window": 256,
            "mlp_layer_types": ["sparse"],
            "tie_word_embeddings": False,
        },
        layer_norm=True,
        ties=True,
    ),
    Kind(
        "qwen4-exp",
        qwen4.QWEN4_EXP,
        1,
        "mtp.layers.0",
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "ple_layer_ids": []},
        outer="mtp",
        joined=("fc_embedding", "fc_hidden"),
        token="pre_fc_norm_embedding",
        state="pre_fc_norm_hidden",
        norm="",
        offset=1.0,
        epsilon=1e-6,
        streams=STREAMS,
        text=TEXT,
        mixer="hyper_connection_mixer",
    ),
    Kind(
        "deepseek-v4",
        None,
        0,
        "mtp.0",
        {"num_hidden_layers": 1, "num_hash_layers": 0, "compress_ratios": [0], "num_nextn_predict_layers": 0},
        joined=("e_proj", "h_proj"),
        norm="norm",
        epsilon=1e-6,
        streams=STREAMS,
        text="",
    ),
)


# Layers that no model has alone: those of GLM-5.3 Flash have one residual stream, those of Nemotron 3 are two layers of
# a checkpoint.


@dataclass(frozen=True)
class Parts:
    """parts: layers of the model, where a prediction layer is made like them, and what some of their tensors become."""

    kind: Tiny
    text: str
    parts: tuple[tuple[int, str, dict[str, str]], ...]
    ends: tuple[tuple[str, str], ...]


GLM5_NEXT = Parts(
    glm5.GLM5_NEXT,
    TEXT,
    ((1, f"{TEXT}.layers.5.", {}),),
    (
        ("eh_proj", "nextn.eh_proj"),
        ("enorm", "nextn.enorm"),
        ("hnorm", "nextn.hnorm"),
        ("shared_head.norm", "nextn.shared_head_norm"),
    ),
)
NEMOTRON_H_MOE = Parts(
    _kind("nemotron-h-moe"),
    "backbone",
    ((3, "mtp.layers.0.", {}), (4, "mtp.layers.1.", {"attn_norm": "post_attention_norm"})),
    (
        ("0.eh_proj", "nextn.eh_proj"),
        ("0.enorm", "nextn.enorm"),
        ("0.hnorm", "nextn.hnorm"),
        ("1.final_layernorm", "nextn.shared_head_norm"),
    ),
)


def make_parts(made_of: Parts, folder: Path) -> tuple[Path, Path]:
    """The checkpoint with a prediction layer, and one where the layers it is made like are the same."""
    with_layer, same = (tiny.write(made_of.kind, folder / name) for name in ("whole", "same"))
    tensors = made.read_tensors(with_layer / "model.safetensors")
    more, changed = dict(tensors), dict(tensors)
    for layer, prefix, _ in made_of.parts:
        own = f"{made_of.text}.layers.{layer}."
        for name, entry in tensors.items():
            if name.startswith(own):
                changed[name] = _rolled(entry, name)
                if ".hc_" not in name:
                    more[name.replace(own, prefix)] = changed[name]
    random = np.random.default_rng(2)
    first = made_of.parts[0][1]
    for name, _ in made_of.ends:
        shape = (D, 2 * D) if name.endswith("eh_proj") else (D,)
        at = f"mtp.layers.{name}" if name[0].isdigit() else f"{first}{name}"
        more[f"{at}.weight"] = made.bf16(random.normal(size=shape).astype(np.float32))
    made.write_tensors(with_layer / "model.safetensors", more)
    made.write_tensors(same / "model.safetensors", changed)
    return with_layer, same
