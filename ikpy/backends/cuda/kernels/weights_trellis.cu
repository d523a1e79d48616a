// Trellis types.
#include "unpack/trellis.cuh"
#include "weights.cuh"

IKPY_WEIGHT_TYPE(iq1_kt, UnpackIQ1_KT);
IKPY_WEIGHT_TYPE(iq2_kt, UnpackIQ2_KT);
IKPY_WEIGHT_TYPE(iq3_kt, UnpackIQ3_KT);
IKPY_WEIGHT_TYPE(iq4_kt, UnpackIQ4_KT);
