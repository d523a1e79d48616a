// What single tokens on AVX2 make of NVFP4 (see row_codes.hpp).
#pragma once
#include "unpack/row_codes.hpp"
#include "unpack/small_blocks.hpp"

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

namespace ikpy {

template <>
struct RowCodes<UnpackNVFP4> : row_codes::CodesOfBlock<UnpackNVFP4> {
    static constexpr int kStep = 0;
    static BlockScales scales(const uint8_t* p) {
        const auto at = [p](int b) { return load_unaligned<int32_t>(p + UnpackNVFP4::kBlockBytes * b); };
        const __m256i bytes =
            _mm256_cvtepu8_epi16(row_codes::by_parity(_mm_setr_epi32(at(0), at(1), at(2), at(3))));
        BlockScales s;
        s.d[0] = UnpackNVFP4::halves_of(_mm256_castsi256_si128(bytes));
        s.d[1] = UnpackNVFP4::halves_of(_mm256_extracti128_si256(bytes, 1));
        return s;
    }
    template <class C>
    static void codes(const uint8_t* p, C to) {
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) UnpackNVFP4::codes(p + UnpackNVFP4::kBlockBytes * b, to + 64 * b);
    }
};

}  // namespace ikpy

#endif
