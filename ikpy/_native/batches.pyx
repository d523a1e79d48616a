"""Tokens on their way to a run: batches, the cells they take, and the arrays that graphs read.

Between two runs the weights of a model push the interpreter out of the processor's caches, and what a token touches
then comes from memory, some 0.2 microseconds for every line of 64 bytes: a few native records are read instead of many
Python objects. Nothing here knows models or layers; ikpy.engine builds on it.
"""

from operator import index

import numpy as np

from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.long cimport PyLong_AsLongLongAndOverflow, PyLong_CheckExact
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libcpp.algorithm cimport find
from libcpp.vector cimport vector

from ikpy.errors import UsageError

cdef enum:
    N_SEQUENCES = 64
    CELLS_PER_BLOCK = 64

MAX_SEQUENCES = N_SEQUENCES
BLOCK = CELLS_PER_BLOCK
"""Cells that go to one sequence if there are enough: attention skips blocks of which a token sees nothing."""


cdef struct Token:
    int64_t id
    int64_t pos
    uint64_t mask  # sequences it belongs to
    int32_t seq    # the one that decides what it attends to
    bint wanted    # whether its logits are


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

    cdef vector[Token] items

    def __init__(self, tokens=(), pos=(), seq_ids=(), logits=()):
        if not len(tokens) == len(pos) == len(seq_ids) == len(logits):
            raise ValueError("tokens, pos, seq_ids and logits of a batch differ in length")
        cdef Token token
        self.items.reserve(len(tokens))
        for token_id, position, ids, wanted in zip(tokens, pos, seq_ids, logits):
            if not isinstance(ids, tuple):
                ids = (ids,)
            token.id, token.pos, token.mask = as_integer(token_id), as_integer(position), mask_of(ids)
            token.seq, token.wanted = as_sequence(ids[0]), bool(wanted)
            self.items.push_back(token)

    @staticmethod
    def one(token_id, pos, seq_id=0):
        """A single token whose logits are wanted: `single([token_id], pos, seq_id)`, with fewer objects."""
        cdef Batch batch = Batch.__new__(Batch)
        cdef Token token
        token.id, token.pos, token.seq, token.wanted = as_integer(token_id), as_integer(pos), as_sequence(seq_id), True
        token.mask = <uint64_t> 1 << token.seq
        batch.items.push_back(token)
        return batch

    @staticmethod
    def single(tokens, pos=0, seq_id=0, str logits="last"):
        """Consecutive tokens of one sequence from position pos. logits: "last", "all" or "none"."""
        cdef Batch batch = Batch.__new__(Batch)
        batch.append(tokens, pos, seq_id, logits)
        return batch

    def add(self, tokens, pos=0, seq_id=0, str logits="last"):
        """Appends consecutive tokens of one sequence from position pos. logits: "last", "all" or "none"."""
        self.append(tokens, pos, seq_id, logits)

    cdef int append(self, tokens, pos, seq_id, str logits) except -1:
        cdef Token token
        token.pos, token.seq, token.wanted = as_integer(pos), as_sequence(seq_id), logits == "all"
        token.mask = <uint64_t> 1 << token.seq
        cdef size_t before = self.items.size()
        for token_id in tokens:
            token.id = as_integer(token_id)
            self.items.push_back(token)
            token.pos += 1
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
        cdef Batch piece
        cdef size_t start, i
        found = []
        for start in range(0, self.items.size(), n):
            piece = Batch()
            for i in range(start, min(start + n, self.items.size())):
                piece.items.push_back(self.items[i])
            found.append(piece)
        return found


cdef struct Latest:
    uint64_t mask
    int64_t cell  # that got the latest token of these sequences


