// Which kernels multiply the weights of a type, and the form they want the activations in.
#include "kernels/weights/weight_kernels.hpp"

#include <stdexcept>
#include <string>

#include "ikpy/ops.hpp"

namespace ikpy {
namespace {

const WeightKernels* unpacking_kernels(int type) {
    using Lookup = const WeightKernels* (*)(int);
    for (Lookup find :
         {lane_weight_kernels, float_weight_kernels, legacy_weight_kernels, kquant_weight_kernels,
          iq4_weight_kernels, iqk_weight_kernels, row_scale_weight_kernels, small_block_weight_kernels,
          interleaved_weight_kernels, trellis_weight_kernels, grid_weight_kernels})
        if (const WeightKernels* k = find(type)) return k;
    return nullptr;
}

}  // namespace

bool has_unpacker(int type) { return unpacking_kernels(type) != nullptr; }

WeightKernels weight_kernels(int type) {
    if (const WeightKernels* k = unpacking_kernels(type)) {
        WeightKernels kernels = *k;
        if (kernels.amd_gemv_tokens > 0 && is_for_amd()) kernels.gemv_tokens = kernels.amd_gemv_tokens;
        return kernels;
    }
    if (const WeightKernels* k = decoded_weight_kernels(type)) return *k;
    throw std::invalid_argument("no matrix product for tensor type " + std::to_string(type));
}

int act_format(int weight_type, int64_t n_rows, bool by_expert) {
    const WeightKernels kernels = weight_kernels(weight_type);
    const int64_t least = by_expert ? kernels.tiles.min_expert_tokens : kernels.tiles.min_tokens;
    const bool tiles = kernels.tiles.product && n_rows >= least && has_amx();
    return tiles ? kernels.tiles.act_format : kernels.act_format;
}

}  // namespace ikpy
