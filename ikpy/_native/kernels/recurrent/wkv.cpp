// Matrix states of RWKV: shares columns of heads among threads; tokens of a sequence come one after the
// other.
#include <algorithm>

#include "ikpy/ops.hpp"
#include "kernels/item_ranges.hpp"
#include "kernels/simd/simd_f32.hpp"
#include "kernels/token_runs.hpp"

namespace ikpy {
namespace {

constexpr int kVectors = 4;  // that go through the rows of a state together
constexpr int64_t kWidth = kVectors * simd::kLanes;

// What a token changes beside S <- w S + k v^T: nothing; its result is that of the state before it, with a
// weighted product of its own; or what its removal key finds in that state is taken off.
enum Rule { kPlain = 0, kFirst = 1, kRemoving = 2 };

struct Sources {
    const Tensor &r, &k, &v, &w, &state, &dst;
    const Tensor *first, *removal, *written;
    const KeptStates kept;

    Sources(const Op& op, const Tensor* ts)
        : r(ts[op.src[0]]),
          k(ts[op.src[1]]),
          v(ts[op.src[2]]),
          w(ts[op.src[3]]),
          state(ts[op.src[6]]),
          dst(ts[op.dst]),
          first(op.ip[0] == kFirst ? &ts[op.src[4]] : nullptr),
          removal(op.ip[0] == kRemoving ? &ts[op.src[4]] : nullptr),
          written(op.ip[0] == kRemoving ? &ts[op.src[5]] : nullptr),
          kept(op, ts, 8) {}

    int64_t rows() const { return k.ne[0]; }
    int64_t columns() const { return v.ne[0]; }
    int64_t heads() const { return r.ne[1]; }
    int64_t value_head(int64_t head) const { return head / (heads() / v.ne[1]); }
    int64_t stride() const { return state.nb[1] / int64_t(sizeof(float)); }
};

// Vectors of a token of one head, as long as a state has rows.
struct Token {
    const float *r, *k, *w, *first, *removal, *written;

