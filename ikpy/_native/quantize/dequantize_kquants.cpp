// Decoders of the k-quants.
#include "layouts_super.hpp"

namespace ikpy::formats {

namespace {

constexpr DecoderRow kRows[] = {decoder_row<Q2_K>(), decoder_row<Q3_K>(), decoder_row<Q4_K>(),
                                decoder_row<Q5_K>(), decoder_row<Q6_K>()};

}  // namespace

DecoderTable kquant_decoders() { return {kRows, sizeof kRows / sizeof *kRows}; }

}  // namespace ikpy::formats
