// Selective scan of Mamba-2 (arXiv:2405.21060), whose states belong to slots.
#include "recurrent.cuh"

using namespace ikpy::cuda;

namespace {

// What the scan reads and writes: x [P, H, T], dt [H, T], A, D [1, H], B, C [N, G, T], states
// [P, N, H, slots], result [P, H, T].
struct Scan {
    View dst, x, dt, a, b, c, d, state;
    const int* slots;
    Kept kept;
};

// What all columns of a head need of some tokens. Rows behind N are zero.
template <int kRows, int kColumns>
struct __align__(16) ScannedTokens {
    float b[kTokens][kRows], c[kTokens][kRows];
    float x[kTokens][kColumns];
    float dt[kTokens], decay[kTokens];
    int token[kTokens], n;
};

// Token number i with the inputs of the block's columns from `first` on; by one warp.
template <int kRows, int kColumns>
__device__ __forceinline__ void prepare_token(const Scan& s, int head, int first, int i,
                                              ScannedTokens<kRows, kColumns>& p) {
    const int t = p.token[i], n = s.b.ne[0], group = head / (s.x.ne[1] / s.b.ne[1]), lane = lane_id();
    const float *b = s.b.row<const float>(group, t), *c = s.c.row<const float>(group, t);
    for (int r = lane; r < kRows; r += 32) {
        p.b[i][r] = r < n ? b[r] : 0.0f;
        p.c[i][r] = r < n ? c[r] : 0.0f;
    }
    const float* x = s.x.row<const float>(head, t) + first;
    if (lane < kColumns) p.x[i][lane] = first + lane < s.x.ne[0] ? x[lane] : 0.0f;
    if (lane == 0) {
        const float dt = s.dt.row<const float>(t)[head];
        p.dt[i] = dt;
        p.decay[i] = expf(dt * *s.a.row<const float>(head));
    }
}

// Of every token: S <- exp(dt A) S + B (dt x)^T; y = S^T C + D x.
template <int kRows, int kParts>
__device__ __forceinline__ void ssm_scan(const Scan& s) {
    constexpr int kPerWarp = 32 / kParts, kColumns = kWarps * kPerWarp;
    __shared__ ScannedTokens<kRows, kColumns> p;
    const int head = blockIdx.y, slot = blockIdx.z, first = blockIdx.x * kColumns;
    const int own = warp_id() * kPerWarp + lane_id() % kPerWarp, column = first + own, size = s.x.ne[0];
    int at = 0;
    if (warp_id() == 0) take_tokens(s.slots, s.x.ne[2], slot, at, p);
    __syncthreads();
    if (p.n == 0) return;
    const float skip = *s.d.row<const float>(head);
    Column<kRows, kParts> state(s.state.row<float>(0, head, slot) + column,
                                static_cast<int>(s.state.nb[1] / sizeof(float)),
                                column < size ? s.b.ne[0] : 0);
    while (const int n = p.n) {
        for (int i = warp_id(); i < n; i += kWarps) prepare_token(s, head, first, i, p);
        __syncthreads();
        for (int i = 0; i < n; ++i) {
            const float x = p.x[i][own];
            state.decay(p.decay[i]);
            state.add(p.b[i], p.dt[i] * x);
            const float y = state.product(p.c[i]) + skip * x;
            if (state.is_first_part() && column < size) s.dst.row<float>(head, p.token[i])[column] = y;
            const int keep = s.kept.behind(p.token[i]);
            if (keep >= 0) state.store_to(s.kept.states.row<float>(0, head, keep) + column);
        }
        __syncthreads();
        if (warp_id() == 0) take_tokens(s.slots, s.x.ne[2], slot, at, p);
        __syncthreads();
    }
    state.store();
}

}  // namespace

// The scan for states of at most so many rows, of which `parts` lanes share a column. Grid (blocks of
// columns, heads, slots).
#define IKPY_SSM_SCAN(name, rows, parts)                                                              \
    IKPY_KERNEL __launch_bounds__(32 * kWarps)                                                        \
        name(View dst, View x, View dt, View a, View b, View c, View d, View state, const int* slots, \
             View copies, const int* to) {                                                            \
        ssm_scan<rows, parts>({dst, x, dt, a, b, c, d, state, slots, {copies, to}});                  \
    }                                                                                                 \
    IKPY_EXPORT(name)

IKPY_SSM_SCAN(ssm_scan_32, 32, 4);
IKPY_SSM_SCAN(ssm_scan_64, 64, 4);
IKPY_SSM_SCAN(ssm_scan_128, 128, 8);
IKPY_SSM_SCAN(ssm_scan_256, 256, 8);
