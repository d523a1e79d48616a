// Kernels of MXFP4, NVFP4, of the types with trits or one or two bits per weight, and of two interleaved
// forms of Q4_0.
#include "ikpy/ops.hpp"
#include "kernels/cpu_makers.hpp"
#include "kernels/gemv/gemv_four_rows.hpp"
#include "kernels/gemv/gemv_trit_bytes.hpp"
#include "kernels/gemv/gemv_trits.hpp"
#include "kernels/gemv/gemv_trits_avx2.hpp"
#include "kernels/matmul/quant_product.hpp"
#include "unpack/lanes_blocks.hpp"
#include "unpack/points_bits.hpp"
#include "unpack/small_blocks.hpp"

namespace ikpy {

#if defined(__AVX512VNNI__)
// Up to PassTokens, Tokens at a time: panels, whose rows are unpacked one by one, are slower (Zen 5, eight
// rows: 5 tokens 151 and 484 Gop/s, 24 tokens 421 and 499).
template <int R, int Tokens, int PassTokens>
static constexpr WeightKernels run_kernels() {
    using L = row_blocks::RunsQ4_0<R>;
    using U = typename L::Plain;
    WeightKernels k = row_blocks::kernels<L, Tokens, quant_gemv<U, Tokens>>(quant_kernels<U>());
    k.gemv_tokens = Tokens;
    k.pass_tokens = PassTokens;
    return k;
}
#endif

// Kernels of types with trits: on AVX2 products of four rows at a time with up to GemvTokens tokens.
template <class U, int GemvTokens>
static constexpr WeightKernels trit_kernels() {
    WeightKernels k = quant_kernels<U>();
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    k.gemv = four_rows::gemv<U, GemvTokens>;
    k.gemv_tokens = GemvTokens;
#endif
    return k;
}

const WeightKernels* small_block_weight_kernels(int type) {
    static constexpr WeightKernels kTable[] = {
        quant_kernels<UnpackMXFP4>(),          quant_kernels<UnpackNVFP4>(),
        quant_kernels<UnpackQ1_0_G128>(),      trit_kernels<UnpackIQ1_BN, 5>(),
        trit_kernels<UnpackIQ2_BN, 8>(),       quant_kernels<UnpackTQ1_0>(),
        quant_kernels<UnpackTQ2_0>(),          quant_kernels<UnpackQ4_0Runs<32, 4>>(),
        quant_kernels<UnpackQ4_0Runs<33, 8>>()};
#if defined(__AVX512VNNI__)
    static constexpr WeightKernels kTrits = record_kernels<trits::Product>();
    static constexpr WeightKernels kPermuted[] = {
        points::kernels<points::Q1_0_G128, UnpackQ1_0_G128, 12, 16>(),
        record_kernels<trit_bytes::Product<trit_bytes::TQ1_0, 4>>()};
    static constexpr WeightKernels kTritBytes =
        record_kernels<trit_bytes::Product<trit_bytes::IQ1_BN, 10>, 20>();
    static constexpr WeightKernels kRuns[] = {run_kernels<4, 8, 15>(), run_kernels<8, 8, 32>()};
    if (has_byte_permutes())
        for (const WeightKernels& k : kRuns)
            if (k.type == type) return &k;
    if (has_byte_permutes())
        for (const WeightKernels& k : kPermuted)
            if (k.type == type) return &k;
    if (type == kTrits.type && has_byte_permutes()) return has_fast_pair_permutes() ? &kTritBytes : &kTrits;
#endif
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    static constexpr WeightKernels kWords =
        record_kernels<trits::Product, four_rows::gemv<UnpackIQ1_BN, 5>>(trit_kernels<UnpackIQ1_BN, 5>());
    if (type == kWords.type) return &kWords;
#endif
    for (const WeightKernels& k : kTable)
        if (k.type == type) return &k;
    return nullptr;
}

}  // namespace ikpy
