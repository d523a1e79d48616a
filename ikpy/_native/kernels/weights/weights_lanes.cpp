// Products of few tokens by byte permutations for types of two to six bits and interleaved rows.
#include "ikpy/ops.hpp"
#include "unpack/lanes.hpp"
#include "unpack/lanes_interleaved.hpp"
#include "unpack/lanes_k.hpp"
#include "unpack/lanes_two_bits.hpp"
#include "unpack/quad_layouts.hpp"

namespace ikpy {

const WeightKernels* lane_weight_kernels([[maybe_unused]] int type) {
#if defined(__AVX512VNNI__)
    if (!has_byte_permutes()) return nullptr;
    static constexpr WeightKernels kTable[] = {lanes::kernels<lanes::Q4_0>(),
                                               lanes::kernels<lanes::Q4_1>(),
                                               lanes::kernels<lanes::Q5_0>(),
                                               lanes::kernels<lanes::Q5_1>(),
                                               lanes::kernels<lanes::Q6_0>(),
                                               lanes::kernels<lanes::Q2_K, 8>(),
                                               lanes::kernels<lanes::Q3_K, 8>(),
                                               lanes::kernels<lanes::Q4_K, 8>(),
                                               lanes::kernels<lanes::Q5_K, 8>(),
                                               lanes::kernels<lanes::IQ2_K, 8>(),
                                               lanes::kernels<lanes::IQ3_K, 8>(),
                                               lanes::kernels<lanes::IQ2_KS, 8>(),
                                               lanes::kernels<lanes::IQ3_KS, 8>(),
                                               lanes::kernels<lanes::IQ4_NL>(),
                                               lanes::kernels<lanes::IQ4_XS>(),
                                               lanes::kernels<lanes::MXFP4>(),
                                               lanes::kernels<lanes::IQ4_KS>(),
                                               lanes::kernels<lanes::IQ4_KSS>(),
                                               lanes::kernels<lanes::IQ4_K, 8>(),
                                               lanes::kernels<lanes::IQ5_K>(),
                                               lanes::kernels<lanes::IQ6_K>(),
                                               row_groups::kernels<row_groups::Q2_K>(),
                                               row_groups::kernels<row_groups::Q3_K>(),
                                               row_groups::kernels<row_groups::Q4_K>(),
                                               row_groups::kernels<row_groups::Q5_K>(),
                                               row_groups::kernels<row_groups::Q6_K>(),
                                               row_groups::kernels<row_groups::IQ2_K>(),
                                               row_groups::kernels<row_groups::IQ3_K>(),
                                               row_groups::kernels<row_groups::IQ4_K>(),
                                               row_groups::kernels<row_groups::IQ5_K>(),
                                               row_groups::kernels<row_groups::IQ4_KS>(),
                                               row_groups::kernels<row_groups::IQ5_KS>(),
                                               row_groups::kernels<row_groups::IQ4_XS>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
#endif
    return nullptr;
}

}  // namespace ikpy
