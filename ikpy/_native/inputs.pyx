"""The arrays that graphs read, written before every run."""

import numpy as np

from ikpy._native.batches cimport N_SEQUENCES, Token


cdef class InputArrays:
    """What graphs read of a micro-batch of at most n tokens.

    arrays: int32 [4 + n_tables, n], tokens, positions, sequences, output rows, then the tokens' cells in every table.
    Of tables with stretches those of the tokens that end one, -1 behind them, and after all tables two rows more for
    each: the tokens, -1 behind them, and the first positions of their stretches.
    turned: int32 [n], rotation positions of the tokens, or [0] unless `turns`.
    scales: float32 [n_adapters, n], one per token, from those in scales_by_sequence, float32 [64, n_adapters].
    """

    def __init__(self, int64_t n, list stretches, int64_t n_adapters, bint turns=False):
        self._stretches = stretches
        further = 2 * sum(stretch > 1 for stretch in stretches)
        self.arrays = np.zeros((4 + len(stretches) + further, n), np.int32)
        self.turned = np.zeros(n if turns else 0, np.int32)
        self.scales = np.zeros((n_adapters, n), np.float32)
        self.scales_by_sequence = np.ones((N_SEQUENCES, n_adapters), np.float32)
        self._arrays, self._scales, self._by_sequence = self.arrays, self.scales, self.scales_by_sequence
        self._turned = self.turned

    def write(self, Batch batch, Taken taken):
        """Sets the tokens of a batch, the cells they took, and their adapters' scales; returns the number of outputs.

        ValueError if the batch has more tokens than fit, or other tables.
        """
        return self.set(batch, taken)

    cdef int64_t set(self, Batch batch, Taken taken) except -1:
        cdef int64_t n = batch.items.size(), n_outputs = 0, i, k
        cdef int64_t further = 4 + self._stretches.size()
        if n > self._arrays.shape[1] or taken.cells.size() != self._stretches.size():
            raise ValueError("the batch does not fit the arrays")
        cdef Token token
        for i in range(n):
            token = batch.items[i]
            self._arrays[0, i], self._arrays[1, i], self._arrays[2, i] = token.id, token.pos, token.seq
            if token.wanted:
                self._arrays[3, n_outputs] = i
                n_outputs += 1
            if i < self._turned.shape[0]:
                self._turned[i] = token.pos + token.turn
            for k in range(self._scales.shape[0]):
                self._scales[k, i] = self._by_sequence[token.seq, k]
        for k in range(<int64_t> taken.cells.size()):
            if self._stretches[k] > 1:
                self.set_stretch(batch, taken, k, further)
                further += 2
                continue
            for i in range(n):
                self._arrays[4 + k, i] = taken.cells[k][i]
        return n_outputs

    cdef int set_stretch(self, Batch batch, Taken taken, int64_t k, int64_t further) except -1:
        cdef int64_t n = taken.owners[k].size(), i, owner
        for i in range(self._arrays.shape[1]):
            owner = taken.owners[k][i] if i < n else -1
            self._arrays[4 + k, i] = taken.cells[k][i] if i < n else -1
            self._arrays[further, i] = owner
            self._arrays[further + 1, i] = batch.items[owner].pos + 1 - self._stretches[k] if i < n else 0
        return 0
