"""Native core of one ISA tier: plan execution and (de)quantization. Import it as `ikpy._native.core`."""

import numpy as np

from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector


cdef extern from "ikpy/tensor.hpp" namespace "ikpy":
    cdef struct Tensor:
        int64_t ne[4]
    cdef struct Op:
        pass
    cdef struct Runtime:
        int64_t n_kv
        CppExpertReader* reader


cdef extern from "ikpy/expert_reader.hpp" namespace "ikpy" nogil:
    cdef struct ExpertMatrix:
        const uint8_t* data
        int64_t stride, nbytes
        int32_t stage
    cdef cppclass CppExpertReader "ikpy::ExpertReader":
        CppExpertReader(int) except +
        int add_layer(const vector[ExpertMatrix]&, int) except +
        void ask(int, const int32_t*)
        int64_t bytes_asked()


cdef extern from "ikpy/executor.hpp" namespace "ikpy" nogil:
    cdef cppclass Executor:
        Executor(const Op*, int64_t, Tensor*, int64_t) except +
        size_t work_bytes(int) except +
        double run(const Runtime&, int, int64_t, int64_t, uint8_t*) except +
        void set_thread_set(int)
        void set_profiling(cbool)
        const double* op_seconds()
    const char* op_name(int)
    int op_count "ikpy::kOpCount"
    int act_format(int, int64_t, cbool) except +
    cbool has_amx()
    cbool has_amx_halves()
    cbool _rounds_f16_activations "ikpy::rounds_f16_activations"()
    cbool c_has_byte_permutes "ikpy::has_byte_permutes"()
    cbool c_is_for_amd "ikpy::is_for_amd"()
    cbool c_has_slow_gathers "ikpy::has_slow_gathers"()
    cbool c_fetches_from_pages "ikpy::fetches_from_pages"()
    cbool c_has_unpacker "ikpy::has_unpacker"(int)
    size_t act_nbytes(int, int64_t, int64_t, int64_t)


cdef extern from "quantize/dequantize.hpp" namespace "ikpy" nogil:
    cbool can_dequantize(int)
    size_t row_nbytes(int, int64_t)
    int interleave(int)
    void dequantize_rows(int, const uint8_t*, int64_t, int64_t, int64_t, float*, int64_t, cbool)


cdef extern from "quantize/quantize.hpp" namespace "ikpy::quantize" nogil:
    cbool quantize_supported "ikpy::quantize::can_quantize"(int)
    int row_group(int)
    int64_t encoded_row_nbytes(int, int64_t)
    int quantize_rows_parallel(int, const float*, int64_t, int64_t, const float*, uint8_t*, int)
    const int QUANTIZE_OUT_OF_MEMORY "ikpy::quantize::OUT_OF_MEMORY"


cdef extern from "quantize/repack.hpp" namespace "ikpy" nogil:
    cbool can_repack(int, int)
    cbool repack_rows(int, int, const uint8_t*, int64_t, int64_t, uint8_t*)


cdef extern from "ikpy/affinity.hpp" namespace "ikpy" nogil:
    const int kThreadSets
    const int kSpins
    void cpp_set_thread_cpus "ikpy::set_thread_cpus"(const vector[vector[int]]&) except +
    void cpp_set_thread_set "ikpy::set_thread_set"(int, const vector[vector[int]]&, int, int) except +

cdef extern from "ikpy/ceiling.hpp" namespace "ikpy" nogil:
    double ceiling_int8_dot(int)
    double ceiling_bf16_dot(int)
    double ceiling_amx_bf16(int)
    double ceiling_fp32_fma(int)
    double ceiling_read_bandwidth(int)
    int64_t cpp_uncached_bytes "ikpy::uncached_bytes"()


cdef extern from *:
    """
    #include <omp.h>
    static const char* ikpy_tier() { return IKPY_TIER; }
    static const char* ikpy_build_flags() { return IKPY_BUILD_FLAGS; }
    static const char* ikpy_compiler() { return __VERSION__; }
    static int ikpy_openmp() { return _OPENMP; }
    """
    const char* ikpy_tier()
    const char* ikpy_build_flags()
    const char* ikpy_compiler()
    int ikpy_openmp()


def build_info() -> dict:
    """Tier, compiler version, OpenMP date and compile flags of this module."""
    return {
        "tier": ikpy_tier().decode(),
        "compiler": "g++ " + ikpy_compiler().decode(),
        "openmp": ikpy_openmp(),
        "flags": ikpy_build_flags().decode(),
    }


