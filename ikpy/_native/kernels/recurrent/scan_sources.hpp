// Operands of the selective scans (ssm_scan.cpp, channel_scan.cpp).
#pragma once
#include "ikpy/ops.hpp"
#include "kernels/token_runs.hpp"

namespace ikpy {

struct ScanSources {
    const Tensor &x, &dt, &a, &b, &c, &d, &state, &dst;
    const KeptStates kept;

    ScanSources(const Op& op, const Tensor* ts)
        : x(ts[op.src[0]]),
          dt(ts[op.src[1]]),
          a(ts[op.src[2]]),
          b(ts[op.src[3]]),
          c(ts[op.src[4]]),
          d(ts[op.src[5]]),
          state(ts[op.src[6]]),
          dst(ts[op.dst]),
          kept(op, ts, 8) {}

    int64_t groups() const { return b.ne[1]; }
    int64_t heads() const { return x.ne[1]; }
    int64_t rows() const { return b.ne[0]; }
    int64_t size() const { return x.ne[0]; }  // columns of a head's state, channels of Mamba
};

}  // namespace ikpy
