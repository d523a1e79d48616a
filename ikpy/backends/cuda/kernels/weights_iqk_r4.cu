// Super-blocks of non-linear levels, row-interleaved.
#include "unpack/interleaved.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(iq4_xs_r8, UnpackIQ4_XS_R8);
IKPY_WEIGHT_TYPE(iq2_k_r4, UnpackIQ2_K_R4);
IKPY_WEIGHT_TYPE(iq3_k_r4, UnpackIQ3_K_R4);
IKPY_WEIGHT_TYPE(iq4_k_r4, UnpackIQ4_K_R4);
IKPY_WEIGHT_TYPE(iq5_k_r4, UnpackIQ5_K_R4);
IKPY_WEIGHT_TYPE(iq4_ks_r4, UnpackIQ4_KS_R4);
IKPY_WEIGHT_TYPE(iq5_ks_r4, UnpackIQ5_KS_R4);
