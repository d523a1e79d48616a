// Super-blocks of non-linear levels with row scales.
#include "unpack/iqk.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(iq2_ks, UnpackIQ2_KS);
IKPY_WEIGHT_TYPE(iq3_ks, UnpackIQ3_KS);
IKPY_WEIGHT_TYPE(iq4_ks, UnpackIQ4_KS);
IKPY_WEIGHT_TYPE(iq5_ks, UnpackIQ5_KS);
IKPY_WEIGHT_TYPE(iq4_kss, UnpackIQ4_KSS);
IKPY_WEIGHT_TYPE(iq2_kl, UnpackIQ2_KL);
