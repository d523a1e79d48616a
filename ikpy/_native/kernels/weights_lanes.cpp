// Products of single tokens by byte permutations for types of four to six bits.
#include "ikpy/ops.hpp"
#include "unpack/lanes.hpp"

namespace ikpy {

const WeightKernels* lane_weight_kernels([[maybe_unused]] int type) {
#if defined(__AVX512VNNI__)
    if (!has_byte_permutes()) return nullptr;
    static constexpr WeightKernels kTable[] = {
        lanes::kernels<lanes::Q4_0>(),    lanes::kernels<lanes::Q4_1>(),  lanes::kernels<lanes::Q5_0>(),
        lanes::kernels<lanes::Q5_1>(),    lanes::kernels<lanes::Q6_0>(),  lanes::kernels<lanes::IQ4_NL>(),
        lanes::kernels<lanes::IQ4_XS>(),  lanes::kernels<lanes::MXFP4>(), lanes::kernels<lanes::IQ4_KS>(),
        lanes::kernels<lanes::IQ4_KSS>(), lanes::kernels<lanes::IQ4_K>(), lanes::kernels<lanes::IQ5_K>(),
        lanes::kernels<lanes::IQ6_K>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
#endif
    return nullptr;
}

}  // namespace ikpy
