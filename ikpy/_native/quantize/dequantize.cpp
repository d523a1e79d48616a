// The table of decoders over all families.
#include "dequantize.hpp"

#include <array>

#include "type_traits.hpp"

namespace ikpy {

namespace {

using namespace formats;

constexpr int kMaxId = 512;

using RowTable = std::array<const DecoderRow*, kMaxId>;

RowTable collect() {
    RowTable table{};
    for (const DecoderTable& family : {legacy_decoders(), kquant_decoders(), iquant_decoders(),
                                       iqk_decoders(), trellis_decoders(), interleaved_decoders()})
        for (int i = 0; i < family.count; ++i) table[family.rows[i].id] = &family.rows[i];
    return table;
}

const DecoderRow* find(int type) {
    static const RowTable table = collect();
    return type >= 0 && type < kMaxId ? table[type] : nullptr;
}

}  // namespace

size_t row_nbytes(int type, int64_t ne0) {
    const DecoderRow* row = find(type);
    if (!row || ne0 < 0 || ne0 % row->elements) return 0;
    return row->row_header + row->block_nbytes * static_cast<size_t>(ne0 / row->elements);
}

int interleave(int type) {
    const DecoderRow* row = find(type);
    return row ? row->rows : 0;
}

bool can_dequantize(int type) { return find(type) != nullptr; }

void dequantize_rows(int type, const uint8_t* matrix, int64_t ne0, int64_t row0, int64_t n_rows, float* dst,
                     int64_t dst_stride, bool compute_scale) {
    find(type)->decode(matrix, ne0, row0, n_rows, dst, dst_stride, compute_scale);
}

}  // namespace ikpy
