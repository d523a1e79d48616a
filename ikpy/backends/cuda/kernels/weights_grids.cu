// Grid types.
#include "unpack/grids.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(iq2_xxs, UnpackIQ2_XXS);
IKPY_WEIGHT_TYPE(iq2_xs, UnpackIQ2_XS);
IKPY_WEIGHT_TYPE(iq2_s, UnpackIQ2_S);
IKPY_WEIGHT_TYPE(iq3_xxs, UnpackIQ3_XXS);
IKPY_WEIGHT_TYPE(iq3_s, UnpackIQ3_S);
IKPY_WEIGHT_TYPE(iq1_s, UnpackIQ1_S);
IKPY_WEIGHT_TYPE(iq1_m, UnpackIQ1_M);