def op_kinds() -> dict:
    """Name of every op of the executor -> its number in an op record."""
    return {op_name(i).decode(): i for i in range(op_count)}


def activation_format(int weight_type, int64_t n_rows=1, bint by_expert=False) -> int:
    """Format in which activations are prepared when n_rows of them meet one matrix of weights of this type.

    by_expert: the matrix is that of an expert, n_rows an average.
    """
    return act_format(weight_type, n_rows, by_expert)


def has_unpacker(int weight_type) -> bool:
    """Whether matmuls of this weight type have an unpacker of their own; other types are decoded to float first."""
    return c_has_unpacker(weight_type)


def has_tiles() -> bool:
    """Whether products of many rows run on the CPU's tile unit (AMX with bf16); IKPY_AMX=0 turns it off."""
    return has_amx()


def has_half_tiles() -> bool:
    """Whether the tile unit multiplies halves (AMX-FP16); IKPY_AMX=fp16 tries it on CPUs that do not list it,
    IKPY_AMX=bf16 does without."""
    return has_amx_halves()


def rounds_f16_activations() -> bool:
    """Whether products of F16 weights round activations to f16, on a tile unit that multiplies halves: IKPY_AMX=fp16 asks
    for it."""
    return _rounds_f16_activations()


def has_byte_permutes() -> bool:
    """Whether few tokens meet weights by byte permutations (VBMI and GFNI); IKPY_VBMI=0 turns it off."""
    return c_has_byte_permutes()


def cpu_maker() -> str:
    """Whose CPU the choices between kernels of the same instructions are made for, "amd" or "intel" (all others);
    IKPY_MAKER decides otherwise."""
    return "amd" if c_is_for_amd() else "intel"


def has_slow_gathers() -> bool:
    """Whether loads of several places by one instruction are slower than as many loads, as with microcode against
    Downfall on Intel's CPUs up to Ice Lake; measured once; IKPY_GATHERS decides otherwise."""
    return c_has_slow_gathers()


def fetches_from_pages() -> bool:
    """Whether single tokens fetch weights from eight pages in turn instead of line after line; IKPY_FETCH decides
    otherwise."""
    return c_fetches_from_pages()


def has_decoder(int type_id) -> bool:
    """Whether rows of this type can be decoded natively."""
    return can_dequantize(type_id)


def activation_nbytes(int fmt, int64_t n_in, int64_t n_rows, int64_t n_batch) -> int:
    """Bytes of a prepared activation buffer for [n_in, n_rows, n_batch]."""
    return act_nbytes(fmt, n_in, n_rows, n_batch)


def set_thread_cpus(groups) -> None:
    """Thread i of every plan runs on the CPUs groups[i % len(groups)] from its next run on, a list of lists of CPU
    numbers; [] lets threads that were never bound stay where they are. Linux only; not while a plan runs."""
    cpp_set_thread_cpus(groups)


USUAL_SPINS = kSpins
"""Pauses after which a thread that waits for others gives up its core, unless `set_thread_set` says otherwise."""


def set_thread_set(int number, groups, int priority, int spins) -> None:
    """`set_thread_cpus` for the plans of one set (0 and 1: single tokens and more of a model, 2 and 3: of its drafter),
    with a priority (0 is the usual one, 1 to 3 are real-time ones, -1 is that of work in the background) and the
    pauses after which a waiting thread gives up its core."""
    if not 0 <= number < kThreadSets or spins < 0:
        raise ValueError("no such set of threads, or a negative number of pauses")
    cpp_set_thread_set(number, groups, priority, spins)


def uncached_bytes() -> int:
    """Bytes that no cache of this machine holds: four times the last-level cache, between 256 MiB and 2 GiB."""
    return cpp_uncached_bytes()


def ceiling(str what, int n_threads) -> float:
    """Measured best of this machine: "int8", "bf16", "fp32" and "amx_bf16" (tile unit) in 1e9 operations/s, "read" in
    1e9 bytes/s. 0 where the unit is absent."""
    measures = ("int8", "bf16", "fp32", "read", "amx_bf16")
    if what not in measures or n_threads < 1:
        raise ValueError(f"ceiling: one of {', '.join(measures)} and at least one thread")
    cdef int which = measures.index(what)
    cdef double rate
    with nogil:
        if which == 0:
            rate = ceiling_int8_dot(n_threads)
        elif which == 1:
            rate = ceiling_bf16_dot(n_threads)
        elif which == 2:
            rate = ceiling_fp32_fma(n_threads)
        elif which == 3:
            rate = ceiling_read_bandwidth(n_threads)
        else:
            rate = ceiling_amx_bf16(n_threads)
    return rate


