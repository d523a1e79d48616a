// Kernels of the trellis types.
#include "ikpy/ops.hpp"
#include "kernels/cpu_makers.hpp"
#include "kernels/gemv_trellis.hpp"
#include "kernels/gemv_trellis_mixed.hpp"
#include "kernels/quant_product.hpp"
#include "unpack/trellis.hpp"

namespace ikpy {

const WeightKernels* trellis_weight_kernels(int type) {
#if defined(__AVX2__)
    static constexpr WeightKernels kTable[] = {
        record_kernels<trellis::Generated<trellis::LanesIQ1_KT, trellis::SpreadChunk>>(),
        record_kernels<trellis::Generated<trellis::LanesIQ2_KT, trellis::SpreadChunk>>(),
        record_kernels<trellis::Generated<trellis::LanesIQ3_KT, trellis::PlacedChunk>>(),
        record_kernels<trellis::Generated<trellis::LanesIQ4_KT, trellis::SpreadChunk>>()};
#else
    static constexpr WeightKernels kTable[] = {quant_kernels<UnpackIQ1_KT>(), quant_kernels<UnpackIQ2_KT>(),
                                               quant_kernels<UnpackIQ3_KT>(), quant_kernels<UnpackIQ4_KT>()};
#endif
#if defined(__AVX512VNNI__)
    static constexpr WeightKernels kByTable[] = {
        record_kernels<trellis::FromTable<trellis::LookedUp<trellis::TableIQ1_KT>, 12>, 16>(),
        record_kernels<trellis::FromTable<trellis::MixedIQ2_KT, 6>>(),
        record_kernels<trellis::FromTable<trellis::LookedUp<trellis::TableIQ3_KT>, 11>>()};
    // Zen 4, 1e9 weights/s from the table and generated: IQ1_KT 13.5 and 18.6, IQ2_KT 17.4 and 23.9, IQ3_KT
    // 11.1 and 12.9.
    if (has_byte_permutes() && has_fast_gathers())
        for (const WeightKernels& k : kByTable)
            if (k.type == type) return &k;
#endif
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
