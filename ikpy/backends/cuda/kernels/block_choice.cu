// Sparse attention of MiniMax M3: every index head chooses blocks of positions for each token, by the largest
// q . k of a block's visible cells. Blocks are counted from a token's own backwards; cells of others are
// never chosen.
#include "indexer.cuh"

using namespace ikpy::cuda;

namespace {

constexpr unsigned kNone = 0;  // below every score

// Positions of cells and tokens, positions of a block, and blocks of a token that are looked at.
struct BlockPositions {
    const int* cells;
    const int* tokens;
    int size, n_blocks;

    // How many blocks a cell is behind a token's own; at least n_blocks, unsigned, for those that do not
    // count.
    __device__ __forceinline__ unsigned distance(int token, int cell) const {
        return static_cast<unsigned>(tokens[token] / size - cells[cell] / size);
    }
};

// What is no number is the lowest score.
__device__ __forceinline__ unsigned block_score(float x) { return ordered(x >= -FLT_MAX ? x : -FLT_MAX); }

}  // namespace

IKPY_KERNEL clear_blocks(unsigned* best, long long n) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) best[i] = kNone;
}
IKPY_EXPORT(clear_blocks);

// Raises the best scores [token][head][distance] of blocks of the tokens from token0 on. Grid (blocks of
// cells, groups of tokens).
IKPY_KERNEL __launch_bounds__(128)
    block_scores(unsigned* best, Indexer a, BlockPositions at, int token0, int n_tokens) {
    __shared__ IndexTile tile;
    const int c0 = blockIdx.x * kCells, n_kv = a.n_cells(), heads = a.q.ne[1];
    if (c0 >= n_kv) return;
    load_index_keys(a, c0, tile);
    wait_copies<0>();
    const int cell0 = c0 + 32 * warp_id() + 2 * (lane_id() % 4);  // the first of this thread's eight cells
    const int first = token0 + blockIdx.y * kTokens, end = min(first + kTokens, token0 + n_tokens);
    for (int t = first; t < end; ++t) {
        if (a.ranges[2 * t] >= c0 + kCells || a.ranges[2 * t + 1] <= c0) continue;
        unsigned distance[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int c = cell0 + 8 * (i / 2) + i % 2;
            distance[i] = c < n_kv && a.sees(t, c) ? at.distance(t, c) : at.n_blocks;
        }
        for (int h0 = 0; h0 < heads; h0 += kHeads) {
            __syncthreads();
            load_index_queries(a, t, h0, tile);
            __syncthreads();
            float scores[4][4] = {};
            index_products(tile, a.padded(), scores);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int h = h0 + lane_id() / 4 + 8 * half;
                if (h >= heads) continue;
                unsigned* const of_head =
                    best + (static_cast<long long>(t - token0) * heads + h) * at.n_blocks;
                unsigned score = kNone;
#pragma unroll
                for (int i = 0; i < 8; ++i) {  // one step for a run of cells of the same block
                    score = max(score, block_score(scores[i / 2][2 * half + i % 2]));
                    if (i < 7 && distance[i] == distance[min(i + 1, 7)]) continue;
                    if (distance[i] < at.n_blocks) atomicMax(of_head + distance[i], score);
                    score = kNone;
                }
            }
        }
    }
}
IKPY_EXPORT(block_scores);

// Of every token and head the cells of the top_k best blocks, or of all that it sees if these are no more, in
// rising order behind their number: i32 [1 + top_k * size, T, H]. The last `local` blocks are better than all
// others, of equal scores the first ones count. sets: memory for a bit of every block [token][head]. A block
// per token from token0 on and head.
IKPY_KERNEL choose_blocks(View chosen, const unsigned* best, unsigned* sets, View mask, const int* ranges,
                          BlockPositions at, int local, int token0, const int* runtime) {
    const int t = token0 + blockIdx.x, n = at.n_blocks, most = chosen.ne[0] - 1, top_k = most / at.size;
    const long long row = static_cast<long long>(blockIdx.x) * gridDim.y + blockIdx.y;
    const unsigned* own = best + row * n;
    unsigned* const set = sets + row * ((n + 31) / 32);
    const auto key = [&](int i) {  // the first blocks first
        const int d = n - 1 - i;
        return own[d] != kNone && d < local ? 0xffffffffu : own[d];
    };
    int seen = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) seen += own[i] != kNone;
    unsigned least = kNone;
    int left = 0;
    if (block_sum(seen) > top_k) least = threshold(key, n, top_k, &left);
    for (int i = threadIdx.x; i < (n + 31) / 32; i += blockDim.x) set[i] = 0;
    __syncthreads();
    int equal = 0;
    for (int i0 = 0; i0 < n; i0 += blockDim.x) {
        const int i = i0 + threadIdx.x, d = n - 1 - i;
        const unsigned x = i < n ? key(i) : kNone;
        int n_equal;
        const int rank = equal + block_rank(i < n && x == least, &n_equal);
        if (i < n && (x > least || (x == least && rank < left))) atomicOr(&set[d / 32], 1u << (d % 32));
        equal += n_equal;
    }
    __syncthreads();
    const auto* shown = mask.row<const uint16_t>(t);
    const int last = min(ranges[2 * t + 1], min(runtime[0], mask.ne[0]));
    int* out = chosen.row<int>(t, blockIdx.y);
    int count = 0;
    for (int c0 = ranges[2 * t]; c0 < last; c0 += blockDim.x) {
        const int c = c0 + threadIdx.x;
        const unsigned d = c < last && shown[c] == 0 ? at.distance(t, c) : n;
        const bool taken = d < n && (set[d / 32] >> (d % 32) & 1);
        int n_taken;
        const int place = count + block_rank(taken, &n_taken);
        if (taken && place < most) out[1 + place] = c;
        count = min(count + n_taken, most);
    }
    if (threadIdx.x == 0) out[0] = count;
}
IKPY_EXPORT(choose_blocks);
