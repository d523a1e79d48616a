"""What an architecture sees while it builds the graph of one micro-batch shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ikpy.graph.builder import Distances, Graph, KeptStates, RopeSections
from ikpy.graph.ir import ALWAYS, F16, Value
from ikpy.models.rope import RopeParams

if TYPE_CHECKING:
    from ikpy.models.residual_bank import Bank

Window = tuple[str, int]
"""Kind ("none", "sliding", "chunked", "symmetric": half its size to both sides) and size of an attention window; or
"every" and a size, of cells that hold what a stretch of so many positions was compressed to, under the last of them."""
FULL: Window = ("none", 0)
EVERY = "every"
SYMMETRIC = "symmetric"


@dataclass(frozen=True)
class CacheSpec:
    """One cache tensor of a layer: rows of n elements for each of n_heads heads per cell.

    window: what the layer attends to; its cells may be as few as that needs. behind: name of a tensor of the layer
    with rows as these, behind whose cells these lie, so that both are attended to as one.
    """

    name: str
    n: int
    n_heads: int
    type_id: int
    window: Window = FULL
    behind: str = ""


@dataclass(frozen=True)
class StateSpec:
    """One state tensor f32 of a recurrent layer: its shape for every sequence."""

    name: str
    shape: tuple[int, ...]

    @property
    def n_elements(self) -> int:
        """Elements of one sequence."""
        return math.prod(self.shape)


@dataclass
class GraphParams:
    """Settings of a context that shape the graph."""

    n_ctx: int
    flash_attn: bool
    mla: int
    attn_max_batch: int  # MiB, 0 = unlimited
    types_k: tuple[int, ...]  # of the K cache (the cached latents), per layer
    types_v: tuple[int, ...]
    rope: RopeParams
    expert_reduction: tuple[int, float]
    causal: bool = True
    n_seq_max: int = 1
    grouped_experts: bool = False
    k_hadamard: bool = False
    v_hadamard: bool = False
    windows: frozenset[Window] = frozenset()  # windows whose layers have cells of their own
    sparse_top_k: int = -1  # cells that indexers choose for a token, 0 = all, -1 = what the file says
    type_indexer: int = F16  # of cached index keys
    on_devices: bool = False
    rope_sections: RopeSections | None = None  # of the positions of pictures, if there may be some
    one_way: frozenset[Window] = frozenset()  # windows through which rows of a picture see earlier ones only


class MediaInputs(NamedTuple):
    """Rows of pictures among the tokens of a micro-batch.

    rows: f32 [n_embd * (1 + n_deep), n] in host memory; slots: i32 [T], which of them stands for a token, -1: none;
    keep: f32 [1, T], 0 for these tokens and 1 for others. places: i32 [4, T], rotation positions in time, height,
    width and the fourth of RopeSections; until: i32 [T], the last position that each token sees.
    """

    rows: Value
    slots: Value
    keep: Value
    places: Value
    until: Value


@dataclass
class BatchGraph:
    """Inputs, caches and shared intermediate values of one micro-batch.

    inputs: tokens, pos, seq (i32 [T]), outputs (i32 [n_outputs]), where copies of states are kept keep (i32 [T]), and
    where pictures may have turned them turned (i32 [T]), the positions of rotations.
    cells: window -> cells of the tokens (i32 [T]), position (i32 [n]) and sequences (i64 [n]) of all n cells.
    stretches: of "every" windows the tokens that end a stretch and its first position (i32 [E]), -1 and 0 where there
    are fewer; their cells are as many.
    caches: (layer, name) -> cache tensor [n, n_heads, n_cells]; windows: whose cells each of them has.
    recurrent: (layer, name) -> states [*shape, n_sequences], inputs["seq"] being the slot of every token, and of what
    is kept of them [*shape, n_copies], if there is any.
    steering: control vectors f32 [D, n_layer], added to the residual stream behind the layers. states: f32 [W, T],
    hidden states behind the tokens before those of the batch, for architectures that read them. keeps_states: whether
    token_states f32 [W, T], what prediction heads read of all tokens, are wanted. unreduced: the residual stream [D,
    T], or streams [D, n, T], behind the last layer where only the output rows go on. layer_inputs: f32 [P * n_layer,
    T], P elements of every token for each layer, where an architecture has them. chosen: of Graph.choose_cells, by the
    last indexer. first_values: f32 [D, T], values of the first layer, with which later ones mix theirs. banks: residual
    streams of earlier layers that later ones read, by the number of tokens they have.
    media: rows of pictures among the tokens, if there may be some. encodes: the tokens are texts for the encoder.
    """

    graph: Graph
    n_tokens: int
    n_outputs: int
    inputs: dict[str, Value]
    cells: dict[Window, tuple[Value, Value, Value]]
    caches: dict[tuple[int, str], Value]
    windows: dict[tuple[int, str], Window]
    params: GraphParams
    recurrent: dict[tuple[int, str], tuple[Value, Value | None]] = field(default_factory=dict)
    embeddings: Value | None = None
    keeps_states: bool = False
    token_states: Value | None = None
    unreduced: Value | None = None
    layer_inputs: Value | None = None
    steering: Value | None = None
    states: Value | None = None
    chosen: Value | None = None
    first_values: Value | None = None
    stretches: dict[Window, tuple[Value, Value]] = field(default_factory=dict)
    banks: dict[int, Bank] = field(default_factory=dict)
    media: MediaInputs | None = None
    encodes: bool = False
    _masks: dict[tuple[Window, Window], tuple[Value, Value]] = field(default_factory=dict)
    _rope_tables: dict[tuple, Value] = field(default_factory=dict)
    _temperatures: dict[tuple[float, int, int], Value] = field(default_factory=dict)

    def mask(self, kind: str = "none", n_swa: int = 0, stretch: Window = FULL) -> tuple[Value, Value]:
        """The mask of a window's cells (of all, if it has none of its own), and of those of compressed stretches, if
        asked for, behind them. Built once per batch.
        """
        window = kind, n_swa
        key = window, stretch
        if key not in self._masks:
            own = window in self.cells and window != FULL
            _, cell_pos, cell_seq = self.cells[window if own else FULL]
            with self.graph.only(ALWAYS):
                self._masks[key] = self.graph.kq_mask(
                    cell_pos,
                    cell_seq,
                    self.inputs["pos"],
                    self.inputs["seq"],
                    window=window[0],
                    n_swa=window[1],
                    causal=self.params.causal and not self.encodes,
                    own=own or stretch != FULL,
                    further=self.cells[stretch][1:] if stretch != FULL else None,
                    until=self.media.until if self.media and window not in self.params.one_way else None,
                )
        return self._masks[key]

    def text_mask(self, *, seen: bool) -> tuple[Value, Value]:
        """The mask of the encoder's text in each token's sequence, or, not seen, of what follows it up to the token."""
        key = ("text", int(seen)), FULL
        if key not in self._masks:
            _, cell_pos, cell_seq = self.cells[FULL]
            pos, seq, turned = (self.inputs[name] for name in ("pos", "seq", "turned"))
            with self.graph.only(ALWAYS):
                self._masks[key] = self.graph.kq_mask(
                    cell_pos, cell_seq, pos, seq, window="none", n_swa=0, causal=True, own=False, text=(turned, seen)
                )
        return self._masks[key]

    def distances(self, layer: int, max_bias: float, biases: Value | None = None) -> Distances:
        """What biases of a layer's attention by positions are made of: linear ones, or those of differences."""
        cell_pos = self.cells[self.windows[layer, "k"]][1]
        return Distances(max_bias, cell_pos, self.inputs["pos"], biases)

    def rope_table(
        self,
        n_rot: int,
        rope: RopeParams,
        factors: Value | None = None,
        *,
        pos: Value | None = None,
        inverse: bool = False,
    ) -> Value:
        """The rotation table for these parameters, built once per batch; pos: of other positions than the tokens';
        inverse: that turns back.
        """
        sections = self.params.rope_sections if self.media and pos is None else None
        if pos is None:
            pos = self.media.places if self.media and sections else self.inputs.get("turned", self.inputs["pos"])
        key = (n_rot, rope, id(factors), pos.buffer, pos.shape, inverse)
        if key not in self._rope_tables:
            values = rope.kernel_params(n_rot)
            with self.graph.only(ALWAYS):
                self._rope_tables[key] = self.graph.rope_table(
                    pos, n_rot, factors, values, inverse=inverse, sections=sections
                )
        return self._rope_tables[key]

    def attention_temperature(self, scale: float, period: int, offset: int) -> Value:
        """The per-token factor of Graph.attention_temperature, built once per batch."""
        key = (scale, period, offset)
        if key not in self._temperatures:
            with self.graph.only(ALWAYS):
                self._temperatures[key] = self.graph.attention_temperature(self.inputs["pos"], scale, period, offset)
        return self._temperatures[key]

    def with_rows(self, x: Value) -> Value:
        """Embeddings x [D, T] of the tokens with rows of pictures in place of those that stand for them."""
        if self.media is None:
            return x
        return self.graph.add(self.graph.mul(x, self.media.keep), self._rows(0, x.shape[0]))

    def with_deep_rows(self, part: int, x: Value) -> Value:
        """The residual stream x [D, T] behind a layer, with a part of pictures' rows added."""
        if self.media is None:
            return x
        return self.graph.add(x, self._rows(part * x.shape[0], x.shape[0]))

    def _rows(self, start: int, n: int) -> Value:
        """Elements of the rows that stand for the tokens, f32 [n, T]; 0 for other tokens."""
        assert self.media is not None
        return self.graph.get_rows(self.media.rows.slice0(start, n), self.media.slots)

    def steer(self, layer: int, x: Value) -> Value:
        """The residual stream x [D, T] behind a layer, with the control vector added."""
        if self.steering is None:
            return x
        return self.graph.add(x, self.steering.slice(1, layer, 1))

    def cache(self, layer: int, name: str) -> Value:
        """The whole cache tensor."""
        return self.caches[layer, name]

    def store(self, layer: int, name: str, x: Value, part: Value | None = None) -> None:
        """Writes x f32 [n, H, T] to the cells of the tokens, or to a part of their rows."""
        cells = self.cells[self.windows[layer, name]][0]
        self.graph.kv_store(x, part or self.caches[layer, name], cells)

    def kept(self, copies: Value | None) -> KeptStates | None:
        """The copies of states that an op of a recurrent layer makes."""
        return None if copies is None else KeptStates(copies, self.inputs["keep"])

    def attended(self, layer: int, name: str) -> Value:
        """The cells of a cache tensor that are attended to: the first n_kv, or all of a window's own."""
        cache = self.caches[layer, name]
        if self.windows[layer, name] != FULL:
            return cache
        return Value(cache.buffer, cache.type_id, cache.shape, cache.strides, cache.offset, dynamic_dim=2)

    def keep_outputs(self, layer: int, n_layer: int, *values: Value) -> Sequence[Value]:
        """In the last layer, only the rows whose logits were asked for."""
        if layer != n_layer - 1 or self.n_outputs == self.n_tokens:
            return values
        return [self.graph.get_rows(v, self.inputs["outputs"]) for v in values]
