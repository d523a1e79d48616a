// Kernels of MXFP4 and of the types with one or two bits and no superblocks.
#include "kernels/quant_product.hpp"
#include "unpack/small_blocks.hpp"

namespace ikpy {

const WeightKernels* small_block_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {quant_kernels<UnpackMXFP4>(), quant_kernels<UnpackQ1_0_G128>(),
                                               quant_kernels<UnpackIQ1_BN>(), quant_kernels<UnpackIQ2_BN>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
