// Selective scans of Mamba-2 (arXiv:2405.21060) and, with rates of every channel, of Mamba
// (arXiv:2312.00752), whose states belong to slots.
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

// What the channels of a block need of some tokens. Rows behind N are zero.
template <int kRows>
struct __align__(16) ChannelTokens {
    float b[kTokens][kRows], c[kTokens][kRows];
    int token[kTokens], n;
};

__device__ __forceinline__ int row_stride(const View& v) { return static_cast<int>(v.nb[1] / sizeof(float)); }

template <int kRows>
__device__ __forceinline__ void store_rows(const float (&rows)[kRows], int n, float* to, int stride) {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
        if (r < n) to[r * stride] = rows[r];
}

// Of every token and channel: S <- exp(dt A) S + dt B x; y = C S + D x. A thread per channel; x [P, 1, T],
// dt [P, T], A [P, N], B, C [N, 1, T], D [P], states [P, N, 1, slots], result [P, 1, T].
template <int kRows>
__device__ __forceinline__ void channel_scan(const Scan& s) {
    __shared__ ChannelTokens<kRows> p;
    const int slot = blockIdx.y, channel = blockIdx.x * 32 * kWarps + threadIdx.x;
    const int n_rows = s.b.ne[0], lane = lane_id();
    const bool own = channel < s.x.ne[0];
    int at = 0;
    if (warp_id() == 0) take_tokens(s.slots, s.x.ne[2], slot, at, p);
    __syncthreads();
    if (p.n == 0) return;
    float rates[kRows], rows[kRows];
    const float* const first_rate = s.a.row<const float>(0) + channel;
    float* const state = s.state.row<float>(0, 0, slot) + channel;
    const int rate_stride = row_stride(s.a), stride = row_stride(s.state);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
        const bool known = own && r < n_rows;
        rates[r] = known ? first_rate[r * rate_stride] : 0.0f;
        rows[r] = known ? state[r * stride] : 0.0f;
    }
    const float skip = own ? s.d.row<const float>(0)[channel] : 0.0f;
    while (const int n = p.n) {
        for (int i = warp_id(); i < n; i += kWarps) {
            const int t = p.token[i];
            const float *b = s.b.row<const float>(0, t), *c = s.c.row<const float>(0, t);
            for (int r = lane; r < kRows; r += 32) {
                p.b[i][r] = r < n_rows ? b[r] : 0.0f;
                p.c[i][r] = r < n_rows ? c[r] : 0.0f;
            }
        }
        __syncthreads();
        for (int i = 0; own && i < n; ++i) {
            const int t = p.token[i];
            const float x = s.x.row<const float>(0, t)[channel], dt = s.dt.row<const float>(t)[channel];
            float y = skip * x;
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
                rows[r] = expf(dt * rates[r]) * rows[r] + dt * x * p.b[i][r];
                y += p.c[i][r] * rows[r];
            }
            s.dst.row<float>(0, t)[channel] = y;
            const int keep = s.kept.behind(t);
            if (keep >= 0)
                store_rows(rows, n_rows, s.kept.states.row<float>(0, 0, keep) + channel,
                           row_stride(s.kept.states));
        }
        __syncthreads();
        if (warp_id() == 0) take_tokens(s.slots, s.x.ne[2], slot, at, p);
        __syncthreads();
    }
    if (own) store_rows(rows, n_rows, state, stride);
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

// The scan of Mamba for states of at most so many rows. Grid (blocks of channels, slots).
#define IKPY_CHANNEL_SCAN(name, rows)                                                                 \
    IKPY_KERNEL __launch_bounds__(32 * kWarps)                                                        \
        name(View dst, View x, View dt, View a, View b, View c, View d, View state, const int* slots, \
             View copies, const int* to) {                                                            \
        channel_scan<rows>({dst, x, dt, a, b, c, d, state, slots, {copies, to}});                     \
    }                                                                                                 \
    IKPY_EXPORT(name)

IKPY_CHANNEL_SCAN(channel_scan_16, 16);
IKPY_CHANNEL_SCAN(channel_scan_64, 64);
