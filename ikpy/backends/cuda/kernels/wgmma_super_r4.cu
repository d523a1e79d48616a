// The k-quants and q8_K, row-interleaved: products by wgmma (sm_90a only).
#include "matmul_wgmma.cuh"
// The list of types, of which that header makes its kernels.
#include "weights_super_r4.cu"
