// Activations in the formats that matrix products read; rows are (batch, token) in order.
#include "quantize_q8.cuh"
#include "tiles.cuh"

using namespace ikpy::cuda;

// int8 with one scale per 32 elements. grid (blocks of columns, rows); 4 warps of 128 elements each.
IKPY_KERNEL act_prepare_q8(View x, uint8_t* out, long long stride, const int* runtime) {
    const int tokens = x.extent(1, runtime), rows = tokens * x.extent(2, runtime);
    const ActQ8Layout at(x.ne[0]);
    const int c = (blockIdx.x * (blockDim.x >> 5) + warp_id()) * 128;
    if (c >= at.n) return;
    for (int r = blockIdx.y; r < rows; r += gridDim.y)
        quantize_128(x.row<const float>(r % tokens, r / tokens), x.ne[0], c, out + r * stride, at);
}
IKPY_EXPORT(act_prepare_q8);

// format as in launch/base.py: f32 or bf16 rows, zero padded to n_padded elements, or tiles of bf16.
IKPY_KERNEL act_prepare_float(View x, uint8_t* out, long long stride, int n_padded, int format,
                              const int* runtime) {
    const int tokens = x.extent(1, runtime), rows = tokens * x.extent(2, runtime);
    const int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= n_padded) return;
    for (int r = blockIdx.y; r < rows; r += gridDim.y) {
        const float v = c < x.ne[0] ? x.row<const float>(r % tokens, r / tokens)[c] : 0.0f;
        if (format == kActTiles) {
            *reinterpret_cast<uint16_t*>(tile_element(out, n_padded, r, c)) = f32_to_bf16(v);
        } else if (format == kActBf16) {
            reinterpret_cast<uint16_t*>(out + r * stride)[c] = f32_to_bf16(v);
        } else {
            reinterpret_cast<float*>(out + r * stride)[c] = v;
        }
    }
}
IKPY_EXPORT(act_prepare_float);
