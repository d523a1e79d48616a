// Which cached cells each query may see (model semantics 2.5): f16 mask rows of 0 and -inf, and the visible
// range.
#include <algorithm>

#include "ikpy/ops.hpp"

namespace ikpy {
namespace {

constexpr uint16_t kMinusInfinity = 0xfc00;  // f16

// Cells with lowest <= position <= highest are visible, if they carry the sequence.
struct Visible {
    int32_t lowest, highest;
    uint64_t sequence;
};

Visible visible_to(const Op& op, int32_t pos, int32_t seq) {
    Visible v{0, INT32_MAX, 0};
    if (seq >= 0 && seq < 64) v.sequence = uint64_t(1) << seq;
    if (op.ip[2]) v.highest = pos;
    const int32_t n_swa = op.ip[1];
    if (op.ip[0] == 1 && n_swa > 0 && pos >= n_swa) v.lowest = pos - n_swa + 1;
    if (op.ip[0] == 2 && n_swa > 0) v.lowest = pos - pos % n_swa;
    return v;
}

void mask_row(const Visible& v, const int32_t* cell_pos, const uint64_t* cell_seq, int64_t n,
              uint16_t* mask) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        const bool see =
            (cell_pos[i] >= v.lowest) & (cell_pos[i] <= v.highest) & ((cell_seq[i] & v.sequence) != 0);
        mask[i] = see ? uint16_t(0) : kMinusInfinity;
    }
}

// First and one-past-last zero of the row; 0, 0 if there is none.
void visible_range(const uint16_t* mask, int64_t n, int32_t* range) {
    int64_t first = 0, last = n;
    while (first < n && mask[first] != 0) ++first;
    while (last > first && mask[last - 1] != 0) --last;
    range[0] = first < last ? int32_t(first) : 0;
    range[1] = first < last ? int32_t(last) : 0;
}

}  // namespace

// ip: window kind, window size, causal, whether all cells count (a window's own cells) or the first n_kv.
void op_kq_mask(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime& runtime) {
    const Tensor& mask = tensors[op.dst];
    const Tensor& ranges = tensors[op.src[4]];
    const int32_t* cell_pos = row<int32_t>(tensors[op.src[0]], 0);
    const uint64_t* cell_seq = row<uint64_t>(tensors[op.src[1]], 0);
    const int32_t* pos = row<int32_t>(tensors[op.src[2]], 0);
    const int32_t* seq = row<int32_t>(tensors[op.src[3]], 0);
    const int64_t n_cells = tensors[op.src[0]].ne[0];
    const int64_t n = op.ip[3] ? n_cells : std::min(runtime.n_kv, n_cells);
    int64_t begin, end;
    split_range(mask.ne[1], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        uint16_t* out = row<uint16_t>(mask, t);
        mask_row(visible_to(op, pos[t], seq[t]), cell_pos, cell_seq, n, out);
        visible_range(out, n, row<int32_t>(ranges, t));
    }
}

}  // namespace ikpy
