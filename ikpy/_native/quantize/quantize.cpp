#include "quantize.hpp"

#include <algorithm>
#include <cmath>
#include <new>
#include <vector>

#include "dequantize.hpp"
#include "encoders.hpp"
#include "magnitude.hpp"
#include "repack.hpp"
#include "search.hpp"

namespace ikpy::quantize {
namespace {

Encoder encoder(int type) {
    for (const auto& family : {simple_encoder, eight_bit_encoder, legacy_encoder, kquant_encoder,
                               iquant_encoder, iqk_encoder, row_scale_encoder, trellis_encoder}) {
        if (const Encoder e = family(type)) return e;
    }
    return nullptr;
}

constexpr int F16 = 1, FIRST_INTERLEAVED = 31, LAST_PLAIN = 158;

// The plain type whose encoded rows are permuted into an interleaved type; -1 if there is none.
int plain_form(int type) {
    if (type < FIRST_INTERLEAVED) return -1;
    for (int plain = 0; plain <= LAST_PLAIN; plain++) {
        if (encoder(plain) && plain != F16 && can_repack(plain, type) && interleave(type) > 1) return plain;
    }
    return -1;
}

// Whether the encoding depends on the column weights.
bool is_weighted(int type) {
    const int encoded = encoder(type) ? type : plain_form(type);
    return !simple_encoder(encoded) && !eight_bit_encoder(encoded);
}

// What searches for scales take at most: weighted sums of squares stay finite. F16 scales are saturated by
// far smaller values.
constexpr float MOST_SEARCHED = 1e12f;

// The values, or those of `copy` where some are beyond MOST_SEARCHED; infinite ones and NaN stay.
const float* searchable(const float* x, int64_t n, std::vector<float>& copy) {
    const float largest = largest_magnitude(x, n);
    if (!(largest > MOST_SEARCHED && std::isfinite(largest))) return x;
    copy.assign(x, x + n);
    for (float& v : copy) v = std::clamp(v, -MOST_SEARCHED, MOST_SEARCHED);
    return copy.data();
}

void encode(int type, const Rows& rows) {
    if (const Encoder e = encoder(type)) return e(rows);
    const int plain = plain_form(type);
    Rows r = rows;
    r.row_bytes = static_cast<int64_t>(row_nbytes(plain, rows.ne0));
    std::vector<uint8_t> encoded(static_cast<size_t>(r.row_bytes * r.n_rows));
    r.dst = encoded.data();
    encoder(plain)(r);
    repack_rows(plain, type, encoded.data(), rows.ne0, rows.n_rows, rows.dst);
}

}  // namespace

bool can_quantize(int type) { return encoder(type) || plain_form(type) >= 0; }

int row_group(int type) { return can_quantize(type) ? interleave(type) : 0; }

int64_t encoded_row_nbytes(int type, int64_t ne0) {
    return can_quantize(type) && ne0 > 0 ? static_cast<int64_t>(row_nbytes(type, ne0)) : 0;
}

int quantize_rows(int type, const float* src, int64_t ne0, int64_t n_rows, const float* imatrix,
                  uint8_t* dst) noexcept try {
    if (!can_quantize(type)) return UNSUPPORTED_TYPE;
    const int64_t row_bytes = encoded_row_nbytes(type, ne0);
    if (row_bytes == 0) return BAD_ROW_LENGTH;
    if (n_rows % row_group(type)) return BAD_ROW_COUNT;
    std::vector<float> w, bounded;
    if (is_weighted(type)) {
        importance_weights(imatrix, ne0, w);
        src = searchable(src, n_rows * ne0, bounded);
    }
    encode(type, Rows{src, ne0, n_rows, w.data(), dst, row_bytes});
    return OK;
} catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
} catch (...) {
    return FAILED;
}

int quantize_rows_parallel(int type, const float* src, int64_t ne0, int64_t n_rows, const float* imatrix,
                           uint8_t* dst, int n_threads) noexcept {
    const int64_t row_bytes = encoded_row_nbytes(type, ne0), group = row_group(type);
    if (row_bytes == 0 || n_rows % group) return quantize_rows(type, src, ne0, n_rows, imatrix, dst);
    // Small pieces even out rows of different difficulty; one piece pays for its search tables with 64 Ki
    // values.
    const int64_t groups = n_rows / group;
    const int64_t piece =
        std::max<int64_t>(1, std::min((int64_t{1} << 16) / (ne0 * group) + 1, groups / n_threads));
    const int64_t pieces = (groups + piece - 1) / piece;
    int status = OK;
#pragma omp parallel for schedule(dynamic) num_threads(n_threads)
    for (int64_t p = 0; p < pieces; p++) {
        const int64_t first = p * piece * group, rows = std::min(piece * group, n_rows - first);
        const int s = quantize_rows(type, src + first * ne0, ne0, rows, imatrix, dst + first * row_bytes);
        if (s != OK) {
#pragma omp atomic write
            status = s;
        }
    }
    return status;
}

}  // namespace ikpy::quantize
