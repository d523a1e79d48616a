// Sparse attention (arXiv:2512.02556): scores of index keys, the choice of the best cells, masks and rows of
// those that were chosen.
#include "indexer.cuh"

using namespace ikpy::cuda;

namespace {

// Below all numbers but that of cells that are not seen, also where a score is -inf or NaN.
__device__ __forceinline__ float seen_score(float x) { return x >= -FLT_MAX ? x : -FLT_MAX; }

// Adds weight * relu(q . k) of 16 heads to the sums of this warp's cells, columns as in index_products.
__device__ __forceinline__ void add_heads(const IndexTile& tile, int n, const float* weights,
                                          float (*sums)[2]) {
    float scores[4][4] = {};
    index_products(tile, n, scores);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sums[j][i % 2] += weights[lane_id() / 4 + 8 * (i / 2)] * fmaxf(scores[j][i], 0.0f);
}

}  // namespace

// Scores [cells] of the tokens from token0 on, `stride` floats apart: sum_h weights[h, t] relu(q[:, h, t] .
// keys), -inf for cells that a token does not see. All are 0 where no token sees more than top_k. Grid
// (blocks of cells, groups of tokens).
IKPY_KERNEL __launch_bounds__(128) index_scores(float* scores, long long stride, Indexer a, View weights,
                                                int top_k, int token0, int n_tokens) {
    __shared__ IndexTile tile;
    __shared__ float of_heads[kHeads];
    const int c0 = blockIdx.x * kCells, n_kv = a.n_cells(), lane = lane_id();
    if (c0 >= n_kv) return;
    const bool chooses = n_kv > top_k;
    if (chooses) load_index_keys(a, c0, tile);
    wait_copies<0>();
    const int first = token0 + blockIdx.y * kTokens, end = min(first + kTokens, token0 + n_tokens);
    for (int t = first; t < end; ++t) {
        float sums[4][2] = {};
        if (chooses && a.ranges[2 * t] < c0 + kCells && a.ranges[2 * t + 1] > c0) {
            for (int h0 = 0; h0 < a.q.ne[1]; h0 += kHeads) {
                __syncthreads();
                load_index_queries(a, t, h0, tile);
                if (threadIdx.x < kHeads) {
                    const int h = h0 + threadIdx.x;
                    of_heads[threadIdx.x] = h < a.q.ne[1] ? weights.row<const float>(t)[h] : 0.0f;
                }
                __syncthreads();
                add_heads(tile, a.padded(), of_heads, sums);
            }
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int m = 4; m < 32; m <<= 1) sums[j][i] += __shfl_xor_sync(kAllLanes, sums[j][i], m);
                const int c = c0 + 32 * warp_id() + 8 * j + 2 * lane + i;
                if (lane < 4 && c < n_kv)
                    scores[(t - token0) * stride + c] = a.sees(t, c) ? seen_score(sums[j][i]) : -INFINITY;
            }
    }
}
IKPY_EXPORT(index_scores);

// Of every token the top_k cells with the largest scores, or all that it sees if these are no more, in rising
// order behind their number: i32 [1 + top_k, T]. Of equal scores the first cells count. A block per token
// from token0 on.
IKPY_KERNEL choose_cells(View chosen, const float* scores, long long stride, const int* ranges, int token0,
                         int n_cells, const int* runtime) {
    const int t = token0 + blockIdx.x, top_k = chosen.ne[0] - 1;
    const int n_kv = runtime ? min(runtime[0], n_cells) : n_cells;
    const int first = ranges[2 * t], n = max(0, min(ranges[2 * t + 1], n_kv) - first);
    const float* own = scores + blockIdx.x * stride + first;
    int* out = chosen.row<int>(t);
    int seen = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) seen += ordered(own[i]) > kUnseen;
    unsigned least = kUnseen;
    int left = 0;
    if (block_sum(seen) > top_k) least = threshold([&](int i) { return ordered(own[i]); }, n, top_k, &left);
    int count = 0, equal = 0;
    for (int i0 = 0; i0 < n; i0 += blockDim.x) {
        const int i = i0 + threadIdx.x;
        const unsigned x = i < n ? ordered(own[i]) : 0;
        int n_equal, n_taken;
        const int rank = equal + block_rank(i < n && x == least, &n_equal);
        const bool taken = i < n && (x > least || (x == least && rank < left));
        const int place = count + block_rank(taken, &n_taken);
        if (taken) out[1 + place] = first + i;
        count += n_taken;
        equal += n_equal;
    }
    if (threadIdx.x == 0) out[0] = count;
}
IKPY_EXPORT(choose_cells);

