"""What a family declares: names of modules, layout changes, and metadata keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from ikpy.convert.checkpoint import Checkpoint
from ikpy.convert.config import Config
from ikpy.convert.rope import llama3_factors, scaling_keys
from ikpy.errors import UnsupportedError

View = Callable[[np.ndarray], np.ndarray]
Change = Callable[[np.ndarray], np.ndarray]
"""Of values float32, element by element."""
KeyValue = int | float | bool | str | np.int32 | list[int] | list[bool] | list[float] | list[str] | np.ndarray
Keys = dict[str, KeyValue]
Targets = str | tuple[str, ...]
Modules = Mapping[str, Targets]

BARE = frozenset({"ssm_a", "ssm_d"})
"""GGUF tensors whose names have no suffix in any family."""

# Modules of a layer -> GGUF names, without ".weight" and ".bias"; {e} is the number of an expert.
ATTENTION: dict[str, Targets] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
ATTENTION_AND_DENSE = QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
HEAD_NORMS: dict[str, Targets] = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}


def feed_forward(prefix: str, suffix: str = "") -> dict[str, Targets]:
    """Gate, up and down of a dense or shared feed-forward network."""
    return {f"{prefix}.{name}_proj": f"ffn_{name}{suffix}" for name in ("gate", "up", "down")}


DENSE = feed_forward("mlp")
EXPERTS: dict[str, Targets] = {"mlp.gate": "ffn_gate_inp", **feed_forward("mlp.experts.{e}", "_exps")}
SHARED = feed_forward("mlp.shared_experts", "_shexp")
SELECTION_BIAS: dict[str, Targets] = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
MIXTRAL_EXPERTS: dict[str, Targets] = {
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.{e}.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.{e}.w2": "ffn_down_exps",
    "block_sparse_moe.experts.{e}.w3": "ffn_up_exps",
}


_APART = re.compile(r"(?:model\.)?mtp\.(?:(?:layers\.)?(\d{1,9})\.)?(.+)")


def place_apart(path: str) -> tuple[int | None, str] | None:
    """Number of a prediction layer (None: all of them) and name within it of `mtp.*`; None for other tensors."""
    found = _APART.fullmatch(path)
    return (int(found[1]) if found[1] else None, found[2]) if found else None


def rope_pairs(n_head: int) -> View:
    """Rows of q or k from halves (element i with i + n/2) to adjacent pairs (2i with 2i + 1), per head."""

    def view(rows: np.ndarray) -> np.ndarray:
        halves = rows.reshape(n_head, 2, rows.shape[0] // n_head // 2, *rows.shape[1:])
        return halves.swapaxes(1, 2).reshape(rows.shape)

    return view


def half_of_rows(targets: Targets, target: str) -> View | None:
    """The half of a matrix's rows that becomes one of two targets in turn; None where a module has a single target."""
    if isinstance(targets, str) or target not in targets:
        return None
    return lambda rows: np.split(rows, 2)[targets.index(target)]


def expert_half(target: str) -> View:
    """Gate or up [E, F, D] of the experts of a layer that are stored together [E, 2F, D]."""
    return lambda values: np.split(values, 2, axis=1)[target == "ffn_up_exps"]


def decay_rates(logarithms: np.ndarray) -> np.ndarray:
    """Factors of a recurrent layer's step, below 0, whose logarithms a checkpoint holds."""
    return -np.exp(logarithms)


def flat(values: np.ndarray) -> np.ndarray:
    """One dimension instead of several."""
    return values.reshape(-1)


