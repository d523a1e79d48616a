"""All kinds of cells of a cache: where the tokens of a batch go in each, and where sequences end."""

from libc.stdint cimport uint64_t

from ikpy._native.batches cimport Token, lowest_bit
from ikpy._native.windows cimport WindowTable


cdef class Taken:
    """The cells that the tokens of a batch got, in the order of the tables. `full`: the table that has too few, so that
    nothing was taken; -1 if none. owners: of tables with stretches, the tokens that got a cell; else empty."""

    def __len__(self):
        return self.cells.size()

    def __getitem__(self, size_t table):
        """Cells of one table, a list of at most as many as there are tokens that want one."""
        if table >= self.cells.size():
            raise IndexError(f"table {table} of {self.cells.size()}")
        return self.cells[table]

    cdef int take(self, list tables, Batch batch) except -1:
        cdef CellTable table
        cdef vector[Token] chosen
        cdef int64_t owner
        cdef size_t n, i, k
        self.full = -1
        self.cells.resize(len(tables))
        self.owners.resize(len(tables))
        for k in range(self.cells.size()):
            table = tables[k]
            self.cells[k].clear()
            self.owners[k].clear()
            n = batch.items.size()
            if table.stretch == 1:
                table.find_cells(batch.items, self.cells[k])
            else:
                self.choose_owners(table, k, batch)
                chosen.clear()
                for owner in self.owners[k]:
                    chosen.push_back(batch.items[owner])
                n = chosen.size()
                table.find_cells(chosen, self.cells[k])
            if self.cells[k].size() < n:
                self.full = k
                return 0
        for k in range(self.cells.size()):
            table = tables[k]
            for i in range(self.cells[k].size()):
                owner = i if table.stretch == 1 else self.owners[k][i]
                table.put(self.cells[k][i], batch.items[owner].pos, batch.items[owner].mask)
        return 0

    cdef int choose_owners(self, CellTable table, size_t k, Batch batch) except -1:
        cdef size_t i
        for i in range(batch.items.size()):
            if (batch.items[i].pos + 1) % table.stretch == 0:
                self.owners[k].push_back(i)
        return 0


cdef class CellTables:
    """The kinds of cells of a cache, those of full attention first.

    With windows, where sequences end is known without a look at all cells: tokens that are added only move the ends of
    their own sequences. After any other change `forget` says whose ends must be looked up when they are needed.
    """

    def __init__(self, list tables):
        self.tables, self.full = tables, tables[0]
        self.windows = [table for table in tables if isinstance(table, WindowTable)]
        self.forget()

    def place(self, Batch batch):
        """Takes empty cells of every kind for the tokens of a batch, or none at all if there are too few of a kind.

        Cells of windows are emptied for them where no query sees their tokens any more.
        """
        cdef Taken taken = Taken()
        self.put(batch, taken)
        return taken

    cdef int put(self, Batch batch, Taken taken) except -1:
        if self.windows and self.full._used + <int64_t> batch.items.size() <= self.full.n_cells:
            self.make_room(batch)
        taken.take(self.tables, batch)
        if self.windows and taken.full < 0:
            self.grow(batch)
        return 0

    def release(self, Taken taken):
        """Empties cells again (a failed batch)."""
        self.take_back(taken)

    cdef int take_back(self, Taken taken) except -1:
        cdef CellTable table
        cdef size_t k
        cdef int64_t cell
        for k in range(taken.cells.size()):
            table = self.tables[k]
            for cell in taken.cells[k]:
                table.empty_cell(cell)
        self.unknown = ~(<uint64_t> 0)
        return 0

    @property
    def shifted(self):
        """Whether shifts are pending in a table."""
        return self.has_shifts()

    cdef bint has_shifts(self):
        cdef CellTable table
        for table in self.tables:
            if table.has_shifts():
                return True
        return False

    def forget(self, int seq_id=-1):
        """The cells of a sequence (of all if negative) have changed."""
        self.unknown = ~(<uint64_t> 0) if seq_id < 0 else self.unknown | <uint64_t> 1 << seq_id

    def next_positions(self, Batch batch=None):
        """Sequence -> smallest position that its next query can have, with a batch to come."""
        cdef int64_t[N_SEQUENCES] following
        self.find_next(batch, following)
        return {i: following[i] for i in range(N_SEQUENCES) if following[i] >= 0}

    cdef int make_room(self, Batch batch) except -1:
        cdef WindowTable table
        cdef int64_t n = batch.items.size()
        cdef int64_t[N_SEQUENCES] following
        cdef bint known = False
        for table in self.windows:
            if table._used + n > table.n_cells:
                if not known:
                    self.find_next(batch, following)
                    known = True
                table.empty_outdated(n, following)
        return 0

    cdef int find_next(self, Batch batch, int64_t* following) except -1:
        """Sets following [64], -1 for sequences without tokens."""
        cdef uint64_t left, seen = 0
        cdef Token token
        cdef int i
        self.look_up_ends()
        for i in range(N_SEQUENCES):
            following[i] = self.ends[i] + 1 if self.ends[i] >= 0 else -1
        if batch is None:
            return 0
        for token in batch.items:
            left = token.mask
            while left:
                i = lowest_bit(left)
                left &= left - 1
                following[i] = min(following[i], token.pos) if seen >> i & 1 else token.pos
            seen |= token.mask
        return 0

    cdef int look_up_ends(self) except -1:
        cdef uint64_t left
        cdef int64_t cell
        cdef int i
        if not self.windows:
            self.unknown = ~(<uint64_t> 0)
        if not self.unknown:
            return 0
        for i in range(N_SEQUENCES):
            if self.unknown >> i & 1:
                self.ends[i] = -1
        for cell in range(self.full.n_cells):
            left = self.full._seq[cell] & self.unknown
            while left:
                i = lowest_bit(left)
                left &= left - 1
                self.ends[i] = max(self.ends[i], <int64_t> self.full._pos[cell])
        self.unknown = 0
        return 0

    cdef int grow(self, Batch batch) except -1:
        cdef uint64_t left
        cdef Token token
        cdef int i
        for token in batch.items:
            left = token.mask & ~self.unknown
            while left:
                i = lowest_bit(left)
                left &= left - 1
                self.ends[i] = max(self.ends[i], token.pos)
        return 0
