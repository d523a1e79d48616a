// Rows of a quantized weight decoded to floats.
#pragma once
#include "tiles.cuh"
#include "weight_blocks.cuh"

namespace ikpy::cuda {

// Elements e .. e + 7 of a row that starts at out, or of a line of tiles: 16 bytes at a time, as pieces of
// lines of memory that are written one by one take as long as whole ones.
__device__ __forceinline__ void store_row8(const float* v, int e, int out_type, uint8_t* out, const View& dst,
                                           int line) {
    if (out_type == kF32) {
        auto* to = reinterpret_cast<float4*>(out + 4 * e);
        to[0] = make_float4(v[0], v[1], v[2], v[3]);
        to[1] = make_float4(v[4], v[5], v[6], v[7]);
        return;
    }
    const bool f16 = out_type == kF16;
    unsigned h[8];
#pragma unroll
    for (int b = 0; b < 8; ++b) h[b] = f16 ? f32_to_f16(v[b]) : f32_to_bf16(v[b]);
    uint8_t* to = is_tiled(out_type) ? tile_element(dst.data, dst.ne[0], line, e) : out + 2 * e;
    *reinterpret_cast<uint4*>(to) =
        uint4{h[0] | h[1] << 16, h[2] | h[3] << 16, h[4] | h[5] << 16, h[6] | h[7] << 16};
}

// dst rows = rows of src (ids: those picked by ids[i1]), decoded. One thread per 32 elements. out_type: F32,
// F16, BF16, or tiles from dst.data on. Rows of dst start at multiples of 16 bytes.
template <class U>
__device__ __forceinline__ void rows_body(const View& dst, const View& src, const int* ids, int out_type,
                                          const int* runtime) {
    const int per_row = dst.ne[0] / 32;
    const long long n = static_cast<long long>(per_row) * dst.rows(runtime);
    const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
    for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
        const int g = static_cast<int>(i % per_row);
        const RowIndex at = row_index(dst, static_cast<int>(i / per_row), runtime);
        const int r = ids ? ids[at.i1] : at.i1;
        const uint8_t* group = row_group<U>(src.row<uint8_t>(0, at.i2, at.i3), src.nb[1], r);
        Group w;
        unpack<U>(group, r % U::kRows, g, w);
        const float scale = U::row_scale(group, r % U::kRows);
        const int line = tile_line(at.i1, out_type);
        uint8_t* out = dst.row<uint8_t>(at.i1, at.i2, at.i3);
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const int half = U::kHalves ? j / 4 : 0;
            float v[8];
#pragma unroll
            for (int b = 0; b < 8; ++b) {
                v[b] = scale * w.d[half] *
                       static_cast<float>(static_cast<int8_t>(w.q[j + b / 4] >> 8 * (b % 4)));
                if (U::kOffset) v[b] += scale * w.m[half];
            }
            store_row8(v, 32 * g + 4 * j, out_type, out, dst, line);
        }
    }
}

}  // namespace ikpy::cuda
