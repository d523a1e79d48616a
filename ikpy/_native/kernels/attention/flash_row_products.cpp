// The row kernel's products for each stored format and number of rows.
#include "kernels/attention/flash_rows.hpp"
#include "kernels/cache/kv_types.hpp"

namespace ikpy {
namespace flash {
namespace {

template <class Row>
const RowProducts* products_of(int64_t n_rows) {
    constexpr int64_t step = Row::kVectors * simd::kLanes;
    static const RowProducts all[] = {
        {row_scores<Row, 1>, row_outputs<Row, 1>, step}, {row_scores<Row, 2>, row_outputs<Row, 2>, step},
        {row_scores<Row, 3>, row_outputs<Row, 3>, step}, {row_scores<Row, 4>, row_outputs<Row, 4>, step},
        {row_scores<Row, 5>, row_outputs<Row, 5>, step}, {row_scores<Row, 6>, row_outputs<Row, 6>, step},
        {row_scores<Row, 7>, row_outputs<Row, 7>, step}, {row_scores<Row, 8>, row_outputs<Row, 8>, step},
    };
    return &all[n_rows - 1];
}

}  // namespace

const RowProducts* row_products(int type, int64_t n_rows) {
    switch (type) {
        case kF32:
            return products_of<kv::VectorsF32>(n_rows);
#if defined(__AVX2__)
        case kF16:
            return products_of<kv::VectorsF16>(n_rows);
        case kBF16:
            return products_of<kv::VectorsBF16>(n_rows);
        case kQ8_0:
            return products_of<kv::VectorsOf<kv::LevelsQ8_0>>(n_rows);
        case kv::kTypeQ4_0:
            return products_of<kv::VectorsOf<kv::LevelsQ4_0>>(n_rows);
        case kv::kTypeQ4_1:
            return products_of<kv::VectorsOf<kv::LevelsQ4_1>>(n_rows);
        case kv::kTypeQ5_0:
            return products_of<kv::VectorsOf<kv::LevelsQ5_0>>(n_rows);
        case kv::kTypeQ5_1:
            return products_of<kv::VectorsOf<kv::LevelsQ5_1>>(n_rows);
        case kv::kTypeQ6_0:
            return products_of<kv::VectorsOf<kv::LevelsQ6_0>>(n_rows);
        case kv::kTypeIQ4_NL:
            return products_of<kv::VectorsOf<kv::LevelsIQ4_NL>>(n_rows);
#endif
        default:
            return nullptr;
    }
}

}  // namespace flash
}  // namespace ikpy
