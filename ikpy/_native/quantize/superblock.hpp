// Row loops around ScaledCodebookSearch: one scale per 256-element block, or one per row.
#pragma once

#include "encoders.hpp"
#include "scaled_codebook.hpp"

namespace ikpy::quantize {

// Format: Codec, codec(), CODES, EFFORT, BLOCK_BYTES,
//   pack(block, d, sub_blocks, levels)
//       writes one zeroed block; row-scale types keep d in the row header instead
template <class Format>
void encode_superblocks(const Rows& r) {
    using Codec = typename Format::Codec;
    constexpr int COUNT = 256 / Codec::SIZE;
    Codec codec = Format::codec();
    ScaledCodebookSearch<Codec, decltype(Format::CODES)> search(codec, Format::CODES, ScaleType::F16,
                                                                Format::EFFORT);
    typename Codec::Output levels[COUNT * Codec::OUTPUTS];
    for (int64_t i = 0; i < r.ne0;
         i += 256) {  // all rows of a block: codecs keep what follows from the weights
        for (int64_t row = 0; row < r.n_rows; row++) {
            uint8_t* block = r.dst + row * r.row_bytes + i / 256 * Format::BLOCK_BYTES;
            const float d = search.fit(r.src + row * r.ne0 + i, r.w + i, COUNT);
            for (int b = 0; b < COUNT; b++) search.levels(b, d, levels + b * Codec::OUTPUTS);
            std::memset(block, 0, Format::BLOCK_BYTES);
            Format::pack(block, search.stored_scale(d), search.sub_blocks().data(), levels);
        }
    }
}

template <class Format>
void encode_row_scale(const Rows& r) {
    using Codec = typename Format::Codec;
    constexpr int COUNT = 256 / Codec::SIZE;
    constexpr bool HALF = Format::HEADER_BYTES == 2;
    const int total = static_cast<int>(r.ne0 / Codec::SIZE);
    Codec codec = Format::codec();
    ScaledCodebookSearch<Codec, decltype(Format::CODES)> search(
        codec, Format::CODES, HALF ? ScaleType::F16 : ScaleType::F32, Format::EFFORT);
    typename Codec::Output levels[COUNT * Codec::OUTPUTS];
    for (int64_t row = 0; row < r.n_rows; row++) {
        uint8_t* out = r.dst + row * r.row_bytes;
        const float d = search.fit(r.src + row * r.ne0, r.w, total), stored = search.stored_scale(d);
        if constexpr (HALF)
            put(out, f32_to_f16(stored));
        else
            put(out, stored);
        uint8_t* block = out + Format::HEADER_BYTES;
        for (int first = 0; first < total; first += COUNT, block += Format::BLOCK_BYTES) {
            for (int b = 0; b < COUNT; b++) search.levels(first + b, d, levels + b * Codec::OUTPUTS);
            std::memset(block, 0, Format::BLOCK_BYTES);
            Format::pack(block, d, search.sub_blocks().data() + first, levels);
        }
    }
}

}  // namespace ikpy::quantize