cdef class WorkMemory:
    """Memory of n bytes from a multiple of 64 on that kernels work in, for plans to share."""

    cdef readonly int64_t nbytes
    cdef object owner
    cdef uint8_t* address

    def __cinit__(self, int64_t nbytes):
        self.owner = np.zeros(nbytes + 64, np.uint8)
        cdef uint8_t[::1] memory = self.owner
        self.address = <uint8_t*> ((<size_t> &memory[0] + 63) & ~<size_t> 63)
        self.nbytes = nbytes


cdef class ExpertReader:
    """Threads that read the pages of the experts that tokens are sent to, for plans whose expert weights are mapped.

    OSError if the threads cannot be started.
    """

    cdef CppExpertReader* reader
    cdef dict n_experts

    def __cinit__(self, int n_threads):
        self.n_experts = {}
        try:
            self.reader = new CppExpertReader(n_threads)
        except RuntimeError as error:
            raise OSError(str(error)) from None

    def __dealloc__(self):
        del self.reader

    def add_layer(self, const int64_t[:, ::1] matrices, int n_experts) -> int:
        """Adds the expert weights of a layer behind those of the layers before; returns its number.

        matrices: int64 [n, 4] of address of the first expert, bytes from one to the next, bytes of one, and stage:
        matrices of one stage are multiplied together, those of the next afterwards. The memory must outlive this
        object.
        """
        cdef vector[ExpertMatrix] records
        cdef ExpertMatrix record
        cdef int64_t i
        if matrices.shape[1] != 4:
            raise ValueError("matrices of experts have four numbers")
        for i in range(matrices.shape[0]):
            record.data = <const uint8_t*> <size_t> matrices[i, 0]
            record.stride, record.nbytes, record.stage = matrices[i, 1], matrices[i, 2], <int32_t> matrices[i, 3]
            records.push_back(record)
        number = self.reader.add_layer(records, n_experts)
        self.n_experts[number] = n_experts
        return number

    def ask(self, int layer, const int32_t[::1] offsets):
        """Reads the experts e of a layer with offsets[e] < offsets[e + 1] from now on, nothing asked for before.

        offsets: int32 [E + 1]. ValueError for another length or a layer that was not added.
        """
        if self.n_experts.get(layer, -1) + 1 != offsets.shape[0]:
            raise ValueError(f"layer {layer} has no {offsets.shape[0] - 1} experts")
        self.reader.ask(layer, &offsets[0])

    @property
    def bytes_asked(self) -> int:
        """Bytes that the system was asked to read so far, whether they were in memory or not."""
        return self.reader.bytes_asked()


