// Types with one scale per 32 elements: products by wgmma (sm_90a only).
#include "matmul_wgmma.cuh"
// The list of types, of which that header makes its kernels.
#include "weights_legacy.cu"
