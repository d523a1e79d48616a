// Grid types, row-interleaved.
#include "unpack/grids.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(iq2_xxs_r4, UnpackIQ2_XXS_R4);
IKPY_WEIGHT_TYPE(iq2_xs_r4, UnpackIQ2_XS_R4);
IKPY_WEIGHT_TYPE(iq2_s_r4, UnpackIQ2_S_R4);
IKPY_WEIGHT_TYPE(iq3_xxs_r4, UnpackIQ3_XXS_R4);
IKPY_WEIGHT_TYPE(iq3_s_r4, UnpackIQ3_S_R4);
IKPY_WEIGHT_TYPE(iq1_s_r4, UnpackIQ1_S_R4);
IKPY_WEIGHT_TYPE(iq1_m_r4, UnpackIQ1_M_R4);
