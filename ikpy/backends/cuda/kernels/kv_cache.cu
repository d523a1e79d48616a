// Masks from cell positions; rows into the key/value cache; keys rotated again after positions have moved.
#include "kv_types.cuh"

using namespace ikpy::cuda;

// mask f16 [n, T] of 0 and -inf and the visible range of every token, i32 [2, T]; one block per token.
// kind: 0 no window, 1 sliding, 2 chunked, 3 half its size to both sides (and no further cells).
// further: cells behind these, to which no window applies. until: the last position that each token sees
// behind its own, or null. turned: positions of the tokens plus the length of the encoder's text before them,
// or null; side: whether that is seen (1), or what follows it (2).
IKPY_KERNEL kq_mask(View mask, int* ranges, const int* cell_pos, const unsigned long long* cell_seq,
                    const int* pos, const int* seq, const int* further_pos,
                    const unsigned long long* further_seq, const int* until, const int* turned, int n_cells,
                    int n_further, int kind, int n_swa, int causal, int side, const int* runtime) {
    const int n_own = runtime ? min(runtime[0], n_cells) : n_cells, n = n_own + n_further;
    const int t = blockIdx.x, p = pos[t], s = seq[t];
    const unsigned long long sequence = s >= 0 && s < 64 ? 1ull << s : 0ull;
    int highest = causal ? p : 0x7fffffff;
    int lowest = 0;
    if (kind == 1 && n_swa > 0 && p >= n_swa) lowest = p - n_swa + 1;
    if (kind == 2 && n_swa > 0) lowest = p - p % n_swa;
    if (kind == 3 && n_swa > 0) {
        lowest = max(0, p - n_swa / 2);
        if (p < 0x7fffffff - n_swa / 2) highest = min(highest, p + n_swa / 2);
    }
    if (until) highest = max(highest, until[t]);
    if (turned) {
        const int end = turned[t] - p;
        lowest = side == 1 ? 0 : max(lowest, end);
        if (side == 1) highest = end - 1;
    }
    auto* out = mask.row<uint16_t>(t);
    int first = n, last = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        const bool own = i < n_own;
        const int at = own ? cell_pos[i] : further_pos[i - n_own];
        const unsigned long long members = own ? cell_seq[i] : further_seq[i - n_own];
        const bool see = at >= (own ? lowest : 0) && at <= highest && (members & sequence) != 0;
        out[i] = see ? 0 : 0xfc00;
        if (see) {
            first = min(first, i);
            last = i + 1;
        }
    }
    // Cell numbers are exact in f32.
    const int low = n - static_cast<int>(block_max(static_cast<float>(n - first)));
    const int high = static_cast<int>(block_max(static_cast<float>(last)));
    if (threadIdx.x == 0) {
        ranges[2 * t] = high > 0 ? low : 0;
        ranges[2 * t + 1] = high;
    }
}
IKPY_EXPORT(kq_mask);

namespace {

// A warp per 32 elements.
__device__ __forceinline__ void store_rows(const View& cache, const View& x, const int* cells, int type) {
    const int parts = store_parts(type, x.ne[0]), unit = blockIdx.x * (blockDim.x >> 5) + warp_id();
    const int r = unit / parts, heads = x.ne[1];
    if (r >= heads * x.ne[2]) return;
    const int t = r / heads, h = r % heads;
    if (cells[t] < 0) return;
    store_part(type, x.row<const float>(h, t), x.ne[0], unit % parts, cache.row<uint8_t>(h, cells[t]));
}

}  // namespace

// Rows of x f32 [n, H, T] to the cache [n, H, cells] at cells[t]; negative cells are left out.
IKPY_KERNEL kv_store(View cache, View x, const int* cells, int type) { store_rows(cache, x, cells, type); }
IKPY_EXPORT(kv_store);

// Two launches of kv_store at once (launch/merging.py), as of keys and values; blockIdx.y says which.
IKPY_KERNEL kv_store_two(View cache0, View x0, const int* cells0, int type0, View cache1, View x1,
                         const int* cells1, int type1) {
    if (blockIdx.y == 0) {
        store_rows(cache0, x0, cells0, type0);
    } else {
        store_rows(cache1, x1, cells1, type1);
    }
}
IKPY_EXPORT(kv_store_two);

