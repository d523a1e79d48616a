// Kernels of the k-quant types.
#include "kernels/matmul/quant_product.hpp"
#include "unpack/kquants.hpp"

namespace ikpy {

const WeightKernels* kquant_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {
        quant_kernels<UnpackQ2_K>(), quant_kernels<UnpackQ3_K>(), quant_kernels<UnpackQ4_K>(),
        quant_kernels<UnpackQ5_K, gemv_tokens<UnpackQ5_K, 6>()>(), quant_kernels<UnpackQ6_K>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
