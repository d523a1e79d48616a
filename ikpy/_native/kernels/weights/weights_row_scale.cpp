// Kernels of the types with a scale per row.
#include "ikpy/ops.hpp"
#include "kernels/matmul/quant_product.hpp"
#include "unpack/points_pairs.hpp"
#include "unpack/row_scale.hpp"

namespace ikpy {

const WeightKernels* row_scale_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {quant_kernels<UnpackIQ2_KS>(),
                                               quant_kernels<UnpackIQ3_KS>(),
                                               quant_kernels<UnpackIQ4_KS>(),
                                               quant_kernels<UnpackIQ5_KS, gemv_tokens<UnpackIQ5_KS, 6>()>(),
                                               quant_kernels<UnpackIQ4_KSS>(),
                                               quant_kernels<UnpackIQ2_KL, gemv_tokens<UnpackIQ2_KL>(), 0>(),
                                               quant_kernels<UnpackQ8_KV, kGemvTokensOfUnscaledBytes>()};
#if defined(__AVX512VNNI__)
    static constexpr WeightKernels kPairs = points::kernels<points::IQ2_KL, UnpackIQ2_KL, 9>();
    if (type == kPairs.type && has_byte_permutes()) return &kPairs;
#endif
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
