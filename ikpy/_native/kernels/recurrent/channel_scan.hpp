// Selective scan of Mamba (arXiv:2312.00752), in which every channel has rates of its own.
#pragma once
#include <cstddef>

#include "ikpy/ops.hpp"

namespace ikpy {

// What the op ssm_scan does where its flag says that rates belong to channels (ssm_scan.cpp).
void channel_scan(const ThreadContext& ctx, const Op& op, const Tensor* ts);
size_t channel_scan_scratch_bytes(const Op& op, const Tensor* ts);

}  // namespace ikpy
