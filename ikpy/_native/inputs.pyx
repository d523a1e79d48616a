"""The arrays that graphs read, written before every run."""

import numpy as np

from ikpy._native.batches cimport N_SEQUENCES, Token


cdef class InputArrays:
    """What graphs read of a micro-batch of at most n tokens.

    arrays: int32 [4 + n_tables, n], tokens, positions, sequences, output rows, then the tokens' cells in every table.
    scales: float32 [n_adapters, n], one per token, from those in scales_by_sequence, float32 [64, n_adapters].
    """

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
