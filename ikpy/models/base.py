"""Base classes of the architectures: what each file in this folder declares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ikpy.errors import UsageError
from ikpy.graph.builder import Graph, RopeSections
from ikpy.graph.ir import Buffer, Value
from ikpy.models.batch import FULL, BatchGraph, CacheSpec, GraphParams, StateSpec, Window
from ikpy.models.blocks import hadamard_block
from ikpy.models.classifier import Classifier
from ikpy.models.hparams import HeadSizes, HParams, block_count, read_hparams
from ikpy.models.keys import Keys
from ikpy.models.projection import Projection
from ikpy.models.rope import RopeParams
from ikpy.models.weights import Presence, WeightSource

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Log = Callable[[str], None]


class Architecture:
    """A loaded model of one GGUF architecture: hyper-parameters, weights, and the graph of a micro-batch."""

    has_rope: ClassVar[bool] = True
    rope_neox: bool = False
    # Window layers keep the RoPE base and scale of the file whatever the user asks for.
    window_rope_of_file: ClassVar[bool] = False
    # Layers for which the file counts no KV heads are recurrent.
    may_lack_heads: ClassVar[bool] = False
    # Files may have factors of LongRoPE.
    has_long_rope: ClassVar[bool] = False
    # Rows of pictures are rotated by their places in a grid.
    reads_grids: ClassVar[bool] = False
    # Positions go on through pictures; the other three are column and row, counted from 0, and the number of the
    # picture in the text (XD-RoPE).
    counts_pictures: ClassVar[bool] = False
    # Heads may have no part that other models rotate.
    may_lack_rope: ClassVar[bool] = False
    drafts_as: ClassVar[str] = "mtp"
    """--spec-type of files that have layers which draft for a model, and nothing else."""
    why_not_alone: ClassVar[str] = "the file has prediction layers alone"
    # Tables so large, and of which tokens read so few rows, that they stay in the mapped file whatever is asked for.
    mapped_tables: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, keys: Keys, weights: WeightSource, log: Log) -> None:
        self.derived: list[Buffer] = []
        """Memory of the tensors that `prepare` has computed."""
        self.rope_sections: RopeSections | None = None
        """How the four positions of a picture's row turn the pairs of a head, where they do."""
        self.deep_parts: dict[int, int] = {}
        """Parts of rows of pictures that are added behind layers, by layer; part 0 is in place of the embedding."""
        self.hp: HParams = self.read_hparams(keys)
        self.log = log
        # Where a tensor goes, for the log: a model placed on devices sets it.
        self.buffer_of: Callable[[str], str] = lambda name: "CPU"
        self.load(weights)

    @classmethod
    def n_layers(cls, keys: Keys) -> int:
        """Layers that run, as the file says before its tensors are looked at."""
        return block_count(keys)

    def read_hparams(self, keys: Keys) -> HParams:
        """Hyper-parameters; architectures with further keys extend this."""
        return read_hparams(keys, may_lack_heads=self.may_lack_heads, long_rope=self.has_long_rope)

    def load(self, weights: WeightSource) -> None:
        """Takes every tensor of the model from weights."""
        raise NotImplementedError

    @property
    def derived_bytes(self) -> int:
        """Bytes of the tensors that `prepare` has computed."""
        return sum(buffer.nbytes for buffer in self.derived)

    @property
    def max_position(self) -> int | None:
        """Number of positions the model has embeddings for; None: any position."""
        return None

    @property
    def is_encoder(self) -> bool:
        """Whether the model computes hidden states only, no logits."""
        return False

    @property
    def decoder_start(self) -> int | None:
        """The token that a decoder starts with behind a text that the model's encoder has read; None: there is none."""
        return None

    @property
    def classifier(self) -> Classifier | None:
        """Head that scores a text (pooling "rank"), if the file has one."""
        return None

    @property
    def projection(self) -> Projection | None:
        """Matrices behind pooling, if the file has some."""
        return None

    @property
    def reads_states(self) -> bool:
        """Whether every token comes with a hidden state (a prediction head)."""
        return False

    @property
    def state_size(self) -> int:
        """Elements of the hidden state of a token that a prediction head reads."""
        return self.hp.n_embd

    @property
    def predicts_alone(self) -> bool:
        """Whether the file has prediction heads alone, and nothing that they read states of."""
        return False

    @property
    def n_prediction_heads(self) -> int:
        """Layers that each predict a token more than the one before, by `prediction_head`'s numbers; 0: none."""
        return 0

    @property
    def values_are_keys(self) -> bool:
        """Whether cached keys are the values as well."""
        return False

    @property
    def has_indexers(self) -> bool:
        """Whether layers choose the cells that they attend to."""
        return False

    def prediction_head(self, weights: WeightSource, number: int = 0) -> Architecture:
        """A layer that predicts further tokens, as a model of one layer. UsageError if there is none."""
        raise UsageError(f"{weights.gguf.path}: the model has no layers that predict further tokens")

    def prepare(self, mla: int) -> None:
        """Derives tensors that a context with this MLA mode needs; nothing for most architectures."""

    def adapted_parts(
        self, name: str, a: NDArray[np.float32], b: NDArray[np.float32]
    ) -> dict[str, tuple[Value, NDArray[np.float32], NDArray[np.float32]]]:
        """Weights that were derived from a tensor, by name, with the low-rank pairs that adapting the tensor means.

        Pairs are float32 [(n,) rank, n_in] and [(n,) n_out, rank], n being the heads, or 1 if all share it.
        """
        return {}

    def effective_mla(self, mla: int) -> int:
        """The MLA mode a context will use; 0 for architectures without latent attention."""
        return 0

    def window(self, layer: int) -> Window:
        """Attention window of a layer."""
        return FULL

    def windows(self, layer: int) -> list[Window]:
        """Windows whose tokens a layer keeps in caches of their own size, that of its attention first."""
        return [self.window(layer)]

    def stretch(self, layer: int) -> int:
        """Positions that a layer compresses to one cell behind those of its window; 0: none."""
        return 0

    def rows_see_each_other(self, window: Window) -> bool:
        """Whether rows of a picture that see each other do so through this window."""
        return True

    def head_sizes(self, layer: int) -> HeadSizes:
        """Sizes of the heads of a layer; window layers may have their own."""
        hp = self.hp
        if self.window(layer)[0] != "none":
            return hp.window_heads
        return HeadSizes(hp.n_embd_head_k, hp.n_embd_head_v, hp.n_rot)

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer applies RoPE."""
        return self.has_rope

    def rope_params(self, layer: int, context: RopeParams) -> RopeParams:
        """RoPE parameters of a layer."""
        hp = self.hp
        base = hp.rope_freq_base if self.window_rope_of_file and hp.window_freq_base is None else hp.window_freq_base
        if base is None or self.window(layer)[0] == "none":
            return context
        return replace(context, freq_base=base, freq_scale=hp.rope_freq_scale)

    def rope_factors(self, layer: int, params: GraphParams) -> Value | None:
        """Frequency factors of a layer, if it has any."""
        return None

    def rotation_name(self, params: GraphParams) -> str:
        """Which of several ways to rotate keys a context takes that its RoPE parameters do not tell; "": the usual."""
        return ""

    def cache_specs(self, layer: int, params: GraphParams) -> list[CacheSpec]:
        """Cache tensors of a layer; none for a layer that reads the cache of another."""
        sizes, heads = self.head_sizes(layer), self.hp.n_head_kv[layer]
        return [
            CacheSpec("k", sizes.k, heads, params.types_k[layer], self.window(layer)),
            CacheSpec("v", sizes.v, heads, params.types_v[layer], self.window(layer)),
        ]

    def divisible_heads(self, layer: int) -> int:
        """K/V heads of a layer that may lie on several devices, each with the heads that read it, or heads of latent
        attention; 0: all on one.
        """
        return 0

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers have states."""
        return any(self.state_specs(il) for il in range(self.hp.n_layer))

    def state_specs(self, layer: int) -> list[StateSpec]:
        """State tensors of a layer that has them instead of, or beside, a cache."""
        return []

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        """Cache name, first element and length of the rotated part of a layer's cached keys; None: none of the model's
        keys can be shifted.
        """
        return "k", 0, self.head_sizes(layer).rotated

    def add_shift(
        self, g: Graph, layer: int, cache: Value, deltas: Value, n_rot: int, offset: int, params: GraphParams
    ) -> None:
        """Adds the re-rotation of a layer's cached keys by deltas i32 [n_cells]."""
        if not self.is_rotated(layer):
            return
        # The cached keys carry the YaRN magnitude already; only the angle is added.
        rope = self.rope_params(layer, params.rope).without_magnitude()
        table = g.rope_table(deltas, n_rot, self.rope_factors(layer, params), rope.kernel_params(n_rot))
        block = hadamard_block(cache.shape[0]) if params.k_hadamard else 0
        g.kv_shift(cache, table, deltas, neox=self.rope_neox, offset=offset, hadamard=block)

    @property
    def n_deep(self) -> int:
        """Further parts of rows of pictures."""
        return max(self.deep_parts.values(), default=0)

    def build(self, b: BatchGraph) -> Value | None:
        """Adds the nodes of a micro-batch; returns logits f32 [V, n_outputs], None if no output is asked for."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayerInputs:
    """Layers whose inputs, one below the other, a drafter reads through a matrix [n * D, W] of its own."""

    layers: tuple[int, ...]
    joining: Value


class Decoder(Architecture):
    """The usual frame: embedding, layers, final norm, output matrix."""

    # "none" and a missing "optional" output.weight mean that the token embedding is used again.
    output_weight: ClassVar[Presence] = "optional"
    output_bias: ClassVar[Presence] = "none"
    output_norm_name: ClassVar[str] = "output_norm"
    output_norm_weight: ClassVar[Presence] = "required"
    norm_bias: ClassVar[Presence] = "none"
    embeds_positions: ClassVar[bool] = False
    """Whether positions have embeddings, which are added to those of the tokens."""
    layer_inputs: LayerInputs | None = None
    """What contexts that keep the states of tokens give instead of the states behind the last layer."""
    layer_norm: bool = False
    """Whether norms take the mean off; files say their epsilon under another key, unless epsilon_key names it."""
    epsilon_key: ClassVar[str] = ""
    predicts_from_normed: ClassVar[bool] = True
    """Whether prediction heads read states behind the output norm, or else those before it."""

    @property
    def max_position(self) -> int | None:
        return self.hp.n_ctx_train if self.embeds_positions else None

    def is_rotated(self, layer: int) -> bool:
        return super().is_rotated(layer) and not self.embeds_positions

    def shift_part(self, layer: int, params: GraphParams) -> tuple[str, int, int] | None:
        return None if self.embeds_positions else super().shift_part(layer, params)

    def load(self, weights: WeightSource) -> None:
        hp = self.hp
        self.norm_biases: dict[str, Value] = {}
        self.token_embd = weights.take("token_embd.weight", (hp.n_embd, hp.n_vocab))
        if self.embeds_positions:
            self.position_embd = weights.take("position_embd.weight", (hp.n_embd, hp.n_ctx_train))
        self.output_norm = self.take_norm(weights, self.output_norm_name, self.output_norm_weight)
        output = weights.take_if(self.output_weight, "output.weight", (hp.n_embd, hp.n_vocab))
        self.output = output or self.token_embd
        self.logit_bias = weights.take_if(self.output_bias, "output.bias", (hp.n_vocab,))
        self.load_global(weights)
        n_layer = 0 if self.predicts_alone else hp.n_layer
        self.layers = [self.load_layer(weights, il, f"blk.{il}") for il in range(n_layer)]

    def take_norm(self, weights: WeightSource, name: str, presence: Presence = "required") -> Value | None:
        """The weight of a norm of n_embd elements; its bias, if it has one, is kept for `norm`."""
        weight = weights.take_if(presence, f"{name}.weight", (self.hp.n_embd,))
        if weight is not None:
            bias = weights.take_if(self.norm_bias, f"{name}.bias", (self.hp.n_embd,))
            if bias is not None:
                self.norm_biases[weight.name] = bias
        return weight

    def load_global(self, weights: WeightSource) -> None:
        """Further tensors that belong to no layer."""

    def load_layer(self, weights: WeightSource, il: int, prefix: str) -> object:
        """Takes the tensors of a layer."""
        raise NotImplementedError

    def layer(self, b: BatchGraph, il: int, x: Value) -> Value:
        """One layer: x [D, T] -> [D, T] (only the output rows in the last layer)."""
        raise NotImplementedError

    def norm(self, b: BatchGraph, x: Value, weight: Value | None) -> Value:
        """The architecture's norm with its epsilon; x itself where a layer has no norm."""
        if weight is None:
            return x
        if self.layer_norm:
            return b.graph.layer_norm(x, weight, self.norm_biases.get(weight.name), self.hp.norm_eps)
        return b.graph.rms_norm(x, weight, self.hp.norm_eps)

    def embed(self, b: BatchGraph) -> Value:
        """Token embeddings [D, T], with those of their positions or scaled where the architecture says so; rows of
        pictures as they are.
        """
        x = b.graph.get_rows(self.token_embd, b.inputs["tokens"])
        if self.embeds_positions:
            x = b.graph.add(x, b.graph.get_rows(self.position_embd, b.inputs["pos"]))
        x = x if self.hp.embedding_scale == 1.0 else b.graph.scale(x, self.hp.embedding_scale)
        return b.with_rows(x)

    def logits(self, b: BatchGraph, y: Value) -> Value:
        """Output matrix on the normed rows, with the architecture's logit scale and cap."""
        if self.hp.logit_scale != 1.0:
            y = b.graph.scale(y, self.hp.logit_scale)
        logits = b.graph.mul_mat(self.output, y, self.logit_bias)
        return b.graph.softcap(logits, self.hp.final_softcap) if self.hp.final_softcap else logits

    def final_state(self, b: BatchGraph, x: Value) -> Value:
        """What the output matrix reads of the residual stream x [D, n] behind the last layer."""
        return self.norm(b, x, self.output_norm)

    def build(self, b: BatchGraph) -> Value | None:
        x = self.embed(b)
        read: dict[int, Value] = {}
        for il in range(self.hp.n_layer):
            read[il] = x
            x = b.steer(il, self.layer(b, il, x))
            if il in self.deep_parts and not self.reads_states:
                x = b.with_deep_rows(self.deep_parts[il], x)
        keeps_states = b.keeps_states
        if keeps_states and self.layer_inputs is not None:
            b.token_states, keeps_states = self.joined_inputs(b, read, self.layer_inputs), False
        if keeps_states and b.n_outputs != b.n_tokens:
            b.token_states = self.states_of_all(b)
        if b.n_outputs == 0:
            return None
        y = self.final_state(b, x)
        state = y if self.predicts_from_normed else x
        b.embeddings = state if self.reads_states else y
        if keeps_states and b.n_outputs == b.n_tokens:
            b.token_states = state
        return self.logits(b, y)

    def joined_inputs(self, b: BatchGraph, read: dict[int, Value], inputs: LayerInputs) -> Value:
        """States [W, T] of a drafter, made of inputs [D, T] of layers."""
        g, d = b.graph, self.hp.n_embd
        both = g.new(len(inputs.layers) * d, b.n_tokens)
        for i, il in enumerate(inputs.layers):
            g.copy(read[il], both.slice0(i * d, d))
        return g.mul_mat(inputs.joining, both)

    def states_of_all(self, b: BatchGraph) -> Value:
        """States [D, T] of all tokens where the last layer keeps the output rows only."""
        if b.unreduced is None:
            raise UsageError(f"contexts of {self.hp.arch} models keep no states of tokens without logits")
        x = b.steer(self.hp.n_layer - 1, b.unreduced)
        return self.final_state(b, x) if self.predicts_from_normed else x