cdef class Plan:
    """A compiled plan: op records over tensor records.

    tensors, ops: contiguous structured arrays (ikpy.graph.plan.TENSOR_DTYPE, OP_DTYPE); their memory, and all
    memory their data pointers name, must outlive the plan. dynamic: int32 [n, 2] of (tensor, dimension) whose
    extent is n_kv at run time. Indices are checked here; shapes are the graph builder's duty. reader: gets to know
    which experts are needed.
    """

    cdef Executor* executor
    cdef object tensors, ops
    cdef ExpertReader reader
    cdef Tensor* records
    cdef int32_t[:, ::1] dynamic
    cdef int64_t[::1] largest
    cdef int64_t n_ops, n_kv
    cdef int n_threads
    cdef readonly double seconds
    """Of the last run, threads and kernels."""

    def __cinit__(self, tensors, ops, dynamic, ExpertReader reader=None):
        self.executor = NULL
        if tensors.dtype.itemsize != sizeof(Tensor) or ops.dtype.itemsize != sizeof(Op):
            raise ValueError("tensor or op records do not have the native size")
        if not (tensors.flags.c_contiguous and ops.flags.c_contiguous):
            raise ValueError("tensor and op records must be contiguous")
        used = np.concatenate([ops["dst"].ravel(), ops["src"].ravel()])
        if len(ops) and (used.max() >= len(tensors) or used.min() < -1 or ops["dst"].min() < 0):
            raise ValueError("an op names a tensor that does not exist")
        if len(ops) and (ops["kind"].min() < 0 or ops["kind"].max() >= op_count):
            raise ValueError("unknown op kind")
        if len(tensors) and not tensors["data"].all():
            raise ValueError("a tensor has no memory")
        self.tensors, self.ops, self.reader = tensors, ops, reader
        changing = np.ascontiguousarray(dynamic, dtype=np.int32).reshape(-1, 2)
        if ((changing < 0) | (changing >= (len(tensors), 4))).any():
            raise ValueError("a dynamic extent of a tensor or dimension that does not exist")
        self.dynamic = changing
        cdef uint8_t[::1] tensor_bytes = tensors.view(np.uint8).reshape(-1)
        cdef uint8_t[::1] op_bytes = ops.view(np.uint8).reshape(-1)
        self.records = <Tensor*> &tensor_bytes[0]
        self.n_ops, self.n_kv, self.n_threads = len(ops), -1, 0
        self.largest = np.array([tensors["ne"][t, dim] for t, dim in changing.tolist()], np.int64)
        self.executor = new Executor(<const Op*> &op_bytes[0], len(ops), self.records, len(tensors))

    def __dealloc__(self):
        del self.executor

    def use_thread_set(self, int number) -> None:
        """Runs as `set_thread_set` says for this number, 0 unless told."""
        if not 0 <= number < kThreadSets:
            raise ValueError("no such set of threads")
        self.executor.set_thread_set(number)

    def work_bytes(self, int n_threads) -> int:
        """Bytes of work memory a run with n_threads allocates (once)."""
        return self.planned(n_threads)

    cdef size_t planned(self, int n_threads):
        """The same, for dynamic extents at their largest whatever ran before."""
        if n_threads != self.n_threads:
            self.set_extents(-1)
            self.n_threads = n_threads
        return self.executor.work_bytes(n_threads)

    cdef void set_extents(self, int64_t n_kv):
        """Dynamic extents of a run; the largest for a negative number."""
        cdef int64_t i
        for i in range(self.dynamic.shape[0]):
            self.records[self.dynamic[i, 0]].ne[self.dynamic[i, 1]] = self.largest[i] if n_kv < 0 else n_kv
        self.n_kv = n_kv

    def run(self, int64_t n_kv, int n_threads, WorkMemory work=None, int64_t first=0, int64_t last=-1) -> None:
        """Executes ops first .. last-1 (all by default) with n_kv attended cache cells; releases the GIL.

        work: at least work_bytes(n_threads) bytes, for plans that share their work memory; without it the plan
        allocates its own. ValueError for too little of it and for ops that do not exist.
        """
        self.execute(n_kv, n_threads, work, first, self.n_ops if last < 0 else last)

    cdef double execute(self, int64_t n_kv, int n_threads, WorkMemory work, int64_t first, int64_t last) except -1:
        cdef uint8_t* address = NULL
        cdef Runtime runtime
        if not 0 <= first <= last <= self.n_ops:
            raise ValueError("no such ops")
        if n_threads < 1:
            raise ValueError("n_threads must be at least 1")
        cdef size_t needed = self.planned(n_threads)
        if work is not None:
            if work.nbytes < <int64_t> needed:
                raise ValueError("the work memory is too small for this plan")
            address = work.address
        if n_kv != self.n_kv:
            self.set_extents(n_kv)
        runtime.n_kv = n_kv
        if self.reader is not None:
            runtime.reader = self.reader.reader
        with nogil:
            self.seconds = self.executor.run(runtime, n_threads, first, last, address)
        return self.seconds

    def profile(self, int64_t n_kv, int n_threads):
        """Runs once with timing; returns seconds per op as float64 [n_ops]."""
        self.executor.set_profiling(True)
        try:
            self.run(n_kv, n_threads)
        finally:
            self.executor.set_profiling(False)
        cdef const double* seconds = self.executor.op_seconds()
        return np.array([seconds[i] for i in range(len(self.ops))])


cdef double c_run_plan(object plan, int64_t n_kv, int n_threads, object work) except? -1:
    cdef Plan whole = plan
    return whole.execute(n_kv, n_threads, work, 0, whole.n_ops)


run_plan = PyCapsule_New(<void*> c_run_plan, "ikpy.run_plan", NULL)
"""Pointer to a function that runs a whole plan, for ikpy._native.steps."""


def run(tensors, ops, n_kv=0, n_threads=1, dynamic=()):
    """Runs op records once without keeping a plan (tests, small tools)."""
    Plan(tensors, ops, np.asarray(dynamic, dtype=np.int32).reshape(-1, 2)).run(n_kv, n_threads)


def _aligned(data):
    """The array, or a copy if kernels cannot read words there: the alignment of a file may be a single byte."""
    return data.copy() if data.ctypes.data % 4 else data


