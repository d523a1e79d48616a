// Matrix states of RWKV (arXiv:2404.05892, arXiv:2503.14456), which belong to slots.
#include "recurrent.cuh"

using namespace ikpy::cuda;

namespace {

enum Rule { kPlain = 0, kFirst = 1, kRemoving = 2 };  // as of the CPU's kernel

// What the op reads and writes: r, k [dk, H, T], v [dv, Hv, T], decay w [dk, H, T], what its rule reads
// (kFirst: further [dk, H]; kRemoving: further and written [dk, H, T]), states [dv, dk, H, slots], result
// [dv, H, T].
struct Wkv {
    View dst, r, k, v, w, further, written, state;
    const int* slots;
    int rule;
    Kept kept;
};

// What all columns of a head need of some tokens. Rows behind dk are zero.
template <int kRows, int kColumns>
struct __align__(16) WkvTokens {
    float r[kTokens][kRows], k[kTokens][kRows], w[kTokens][kRows];
    float removal[kTokens][kRows], written[kTokens][kRows];
    float values[kTokens][kColumns];
    float own[kTokens];
    int token[kTokens], n;
};

// Token number i with the values of the block's columns from `first` on; by one warp.
template <int kRows, int kColumns>
__device__ __forceinline__ void prepare_token(const Wkv& s, int head, int first, int i,
                                              WkvTokens<kRows, kColumns>& p) {
    const int t = p.token[i], n = s.k.ne[0], lane = lane_id();
    const float *r = s.r.row<const float>(head, t), *k = s.k.row<const float>(head, t),
                *w = s.w.row<const float>(head, t);
    float own = 0;
    for (int j = lane; j < kRows; j += 32) {
        const bool known = j < n;
        p.r[i][j] = known ? r[j] : 0.0f;
        p.k[i][j] = known ? k[j] : 0.0f;
        p.w[i][j] = known ? w[j] : 0.0f;
        if (s.rule == kFirst && known) own += r[j] * s.further.row<const float>(head)[j] * k[j];
        if (s.rule != kRemoving) continue;
        p.removal[i][j] = known ? s.further.row<const float>(head, t)[j] : 0.0f;
        p.written[i][j] = known ? s.written.row<const float>(head, t)[j] : 0.0f;
    }
    own = warp_sum(own);
    const float* v = s.v.row<const float>(head / (s.r.ne[1] / s.v.ne[1]), t) + first;
    if (lane < kColumns) p.values[i][lane] = first + lane < s.v.ne[0] ? v[lane] : 0.0f;
    if (lane == 0) p.own[i] = own;
}

// Of every token: S' = w S + k v^T, less written (removal^T S)^T; o = S'^T r or, of the state before it,
// S^T r + (r.(first k)) v.
template <int kRows, int kParts>
__device__ __forceinline__ void wkv(const Wkv& s) {
    constexpr int kPerWarp = 32 / kParts, kColumns = kWarps * kPerWarp;
    __shared__ WkvTokens<kRows, kColumns> p;
    const int head = blockIdx.y, slot = blockIdx.z, first = blockIdx.x * kColumns;
    const int own = warp_id() * kPerWarp + lane_id() % kPerWarp, column = first + own, dv = s.v.ne[0];
    int at = 0;
    if (warp_id() == 0) take_tokens(s.slots, s.r.ne[2], slot, at, p);
    __syncthreads();
    if (p.n == 0) return;
    Column<kRows, kParts> state(s.state.row<float>(0, head, slot) + column,
                                static_cast<int>(s.state.nb[1] / sizeof(float)), column < dv ? s.k.ne[0] : 0);
    while (const int n = p.n) {
        for (int i = warp_id(); i < n; i += kWarps) prepare_token(s, head, first, i, p);
        __syncthreads();
        for (int i = 0; i < n; ++i) {
            const float value = p.values[i][own];
            float out = s.rule == kFirst ? state.product(p.r[i]) + p.own[i] * value : 0.0f;
            const float found = s.rule == kRemoving ? state.product(p.removal[i]) : 0.0f;
            state.decay(p.w[i]);
            state.add(p.k[i], value);
            if (s.rule == kRemoving) state.add(p.written[i], -found);
            if (s.rule != kFirst) out = state.product(p.r[i]);
            if (state.is_first_part() && column < dv) s.dst.row<float>(head, p.token[i])[column] = out;
            const int keep = s.kept.behind(p.token[i]);
            if (keep >= 0) state.store_to(s.kept.states.row<float>(0, head, keep) + column);
        }
        __syncthreads();
        if (warp_id() == 0) take_tokens(s.slots, s.r.ne[2], slot, at, p);
        __syncthreads();
    }
    state.store();
}

}  // namespace

// For states of at most so many rows, of which `parts` lanes share a column. Grid (blocks of columns, heads,
// slots).
#define IKPY_WKV(name, rows, parts)                                                              \
    IKPY_KERNEL __launch_bounds__(32 * kWarps)                                                   \
        name(View dst, View r, View k, View v, View w, View further, View written, View state,   \
             const int* slots, int rule, View copies, const int* to) {                           \
        wkv<rows, parts>({dst, r, k, v, w, further, written, state, slots, rule, {copies, to}}); \
    }                                                                                            \
    IKPY_EXPORT(name)

IKPY_WKV(wkv_32, 32, 4);
IKPY_WKV(wkv_64, 64, 4);
IKPY_WKV(wkv_128, 128, 8);
IKPY_WKV(wkv_256, 256, 8);
