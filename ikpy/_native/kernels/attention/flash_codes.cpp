// Products of codes on tiles. Scores: 16 cells are transposed, one to a column, and meet as right operand a
// tile of queries: 4 rows, each as upper and lower bytes, once for either block of a pair of blocks with
// zeros for the other, so that scales of blocks are vectors of cells. Outputs: four cells at a time are
// interleaved and meet weights that contain the scales.
//
// On paper, vector instructions per block of 32 codes of q4_0 with 4 rows, two of which start per cycle, if
// they are neither multiplications nor conversions (those start one per cycle beside tile products) nor
// permutations (one at any time): scores 2 for unpacking and 1.1 for sums, outputs 1.8 for unpacking, 0.5 for
// weights, 0.5 for sums and 0.5 for scales: 3.2 cycles for both; on vectors, products add 4 cycles. A tile
// product of 16 rows with its loads and stores takes 34 cycles per 32 blocks of K and as many per 64 blocks
// of V for its two halves: 1.6 cycles more. Measured in the second-level cache, the parts add up to 9.6
// cycles: tile products 2.2, unpacking 2.9, scales (a gather for 16 cells) 1.4, sums and weights 2.2, the
// rest is fetching ahead and calls.
#include "kernels/attention/flash_codes.hpp"

#include "ikpy/ops.hpp"
#include "kernels/attention/flash_amx.hpp"
#include "kernels/attention/flash_code_outputs.hpp"
#include "kernels/attention/flash_code_scores.hpp"
#include "kernels/cache/kv_types.hpp"

namespace ikpy {
namespace flash {

#if defined(__AVX512VNNI__) && defined(__linux__)

namespace {

size_t tile_work_bytes(int64_t rows, int64_t d) {
    uint8_t* scores = nullptr;
    uint8_t* outputs = nullptr;
    score_work(scores, rows, (d + 63) / 64 * 64);
    output_work(outputs, rows, (d + 31) / 32 * 32);
    return std::max(reinterpret_cast<uintptr_t>(scores), reinterpret_cast<uintptr_t>(outputs));
}

void begin_code_tiles(int64_t rows) {
    TileConfig config(kTileHeight);
    for (const int tile : {0, 1, 4}) config.rows[tile] = uint8_t(4 * std::min(rows, kQuad));
    for (const int tile : {2, 3, 5}) config.rows[tile] = uint8_t(2 * std::min(rows, kTileRowsOfP));
    load_tile_config(config);
}

template <class Codes>
const CodeProducts* products_of() {
    static const CodeProducts products = {
        code_scores<Codes>, code_outputs<Codes>, tile_query_bytes, pack_tile_query<Codes>,
        tile_work_bytes,    begin_code_tiles,    end_tiles};
    return &products;
}

bool has_code_tiles() {
    static const bool available =
        has_amx() && __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("avx512vbmi");
    return available;
}

}  // namespace

const CodeProducts* tile_code_products(int type) {
    if (!has_code_tiles()) return nullptr;
    return kv::with_codes(type, [](auto codes) { return products_of<decltype(codes)>(); });
}

#else

const CodeProducts* tile_code_products(int) { return nullptr; }

#endif

}  // namespace flash
}  // namespace ikpy
