// Kernels of the row-interleaved types whose panels need no transposition.
#include "unpack/interleaved_legacy.hpp"
#include "unpack/interleaved_super.hpp"
#include "unpack/lanes_blocks.hpp"
#include "unpack/quad_layouts.hpp"

namespace ikpy {

const WeightKernels* interleaved_weight_kernels(int type) {
#if defined(__AVX512VNNI__)
    static constexpr WeightKernels kByGroups[] = {
        row_blocks::kernels<row_blocks::Q4_0>(interleaved_kernels<UnpackQ4_0_R8>()),
        row_blocks::kernels<row_blocks::Q4_0_4x4>(interleaved_kernels<UnpackQ4_0_4x4>()),
        row_blocks::kernels<row_blocks::MXFP4>(interleaved_kernels<UnpackMXFP4_R8, kAmdWordTokens, 20>()),
        row_blocks::kernels<row_blocks::IQ4_NL>(interleaved_kernels<UnpackIQ4_NL_R4>()),
        row_blocks::kernels<row_blocks::Q5_0>(interleaved_kernels<UnpackQ5_0_R4>()),
        row_blocks::kernels<row_blocks::Q6_0>(interleaved_kernels<UnpackQ6_0_R4>())};
    if (has_byte_permutes())
        for (const WeightKernels& k : kByGroups)
            if (k.type == type) return &k;
#endif
    static constexpr WeightKernels kTable[] = {interleaved_kernels<UnpackQ4_0_R8>(),
                                               interleaved_kernels<UnpackQ4_0_4x4>(),
                                               interleaved_kernels<UnpackMXFP4_R8, kAmdWordTokens, 20>(),
                                               interleaved_kernels<UnpackIQ4_NL_R4>(),
                                               interleaved_kernels<UnpackQ5_0_R4>(),
                                               interleaved_kernels<UnpackQ6_0_R4>(),
                                               interleaved_kernels<UnpackQ8_0_R8>(),
                                               interleaved_kernels<UnpackQ8_K_R8>(),
                                               interleaved_kernels<UnpackQ8_K_R16>(),
                                               interleaved_kernels<UnpackQ8_KV_R8>(),
                                               interleaved_kernels<UnpackIQ2_BN_R4>(),
                                               interleaved_kernels<UnpackQ2_K_R4>(),
                                               interleaved_kernels<UnpackQ3_K_R4>(),
                                               interleaved_kernels<UnpackQ4_K_R4>(),
                                               interleaved_kernels<UnpackQ5_K_R4>(),
                                               interleaved_kernels<UnpackQ6_K_R4, 2>(),
                                               interleaved_kernels<UnpackIQ4_XS_R8>(),
                                               interleaved_kernels<UnpackIQ2_K_R4, 5>(),
                                               interleaved_kernels<UnpackIQ3_K_R4>(),
                                               interleaved_kernels<UnpackIQ4_K_R4, 3>(),
                                               interleaved_kernels<UnpackIQ5_K_R4, 3>(),
                                               interleaved_kernels<UnpackIQ4_KS_R4>(),
                                               interleaved_kernels<UnpackIQ5_KS_R4>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
