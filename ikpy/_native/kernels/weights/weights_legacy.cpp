// Kernels of the 32-element types.
#include "kernels/matmul/quant_product.hpp"
#include "unpack/legacy.hpp"

namespace ikpy {

const WeightKernels* legacy_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {
        quant_kernels<UnpackQ4_0>(), quant_kernels<UnpackQ4_1>(),
        quant_kernels<UnpackQ5_0>(), quant_kernels<UnpackQ5_1>(),
        quant_kernels<UnpackQ6_0>(), quant_kernels<UnpackQ8_0, kGemvTokensOfBytes, kAmdTokensOfBytes>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
