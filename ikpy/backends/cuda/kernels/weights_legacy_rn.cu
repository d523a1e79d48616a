// Types with one scale per 32 elements, row-interleaved.
#include "unpack/interleaved.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(q4_0_r8, UnpackQ4_0_R8);
IKPY_WEIGHT_TYPE(q5_0_r4, UnpackQ5_0_R4);
IKPY_WEIGHT_TYPE(q6_0_r4, UnpackQ6_0_R4);
IKPY_WEIGHT_TYPE(q8_0_r8, UnpackQ8_0_R8);
IKPY_WEIGHT_TYPE(q8_kv_r8, UnpackQ8_KV_R8);
IKPY_WEIGHT_TYPE(iq4_nl_r4, UnpackIQ4_NL_R4);
IKPY_WEIGHT_TYPE(mxfp4_r8, UnpackMXFP4_R8);
IKPY_WEIGHT_TYPE(q4_0_4x4, UnpackQ4_0_4x4);
IKPY_WEIGHT_TYPE(q4_0_4x8, UnpackQ4_0_4x8);
IKPY_WEIGHT_TYPE(q4_0_8x8, UnpackQ4_0_8x8);
IKPY_WEIGHT_TYPE(iq2_bn_r4, UnpackIQ2_BN_R4);
