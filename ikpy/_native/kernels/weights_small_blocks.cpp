// Kernels of MXFP4, of the types with trits or one or two bits per weight, and of two interleaved forms of
// Q4_0.
#include "ikpy/ops.hpp"
#include "kernels/gemv_trits.hpp"
#include "kernels/quant_product.hpp"
#include "unpack/small_blocks.hpp"

namespace ikpy {

const WeightKernels* small_block_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {
        quant_kernels<UnpackMXFP4>(),           quant_kernels<UnpackQ1_0_G128>(),
        quant_kernels<UnpackIQ1_BN>(),          quant_kernels<UnpackIQ2_BN>(),
        quant_kernels<UnpackTQ1_0>(),           quant_kernels<UnpackTQ2_0>(),
        quant_kernels<UnpackQ4_0Runs<32, 4>>(), quant_kernels<UnpackQ4_0Runs<33, 8>>()};
#if defined(__AVX512VNNI__)
    static constexpr WeightKernels kTrits = record_kernels<trits::Product>();
    if (type == kTrits.type && has_byte_permutes()) return &kTrits;
#endif
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