cdef class CellTable:
    """Which position and which sequences each of n_cells cells holds.

    pos: int32, -1 = empty; seq: uint64 bit mask of sequence ids; delta: int32 pending position shifts, 0 in empty
    cells. Which cells are in use is changed by the methods only, which keep count.
    """

    cdef readonly int64_t n_cells
    cdef readonly object pos, seq, delta
    cdef int32_t[::1] _pos, _delta
    cdef uint64_t[::1] _seq
    cdef int64_t _used, _end
    cdef bint _shifted
    cdef vector[Latest] _latest

    def __init__(self, int64_t n_cells):
        self.n_cells = n_cells
        self.pos = np.full(n_cells, -1, np.int32)
        self.seq = np.zeros(n_cells, np.uint64)
        self.delta = np.zeros(n_cells, np.int32)
        self._pos, self._seq, self._delta = self.pos, self.seq, self.delta

    @property
    def used(self):
        """Cells that hold a token."""
        return self._used

    @property
    def end(self):
        """The cell behind the last used one."""
        return self.end_of_used()

    cdef int64_t end_of_used(self):
        while self._end > 0 and self._pos[self._end - 1] < 0:  # emptied since
            self._end -= 1
        return self._end

    @property
    def shifted(self):
        """Whether shifts are pending."""
        return self.has_shifts()

    cdef bint has_shifts(self):
        if self._shifted:  # cells with a shift may have been emptied since
            self._shifted = self.delta.any()
        return self._shifted

    def find(self, masks):
        """Indices of empty cells for tokens of these sequences; fewer if there are too few.

        Tokens go behind the latest one of the same sequences up to the end of its block, then to empty blocks, and to
        any empty cells only when no block is empty.
        """
        cdef vector[int64_t] cells
        cdef vector[Token] tokens
        cdef Token token
        for mask in masks:
            token.mask = mask
            tokens.push_back(token)
        self.find_cells(tokens, cells)
        return cells

    def fill(self, cells, pos, masks):
        """Puts tokens into empty cells. IndexError for cells that do not exist."""
        cdef vector[int64_t] chosen = cells
        cdef vector[int32_t] positions = pos
        cdef vector[uint64_t] sequences = masks
        if not chosen.size() == positions.size() == sequences.size():
            raise ValueError("cells, pos and masks differ in length")
        cdef size_t i
        for i in range(chosen.size()):
            self.check(chosen[i])
        for i in range(chosen.size()):
            self.put(chosen[i], positions[i], sequences[i])

    def empty(self, cells):
        """Empties cells. IndexError for cells that do not exist."""
        cdef const int64_t[::1] chosen = np.ascontiguousarray(cells, np.int64)
        cdef int64_t cell
        for cell in chosen:
            self.check(cell)
        for cell in chosen:
            self.empty_cell(cell)

    def shift(self, cells, deltas):
        """Sets the pending shifts (int32) of filled cells."""
        self.delta[cells] = deltas
        self._shifted = True

    def settle(self):
        """Forgets the shifts, which have been made."""
        self.delta[:] = 0
        self._shifted = False

    cdef int check(self, int64_t cell) except -1:
        if not 0 <= cell < self.n_cells:
            raise IndexError(f"cell {cell} of {self.n_cells}")
        return 0

    cdef void put(self, int64_t cell, int32_t pos, uint64_t mask):
        self._used += self._pos[cell] < 0
        self._pos[cell], self._seq[cell] = pos, mask
        cdef size_t i = self.place_of(mask)
        if i == self._latest.size():
            self._latest.push_back(Latest(mask, cell))
        self._latest[i].cell = cell
        self._end = max(self._end, cell + 1)

    cdef size_t place_of(self, uint64_t mask):
        """Of the latest token of these sequences; behind the last place if there was none."""
        cdef size_t i = 0
        while i < self._latest.size() and self._latest[i].mask != mask:
            i += 1
        return i

    cdef void empty_cell(self, int64_t cell):
        self._used -= self._pos[cell] >= 0
        self._pos[cell], self._seq[cell], self._delta[cell] = -1, 0, 0

    cdef void find_cells(self, const vector[Token]& tokens, vector[int64_t]& cells):
        """Appends the cells for tokens, fewer if there are too few."""
        cdef size_t i
        cdef int64_t cell
        for i in range(tokens.size()):
            cell = self.following(tokens[i].mask)
            if cell < 0 or find(cells.begin(), cells.end(), cell) != cells.end():
                cells.clear()
                self.search(tokens, cells)
                return
            cells.push_back(cell)

    cdef int64_t following(self, uint64_t mask):
        """The cell behind the latest token of these sequences, if it is empty and in the same block; else -1."""
        cdef int64_t latest = -1, cell
        cdef size_t i = self.place_of(mask)
        if i < self._latest.size():
            latest = self._latest[i].cell
        if latest < 0 or self._pos[latest] < 0 or self._seq[latest] != mask:
            latest = -1
            for cell in range(self.n_cells):
                if self._seq[cell] & mask and (latest < 0 or self._pos[cell] > self._pos[latest]):
                    latest = cell
            if latest < 0:
                return -1
        cell = latest + 1
        return cell if cell % CELLS_PER_BLOCK and cell < self.n_cells and self._pos[cell] < 0 else -1

    cdef void search(self, const vector[Token]& tokens, vector[int64_t]& found):
        """Cells for tokens that do not all follow others: blocks for each set of sequences, then any empty cells."""
        cdef vector[uint8_t] free = vector[uint8_t](self.n_cells)
        cdef vector[uint64_t] distinct
        cdef vector[int64_t] chosen = vector[int64_t](tokens.size(), -1), own
        cdef size_t i, n
        cdef uint64_t mask
        cdef int64_t cell = 0
        for i in range(free.size()):
            free[i] = self._pos[i] < 0
        for i in range(tokens.size()):
            mask = tokens[i].mask
            if find(distinct.begin(), distinct.end(), mask) == distinct.end():
                distinct.push_back(mask)
        for mask in distinct:
            n = 0
            for i in range(tokens.size()):
                n += tokens[i].mask == mask
            own.clear()
            self.cells_of_blocks(free, self.following(mask), n, own)
            n = 0
            for i in range(tokens.size()):
                if tokens[i].mask == mask and n < own.size():
                    chosen[i] = own[n]
                    free[own[n]] = False
                    n += 1
        for i in range(tokens.size()):
            if chosen[i] < 0:
                while cell < self.n_cells and not free[cell]:
                    cell += 1
                if cell == self.n_cells:
                    continue
                chosen[i] = cell
                cell += 1
            found.push_back(chosen[i])

    cdef void cells_of_blocks(
        self, const vector[uint8_t]& free, int64_t following, size_t n, vector[int64_t]& found
    ):
        """At most n cells: those from `following` to the end of its block, then those of empty blocks."""
        cdef int64_t cell = following, block, last
        if following >= 0:
            last = min(self.n_cells, following + CELLS_PER_BLOCK - following % CELLS_PER_BLOCK)
            while cell < last and free[cell] and found.size() < n:
                found.push_back(cell)
                cell += 1
        for block in range(self.n_cells // CELLS_PER_BLOCK):
            if found.size() == n:
                return
            cell, last = block * CELLS_PER_BLOCK, (block + 1) * CELLS_PER_BLOCK
            while cell < last and free[cell]:
                cell += 1
            if cell < last:
                continue
            for cell in range(block * CELLS_PER_BLOCK, last):
                if found.size() < n:
                    found.push_back(cell)


cdef class Taken:
    """The cells that the tokens of a batch got, in the order of the tables. `full`: the table that has too few, so that
    nothing was taken; -1 if none."""

    cdef vector[vector[int64_t]] cells
    cdef readonly int full

    def __len__(self):
        return self.cells.size()

    def __getitem__(self, size_t table):
        """Cells of one table, a list of at most as many as there are tokens."""
        if table >= self.cells.size():
            raise IndexError(f"table {table} of {self.cells.size()}")
        return self.cells[table]

    cdef int take(self, list tables, Batch batch) except -1:
        cdef CellTable table
        cdef size_t n = batch.items.size(), i, k
        self.full = -1
        self.cells.resize(len(tables))
        for k in range(self.cells.size()):
            table = tables[k]
            self.cells[k].clear()
            table.find_cells(batch.items, self.cells[k])
            if self.cells[k].size() < n:
                self.full = k
                return 0
        for k in range(self.cells.size()):
            table = tables[k]
            for i in range(n):
                table.put(self.cells[k][i], batch.items[i].pos, batch.items[i].mask)
        return 0

    cdef int give_back(self, list tables) except -1:
        cdef CellTable table
        cdef size_t k, i
        for k in range(self.cells.size()):
            table = tables[k]
            for i in range(self.cells[k].size()):
                table.empty_cell(self.cells[k][i])
        return 0


def take(list tables, Batch batch):
    """Takes empty cells in every one of the tables for the tokens of a batch, or none at all if a table has too few."""
    cdef Taken taken = Taken()
    taken.take(tables, batch)
    return taken


def any_shifted(list tables):
    """Whether shifts are pending in a table."""
    return has_shifts(tables)


cdef bint has_shifts(list tables):
    cdef CellTable table
    for table in tables:
        if table.has_shifts():
            return True
    return False


cdef class InputArrays:
    """What graphs read of a micro-batch of at most n tokens.

    arrays: int32 [4 + n_tables, n], tokens, positions, sequences, output rows, then the tokens' cells in every table.
    scales: float32 [n_adapters, n], one per token, from those in scales_by_sequence, float32 [64, n_adapters].
    """

    cdef readonly object arrays, scales, scales_by_sequence
    cdef int32_t[:, ::1] _arrays
    cdef float[:, ::1] _scales, _by_sequence

    def __init__(self, int64_t n, int64_t n_tables, int64_t n_adapters):
        self.arrays = np.zeros((4 + n_tables, n), np.int32)
        self.scales = np.zeros((n_adapters, n), np.float32)
        self.scales_by_sequence = np.ones((N_SEQUENCES, n_adapters), np.float32)
        self._arrays, self._scales, self._by_sequence = self.arrays, self.scales, self.scales_by_sequence

    def write(self, Batch batch, Taken taken):
        """Sets the tokens of a batch, the cells they took, and their adapters' scales; returns the number of outputs.

        ValueError if the batch has more tokens than fit, or other tables.
        """
        return self.set(batch, taken)

    cdef int64_t set(self, Batch batch, Taken taken) except -1:
        cdef int64_t n = batch.items.size(), n_outputs = 0, i, k
        if n > self._arrays.shape[1] or 4 + <int64_t> taken.cells.size() != self._arrays.shape[0]:
            raise ValueError("the batch does not fit the arrays")
        cdef Token token
        for i in range(n):
            token = batch.items[i]
            self._arrays[0, i], self._arrays[1, i], self._arrays[2, i] = token.id, token.pos, token.seq
            if token.wanted:
                self._arrays[3, n_outputs] = i
                n_outputs += 1
            for k in range(self._scales.shape[0]):
                self._scales[k, i] = self._by_sequence[token.seq, k]
        for k in range(<int64_t> taken.cells.size()):
            for i in range(n):
                self._arrays[4 + k, i] = taken.cells[k][i]
        return n_outputs


cdef class Ready:
    """A compiled plan for n_tokens with n_outputs, run with n_threads, and views of its results.

    native: the core's plan, if it is all that is to be run; else None.
    """

    cdef readonly int64_t n_tokens, n_outputs
    cdef readonly int n_threads
    cdef readonly object plan, results
    cdef object native
    cdef Ready next

    def __init__(self, int64_t n_tokens, int64_t n_outputs, int n_threads, plan, results, native):
        self.n_tokens, self.n_outputs, self.n_threads = n_tokens, n_outputs, n_threads
        self.plan, self.results, self.native = plan, results, native


ctypedef double (*RunPlan)(object plan, int64_t n_kv, int n_threads, object work) except? -1


cdef class Steps:
    """The plans of a context, and the way from a batch to a run of one of them that needs no interpreter.

    run_plan: the core's. tables: all kinds of cells, those of full attention first, of which a multiple of pad cells is
    attended to. work: core.WorkMemory that is large enough for every plan.
    """

    cdef RunPlan run_plan
    cdef InputArrays inputs
    cdef list tables
    cdef int64_t n_vocab, n_positions, pad
    cdef Taken taken
    cdef public object work
    cdef Ready latest  # the head of a list in the order of their last use
    cdef size_t n_most

    def __init__(self, run_plan, InputArrays inputs, list tables, int64_t n_vocab, int64_t n_positions, int64_t pad,
                 size_t n_plans):
        self.run_plan = <RunPlan> PyCapsule_GetPointer(run_plan, "ikpy.run_plan")
        self.inputs, self.tables = inputs, tables
        self.n_vocab, self.n_positions, self.pad, self.n_most = n_vocab, n_positions, pad, n_plans
        self.taken = Taken()

    def n_kv(self):
        """Attended length: up to the last used cell of full attention, rounded up to pad."""
        return self.attended()

    cdef int64_t attended(self):
        cdef CellTable cells = self.tables[0]
        return min(cells.n_cells, max(1, (cells.end_of_used() + self.pad - 1) // self.pad) * self.pad)

    def get(self, int64_t n_tokens, int64_t n_outputs):
        """The plan of this shape, if it is kept."""
        return self.find(n_tokens, n_outputs)

    def put(self, Ready ready):
        """Keeps a plan; the one that was used longest ago goes when there are too many."""
        cdef Ready last = ready
        ready.next, self.latest = self.latest, ready
        cdef size_t n = 1
        while last.next is not None:
            if n == self.n_most:
                last.next = None
                break
            n += 1
            last = last.next

    def clear(self):
        """Forgets all plans."""
        self.latest = None

    cdef Ready find(self, int64_t n_tokens, int64_t n_outputs):
        cdef Ready before = None, ready = self.latest
        while ready is not None and not (ready.n_tokens == n_tokens and ready.n_outputs == n_outputs):
            before, ready = ready, ready.next
        if before is not None and ready is not None:
            before.next, ready.next, self.latest = ready.next, self.latest, ready
        return ready

    def run(self, Batch batch):
        """Evaluates a batch for which everything is at hand; the results of the plan.

        None if it is no valid batch of one micro-batch with cells for all tokens and a native plan, or if positions are
        to be shifted; nothing has changed then. Nor has it after an exception, such as an interruption during the run.
        """
        cdef Ready ready = self.find(batch.items.size(), batch.n_wanted())
        if ready is None or ready.native is None or has_shifts(self.tables):
            return None
        if batch.invalid(self.n_vocab, self.n_positions) >= 0:
            return None
        self.taken.take(self.tables, batch)
        if self.taken.full >= 0:
            return None
        try:
            self.inputs.set(batch, self.taken)
            self.run_plan(ready.native, self.attended(), ready.n_threads, self.work)
            PyErr_CheckSignals()
        except BaseException:
            self.taken.give_back(self.tables)
            raise
        return ready.results
