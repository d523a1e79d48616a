// Kernels of the IQ4 types.
#include "kernels/matmul/quant_product.hpp"
#include "unpack/iq4.hpp"

namespace ikpy {

const WeightKernels* iq4_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {quant_kernels<UnpackIQ4_NL>(), quant_kernels<UnpackIQ4_XS>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
