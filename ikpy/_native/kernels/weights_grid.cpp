// Kernels of the grid types.
#include "kernels/quant_product.hpp"
#include "unpack/grids.hpp"
#include "unpack/grids_interleaved.hpp"
#include "unpack/ternary_grid.hpp"

namespace ikpy {

const WeightKernels* grid_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {quant_kernels<UnpackGrid<grid::IQ2_XXS>>(),
                                               quant_kernels<UnpackGrid<grid::IQ2_XS>>(),
                                               quant_kernels<UnpackGrid<grid::IQ2_S>>(),
                                               quant_kernels<UnpackGrid<grid::IQ3_XXS>>(),
                                               quant_kernels<UnpackGrid<grid::IQ3_S>>(),
                                               quant_kernels<UnpackGridRows<grid::IQ2_XXS_R4>>(),
                                               quant_kernels<UnpackGridRows<grid::IQ2_XS_R4>>(),
                                               quant_kernels<UnpackGridRows<grid::IQ2_S_R4>>(),
                                               quant_kernels<UnpackGridRows<grid::IQ3_XXS_R4>>(),
                                               quant_kernels<UnpackGridRows<grid::IQ3_S_R4>>(),
                                               quant_kernels<UnpackIQ1_S>(),
                                               quant_kernels<UnpackIQ1_M>(),
                                               quant_kernels<UnpackIQ1_S_R4>(),
                                               quant_kernels<UnpackIQ1_M_R4>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