def dequantize(data, int type_id, int64_t ne0, int64_t n_rows, compute_scale=False):
    """Rows of any type as float32 [n_rows, ne0].

    data: contiguous uint8 array with n_rows rows from row 0 of a matrix (whole groups of an interleaved type).
    compute_scale applies the read-time factor of IQ2_KT and IQ3_KT. ValueError if the type is unknown, ne0 is not a
    multiple of its block or data too short.
    """
    if not can_dequantize(type_id):
        raise ValueError(f"type {type_id} cannot be dequantized")
    if n_rows < 0 or ne0 < 0 or not row_nbytes(type_id, ne0):
        raise ValueError(f"{n_rows} rows of {ne0} elements are not possible in type {type_id}")
    cdef const uint8_t[::1] src = _aligned(np.ascontiguousarray(data, dtype=np.uint8).reshape(-1))
    cdef int64_t group = interleave(type_id)
    if src.shape[0] < <int64_t> row_nbytes(type_id, ne0) * ((n_rows + group - 1) // group * group):
        raise ValueError("data is shorter than the rows asked for")
    out = np.empty((n_rows, ne0), dtype=np.float32)
    cdef float[:, ::1] dst = out
    cdef cbool scale = compute_scale
    if out.size:
        with nogil:
            dequantize_rows(type_id, &src[0], ne0, 0, n_rows, &dst[0, 0], ne0, scale)
    return out


def repack(data, int from_id, int to_id, int64_t ne0, int64_t n_rows):
    """Bytes of n_rows rows of ne0 elements converted to another type, as uint8 [nbytes]; releases the GIL.

    One of the types is the row-interleaved form of the other. ValueError if they are not, if n_rows is not a multiple
    of the rows interleaved, or if data does not have the size of the rows.
    """
    if not can_repack(from_id, to_id):
        raise ValueError(f"type {from_id} cannot be repacked to {to_id}")
    cdef const uint8_t[::1] src = _aligned(np.ascontiguousarray(data, dtype=np.uint8).reshape(-1))
    cdef int64_t expected = row_nbytes(from_id, ne0) * n_rows
    if n_rows < 0 or src.shape[0] != expected or not row_nbytes(to_id, ne0):
        raise ValueError(f"data does not hold {n_rows} rows of {ne0} elements of type {from_id}")
    out = np.empty(row_nbytes(to_id, ne0) * n_rows, dtype=np.uint8)
    cdef uint8_t[::1] dst = out
    cdef cbool done = True
    if out.size:
        with nogil:
            done = repack_rows(from_id, to_id, &src[0], ne0, n_rows, &dst[0])
    if not done:
        raise ValueError(f"{n_rows} rows are not a multiple of the rows interleaved by types {from_id} and {to_id}")
    return out


def can_quantize(int type_id) -> bool:
    """Whether `quantize` encodes this type."""
    return quantize_supported(type_id)


def quantize(src, int type_id, imatrix=None, int n_threads=1):
    """Rows of floats encoded as a type: uint8 array of n_rows * row size bytes.

    src: float32 [n_rows, ne0], finite. imatrix: float32 [ne0] importance of the columns (non-negative), or None for
    equal importance. Rows of interleaved types come in whole groups. ValueError if the type has no encoder or the shape
    does not fit it, MemoryError if there is too little work memory.
    """
    if not quantize_supported(type_id):
        raise ValueError(f"type {type_id} cannot be encoded")
    cdef const float[:, ::1] rows = np.require(src, np.float32, ["C", "ALIGNED"])
    cdef int64_t n_rows = rows.shape[0], ne0 = rows.shape[1], row_bytes = encoded_row_nbytes(type_id, ne0)
    if n_rows <= 0 or row_bytes <= 0 or n_rows % row_group(type_id):
        raise ValueError(f"{n_rows} rows of {ne0} values do not fit type {type_id}")
    if n_threads < 1:
        raise ValueError("n_threads must be at least 1")
    cdef const float[::1] weights
    cdef const float* w = NULL
    if imatrix is not None:
        weights = np.require(imatrix, np.float32, ["C", "ALIGNED"])
        if weights.shape[0] != ne0:
            raise ValueError(f"imatrix has {weights.shape[0]} values for rows of {ne0}")
        w = &weights[0]
    out = np.empty(n_rows * row_bytes, dtype=np.uint8)
    cdef uint8_t[::1] dst = out
    cdef int status
    with nogil:
        status = quantize_rows_parallel(type_id, &rows[0, 0], ne0, n_rows, w, &dst[0], n_threads)
    if status == QUANTIZE_OUT_OF_MEMORY:
        raise MemoryError(f"encoding {n_rows} rows of {ne0} values as type {type_id}")
    if status:
        raise ValueError(f"encoding type {type_id} failed with status {status}")
    return out
