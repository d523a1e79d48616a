// Kernels of the IQ_K types.
#include "kernels/matmul/quant_product.hpp"
#include "unpack/iqk.hpp"

namespace ikpy {

const WeightKernels* iqk_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {quant_kernels<UnpackIQ2_K>(), quant_kernels<UnpackIQ3_K>(),
                                               quant_kernels<UnpackIQ4_K>(), quant_kernels<UnpackIQ5_K>(),
                                               quant_kernels<UnpackIQ6_K, gemv_tokens<UnpackIQ6_K>(), 0>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
