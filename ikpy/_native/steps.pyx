"""The plans of a context, and the way from a batch to a run of one of them that needs no interpreter."""

from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t

from ikpy._native.batches cimport Batch
from ikpy._native.cells cimport CellTable
from ikpy._native.inputs cimport InputArrays
from ikpy._native.tables cimport CellTables, Taken


cdef class Ready:
    """A compiled plan for n_tokens with n_outputs, run with n_threads, and views of its results.

    native: the core's plan, if that is all of it; else None, and `plan.run(n_kv, n_threads, work)` runs it. direct:
    whether a run needs nothing but a batch and cells.
    """

    cdef readonly int64_t n_tokens, n_outputs
    cdef readonly int n_threads
    cdef readonly object plan, results
    cdef object native
    cdef bint direct
    cdef Ready next

    def __init__(self, int64_t n_tokens, int64_t n_outputs, int n_threads, plan, results, native, bint direct=True):
        self.n_tokens, self.n_outputs, self.n_threads = n_tokens, n_outputs, n_threads
        self.plan, self.results, self.native, self.direct = plan, results, native, direct


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

        None if it is no valid batch of one micro-batch with cells for all tokens and a plan that needs no more, or if
        positions are to be shifted; no token was added then. Nor was one after an exception, such as an interruption
        during the run.
        """
        cdef Ready ready = self.find(batch.items.size(), batch.n_wanted())
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
