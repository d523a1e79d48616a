"""Batches: tokens with positions, sequences and whether their logits are wanted.

Between two runs the weights of a model push the interpreter out of the processor's caches, and what a token touches
then comes from memory, some 0.2 microseconds for every line of 64 bytes: a few native records are read instead of many
Python objects. Nothing here, nor in the modules cells, tables and steps beside it, knows models or layers; ikpy.engine
builds on them.
"""

from itertools import pairwise
from operator import index

import numpy as np

from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport INT64_MAX

from ikpy.errors import UsageError

MAX_SEQUENCES = N_SEQUENCES
cdef int64_t MOST_TURN = 1 << 30


cdef int64_t as_integer(value) except? -1:
    cdef int overflow = 0
    cdef int64_t result = PyLong_AsLongLongAndOverflow(value if PyLong_CheckExact(value) else index(value), &overflow)
    if overflow:
        raise UsageError(f"{value} is too large for a token or a position")
    return result


cdef int32_t as_sequence(value) except -1:
    cdef int64_t seq_id = as_integer(value)
    if not 0 <= seq_id < N_SEQUENCES:
        raise UsageError(f"sequence id {seq_id} of a token is outside 0..{N_SEQUENCES - 1}")
    return seq_id


cdef int32_t as_turn(value) except? -1:
    cdef int64_t turn = as_integer(value)
    if not -MOST_TURN <= turn <= MOST_TURN:
        raise UsageError(f"positions turned by {turn}: {MOST_TURN} are possible at most")
    return turn


cdef uint64_t mask_of(ids) except? 0:
    cdef uint64_t mask = 0
    for seq_id in ids:
        mask |= <uint64_t> 1 << as_sequence(seq_id)
    if not mask:
        raise UsageError("a token of a batch belongs to no sequence")
    return mask


cdef class Batch:
    """n tokens with positions, sequence ids (one or several per token) and whether logits are wanted.

    tokens, pos: integers [n]; logits: booleans [n]; seq_ids: per token one id or a tuple of ids, the first of which
    decides what the token attends to. Raises ValueError for lengths that differ, TypeError for tokens and positions
    that are no integers, UsageError for sequence ids out of range. What the model allows is checked by Context.decode.
    """

    def __init__(self, tokens=(), pos=(), seq_ids=(), logits=()):
        if not len(tokens) == len(pos) == len(seq_ids) == len(logits):
            raise ValueError("tokens, pos, seq_ids and logits of a batch differ in length")
        cdef Token token
        self.items.reserve(len(tokens))
        for token_id, position, ids, wanted in zip(tokens, pos, seq_ids, logits):
            if not isinstance(ids, tuple):
                ids = (ids,)
            token.id, token.pos, token.mask = as_integer(token_id), as_integer(position), mask_of(ids)
            token.seq, token.wanted, token.turn = as_sequence(ids[0]), bool(wanted), 0
            self.items.push_back(token)

    @staticmethod
    def one(token_id, pos, seq_id=0, turn=0):
        """A single token whose logits are wanted: as `single([token_id], pos, seq_id)`, with fewer objects."""
        cdef Batch batch = Batch.__new__(Batch)
        cdef Token token
        token.id, token.pos, token.seq, token.wanted = as_integer(token_id), as_integer(pos), as_sequence(seq_id), True
        token.mask, token.turn = <uint64_t> 1 << token.seq, as_turn(turn)
        batch.items.push_back(token)
        return batch

    @staticmethod
    def single(tokens, pos=0, seq_id=0, str logits="last", turn=0):
        """A batch of one `add`."""
        cdef Batch batch = Batch.__new__(Batch)
        batch.append(tokens, pos, seq_id, logits, turn)
        return batch

    def add(self, tokens, pos=0, seq_id=0, str logits="last", turn=0):
        """Appends consecutive tokens of one sequence from position pos. logits: "last", "all" or "none".

        turn: rotation position minus position in front of the first token, as pictures before it make it.
        """
        self.append(tokens, pos, seq_id, logits, turn)

    cdef int append(self, tokens, pos, seq_id, str logits, turn) except -1:
        cdef Token token
        token.pos, token.seq, token.wanted = as_integer(pos), as_sequence(seq_id), logits == "all"
        token.mask, token.turn = <uint64_t> 1 << token.seq, as_turn(turn)
        cdef size_t before = self.items.size()
        for token_id in tokens:
            token.id = as_integer(token_id)
            self.items.push_back(token)
            token.pos += token.pos < INT64_MAX  # far above what decoding takes
        if logits == "last" and self.items.size() > before:
            self.items.back().wanted = True
        return 0

    def __len__(self):
        return self.items.size()

    @property
    def tokens(self):
        """A copy of the tokens, int64 [n]."""
        return np.array([token.id for token in self.items], np.int64)

    @property
    def pos(self):
        """A copy of the positions, int64 [n]."""
        return np.array([token.pos for token in self.items], np.int64)

    @property
    def turns(self):
        """A copy of the differences between rotation position and position, int64 [n]."""
        return np.array([token.turn for token in self.items], np.int64)

    @property
    def masks(self):
        """A copy of the bit masks of the sequences, uint64 [n]."""
        return np.array([token.mask for token in self.items], np.uint64)

    @property
    def seq_ids(self):
        """A copy of the sequences of each token, the one that decides what it attends to first."""
        found = []
        for token in self.items:
            others = (i for i in range(N_SEQUENCES) if i != token.seq and token.mask >> <uint64_t> i & 1)
            found.append((token.seq, *others))
        return found

    @property
    def logits(self):
        """A copy of what is wanted, bool [n]."""
        return np.array([token.wanted for token in self.items], np.bool_)

    def first_invalid(self, int64_t n_vocab, int64_t n_positions):
        """Index of the first token outside 0..n_vocab-1 or at a position outside 0..n_positions-1; -1: none is."""
        return self.invalid(n_vocab, n_positions)

    cdef int64_t invalid(self, int64_t n_vocab, int64_t n_positions):
        cdef size_t i
        for i in range(self.items.size()):
            if not (0 <= self.items[i].id < n_vocab and 0 <= self.items[i].pos < n_positions):
                return i
        return -1

    cdef int64_t n_wanted(self):
        cdef int64_t n = 0
        cdef size_t i
        for i in range(self.items.size()):
            n += self.items[i].wanted
        return n

    def pieces(self, size_t n):
        """The batch in pieces of n tokens, the last one of at most n."""
        if self.items.size() <= n:
            return [self]
        return [self.part(start, min(start + n, self.items.size())) for start in range(0, self.items.size(), n)]

    def cut(self, bounds):
        """The batch in pieces that end at these rising indices, the last one its length."""
        if len(bounds) == 1 and bounds[0] == <int64_t> self.items.size():
            return [self]
        return [self.part(start, end) for start, end in pairwise([0, *bounds])]

    cdef Batch part(self, size_t start, size_t end):
        cdef Batch piece = Batch.__new__(Batch)
        cdef size_t i
        for i in range(start, min(end, self.items.size())):
            piece.items.push_back(self.items[i])
        return piece
