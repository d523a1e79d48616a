// Super-blocks of non-linear levels.
#include "unpack/iqk.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(iq4_xs, UnpackIQ4_XS);
IKPY_WEIGHT_TYPE(iq2_k, UnpackIQ2_K);
IKPY_WEIGHT_TYPE(iq3_k, UnpackIQ3_K);
IKPY_WEIGHT_TYPE(iq4_k, UnpackIQ4_K);
IKPY_WEIGHT_TYPE(iq5_k, UnpackIQ5_K);
IKPY_WEIGHT_TYPE(iq6_k, UnpackIQ6_K);
