"""The usual way from logits to a token, of few passes and without Python objects: the samplers top_k, top_p, min_p and
temperature, and a draw. What it computes is written down in ikpy.engine.candidates, which has all samplers."""

import numpy as np

from libc.math cimport exp, fmax, fmin, isfinite, isinf, log
from libc.stdint cimport int32_t, int64_t
from libcpp.algorithm cimport nth_element, sort
from libcpp.vector cimport vector

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void*) noexcept nogil

cdef enum:
    # A row of 128,256 logits, half of them in the cache of another core: 80 us with, 106 without.
    AHEAD = 512
    STEP = 64  # logits that are compared with the limit at once

BLOCK_LOGITS = STEP
"""Logits whose largest is known where block maxima are given."""

cdef double LARGEST32 = np.finfo(np.float32).max


cdef struct Candidate:
    float logit
    int32_t id


cdef bint is_better(const Candidate& a, const Candidate& b) noexcept nogil:
    return a.logit > b.logit or (a.logit == b.logit and a.id < b.id)


cdef void keep_best(vector[Candidate]& found, size_t k) noexcept nogil:
    """Leaves the k best, the worst of them last."""
    if found.size() > k:
        nth_element(found.begin(), found.begin() + (k - 1), found.end(), is_better)
        found.resize(k)


cdef void find_best(const float* logits, int64_t n, size_t k, vector[Candidate]& found) noexcept nogil:
    """The k largest logits in descending order, of equal ones the first; NaN is none of them."""
    cdef int64_t i = 0, start, end
    cdef float limit
    cdef int any_above
    cdef Candidate candidate
    found.clear()
    while i < n and found.size() < k:
        if logits[i] == logits[i]:
            candidate.logit, candidate.id = logits[i], i
            found.push_back(candidate)
        i += 1
    if found.size() == k:
        sort(found.begin(), found.end(), is_better)
        limit = found[k - 1].logit
        while i < n:
            start, end, any_above = i, min(i + STEP, n), 0
            for i in range(start + AHEAD, start + AHEAD + STEP, 16):
                prefetch(logits + i)
            for i in range(start, end):
                any_above |= logits[i] > limit
            if any_above:
                for i in range(start, end):
                    if logits[i] > limit:
                        candidate.logit, candidate.id = logits[i], i
                        found.push_back(candidate)
            i = end
            if found.size() > 4 * k + STEP:
                keep_best(found, k)
                limit = found[k - 1].logit
        keep_best(found, k)
    sort(found.begin(), found.end(), is_better)


cdef void find_best_in_blocks(
    const float* logits, int64_t n, const float* maxima, size_t k, vector[Candidate]& found
) except *:
    """find_best, reading the k blocks with the largest logits only: there is a better one in each than in all others."""
    cdef int64_t n_blocks = (n + STEP - 1) // STEP, block, i
    cdef vector[Candidate] blocks
    cdef Candidate candidate, best
    cdef int any_nan = 0
    for block in range(n_blocks):
        any_nan |= maxima[block] != maxima[block]
    if any_nan or <size_t> n_blocks < k:
        find_best(logits, n, k, found)
        return
    find_best(maxima, n_blocks, k, blocks)
    found.clear()
    for best in blocks:
        for i in range(best.id * STEP, min(n, (<int64_t> best.id + 1) * STEP)):
            if logits[i] >= blocks[k - 1].logit:
                candidate.logit, candidate.id = logits[i], i
                found.push_back(candidate)
    keep_best(found, k)
    sort(found.begin(), found.end(), is_better)