    Token(const Sources& s, int64_t head, int64_t t)
        : r(row<const float>(s.r, head, t)),
          k(row<const float>(s.k, head, t)),
          w(row<const float>(s.w, head, t)),
          first(s.first ? row<const float>(*s.first, head) : nullptr),
          removal(s.removal ? row<const float>(*s.removal, head, t) : nullptr),
          written(s.written ? row<const float>(*s.written, head, t) : nullptr) {}
};

// One token on kWidth columns of a state whose rows are `stride` floats apart.
template <Rule kRule>
void meet(const Token& t, float* state, int64_t stride, int64_t n_rows, const float* v, float* out) {
    simd::V values[kVectors], sums[kVectors], found[kVectors];
    for (int j = 0; j < kVectors; ++j) {
        values[j] = simd::load(v + j * simd::kLanes);
        sums[j] = found[j] = simd::zero();
    }
    if (kRule == kRemoving)
        for (int64_t i = 0; i < n_rows; ++i) {
            const simd::V removal = simd::set1(-t.removal[i]);
            for (int j = 0; j < kVectors; ++j)
                found[j] = simd::fma(removal, simd::load(state + i * stride + j * simd::kLanes), found[j]);
        }
    float own = 0;  // product of the token with itself
    for (int64_t i = 0; i < n_rows; ++i) {
        const simd::V r = simd::set1(t.r[i]), k = simd::set1(t.k[i]), w = simd::set1(t.w[i]);
        const simd::V written = kRule == kRemoving ? simd::set1(t.written[i]) : simd::zero();
        if (kRule == kFirst) own += t.r[i] * t.first[i] * t.k[i];
        for (int j = 0; j < kVectors; ++j) {
            float* const place = state + i * stride + j * simd::kLanes;
            const simd::V before = simd::load(place);
            simd::V after = simd::fma(k, values[j], simd::mul(w, before));
            if (kRule == kRemoving) after = simd::fma(written, found[j], after);
            simd::store(place, after);
            sums[j] = simd::fma(r, kRule == kFirst ? before : after, sums[j]);
        }
    }
    for (int j = 0; j < kVectors; ++j) {
        if (kRule == kFirst) sums[j] = simd::fma(simd::set1(own), values[j], sums[j]);
        simd::store(out + j * simd::kLanes, sums[j]);
    }
}

void copy_rows(const float* from, int64_t from_stride, int64_t n, int64_t n_rows, float* to,
               int64_t to_stride) {
    for (int64_t i = 0; i < n_rows; ++i) std::copy_n(from + i * from_stride, n, to + i * to_stride);
}

// Columns from `begin` on, at most kWidth, of a head for all tokens of a slot. Fewer than kWidth go through a
// tile, padded with zeros.
template <Rule kRule>
void run_columns(const Sources& s, const TokenRuns& runs, int32_t slot, int64_t head, int64_t begin,
                 float* tile) {
    const int64_t n = std::min(kWidth, s.columns() - begin), n_rows = s.rows();
    const bool whole = n == kWidth;
    float* const own = row<float>(s.state, 0, head, slot) + begin;
    float* const state = whole ? own : tile;
    const int64_t stride = whole ? s.stride() : kWidth;
    float v[kWidth] = {}, out[kWidth];
    if (!whole) {
        std::fill_n(tile, n_rows * kWidth, 0.0f);
        copy_rows(own, s.stride(), n, n_rows, tile, kWidth);
    }
    for (int32_t t = runs.first(slot); t >= 0; t = runs.next(t)) {
        std::copy_n(row<const float>(s.v, s.value_head(head), t) + begin, n, v);
        meet<kRule>(Token(s, head, t), state, stride, n_rows, v, out);
        std::copy_n(out, n, row<float>(s.dst, head, t) + begin);
        const int32_t to = s.kept.behind(t);
        if (to >= 0)
            copy_rows(state, stride, n, n_rows, row<float>(*s.kept.states, 0, head, to) + begin,
                      s.kept.states->nb[1] / int64_t(sizeof(float)));
    }
    if (!whole) copy_rows(tile, kWidth, n, n_rows, own, s.stride());
}

size_t tile_nbytes(const Tensor& k) { return k.ne[0] * kWidth * sizeof(float); }

}  // namespace

size_t wkv_scratch_bytes(const Op& op, const Tensor* ts) {
    return tile_nbytes(ts[op.src[1]]) + TokenRuns::nbytes(ts[op.src[6]].ne[3], ts[op.src[7]].ne[0]);
}

// src: r, k [dk, H, T], v [dv, Hv, T], decay w [dk, H, T], what the rule ip[0] reads (kFirst: [dk, H];
// kRemoving: removal and written keys [dk, H, T]), states [dv, dk, H, slots], slots [T], and perhaps kept
// states and their slots [T]. Every token comes for itself, so results depend on neither threads nor batches.
void op_wkv(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Sources s(op, ts);
    const Tensor& slots = ts[op.src[7]];
    const size_t tile = tile_nbytes(s.k);
    const TokenRuns runs(row<const int32_t>(slots, 0), s.state.ne[3], slots.ne[0], ctx.scratch + tile);
    if (!runs.size()) return;
    const auto run = op.ip[0] == kFirst      ? run_columns<kFirst>
                     : op.ip[0] == kRemoving ? run_columns<kRemoving>
                                             : run_columns<kPlain>;
    const int64_t n_blocks = (s.columns() + kWidth - 1) / kWidth;
    ItemRanges ranges(ctx, runs.size() * s.heads() * n_blocks);
    for (int64_t item; (item = ranges.next()) >= 0;)
        run(s, runs, runs.slot(item / n_blocks / s.heads()), item / n_blocks % s.heads(),
            item % n_blocks * kWidth, reinterpret_cast<float*>(ctx.scratch));
}

}  // namespace ikpy
