// One-bit and ternary types.
#include "unpack/legacy.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(q1_0_g128, UnpackQ1_0_G128);
IKPY_WEIGHT_TYPE(iq1_bn, UnpackIQ1_BN);
IKPY_WEIGHT_TYPE(iq2_bn, UnpackIQ2_BN);
IKPY_WEIGHT_TYPE(tq1_0, UnpackTQ1_0);
IKPY_WEIGHT_TYPE(tq2_0, UnpackTQ2_0);
