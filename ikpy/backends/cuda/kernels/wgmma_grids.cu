// Grid types: products by wgmma (sm_90a only).
#include "matmul_wgmma.cuh"
// The list of types, of which that header makes its kernels.
#include "weights_grids.cu"
