// The single cells behind a choice of stretches of positions.
#include <algorithm>

#include "ikpy/ops.hpp"

namespace ikpy {
namespace {

constexpr int32_t kAll = -1;  // in place of a number of cells
constexpr int kBits = 64;

// Positions from 0 to 2^31 - 1 as numbers of their stretches: a product instead of a division. With 2^bits >=
// ratio the factor is above 2^(31 + bits) / ratio by less than 2^bits / ratio, which rounds no quotient up.
class StretchOf {
  public:
    explicit StretchOf(int32_t ratio) {
        int bits = 0;
        while (int64_t(1) << bits < ratio) ++bits;
        shift_ = 31 + bits;
        factor_ = (uint64_t(1) << shift_) / uint64_t(ratio) + 1;
    }
    uint32_t operator()(int32_t position) const { return uint32_t(uint64_t(position) * factor_ >> shift_); }

  private:
    uint64_t factor_;
    int shift_;
};

// A set of stretches, by their number from position 0 on; others than the n first are never in it.
class Stretches {
  public:
    static size_t nbytes(int64_t n) { return size_t((n + kBits - 1) / kBits) * sizeof(uint64_t); }

    Stretches(uint8_t* memory, int64_t n) : words_(reinterpret_cast<uint64_t*>(memory)), n_(uint64_t(n)) {}
    void clear() { std::fill_n(words_, nbytes(int64_t(n_)) / sizeof(uint64_t), 0); }
    void add(int64_t stretch) {
        if (uint64_t(stretch) < n_) words_[stretch / kBits] |= uint64_t(1) << (stretch % kBits);
    }
    bool has(uint32_t stretch) const {
        return stretch < n_ && (words_[stretch / kBits] >> (stretch % kBits) & 1);
    }

  private:
    uint64_t* words_;
    uint64_t n_;
};

}  // namespace

size_t stretch_cells_scratch_bytes(const Op& op, const Tensor* ts) {
    return Stretches::nbytes(ts[op.src[1]].ne[0]);
}

// src: chosen i32 [1 + top_k, T], last positions i32 [E] of the stretches, mask f16 [n, T] of single cells
// and their ranges i32 [2, T], positions of the cells i32 [n] and of the tokens i32 [T]; ip: positions of a
// stretch. dst i32 [most + 1, T]: the number of cells, or -1 where all stretches were chosen, and the cells.
void op_stretch_cells(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime& runtime) {
    const Tensor &chosen = ts[op.src[0]], &mask = ts[op.src[2]], &ranges = ts[op.src[3]], &out = ts[op.dst];
    const int32_t *ends = row<int32_t>(ts[op.src[1]], 0), *at = row<int32_t>(ts[op.src[4]], 0);
    const int32_t* pos = row<int32_t>(ts[op.src[5]], 0);
    const int32_t ratio = op.ip[0], most = int32_t(out.ne[0]) - 1;
    const int64_t n_cells = std::min(mask.ne[0], runtime.n_kv);
    const StretchOf stretch_of(ratio);
    Stretches set(ctx.scratch, ts[op.src[1]].ne[0]);
    for (int64_t t = ctx.ith; t < out.ne[1]; t += ctx.nth) {
        const int32_t* stretches = row<int32_t>(chosen, t);
        int32_t* to = row<int32_t>(out, t);
        to[0] = kAll;
        if (stretches[0] == kAll) continue;
        set.clear();
        for (int32_t i = 1; i <= stretches[0]; ++i) set.add(stretch_of(ends[stretches[i]]));
        const uint16_t* shown = row<uint16_t>(mask, t);
        const int64_t tail = (int64_t(pos[t]) + 1) / ratio * ratio;
        const int64_t first = row<int32_t>(ranges, t)[0],
                      last = std::min<int64_t>(row<int32_t>(ranges, t)[1], n_cells);
        int32_t n = 0;
        for (int64_t c = first; c < last && n < most; ++c)
            if (shown[c] == 0 && (at[c] >= tail || set.has(stretch_of(at[c])))) to[1 + n++] = int32_t(c);
        to[0] = n;
    }
}

}  // namespace ikpy