// Rows of a mask with all cells from `first` on hidden that a token did not choose; a number of -1: all. A
// block per token.
IKPY_KERNEL chosen_mask(View dst, View mask, View chosen, int first, const int* runtime) {
    const int t = blockIdx.x, n = first ? dst.ne[0] : min(runtime[0], dst.ne[0]);
    const int* cells = chosen.row<const int>(t);
    const auto* all = mask.row<const uint16_t>(t);
    auto* out = dst.row<uint16_t>(t);
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = cells[0] < 0 || i < first ? all[i] : 0xfc00;
    __syncthreads();
    for (int i = threadIdx.x; i < cells[0]; i += blockDim.x)
        if (first + cells[1 + i] < n) out[first + cells[1 + i]] = 0;
}
IKPY_EXPORT(chosen_mask);

// Lists of the cells before `first` that the mask shows and the chosen ones behind them. A block of one warp
// per token.
IKPY_KERNEL chosen_list(View dst, View mask, View chosen, int first) {
    const int t = blockIdx.x, most = dst.ne[0] - chosen.ne[0], lane = lane_id();
    const int* cells = chosen.row<const int>(t);
    const auto* shown = mask.row<const uint16_t>(t);
    int* out = dst.row<int>(t);
    if (cells[0] < 0) {
        if (lane == 0) out[0] = -1;
        return;
    }
    int n = 0;
    for (int c = 0; c < first; c += 32) {
        const bool see = c + lane < first && shown[c + lane] == 0;
        const unsigned seen = __ballot_sync(kAllLanes, see);
        const int place = n + __popc(seen & ((1u << lane) - 1));
        if (see && place < most) out[1 + place] = c + lane;
        n = min(n + __popc(seen), most);
    }
    for (int i = lane; i < cells[0]; i += 32) out[1 + n + i] = first + cells[1 + i];
    if (lane == 0) out[0] = n + cells[0];
}
IKPY_EXPORT(chosen_list);

// Where single cells and stretches of positions lie: the cells' positions, the last ones of the stretches,
// and the tokens'.
struct Positions {
    const int* cells;
    const int* ends;
    const int* tokens;
    int n_stretches, ratio;
};

// Lists of the cells that the mask shows of chosen stretches and behind the last whole one; a number of -1:
// all. A block per token; the set of its stretches, a bit each, is in shared memory.
IKPY_KERNEL stretch_cells(View dst, View chosen, View mask, const int* ranges, Positions at,
                          const int* runtime) {
    IKPY_DYNAMIC_SHARED(memory);
    unsigned* const set = reinterpret_cast<unsigned*>(memory);
    const int t = blockIdx.x, most = dst.ne[0] - 1, ratio = at.ratio, n_cells = min(runtime[0], mask.ne[0]);
    const int* stretches = chosen.row<const int>(t);
    int* out = dst.row<int>(t);
    for (int i = threadIdx.x; i < (at.n_stretches + 31) / 32; i += blockDim.x) set[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < stretches[0]; i += blockDim.x) {
        const int stretch = at.ends[stretches[1 + i]] / ratio;
        if (stretch >= 0 && stretch < at.n_stretches) atomicOr(&set[stretch / 32], 1u << (stretch % 32));
    }
    __syncthreads();
    const auto* shown = mask.row<const uint16_t>(t);
    const int tail = (at.tokens[t] + 1) / ratio * ratio, last = min(ranges[2 * t + 1], n_cells);
    int n = 0;
    for (int c0 = ranges[2 * t]; c0 < last; c0 += blockDim.x) {
        const int c = c0 + threadIdx.x;
        bool taken = false;
        if (c < last && shown[c] == 0) {
            const int p = at.cells[c], stretch = p / ratio;
            taken = p >= tail || (stretch < at.n_stretches && (set[stretch / 32] >> (stretch % 32) & 1));
        }
        int n_taken;
        const int place = n + block_rank(taken, &n_taken);
        if (taken && place < most) out[1 + place] = c;
        n = min(n + n_taken, most);
    }
    if (threadIdx.x == 0) out[0] = stretches[0] < 0 ? -1 : n;
}
IKPY_EXPORT(stretch_cells);

namespace {

template <class T>
__device__ __forceinline__ void copy_row(uint8_t* to, const uint8_t* from, int nbytes) {
    for (int i = lane_id(); i < nbytes / static_cast<int>(sizeof(T)); i += 32)
        reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i];
}

}  // namespace

// The rows of chosen cells side by side, `stride` bytes apart; width: bytes that all addresses and sizes are
// multiples of. A warp per cell.
IKPY_KERNEL gather_cells(uint8_t* to, long long stride, View from, const int* chosen, int nbytes, int width) {
    const int i = blockIdx.x * (blockDim.x >> 5) + warp_id();
    if (i >= chosen[0]) return;
    const auto* row = from.row<const uint8_t>(0, chosen[1 + i]);
    uint8_t* out = to + i * stride;
    if (width == 16) {
        copy_row<uint4>(out, row, nbytes);
    } else if (width == 4) {
        copy_row<unsigned>(out, row, nbytes);
    } else {
        copy_row<uint16_t>(out, row, nbytes);
    }
}
IKPY_EXPORT(gather_cells);
