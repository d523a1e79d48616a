"""Graph builder: one method per op, with shape rules. Architectures use it through models/blocks.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ikpy.errors import UnsupportedError
from ikpy.graph.choices import ChoiceOps
from ikpy.graph.hyper_connections import HyperConnectionOps
from ikpy.graph.ir import F16, I32, I64, Value
from ikpy.graph.products import ProductOps

MAX_I32 = 2**31 - 1
"""Largest parameter of a node: no position comes behind a longer window or period."""
MAX_CONV_TAPS = 16
"""Tokens that the longest filter of causal_conv reaches over."""
MAX_HASHED_TOKEN = 1 << 24
"""Ids of tokens that ngram_rows keeps as floats are below."""


class KeptStates(NamedTuple):
    """Copies of states behind single tokens: states as those of the op, [..., n], and slots i32 [T], which of them gets
    the copy behind each token; -1: none."""

    states: Value
    slots: Value


class Distances(NamedTuple):
    """Linear biases of attention (ALiBi, arXiv:2108.12409): a score loses the slope of its head times the distance of
    the positions i32 of cell [n_cells] and token [T]. Slopes fall to 2^-max_bias, or between those where heads are no
    power of two.

    biases: instead (max_bias is 0), f32 [2 n + 1, H]: a score gets the bias of its head for the position of the cell
    less that of the token, from -n to n and the same beyond.
    """

    max_bias: float
    cell_pos: Value
    pos: Value
    biases: Value | None = None


class Removal(NamedTuple):
    """Of a matrix state: what is found with `keys` f32 [dk, H, T] is taken off under `written` f32 [dk, H, T]."""

    keys: Value
    written: Value


class RopeSections(NamedTuple):
    """How many of the pairs of a head are turned by a token's time, height, width and fourth position (M-RoPE,
    arXiv:2409.12191): one section behind the other, or interleaved, the rest being turned by time (arXiv:2511.21631).
    """

    lengths: tuple[int, int, int, int]
    interleaved: bool


class Graph(ChoiceOps, HyperConnectionOps, ProductOps):
    """All ops: those of its bases (products; single elements and rows; residual streams; choices of cells), positions,
    attention and recurrent layers."""

    # positions and attention

    def rope_table(
        self,
        pos: Value,
        n_rot: int,
        factors: Value | None,
        params: Sequence[float],
        *,
        inverse: bool = False,
        sections: RopeSections | None = None,
    ) -> Value:
        """(cos, sin) pairs f32 [n_rot, T]. params: base, freq_scale, ext_factor, attn_factor, low, high.

        inverse: the sines are negative, so that a rotation by the table undoes one. sections: pos i32 [4, T] has four
        positions of every token, one of which turns a pair.
        """
        if sections is not None and pos.shape[0] != 4:
            raise ValueError(f"positions {pos.shape} for {sections}")
        n_tokens = pos.shape[0] if sections is None else pos.shape[1]
        ip = [int(inverse)] if sections is None else [int(inverse), 1 + sections.interleaved, *sections.lengths]
        return self._emit("rope_table", self.new(n_rot, n_tokens), [pos, factors], ip=ip, fp=params)

    def rope(self, x: Value, table: Value, *, neox: bool, offset: int = 0) -> Value:
        """Rotates table.shape[0] elements from offset of every head of x [d, H, T], in place."""
        return self._emit("rope", x, [x, table], ip=[table.shape[0], int(neox), offset])

    def attention_temperature(self, pos: Value, scale: float, period: int, offset: int) -> Value:
        """1 + scale * ln(1 + floor((pos + offset) / period)) of every token, f32 [1, 1, T]."""
        dst = self.new(1, 1, pos.shape[0])
        return self._emit("attention_temperature", dst, [pos], ip=[min(period, MAX_I32), offset], fp=[scale])

    def hadamard(self, x: Value, block: int) -> Value:
        """Orthonormal Walsh-Hadamard transform of dimension 0 in blocks of a power of two, in place."""
        return self._emit("hadamard", x, [x], ip=[block])

    def kv_store(self, x: Value, cache: Value, cells: Value) -> Value:
        """Writes x f32 [n, H, T] to the cache [n, H, n_ctx] at cells i32 [T]."""
        return self._emit("kv_store", cache, [x, cells])

    def kv_shift(
        self, cache: Value, table: Value, deltas: Value, *, neox: bool, offset: int, hadamard: int = 0
    ) -> Value:
        """Re-rotates the keys of cache [n, H, n_ctx] by table [n_rot, n_ctx] where deltas i32 [n_ctx] is not 0.

        hadamard: block of the transform under which the keys are stored, 0 for none.
        """
        return self._emit("kv_shift", cache, [table, deltas], ip=[table.shape[0], int(neox), offset, hadamard])

    def kq_mask(
        self,
        cell_pos: Value,
        cell_seq: Value,
        pos: Value,
        seq: Value,
        *,
        window: str,
        n_swa: int,
        causal: bool,
        own: bool,
        further: tuple[Value, Value] | None = None,
        until: Value | None = None,
        text: tuple[Value, bool] | None = None,
    ) -> tuple[Value, Value]:
        """Mask f16 [cells, T] and visible ranges i32 [2, T]. window: none, sliding, chunked, every (as none),
        symmetric (n_swa // 2 positions to both sides).

        own: the cells are those of this window alone and all of them are looked at, not the first n_kv. further:
        positions and sequences of more cells behind all of these, to which no window applies. until: i32 [T],
        the last position that each token sees, its own or one behind it. text: i32 [T], the tokens' positions plus the
        length of the encoder's text before them, and whether that is seen or what follows it.
        """
        n_tokens = pos.shape[0]
        n_cells = cell_pos.shape[0] + (further[0].shape[0] if further else 0)
        mask = self.new(n_cells, n_tokens, type_id=F16)
        ranges = self.new(2, n_tokens, type_id=I32)
        kind = {"none": 0, "sliding": 1, "chunked": 2, "every": 0, "symmetric": 3}[window]
        src = [cell_pos, cell_seq, pos, seq, ranges, *(further or (None, None)), until]
        ip = [kind, min(n_swa, MAX_I32), int(causal), int(own)]
        if text is not None:
            src, ip = [*src, text[0]], [*ip, 1 if text[1] else 2]
        self._emit("kq_mask", mask, src, ip=ip, writes=[ranges])
        return mask, ranges

    def attention(
        self,
        q: Value,
        keys: Sequence[Value],
        values: Value,
        mask: tuple[Value, Value],
        *,
        scale: float,
        flash: bool,
        heads_per_step: int = 1,
        softcap: float = 0.0,
        sinks: Value | None = None,
        dst: Value | None = None,
        chosen: Value | None = None,
        common: Value | None = None,
        distances: Distances | None = None,
    ) -> Value:
        """softmax(scale * q.k + mask) v as f32 [dv, H, T]. keys: one or two segments of the head dimension.

        chosen: of choose_cells; the mask counts for tokens that chose all. common: another mask by which tokens that
        have cells in common are found, where the mask hides most of these. distances: what they cost the scores.
        """
        dst = dst or self.new(values.shape[0], q.shape[1], q.shape[2])
        second = keys[1] if len(keys) > 1 else None
        src = [q, keys[0], values, mask[0], sinks, second, mask[1], chosen, common]
        ip, fp = [int(flash), heads_per_step], [scale, softcap]
        if distances is not None:
            if second is not None or chosen is not None or common is not None or keys[0].buffer is values.buffer:
                raise ValueError("distances cost scores of whole keys of all cells only")
            src[8:] = [distances.biases, distances.cell_pos, distances.pos]
            ip, fp = [*ip, 0, q.shape[1]], [*fp, distances.max_bias]
        return self._emit("attention", dst, src, ip=ip, fp=fp)

    # recurrent layers

    def causal_conv(
        self,
        x: Value,
        weight: Value,
        state: Value,
        slots: Value,
        *,
        silu: bool,
        bias: Value | None = None,
        dilation: int = 1,
        kept: KeptStates | None = None,
    ) -> Value:
        """Causal convolution along the tokens of each sequence, one filter per channel, as f32 [C, T].

        y[c, t] = sum_j weight[j, c] * input[c, t - (n - 1 - j) * dilation] + bias[c], then SiLU if asked for. x f32
        [C, T]; weight f32 [n, C], over MAX_CONV_TAPS tokens at most; bias f32 [C]; state f32 [(n - 1) * dilation, C,
        n_slots], the inputs before the batch, oldest first, is brought up to date; slots i32 [T]: the state of every
        token. Tokens of a slot come in the order of their positions, those of several slots in any. Kernels do not
        check slots: whoever fills them in, as with the cells of kv_store, keeps them within 0 .. n_slots - 1. kept:
        states behind some of the tokens are copied.
        """
        taps, channels = weight.shape[:2]
        n_past = (taps - 1) * dilation
        if n_past >= MAX_CONV_TAPS:
            what = f"{taps} taps" if dilation == 1 else f"{taps} taps {dilation} tokens apart"
            raise UnsupportedError(f"tensor '{weight.name}' has {what}; at most {MAX_CONV_TAPS} tokens are supported")
        if x.shape[:2] != (channels, slots.shape[0]) or state.shape[:2] != (n_past, channels):
            raise ValueError(f"convolution of {x.shape} with {weight.shape}, state {state.shape}, slots {slots.shape}")
        if bias is not None and bias.shape[0] != channels:
            raise ValueError(f"convolution of {channels} channels with a bias {bias.shape}")
        src: list[Value | None] = [x, weight, state, slots, bias]
        writes = _updated_states(src, state, slots, kept, 2)
        return self._emit("causal_conv", self.new(*x.shape[:2]), src, ip=[int(silu), dilation], writes=writes)

    def ngram_rows(
        self,
        tokens: Value,
        hashes: Value,
        state: Value,
        slots: Value,
        *,
        n_heads: int,
        eos: int,
        kept: KeptStates | None = None,
    ) -> Value:
        """Rows of a table of hashed n-grams, i32 [n_heads, T]: as many heads for each of 2 to n tokens.

        For a head of k tokens t[0], the token itself, t[1] before it, and so on: (xor_j t[j] * m[j]) mod size + offset.
        Tokens before the last end-of-text token ahead of t[0], that one, and those before the sequence are `eos`.
        tokens i32 [T]; hashes i64 [n + 2 * n_heads]: m, sizes, offsets; state f32 [n - 1, n_slots]: the tokens before
        the batch plus 1, 0 for none, oldest first, is brought up to date; slots and kept as in causal_conv.
        """
        n_before, n_tokens = state.shape[0], tokens.shape[0]
        if n_before < 1 or n_heads % n_before or hashes.shape[0] != n_before + 1 + 2 * n_heads:
            raise ValueError(f"{n_heads} heads of n-grams behind {n_before} tokens, constants {hashes.shape}")
        if slots.shape[0] != n_tokens or hashes.type_id != I64:
            raise ValueError(f"n-grams of {n_tokens} tokens, slots {slots.shape}, constants {hashes.type_name}")
        src: list[Value | None] = [tokens, hashes, state, slots]
        writes = _updated_states(src, state, slots, kept, 1)
        return self._emit("ngram_rows", self.new(n_heads, n_tokens, type_id=I32), src, ip=[eos], writes=writes)

    def gated_delta_rule(
        self,
        q: Value,
        k: Value,
        v: Value,
        g: Value,
        beta: Value,
        state: Value,
        slots: Value,
        *,
        l2_eps: float,
        scale: float,
        interleaved: bool,
        kept: KeptStates | None = None,
    ) -> Value:
        """Gated delta rule (arXiv:2412.06464, per channel arXiv:2510.26692) as f32 [dv, Hv, T].

        Of every token: S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = scale * S^T q. q and k f32 [dk, Hk, T], with
        l2_eps > 0 first divided by sqrt(x.x + l2_eps); v f32 [dv, Hv, T]; all three may be views whose dimension 0 is
        contiguous. g f32 [Hv, T], or [dk, Hv, T] for a decay per row of S; beta f32 [Hv, T]. state f32
        [dv, dk, Hv, n_slots], the columns of S contiguous, is brought up to date; slots and kept as in causal_conv.
        Head h of v meets head h // (Hv / Hk) of q and k if interleaved, else h % Hk.
        """
        (dk, key_heads, n_tokens), (dv, heads) = k.shape[:3], v.shape[:2]
        per_head, per_row = (heads, n_tokens, 1), (dk, heads, n_tokens)
        if heads % key_heads or q.shape != k.shape or v.shape[2] != n_tokens or slots.shape[0] != n_tokens:
            raise ValueError(f"delta rule of q {q.shape}, k {k.shape}, v {v.shape}, slots {slots.shape}")
        if state.shape[:3] != (dv, dk, heads) or beta.shape[:3] != per_head or g.shape[:3] not in (per_head, per_row):
            raise ValueError(f"delta rule of k {k.shape}, decay {g.shape}, beta {beta.shape}, state {state.shape}")
        src: list[Value | None] = [q, k, v, g, beta, state, slots]
        ip, fp = [int(interleaved), int(g.shape[:3] == per_row)], [l2_eps, scale]
        writes = _updated_states(src, state, slots, kept, 3)
        return self._emit("gated_delta_rule", self.new(dv, heads, n_tokens), src, ip=ip, fp=fp, writes=writes)

    def ssm_scan(
        self,
        x: Value,
        dt: Value,
        a: Value,
        b: Value,
        c: Value,
        d: Value,
        state: Value,
        slots: Value,
        *,
        kept: KeptStates | None = None,
    ) -> Value:
        """Selective scan of Mamba-2 (arXiv:2405.21060) as f32 [P, H, T].

        Of every token: S <- exp(dt A) S + B (dt x)^T; y = S^T C + D x. x f32 [P, H, T]; dt f32 [H, T], behind bias and
        softplus; a and d f32 [1, H]; b and c f32 [N, G, T], of which head h reads group h // (H / G). x, b and c may be
        views whose dimension 0 is contiguous. state f32 [P, N, H, n_slots], the columns of S contiguous, is brought up
        to date; slots and kept as in causal_conv.
        """
        (size, heads, n_tokens), (rows, groups) = x.shape[:3], b.shape[:2]
        per_head = [value.shape[:2] for value in (a, d)]
        if heads % groups or b.shape != c.shape or b.shape[2] != n_tokens or slots.shape[0] != n_tokens:
            raise ValueError(f"scan of x {x.shape}, B {b.shape}, C {c.shape}, slots {slots.shape}")
        if state.shape[:3] != (size, rows, heads) or dt.shape[:2] != (heads, n_tokens) or per_head != [(1, heads)] * 2:
            raise ValueError(f"scan of x {x.shape}, dt {dt.shape}, A and D {per_head}, state {state.shape}")
        src: list[Value | None] = [x, dt, a, b, c, d, state, slots]
        writes = _updated_states(src, state, slots, kept, 3)
        return self._emit("ssm_scan", self.new(size, heads, n_tokens), src, writes=writes)

    def channel_scan(
        self,
        x: Value,
        dt: Value,
        a: Value,
        b: Value,
        c: Value,
        d: Value,
        state: Value,
        slots: Value,
        *,
        kept: KeptStates | None = None,
    ) -> Value:
        """Selective scan of Mamba (arXiv:2312.00752) as f32 [P, T].

        Of every token and channel: S <- exp(dt A) S + dt B x; y = C S + D x. x and dt f32 [P, T], dt behind bias and
        softplus; a f32 [P, N]; b and c f32 [N, T]; d f32 [P]. Views must have a contiguous dimension 0. state f32
        [P, N, 1, n_slots] is brought up to date; slots and kept as in causal_conv.
        """
        (size, n_tokens), rows = x.shape[:2], b.shape[0]
        if b.shape != c.shape or b.shape[1] != n_tokens or slots.shape[0] != n_tokens or dt.shape != x.shape:
            raise ValueError(f"scan of x {x.shape}, dt {dt.shape}, B {b.shape}, C {c.shape}, slots {slots.shape}")
        if state.shape[:3] != (size, rows, 1) or a.shape[:2] != (size, rows) or d.shape[0] != size:
            raise ValueError(f"scan of x {x.shape}, A {a.shape}, D {d.shape}, state {state.shape}")
        per_token = [v.view((v.shape[0], 1, n_tokens), (v.strides[1], v.strides[1])) for v in (x, b, c)]
        src: list[Value | None] = [per_token[0], dt, a, *per_token[1:], d, state, slots]
        writes = _updated_states(src, state, slots, kept, 3)
        out = self._emit("ssm_scan", self.new(size, 1, n_tokens), src, ip=[1], writes=writes)
        return out.reshape(size, n_tokens)

    def wkv(
        self,
        r: Value,
        k: Value,
        v: Value,
        decay: Value,
        state: Value,
        slots: Value,
        *,
        first: Value | None = None,
        removal: Removal | None = None,
        kept: KeptStates | None = None,
    ) -> Value:
        """Matrix states of RWKV as f32 [dv, H, T]: S' = diag(decay) S + k v^T of every token, o = S'^T r.

        first (RWKV-6, arXiv:2404.05892) f32 [dk, H]: o = S^T r + (r.(first k)) v, of the state before the token.
        removal (RWKV-7, arXiv:2503.14456): S' loses written (keys^T S)^T. r, k and decay f32 [dk, H, T]; v f32
        [dv, Hv, T], of which head h reads h // (H / Hv). Views must have a contiguous dimension 0. state f32
        [dv, dk, H, n_slots], the columns of S contiguous, is brought up to date; slots and kept as in causal_conv.
        """
        (dk, heads, n_tokens), (dv, value_heads) = r.shape[:3], v.shape[:2]
        alike = (k, decay, *(removal or ()))
        if any(x.shape != r.shape for x in alike) or v.shape[2] != n_tokens or slots.shape[0] != n_tokens:
            raise ValueError(f"states of r {r.shape}, {[x.shape for x in alike]}, v {v.shape}, slots {slots.shape}")
        if state.shape[:3] != (dv, dk, heads) or heads % value_heads or (first and first.shape[:2] != (dk, heads)):
            raise ValueError(f"states {state.shape} of r {r.shape}, v {v.shape}, first {first and first.shape}")
        further = [first, None] if removal is None else list(removal)
        src: list[Value | None] = [r, k, v, decay, *further, state, slots]
        ip = [2 if removal is not None else int(first is not None)]
        writes = _updated_states(src, state, slots, kept, 3)
        return self._emit("wkv", self.new(dv, heads, n_tokens), src, ip=ip, writes=writes)


def _updated_states(
    src: list[Value | None], state: Value, slots: Value, kept: KeptStates | None, dims: int
) -> list[Value]:
    """What an op of a recurrent layer writes, states of so many dimensions each; adds what it keeps to its sources.
    Each is an output of its own, as those that are listed among the sources count as not read."""
    if kept is None:
        return [replace(state)]
    if kept.slots.shape != slots.shape or kept.states.shape[:dims] != state.shape[:dims]:
        raise ValueError(f"kept states {kept.states.shape} of {state.shape}, slots {kept.slots.shape}")
    src.extend(kept)
    return [replace(state), replace(kept.states)]
