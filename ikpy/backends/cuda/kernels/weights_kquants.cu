// The k-quants.
#include "unpack/kquants.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(q2_k, UnpackQ2_K);
IKPY_WEIGHT_TYPE(q3_k, UnpackQ3_K);
IKPY_WEIGHT_TYPE(q4_k, UnpackQ4_K);
IKPY_WEIGHT_TYPE(q5_k, UnpackQ5_K);
IKPY_WEIGHT_TYPE(q6_k, UnpackQ6_K);
