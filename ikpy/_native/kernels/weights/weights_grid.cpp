// Kernels of the grid types.
#include <cstdlib>
#include <cstring>

#include "ikpy/ops.hpp"
#include "kernels/cpu_makers.hpp"
#include "kernels/gemv/gemv_signed.hpp"
#include "kernels/gemv/gemv_signed_rows.hpp"
#include "kernels/matmul/quant_product.hpp"
#include "unpack/grid_block.hpp"
#include "unpack/grids.hpp"
#include "unpack/grids_interleaved.hpp"
#include "unpack/points.hpp"
#include "unpack/points_interleaved.hpp"
#include "unpack/points_of_words.hpp"
#include "unpack/points_ternary.hpp"
#include "unpack/ternary_grid.hpp"

namespace ikpy {

bool has_byte_permutes() {
#if defined(__AVX512VNNI__)
    static const bool available = [] {
        const char* wanted = std::getenv("IKPY_VBMI");
        const bool off = wanted && std::strcmp(wanted, "0") == 0;
        return !off && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
    }();
    return available;
#else
    return false;
#endif
}

#if defined(__AVX512VNNI__)
namespace {

template <class Find>
const WeightKernels* kernels_of_found_points(int type) {
    using namespace points;
    // More passes are faster than panels where points are found faster.
    constexpr bool kPasses = !std::is_same_v<Find, OneRegister>;
    static constexpr WeightKernels kTable[] = {
        kernels<IQ2_XXS<Find>, UnpackGrid<grid::IQ2_XXS>, 12, 24, kTileMinFastRowTokens>(),
        kernels<IQ2_XS<Find>, UnpackGrid<grid::IQ2_XS>, 12, kPasses ? 24 : 16>(),
        kernels<IQ2_S<Find>, UnpackGrid<grid::IQ2_S>, 12, kPasses ? 20 : 0>(),
        kernels<IQ3_XXS<Find>, UnpackGrid<grid::IQ3_XXS>, 12, 24, kTileMinFastRowTokens>(),
        kernels<IQ3_S<Find>, UnpackGrid<grid::IQ3_S>, 11, kPasses ? 22 : 0>(),
        kernels<IQ2_XXS_R4<Find>, UnpackGridRows<grid::IQ2_XXS_R4>, 12, 32, kTileMinFastRowTokens>(),
        kernels<IQ2_XS_R4<Find>, UnpackGridRows<grid::IQ2_XS_R4>, 12, 24>(),
        kernels<IQ2_S_R4<Find>, UnpackGridRows<grid::IQ2_S_R4>, 12, 24>(),
        kernels<IQ3_XXS_R4<Find>, UnpackGridRows<grid::IQ3_XXS_R4>, 12, 24, kTileMinFastRowTokens>(),
        kernels<IQ3_S_R4<Find>, UnpackGridRows<grid::IQ3_S_R4>, 11, kPasses ? 28 : 0>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

// Points of IQ1_S and IQ1_M by permutations of bytes.
template <class Find>
const WeightKernels* kernels_of_permuted_trits(int type) {
    using namespace points;
    static constexpr WeightKernels kTable[] = {kernels<ByBytesIQ1_S<Find>, UnpackIQ1_S, 11, 18>(),
                                               kernels<ByBytesIQ1_S_R4<Find>, UnpackIQ1_S_R4, 12, 16>(),
                                               kernels<IQ1_M<Find>, UnpackIQ1_M, 11, 16>(),
                                               kernels<IQ1_M_R4<Find>, UnpackIQ1_M_R4, 12, 16>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return kernels_of_found_points<Find>(type);
}

const WeightKernels* kernels_of_gathered_trits(int type) {
    using namespace points;
    static constexpr WeightKernels kTable[] = {kernels<IQ1_S, UnpackIQ1_S, 11>(),
                                               kernels<IQ1_M<OneRegister>, UnpackIQ1_M, 11>(),
                                               kernels<IQ1_S_R4, UnpackIQ1_S_R4, 12, 16>(),
                                               kernels<IQ1_M_R4<OneRegister>, UnpackIQ1_M_R4, 12, 16>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return kernels_of_found_points<OneRegister>(type);
}

const WeightKernels* point_weight_kernels(int type) {
    if (has_fast_pair_permutes()) return kernels_of_permuted_trits<points::TwoRegisters>(type);
    if (!has_fast_gathers()) return kernels_of_permuted_trits<points::WithoutGathers>(type);
    return kernels_of_gathered_trits(type);
}

}  // namespace
#endif

// Kernels of a type whose points are multiplied as they are on AVX2, with up to GemvTokens tokens.
template <class U, int GemvTokens>
static constexpr WeightKernels signed_kernels() {
    WeightKernels k = quant_kernels<U>();
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    k.gemv = signed_points::gemv<U, GemvTokens>;
    k.gemv_tokens = GemvTokens - (kByteDots ? 1 : 0);  // dot products of bytes are good to panels
#endif
    return k;
}

// The same for four interleaved rows at a time.
template <class U, int GemvTokens>
static constexpr WeightKernels signed_row_kernels() {
    WeightKernels k = quant_kernels<U>();
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    k.gemv = signed_points::gemv_of_groups<U, GemvTokens>;
    k.gemv_tokens = GemvTokens;
#endif
    return k;
}

const WeightKernels* grid_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {signed_kernels<UnpackGrid<grid::IQ2_XXS>, 4>(),
                                               signed_kernels<UnpackGrid<grid::IQ2_XS>, 3>(),
                                               signed_kernels<UnpackGrid<grid::IQ2_S>, 3>(),
                                               signed_kernels<UnpackGrid<grid::IQ3_XXS>, 2>(),
                                               signed_kernels<UnpackGrid<grid::IQ3_S>, 3>(),
                                               signed_row_kernels<UnpackGridRows<grid::IQ2_XXS_R4>, 8>(),
                                               signed_row_kernels<UnpackGridRows<grid::IQ2_XS_R4>, 8>(),
                                               signed_row_kernels<UnpackGridRows<grid::IQ2_S_R4>, 8>(),
                                               signed_row_kernels<UnpackGridRows<grid::IQ3_XXS_R4>, 8>(),
                                               signed_row_kernels<UnpackGridRows<grid::IQ3_S_R4>, 8>(),
                                               signed_kernels<UnpackIQ1_S, 2>(),
                                               signed_kernels<UnpackIQ1_M, 3>(),
                                               signed_row_kernels<UnpackIQ1_S_R4, 6>(),
                                               signed_row_kernels<UnpackIQ1_M_R4, 7>()};
#if defined(__AVX512VNNI__)
    if (has_byte_permutes())
        if (const WeightKernels* k = point_weight_kernels(type)) return k;
#endif
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
