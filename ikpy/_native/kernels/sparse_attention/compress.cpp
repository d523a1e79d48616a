// Compressed cache entries: weighted means over the cells of a stretch of positions.
#include <algorithm>
#include <limits>

#include "ikpy/ops.hpp"
#include "ikpy/vecmath.hpp"

namespace ikpy {
namespace {

constexpr int64_t kCells = 64;     // looked at before the first one is taken
constexpr int64_t kElements = 64;  // of an entry that are computed at a time

struct Compression {
    const Tensor &values, &gates, &bias, &cell_pos, &cell_seq, &pos, &seq, &ends, &dst;
    const int64_t size, ratio;
    const bool overlaps;  // the stretch before counts as well

    Compression(const Op& op, const Tensor* ts)
        : values(ts[op.src[0]]),
          gates(ts[op.src[1]]),
          bias(ts[op.src[2]]),
          cell_pos(ts[op.src[3]]),
          cell_seq(ts[op.src[4]]),
          pos(ts[op.src[5]]),
          seq(ts[op.src[6]]),
          ends(ts[op.src[7]]),
          dst(ts[op.dst]),
          size(dst.ne[0]),
          ratio(bias.ne[1]),
          overlaps(values.ne[0] > size) {}

    int64_t n_positions() const { return overlaps ? 2 * ratio : ratio; }

    // The cell of every position that counts for an entry, -1 where there is none. Whether there is one.
    bool find_cells(int64_t entry, int32_t* cells) const {
        std::fill_n(cells, n_positions(), -1);
        const int64_t token = row<const int32_t>(ends, 0)[entry];
        if (token < 0 || token >= pos.ne[0]) return false;
        const int32_t sequence = row<const int32_t>(seq, 0)[token];
        if (sequence < 0 || sequence >= 64) return false;
        const uint64_t mask = uint64_t(1) << sequence;
        const int32_t last = row<const int32_t>(pos, 0)[token];
        const int64_t first = last - n_positions() + 1;
        const int32_t lowest = int32_t(std::max<int64_t>(first, 0));
        const int32_t* at = row<const int32_t>(cell_pos, 0);
        const uint64_t* of = row<const uint64_t>(cell_seq, 0);
        const auto counts = [&](int64_t c) {
            return (at[c] >= lowest) & (at[c] <= last) & ((of[c] & mask) != 0);
        };
        bool any = false;
        for (int64_t c0 = 0, n = cell_pos.ne[0]; c0 < n; c0 += kCells) {
            const int64_t c1 = std::min(n, c0 + kCells);
            int found = 0;
            for (int64_t c = c0; c < c1; ++c) found |= counts(c);
            if (!found) continue;
            any = true;
            for (int64_t c = c0; c < c1; ++c)
                if (counts(c)) cells[at[c] - first] = int32_t(c);
        }
        return any;
    }

    // Up to kElements elements of an entry, from `element` on.
    void weigh(const int32_t* cells, int64_t element, int64_t n, float* out) const {
        float top[kElements], sum[kElements] = {}, mean[kElements] = {};
        std::fill_n(top, kElements, -std::numeric_limits<float>::infinity());
        for_cells(cells, element, [&](const float*, const float* gate, const float* offset) {
            for (int64_t i = 0; i < n; ++i) top[i] = std::max(top[i], gate[i] + offset[i]);
        });
        for_cells(cells, element, [&](const float* value, const float* gate, const float* offset) {
            for (int64_t i = 0; i < n; ++i) {
                const float weight = exp_fast(gate[i] + offset[i] - top[i]);
                sum[i] += weight;
                mean[i] += weight * value[i];
            }
        });
        for (int64_t i = 0; i < n; ++i) out[i] = mean[i] / sum[i];
    }

  private:
    // Calls f(value, gate, bias of the gate) from `element` on for every cell there is. The stretch before
    // has the first halves of its cells, the stretch itself the second ones.
    template <typename F>
    void for_cells(const int32_t* cells, int64_t element, F&& f) const {
        for (int64_t o = 0, n = n_positions(); o < n; ++o) {
            if (cells[o] < 0) continue;
            const int64_t column = element + (overlaps && o >= ratio ? size : 0);
            f(row<const float>(values, 0, cells[o]) + column, row<const float>(gates, 0, cells[o]) + column,
              row<const float>(bias, o % ratio) + column);
        }
    }
};

}  // namespace

size_t compress_cells_scratch_bytes(const Op& op, const Tensor* ts) {
    return size_t(Compression(op, ts).n_positions()) * sizeof(int32_t);
}

// src: values and gates f32 [w, 1, n_cells], bias of the gates [w, ratio], cell_pos i32 and cell_seq masks of
// 64 bits [n_cells], pos and seq i32 [T], ends i32 [E]: tokens that complete a stretch of ratio positions;
// dst [size, E]. An entry is the mean of its cells' values, weighted by the softmax of gate + bias per
// element; w is size, or 2 * size if the stretch before counts as well. Entries without cells are zeros.
// Threads share the entries, and parts of them where they are few.
void op_compress_cells(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Compression p(op, ts);
    const int64_t n_entries = p.dst.ne[1], blocks = (p.size + kElements - 1) / kElements;
    if (n_entries == 0) return;
    const int64_t parts = std::min((ctx.nth + n_entries - 1) / n_entries, blocks);
    int32_t* const cells = reinterpret_cast<int32_t*>(ctx.scratch);
    for (int64_t item = ctx.ith; item < n_entries * parts; item += ctx.nth) {
        const int64_t entry = item % n_entries;
        const bool any = p.find_cells(entry, cells);
        int64_t first, last;
        split_range(p.size, int(item / n_entries), int(parts), kElements, &first, &last);
        float* const out = row<float>(p.dst, entry);
        for (int64_t i = first; i < last; i += kElements) {
            const int64_t n = std::min(kElements, last - i);
            if (any)
                p.weigh(cells, i, n, out + i);
            else
                std::fill_n(out + i, n, 0.0f);
        }
    }
}

}  // namespace ikpy
