// Kernels of the trellis types.
#include "kernels/quant_product.hpp"
#include "unpack/trellis.hpp"

namespace ikpy {

const WeightKernels* trellis_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {quant_kernels<UnpackIQ1_KT>(), quant_kernels<UnpackIQ2_KT>(),
                                               quant_kernels<UnpackIQ3_KT>(), quant_kernels<UnpackIQ4_KT>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
