// Super-blocks of non-linear levels, row-interleaved: products by wgmma (sm_90a only).
#include "matmul_wgmma.cuh"
// The list of types, of which that header makes its kernels.
#include "weights_iqk_r4.cu"