class Family:
    """Checkpoints of one kind. Subclasses set attributes and extend `keys` and `view`."""

    arch: ClassVar[str]
    modules: ClassVar[Modules] = {**ATTENTION, **DENSE}
    bare: ClassVar[frozenset[str]] = BARE  # tensors whose names have no suffix
    biases: ClassVar[frozenset[str]] = frozenset()  # tensors that may have one
    unused: ClassVar[frozenset[str]] = frozenset()  # modules that are left out
    needed_biases: ClassVar[frozenset[str]] = frozenset()  # tensors that must have one
    drops_zero_biases: ClassVar[bool] = False  # that the architecture does not have
    tables: ClassVar[frozenset[str]] = frozenset()  # tensors of a layer that hold integers
    # Modules, of layers and outer ones, whose values multiply those that a tensor is made of.
    factors: ClassVar[Mapping[str, str]] = {}
    # Tensors of one number in every layer -> the key (without the architecture) that lists them, and the number where a
    # checkpoint has none.
    layer_values: ClassVar[Mapping[str, tuple[str, float | None]]] = {}
    # Tensors of integers in one layer -> the key (with the architecture) that holds them.
    layer_lists: ClassVar[Mapping[str, str]] = {}
    # Modules of a layer of which {n} is the number of a shard -> the tensor outside layers that all of them are.
    shards: ClassVar[Mapping[str, str]] = {}
    outer: ClassVar[Mapping[str, str]] = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    # GGUF files of llama and its kin pair adjacent elements, transformers' models pair the halves of a head.
    rotates_pairs: ClassVar[bool] = False
    norm_offset: ClassVar[float] = 0.0  # added to every norm weight
    # Modules outside layers that repeat the first of others which a checkpoint has.
    repeated: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    needs_output: ClassVar[bool] = False  # output.weight is written even if it is the token embedding
    has_output: ClassVar[bool] = True
    needs_embedding: ClassVar[bool] = True
    reads_target: ClassVar[bool] = False  # whether it drafts for another model, whose folder tells what is read
    may_read_target: ClassVar[bool] = False  # whether the tokenizer may be that of a folder which is named
    own_tensors: ClassVar[frozenset[str]] = frozenset()  # that the family reads itself
    writes_texts: ClassVar[bool] = True
    template: ClassVar[str] = ""  # built-in chat template of the published models, for checkpoints without one
    rope_scalings: ClassVar[tuple[str, ...]] = ()  # that can be expressed, beside linear and yarn
    has_windows: ClassVar[bool] = False  # in the layers that `layer_types` says
    own_yarn_magnitude: ClassVar[bool] = False
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    # Names of configuration values in older revisions -> those that are looked for.
    aliases: ClassVar[Mapping[str, str]] = {}
    activation_names: ClassVar[tuple[str, ...]] = ("hidden_act", "hidden_activation")  # in the configuration
    rotates_part: ClassVar[bool] = False  # of a head, if the configuration says so
    rotary_fraction: ClassVar[float] = 1.0
    norm_key: ClassVar[str] = "attention.layer_norm_rms_epsilon"
    usual_pre: str = ""  # pre-tokenizer of the published models, where splitting alone does not tell
    # Values of transformers' configuration class that published files leave out.
    defaults: ClassVar[Mapping[str, int | float]] = {}
    # Layers that predict further tokens: modules that they have beside those of layers; none where files have none.
    prediction_modules: ClassVar[Modules] = {}
    # Modules of theirs whose matrices lie side by side in nextn.eh_proj, with their places.
    prediction_columns: ClassVar[Mapping[str, int]] = {}
    # Modules of theirs whose rows follow each other in attn_qkv, with their places (`n_shards` in all).
    prediction_rows: ClassVar[Mapping[str, int]] = {}
    # Modules of theirs that files of a model have no place for -> their tensors in a file of prediction layers alone.
    prediction_ends: ClassVar[Mapping[str, str]] = {}
    n_predict: int = 0  # prediction layers of the file
    predicts_alone: bool = False  # whether these are all that the file has

    def __init__(self, config: Config) -> None:
        self.config = config
        named = {new: config.values[old] for old, new in self.aliases.items() if old in config.values}
        config.values = {**self.defaults, **named, **config.values}
        self.n_head = config.integer("num_attention_heads")
        self.n_head_kv = config.integer("num_key_value_heads", default=self.n_head)

    @classmethod
    def chosen(cls, config: Config) -> type[Family]:
        """The class of a configuration, for model types that have several."""
        return cls

    @staticmethod
    def usual_name(path: str) -> str:
        """The name of a tensor where checkpoints of the kind have several spellings."""
        return path

    def take_target(self, target: Config, checkpoint: Checkpoint) -> None:
        """Tells a drafter for which model it is."""

    @property
    def n_expert(self) -> int:
        """Routed experts, 0 for dense models."""
        return self.config.count("num_local_experts", "num_experts", "n_routed_experts", default=0)

    def n_parts(self, target: str) -> int:
        """Checkpoint tensors, told apart by {e} in the names of their modules, that become one tensor."""
        return self.n_expert

    def place(self, module: str) -> int | None:
        """Place of a module of a layer among those, of names without numbers, that become one tensor."""
        return None

    def padded_rows(self, target: str) -> int:
        """Rows that a tensor outside layers has at least: its first row is repeated behind the last."""
        return 0

    @property
    def n_vocab(self) -> int:
        """Tokens of the vocabulary, as config.json says."""
        return self.config.integer("vocab_size")

    @property
    def n_shards(self) -> int:
        """Of a tensor that comes in `shards`."""
        return 0

    @property
    def n_rot(self) -> int:
        """Rotated elements of a head."""
        return int(self.config.head_dim * self.config.rotary_fraction(self.rotary_fraction))

    def check(self) -> None:
        """Refuse configurations that the architecture cannot express."""
        activation = self.config.get(*self.activation_names, default=self.activations[0])
        self.config.require(f"activation '{activation}'", activation in self.activations)
        fraction = self.config.rotary_fraction(self.rotary_fraction)
        self.config.require(f"partial_rotary_factor {fraction:g}", self.rotates_part or fraction == 1)
        windows = any(self.config.sliding_layers() or [])
        self.config.require("a window in some layers", self.has_windows or not windows)
        kind = self.config.rope()["rope_type"]
        if kind not in ("default", "linear", "yarn", *self.rope_scalings):
            raise UnsupportedError(f"{self.config.path}: RoPE scaling '{kind}' is not supported for {self.arch}")

    def needs_list(self, module: str) -> bool:
        """Whether a checkpoint must have a tensor of `layer_lists`."""
        return True

    def keys(self) -> Keys:
        """Metadata under the architecture prefix: int is u32, float f32, lists are arrays of the same."""
        config = self.config
        keys: Keys = {
            "block_count": config.n_layer,
            "context_length": config.n_context,
            "embedding_length": config.integer("hidden_size"),
            "feed_forward_length": config.integer("intermediate_size"),
            "attention.head_count": self.n_head,
            "attention.head_count_kv": self.n_head_kv,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            self.norm_key: config.epsilon("rms_norm_eps", "layer_norm_eps"),
            "rope.dimension_count": self.n_rot,
            **scaling_keys(config, own_magnitude=self.own_yarn_magnitude),
        }
        if self.n_expert:
            keys["expert_count"] = self.n_expert
            keys["expert_used_count"] = config.integer("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
        return keys

    def keys_of_tokens(self) -> Keys:
        """Metadata of the vocabulary that the tokenizer does not tell."""
        return {}

    def targets(self, module: str, layer: int) -> Targets | None:
        """What a module of a layer becomes; None: it has no place."""
        return self.modules.get(module)

    def prediction_place(self, path: str) -> tuple[int | None, str] | None:
        """Number of the prediction layer (None: all of them) and name within it of a tensor apart from the layers
        (`mtp.*`); None if that is not known.
        """
        return place_apart(path)

    def prediction_lists(self) -> Mapping[str, list[Any]]:
        """Entries of the n_predict prediction layers in keys that list a value per layer."""
        return {}

    def prediction_keys(self, keys: Keys) -> Keys:
        """What becomes of the keys of a file with prediction layers."""
        longer = {name: [*keys[name], *values] for name, values in self.prediction_lists().items() if name in keys}  # type: ignore[misc]
        return {"block_count": self.config.n_layer + self.n_predict, "nextn_predict_layers": self.n_predict, **longer}

    def view(self, target: str, source: str) -> View | None:
        """Change of layout from a checkpoint module to a GGUF tensor (both without suffix), None for none."""
        if self.rotates_pairs and target in ("attn_q", "attn_k"):
            return rope_pairs(self.n_head if target == "attn_q" else self.n_head_kv)
        return flat if target in ("exp_probs_b", "exp_probs_b.bias", "ffn_gate_inp_shexp") else None

    def change(self, target: str) -> Change | None:
        """What becomes of every value of a tensor, None if they stay."""
        offset = np.float32(self.norm_offset)
        return (lambda values: values + offset) if offset and target.endswith("norm") else None

    def bias_change(self, target: str) -> Change | None:
        """What becomes of the bias of a tensor."""
        return self.change(target)

    def row_factors(self, target: str) -> np.ndarray | None:
        """Factors f32 of the rows of a matrix of a layer, None for ones."""
        return None

    def unit_columns(self, target: str) -> bool:
        """Whether the columns of a matrix outside layers are divided by their lengths."""
        return False

    def extra_tensors(self) -> dict[str, np.ndarray]:
        """Further tensors f32 and i64 by GGUF name, made from the configuration or read by the family itself."""
        rope = self.config.rope()
        if rope["rope_type"] != "llama3":
            return {}
        n_rot = self.config.bounded("head_dim", self.n_rot)
        return {"rope_freqs.weight": llama3_factors(rope, n_rot)}

    def may_lack(self, target: str, layer: int) -> bool:
        """Whether a layer may be without a tensor (with its suffix) that others have."""
        return False

    def must_lack(self, target: str, layer: int) -> bool:
        """Whether config.json says that a layer has no such tensor (with its suffix), and it would change the layer."""
        return False

    def needed_tensors(self) -> frozenset[str]:
        """Tensors (with their suffix) that config.json says all layers have, of those that the architecture can do
        without.
        """
        return frozenset()

    def needed_outer_tensors(self) -> frozenset[str]:
        """The same of tensors that belong to no layer."""
        return frozenset()

    def is_empty(self, layer: int) -> bool:
        """Whether a layer has no tensors at all."""
        return False

    def notes(self) -> list[str]:
        """What the user should know about the result."""
        return []


class WindowFamily(Family):
    """A window in the layers that the configuration lists, or else in those that transformers takes."""

    has_windows = True

    @property
    def full_layer_period(self) -> int:
        """Every which layer has no window where the configuration lists none: a number, or one letter per layer."""
        pattern = self.config.get("sliding_window_pattern", "global_attn_every_n_layers", default=4)
        if isinstance(pattern, str):
            usual = pattern == "L" * (len(pattern) - 1) + "G"
            self.config.require(f"sliding_window_pattern '{pattern}'", usual)
            return len(pattern)
        return self.config.integer("sliding_window_pattern", "global_attn_every_n_layers", default=4)

    @property
    def window_layers(self) -> list[bool]:
        """Whether each layer attends to a window."""
        config, listed = self.config, self.config.sliding_layers()
        has_window = config.get("sliding_window", default=None) is not None
        usual = [has_window and (il + 1) % self.full_layer_period != 0 for il in range(config.n_layer)]
        return usual if listed is None else listed

    def keys(self) -> Keys:
        keys, layers = super().keys(), self.window_layers
        # Also where no layer has one: full layers beside a window may not know positions.
        if not any(layers) and self.config.get("sliding_window", default=None) is None:
            return keys
        return keys | {
            "attention.sliding_window": self.config.integer("sliding_window"),
            "attention.sliding_window_pattern": [int(flag) for flag in layers],
        }


def full_window_note(config: Config) -> list[str]:
    """A note if the model attends to a window and its architecture has none."""
    window = config.get("sliding_window", default=None)
    if not window or window >= config.n_context:
        return []
    return [f"the attention window of {window} tokens is not part of this architecture; beyond it results differ"]


def routing_keys(config: Config, *, gating: int) -> Keys:
    """Keys of leading dense layers, shared experts and routed weights. gating: 1 softmax, 2 sigmoid."""
    named = config.get("scoring_func", "score_function", "score_func", default="")
    gating = {"softmax": 1, "sigmoid": 2}.get(named, gating)
    dense = [kind == "dense" for kind in config.get("mlp_layer_types", default=[])]
    n_dense = sum(dense)
    config.require("dense layers among the expert layers", all(dense[:n_dense]))
    n_leading = config.integer("first_k_dense_replace", default=n_dense)
    config.require(f"first_k_dense_replace {n_leading} of {n_dense} dense layers", not dense or n_leading == n_dense)
    return {
        "leading_dense_block_count": n_leading,
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_shared_count": config.integer("n_shared_experts", "num_shared_experts", default=0),
        "expert_weights_scale": config.number("routed_scaling_factor", default=1.0),
        "expert_weights_norm": bool(config.get("norm_topk_prob", default=False)),
        "expert_gating_func": gating,
    }


def group_note(config: Config) -> list[str]:
    """A note if the model limits routing to groups of experts."""
    n_group = config.integer("n_group", default=1)
    if n_group <= max(1, config.integer("topk_group", default=1)):
        return []
    return [f"routing of the {n_group} expert groups is not limited to the best ones when the file is run"]
