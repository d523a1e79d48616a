// Types with one scale per 32 elements.
#include "unpack/legacy.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(q4_0, UnpackQ4_0);
IKPY_WEIGHT_TYPE(q4_1, UnpackQ4_1);
IKPY_WEIGHT_TYPE(q5_0, UnpackQ5_0);
IKPY_WEIGHT_TYPE(q5_1, UnpackQ5_1);
IKPY_WEIGHT_TYPE(q6_0, UnpackQ6_0);
IKPY_WEIGHT_TYPE(q8_0, UnpackQ8_0);
IKPY_WEIGHT_TYPE(q8_kv, UnpackQ8_KV);
IKPY_WEIGHT_TYPE(iq4_nl, UnpackIQ4_NL);
IKPY_WEIGHT_TYPE(mxfp4, UnpackMXFP4);
IKPY_WEIGHT_TYPE(nvfp4, UnpackNVFP4);
