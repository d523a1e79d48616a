// Kernels of the trellis types.
#include "ikpy/ops.hpp"
#include "kernels/cpu_makers.hpp"
#include "kernels/gemv/gemv_trellis.hpp"
#include "kernels/gemv/gemv_trellis_mixed.hpp"
#include "kernels/gemv/gemv_trellis_states.hpp"
#include "kernels/matmul/quant_product.hpp"
#include "unpack/trellis.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__)
// One token by states, up to 12 by values, up to PassTokens in two passes.
template <class T, int PassTokens>
static constexpr WeightKernels generated_kernels() {
    using Values = trellis::InLanes<trellis::ValueProducts<T>, 12>;
    WeightKernels k = record_kernels<Values, PassTokens>();
    if constexpr (!T::kSigned) {
        using State = trellis::InLanes<trellis::StateProducts<T>, 1>;
        static_assert(sizeof(typename State::Record) <= Values::kTokens * sizeof(typename Values::Record));
        k.gemv = gemv_of_records<State, record_kernels<Values>().gemv>;
    }
    return k;
}

template <int PassTokens>
const WeightKernels* kernels_of_states(int type) {
    static constexpr WeightKernels kTable[] = {generated_kernels<trellis::StatesIQ1_KT, PassTokens>(),
                                               generated_kernels<trellis::StatesIQ2_KT, PassTokens>(),
                                               generated_kernels<trellis::StatesIQ3_KT, PassTokens>(),
                                               generated_kernels<trellis::StatesIQ4_KT, PassTokens>()};
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}
#endif

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
        record_kernels<trellis::InLanes<trellis::LookedUp<trellis::TableIQ1_KT>, 12>, 16>(),
        record_kernels<trellis::InLanes<trellis::MixedIQ2_KT, 6>>(),
        record_kernels<trellis::InLanes<trellis::LookedUp<trellis::TableIQ3_KT>, 11>>()};
    // 1e9 weights/s from the table and generated: of Zen 4 IQ1_KT 13.5 and 18.6, IQ2_KT 17.4 and 23.9, IQ3_KT
    // 11.1 and 12.9; of Ice Lake, whose gathers are slow, 6.5 and 17.2, 11.4 and 18.5, 6.2 and 12.7.
    if (has_byte_permutes() && has_fast_gathers())
        for (const WeightKernels& k : kByTable)
            if (k.type == type) return &k;
    // From 13 tokens on panels are faster on Intel's: 16 tokens of IQ2_KT 150 Gop/s, in two passes 134.
    if (has_byte_permutes() && !has_fast_gathers())
        if (const WeightKernels* k = is_for_amd() ? kernels_of_states<16>(type) : kernels_of_states<12>(type))
            return k;
#endif
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