// Copy of f32 rows to rows of a cache type. A warp per 32 elements, in turn.
IKPY_KERNEL copy_to_type(View dst, View src, int type, const int* runtime) {
    const int parts = store_parts(type, dst.ne[0]), warps = blockDim.x >> 5;
    const long long n = static_cast<long long>(parts) * dst.rows(runtime);
    for (long long unit = static_cast<long long>(blockIdx.x) * warps + warp_id(); unit < n;
         unit += gridDim.x * warps) {
        const RowIndex i = row_index(dst, static_cast<int>(unit / parts), runtime);
        store_part(type, src.row<const float>(i.i1, i.i2, i.i3), dst.ne[0], static_cast<int>(unit % parts),
                   dst.row<uint8_t>(i.i1, i.i2, i.i3));
    }
}
IKPY_EXPORT(copy_to_type);

namespace {

// Blocks of a row in shared memory through the orthonormal Walsh-Hadamard transform; by all threads of the
// block.
__device__ __forceinline__ void hadamard(float* x, int n, int block) {
    for (int half = 1; half < block; half *= 2) {
        __syncthreads();
        for (int p = threadIdx.x; p < n / 2; p += blockDim.x) {
            const int i = p / half * 2 * half + p % half;
            const float a = x[i], b = x[i + half];
            x[i] = a + b;
            x[i + half] = a - b;
        }
    }
    __syncthreads();
    const float scale = 1.0f / sqrtf(static_cast<float>(block));
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] *= scale;
    __syncthreads();
}

}  // namespace

// Rows of x f32 transformed in place in blocks of a power of two. One block per row; dynamic shared memory: n
// floats.
IKPY_KERNEL hadamard_rows(View x, int block, const int* runtime) {
    IKPY_DYNAMIC_SHARED(memory);
    auto* values = reinterpret_cast<float*>(memory);
    if (static_cast<int>(blockIdx.x) >= x.rows(runtime)) return;
    const RowIndex r = row_index(x, blockIdx.x, runtime);
    float* row = x.row<float>(r.i1, r.i2, r.i3);
    const int n = x.ne[0];
    for (int i = threadIdx.x; i < n; i += blockDim.x) values[i] = row[i];
    hadamard(values, n, block);
    for (int i = threadIdx.x; i < n; i += blockDim.x) row[i] = values[i];
}
IKPY_EXPORT(hadamard_rows);

// Keys of cache [n, H, cells] rotated by table [n_rot, cells] where delta is not 0; transform: block of the
// Hadamard transform under which they are stored, 0 for none. One warp per (head, cell). Dynamic shared
// memory: n floats.
IKPY_KERNEL kv_shift(View cache, View table, const int* deltas, int n_rot, int neox, int offset,
                     int transform, int type) {
    IKPY_DYNAMIC_SHARED(memory);
    auto* x = reinterpret_cast<float*>(memory);
    const int c = blockIdx.y, n = cache.ne[0], half = n_rot / 2;
    if (deltas[c] == 0) return;
    auto* stored = cache.row<uint8_t>(blockIdx.x, c);
    const float* cs = table.row<const float>(c);
    for (int i = threadIdx.x; i < n; i += 32) x[i] = kv_element(type, stored, i);
    __syncwarp();
    if (transform) hadamard(x, n, transform);
    for (int i = threadIdx.x; i < half; i += 32) {
        const int p = offset + (neox ? i : 2 * i), q = neox ? p + half : p + 1;
        const float a = x[p], b = x[q], co = cs[2 * i], s = cs[2 * i + 1];
        x[p] = a * co - b * s;
        x[q] = a * s + b * co;
    }
    __syncwarp();
    if (transform) hadamard(x, n, transform);
    for (int p = 0; p < store_parts(type, n); ++p) store_part(type, x, n, p, stored);
}
IKPY_EXPORT(kv_shift);
