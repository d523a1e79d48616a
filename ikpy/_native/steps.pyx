"""The plans of a context, and the way from a batch to a run of one of them that needs no interpreter."""

from cpython.buffer cimport PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t

from ikpy._native.batches cimport Batch
from ikpy._native.cells cimport CellTable
from ikpy._native.draws cimport likeliest
from ikpy._native.inputs cimport InputArrays
from ikpy._native.tables cimport CellTables, Taken


cdef class Ready:
    """A compiled plan for n_tokens with n_outputs, run with n_threads, and views of its results.

    native: the core's plan, if that is all of it; else None, and `plan.run(n_kv, n_threads, work)` runs it. direct:
    whether a run needs nothing but a batch and cells. media: whether tokens may be rows of pictures. maxima: float32 [n_outputs, n], the largest of every few of the
    logits, which are the first of the results; or None.
    """

    cdef readonly int64_t n_tokens, n_outputs
    cdef readonly int n_threads
    cdef readonly object plan, results, maxima
    cdef object native
    cdef readonly bint media
    cdef bint direct
    cdef const float* logits
    cdef const float* block_maxima
    cdef int64_t n_vocab, n_blocks
    cdef Ready next

    def __init__(
        self,
        int64_t n_tokens,
        int64_t n_outputs,
        int n_threads,
        plan,
        results,
        maxima,
        native,
        bint direct=True,
        bint media=False,
    ):
        self.n_tokens, self.n_outputs, self.n_threads = n_tokens, n_outputs, n_threads
        self.plan, self.results, self.native, self.direct = plan, results, native, direct
        self.maxima, self.media = maxima, media
        self.n_vocab = self.n_blocks = 0
        if maxima is not None:
            self.point_to(results[0], maxima)

    cdef int point_to(self, const float[:, ::1] logits, const float[:, ::1] maxima) except -1:
        self.logits, self.block_maxima = &logits[0, 0], &maxima[0, 0]
        self.n_vocab, self.n_blocks = logits.shape[1], maxima.shape[1]
        return 0

    cdef int64_t row_of(self, array) except? -1:
        """Which row of the logits an array is; -1 if it is none."""
        cdef Py_buffer view  # its own memoryview takes some microseconds while everything is cold
        cdef int64_t start = -1
        if self.n_vocab == 0:
            return -1
        PyObject_GetBuffer(array, &view, PyBUF_STRIDES)
        if view.ndim == 1 and view.shape[0] == self.n_vocab and view.strides[0] == view.itemsize == sizeof(float):
            start = <const float*> view.buf - self.logits
        PyBuffer_Release(&view)
        if not 0 <= start < self.n_outputs * self.n_vocab or start % self.n_vocab:
            return -1
        return start // self.n_vocab


ctypedef double (*RunPlan)(object plan, int64_t n_kv, int n_threads, object work) except? -1


cdef class Steps:
    """The plans of a context, and the way from a batch to a run of one of them that needs no interpreter.

    run_plan: the core's. tables: those of the cache; of the cells of full attention a multiple of pad is attended to.
    work: core.WorkMemory that is large enough for every plan.
    """

    cdef RunPlan run_plan
    cdef InputArrays inputs
    cdef CellTables tables
    cdef int64_t n_vocab, n_positions, pad
    cdef Taken taken
    cdef public object work
    cdef Ready latest  # the head of a list in the order of their last use
    cdef size_t n_most

    def __init__(self, run_plan, InputArrays inputs, CellTables tables, int64_t n_vocab, int64_t n_positions, int64_t pad,
                 size_t n_plans):
        self.run_plan = <RunPlan> PyCapsule_GetPointer(run_plan, "ikpy.run_plan")
        self.inputs, self.tables = inputs, tables
        self.n_vocab, self.n_positions, self.pad, self.n_most = n_vocab, n_positions, pad, n_plans
        self.taken = Taken()

    def n_kv(self):
        """Attended length: up to the last used cell of full attention, rounded up to pad."""
        return self.attended()

    cdef int64_t attended(self):
        cdef CellTable cells = self.tables.full
        return min(cells.n_cells, max(1, (cells.end_of_used() + self.pad - 1) // self.pad) * self.pad)

    def get(self, int64_t n_tokens, int64_t n_outputs, bint media=False):
        """The plan of this shape, if it is kept."""
        return self.find(n_tokens, n_outputs, media)

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

    def block_maxima(self, logits):
        """The largest of every BLOCK_LOGITS of these, if they are a row of those of the plan that ran last; else None.

        float32 [n_vocab / BLOCK_LOGITS rounded up], NaN where one of them is; memory as that of the logits.
        """
        cdef int64_t row = self.row_of(logits)
        return None if row < 0 else self.latest.maxima[row]

    def likeliest(self, logits):
        """The first of the largest logits or the first NaN, if they are such a row; else -1."""
        cdef int64_t row = self.row_of(logits)
        if row < 0:
            return -1
        cdef Ready ready = self.latest
        return likeliest(ready.logits + row * ready.n_vocab, ready.n_vocab, ready.block_maxima + row * ready.n_blocks)

    cdef int64_t row_of(self, logits) except? -1:
        return -1 if self.latest is None else self.latest.row_of(logits)

    def clear(self):
        """Forgets all plans."""
        self.latest = None

    cdef Ready find(self, int64_t n_tokens, int64_t n_outputs, bint media):
        cdef Ready before = None, ready = self.latest
        while ready is not None and not (
            ready.n_tokens == n_tokens and ready.n_outputs == n_outputs and ready.media == media
        ):
            before, ready = ready, ready.next
        if before is not None and ready is not None:
            before.next, ready.next, self.latest = ready.next, self.latest, ready
        return ready

    def run(self, Batch batch):
        """Evaluates a batch for which everything is at hand; the results of the plan.

        None if it is no valid batch of one micro-batch with cells for all tokens and a plan that needs no more, or if
        positions are to be shifted; no token was added then. Nor was one after an exception, such as an interruption
        during the run.
        """
        cdef Ready ready = self.find(batch.items.size(), batch.n_wanted(), False)
        if ready is None or not ready.direct or self.tables.has_shifts():
            return None
        if batch.invalid(self.n_vocab, self.n_positions) >= 0:
            return None
        self.tables.put(batch, self.taken)
        if self.taken.full >= 0:
            return None
        try:
            self.inputs.set(batch, self.taken)
            if ready.native is None:
                ready.plan.run(self.attended(), ready.n_threads, self.work)
            else:
                self.run_plan(ready.native, self.attended(), ready.n_threads, self.work)
            PyErr_CheckSignals()
        except BaseException:
            self.tables.take_back(self.taken)
            raise
        return ready.results
