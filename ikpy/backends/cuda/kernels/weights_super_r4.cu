// The k-quants and q8_K, row-interleaved.
#include "unpack/interleaved.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(q2_k_r4, UnpackQ2_K_R4);
IKPY_WEIGHT_TYPE(q3_k_r4, UnpackQ3_K_R4);
IKPY_WEIGHT_TYPE(q4_k_r4, UnpackQ4_K_R4);
IKPY_WEIGHT_TYPE(q5_k_r4, UnpackQ5_K_R4);
IKPY_WEIGHT_TYPE(q6_k_r4, UnpackQ6_K_R4);
IKPY_WEIGHT_TYPE(q8_k_r8, UnpackQ8_K_R8);
IKPY_WEIGHT_TYPE(q8_k_r16, UnpackQ8_K_R16);