cdef int64_t likeliest(const float* logits, int64_t n, const float* maxima) noexcept nogil:
    """The first of the largest of n logits, or the first NaN; maxima: of blocks of them, NaN where one is."""
    cdef int64_t start = STEP * first_largest(maxima, (n + STEP - 1) // STEP)
    return start + first_largest(logits + start, min(STEP, n - start))


cdef int64_t first_largest(const float* x, int64_t n) noexcept nogil:
    cdef int64_t best = 0, i
    for i in range(n):
        if x[i] != x[i]:
            return i
        if x[i] > x[best]:
            best = i
    return best


cdef class Draws:
    """Draws tokens from the `top_k` likeliest, cut by `top_p` (1: not) and `min_p` (0: not), at a temperature above 0.

    After `choose`, ids int32 [n] and probabilities float64 [n] are those that the token was drawn from.
    """

    cdef size_t top_k
    cdef double top_p, log_min_p, temperature
    cdef bint cuts_min_p
    cdef vector[Candidate] kept
    cdef vector[double] weights

    def __init__(self, size_t top_k, double top_p, double min_p, double temperature):
        self.top_k, self.top_p, self.temperature = top_k, top_p, np.float32(temperature)
        self.cuts_min_p = min_p > 0
        self.log_min_p = log(min_p) if min_p > 0 else 0

    def choose(self, const float[::1] logits, double unit, const float[::1] maxima=None):
        """A token for logits float32 [n_vocab]; unit is a random number from 0 to 1. ValueError without numbers.

        maxima: float32, the largest of every BLOCK_LOGITS logits (NaN where one is), if they are known.
        """
        if maxima is None:
            find_best(&logits[0], logits.shape[0], self.top_k, self.kept)
        elif maxima.shape[0] * STEP < logits.shape[0]:
            raise ValueError("too few maxima for these logits")
        else:
            find_best_in_blocks(&logits[0], logits.shape[0], &maxima[0], self.top_k, self.kept)
        if self.kept.empty():
            raise ValueError("no logit is a number")
        self.cut_top_p()
        self.cut_min_p()
        self.apply_temperature()
        return self.kept[self.place(unit)].id

    @property
    def ids(self):
        """Candidates that the last token was drawn from."""
        return np.array([candidate.id for candidate in self.kept], np.int32)

    @property
    def probabilities(self):
        """Their probabilities."""
        return np.array(self.weights, np.float64)

    cdef int softmax(self) except -1:
        cdef double total = 0, top = self.kept[0].logit
        cdef size_t i, n = self.kept.size()
        self.weights.resize(n)
        for i in range(n):
            self.weights[i] = exp(self.kept[i].logit - top) if isfinite(top) else self.kept[i].logit == top
            total += self.weights[i]
        for i in range(n):
            self.weights[i] /= total
        return 0

    cdef int cut_top_p(self) except -1:
        cdef double total = 0
        cdef size_t i
        if self.top_p >= 1:
            return 0
        self.softmax()
        for i in range(self.kept.size()):
            total += self.weights[i]
            if total >= self.top_p:
                self.kept.resize(i + 1)
                break
        return 0

    cdef int cut_min_p(self) except -1:
        cdef size_t n = 1
        if self.cuts_min_p:
            while n < self.kept.size() and self.kept[n].logit >= self.kept[0].logit + self.log_min_p:
                n += 1
            self.kept.resize(n)
        return 0

    cdef int apply_temperature(self) except -1:
        cdef size_t i
        cdef double value
        if self.temperature != 1:
            for i in range(self.kept.size()):
                value = self.kept[i].logit / self.temperature
                self.kept[i].logit = value if isinf(value) else fmin(fmax(value, -LARGEST32), LARGEST32)
        return 0

    cdef int64_t place(self, double unit) except -1:
        """Of the candidate where the sum of probabilities passes `unit` times the whole."""
        cdef double total = 0, passed = 0
        cdef size_t i
        cdef int64_t last = 0
        self.softmax()
        for i in range(self.weights.size()):
            total += self.weights[i]
            if self.weights[i] > 0:
                last = i
        for i in range(self.weights.size()):
            passed += self.weights[i]
            if passed > total * unit:
                return min(<int64_t> i, last)
        return last
