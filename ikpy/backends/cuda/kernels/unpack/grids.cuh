// Grid types: eight or four elements are a lattice point with signs (quant-formats.md#grid-types).
#pragma once
#include "own_grids.cuh"

namespace ikpy::cuda {

// Sign index of seven bits to its mask of even parity; code z of the interleaved types to its mask.
__device__ __forceinline__ unsigned even_mask(unsigned index) { return index | (__popc(index) & 1u) << 7; }
__device__ __forceinline__ unsigned code_mask(unsigned z) { return (z ^ z << 1) & 255; }
__device__ __forceinline__ float odd(unsigned s) { return static_cast<float>(2 * s + 1); }

// Words 2 t and 2 t + 1 of a group from points and an eight-bit sign mask.
__device__ __forceinline__ void set_eight(Group& g, int t, unsigned low, unsigned high, unsigned mask) {
    g.q[2 * t] = negate_bytes(low, spread_bits(mask));
    g.q[2 * t + 1] = negate_bytes(high, spread_bits(mask >> 4));
}
__device__ __forceinline__ void set_point(Group& g, int t, unsigned long long point, unsigned mask) {
    set_eight(g, t, static_cast<unsigned>(point), static_cast<unsigned>(point >> 32), mask);
}

struct UnpackIQ2_XXS : UnpackerTraits<256, 66> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ2_XXS>(p);
        const unsigned index = load4<2>(b.sub[s].index), signs = load4<2>(b.sub[s].signs_scale);
        g.d[0] = half_of(b.d) * 0.125f * odd(signs >> 28);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_point(g, t, __ldg(&iq2xxs_grid[index >> 8 * t & 255]), even_mask(signs >> 7 * t & 127));
    }
};

struct UnpackIQ2_XS : UnpackerTraits<256, 74, 1, 0, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ2_XS>(p);
        const float d = half_of(b.d) * 0.125f;
        g.d[0] = d * odd(b.scales[s] & 15);
        g.d[1] = d * odd(b.scales[s] >> 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = load2<2>(b.qs[4 * s + t].bytes);
            set_point(g, t, __ldg(&iq2xs_grid[v & 511]), even_mask(v >> 9));
        }
    }
};

struct UnpackIQ2_S : UnpackerTraits<256, 82, 1, 0, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ2_S>(p);
        const float d = half_of(b.d) * 0.125f;
        g.d[0] = d * odd(b.scales[s] & 15);
        g.d[1] = d * odd(b.scales[s] >> 4);
        const unsigned low = load4<2>(b.qs + 4 * s), signs = load4<2>(b.signs + 4 * s), high = b.qh[s];
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_point(g, t, __ldg(&iq2s_grid[(low >> 8 * t & 255) | (high >> 2 * t & 3) << 8]),
                      signs >> 8 * t & 255);
    }
};

struct UnpackIQ3_XXS : UnpackerTraits<256, 98> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ3_XXS>(p);
        const unsigned signs = load4<2>(b.signs_scale[s]);
        g.d[0] = half_of(b.d) * 0.25f * odd(signs >> 28);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = load2<2>(b.qs + 8 * s + 2 * t);
            set_eight(g, t, __ldg(&iq3xxs_grid[v & 255]), __ldg(&iq3xxs_grid[v >> 8]),
                      even_mask(signs >> 7 * t & 127));
        }
    }
};

struct UnpackIQ3_S : UnpackerTraits<256, 110> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ3_S>(p);
        g.d[0] = half_of(b.d) * odd(nibble_of(b.scales, s));
        const unsigned high = b.qh[s], signs = load4<2>(b.signs + 4 * s);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = load2<2>(b.qs + 8 * s + 2 * t), h = high >> 2 * t;
            set_eight(g, t, __ldg(&iq3s_grid[(v & 255) | (h & 1) << 8]),
                      __ldg(&iq3s_grid[v >> 8 | (h & 2) << 7]), signs >> 8 * t & 255);
        }
    }
};

// Ternary points shifted by an eighth: q = 8 * point + 1 or - 1, so that the shift needs no offset. The table
// holds point + 1 in nibbles.
__device__ __forceinline__ void set_shifted(Group& g, int t, int index, bool down) {
    const unsigned point = __ldg(&iq1s_codes[index]), base = down ? 9 : 7;
    g.q[2 * t] = sub_bytes((point & kNibbles) << 3, base);
    g.q[2 * t + 1] = sub_bytes((point & ~kNibbles) >> 1, base);
}

struct UnpackIQ1_S : UnpackerTraits<256, 50> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ1_S>(p);
        const unsigned h = load2<2>(b.qh[s].bytes), low = load4<2>(b.qs + 4 * s);
        g.d[0] = half_of(b.d) * 0.125f * odd(h >> 12 & 7);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_shifted(g, t, (low >> 8 * t & 255) | (h >> 3 * t & 7) << 8, h & 0x8000);
    }
};

struct UnpackIQ1_M : UnpackerTraits<256, 56, 1, 0, true> {
    __device__ static void group(const uint8_t* p, int, int s, Group& g) {
        const auto& b = as<BlockIQ1_M>(p);
        unsigned bits = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) bits |= (load2<2>(b.scales[w].bytes) >> 12) << 4 * w;
        const float d = f16_to_f32(static_cast<uint16_t>(bits)) * 0.125f;
        const unsigned scales = load2<2>(b.scales[s >> 1].bytes) >> 6 * (s & 1);
        g.d[0] = d * odd(scales & 7);
        g.d[1] = d * odd(scales >> 3 & 7);
        const unsigned low = load4<4>(b.qs + 4 * s), high = load2<2>(b.qh + 2 * s);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned h = high >> 4 * t;
            set_shifted(g, t, (low >> 8 * t & 255) | (h & 7) << 8, h & 8);
        }
    }
};

// interleaved

// Four bytes with a sign code above one bit of the scale: masks of the four 8-groups, and the scale.
__device__ __forceinline__ unsigned signs_and_scale(const uint8_t* sas, int k, int s, unsigned* scale) {
    const unsigned v = load4<4>(sas + 16 * s + 4 * k), z = v >> 1 & 0x7f7f7f7fu;
    *scale = (v & 1) | (v >> 7 & 2) | (v >> 14 & 4) | (v >> 21 & 8);
    return z ^ z << 1;
}

struct UnpackIQ2_XXS_R4 : UnpackerTraits<256, 264, 4> {
    using Own = OwnIQ2_XXS_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ2_XXS_R4>(p);
        unsigned scale;
        const unsigned masks = signs_and_scale(b.sas, k, s, &scale), index = load4<4>(b.qs + 16 * s + 4 * k);
        g.d[0] = half_of(b.d[k]) * 0.125f * odd(scale);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_point(g, t, __ldg(&iq2xxs_grid[index >> 8 * t & 255]), masks >> 8 * t & 255);
    }
};

struct UnpackIQ3_XXS_R4 : UnpackerTraits<256, 392, 4> {
    using Own = OwnIQ3_XXS_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ3_XXS_R4>(p);
        unsigned scale;
        const unsigned masks = signs_and_scale(b.sas, k, s, &scale);
        g.d[0] = half_of(b.d[k]) * 0.25f * odd(scale);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = load2<2>(b.qs + 32 * s + 8 * k + 2 * t);
            set_eight(g, t, __ldg(&iq3xxs_grid[v & 255]), __ldg(&iq3xxs_grid[v >> 8]), masks >> 8 * t & 255);
        }
    }
};

struct UnpackIQ2_XS_R4 : UnpackerTraits<256, 296, 4, 0, true> {
    using Own = OwnIQ2_XS_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ2_XS_R4>(p);
        const float d = half_of(b.d[k]) * 0.125f;
        const unsigned scales = b.scales[4 * s + k];
        g.d[0] = d * odd(scales & 15);
        g.d[1] = d * odd(scales >> 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned v = load2<2>(b.qs[16 * s + 4 * k + t].bytes);
            set_point(g, t, __ldg(&iq2xs_grid[v & 511]), code_mask(v >> 9));
        }
    }
};

struct UnpackIQ2_S_R4 : UnpackerTraits<256, 328, 4, 0, true> {
    using Own = OwnIQ2_S_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ2_S_R4>(p);
        const float d = half_of(b.d[k]) * 0.125f;
        const unsigned scales = b.scales[4 * s + k], high = b.qh[4 * s + k];
        g.d[0] = d * odd(scales & 15);
        g.d[1] = d * odd(scales >> 4);
        const unsigned low = load4<4>(b.qs + 16 * s + 4 * k), signs = load4<4>(b.signs + 16 * s + 4 * k);
#pragma unroll
        for (int t = 0; t < 4; ++t)
            set_point(g, t, __ldg(&iq2s_grid[(low >> 8 * t & 255) | (high >> 2 * t & 3) << 8]),
                      signs >> 8 * t & 255);
    }
};

struct UnpackIQ3_S_R4 : UnpackerTraits<256, 440, 4> {
    using Own = OwnIQ3_S_R4;
    __device__ static void group(const uint8_t* p, int k, int s, Group& g) {
        const auto& b = as<BlockIQ3_S_R4>(p);
        const int place = 4 * s + k;
        g.d[0] = half_of(b.d[k]) * odd(b.scales[place & 15] >> 4 * (place >> 4) & 15);
        const unsigned high = b.qh[place], signs = load4<4>(b.signs + 16 * s + 4 * k);
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const unsigned index = b.qs[32 * s + k + 8 * (w & 3) + 4 * (w >> 2)] | (high >> w & 1) << 8;
            g.q[w] = negate_bytes(__ldg(&iq3s_grid[index]), signs >> w & kOnes);
        }
    }
};

struct UnpackIQ1_S_R4 : UnpackerTraits<32, 24, 4, 2> {
    using Own = OwnIQ1_S_R4;
    __device__ static float row_scale(const uint8_t* group, int k) { return load_f16<2>(group + 2 * k); }
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockIQ1_S_R4>(p);
        const unsigned h = load2<2>(b.qh[k].bytes);
        g.d[0] = 0.125f * odd(h >> 12 & 7);
#pragma unroll
        for (int t = 0; t < 4; ++t) set_shifted(g, t, b.qs[4 * t + k] | (h >> 3 * t & 7) << 8, h & 0x8000);
    }
};

struct UnpackIQ1_M_R4 : UnpackerTraits<32, 28, 4, 2, true> {
    using Own = OwnIQ1_M_R4;
    __device__ static float row_scale(const uint8_t* group, int k) { return load_f16<2>(group + 2 * k); }
    __device__ static void group(const uint8_t* p, int k, int, Group& g) {
        const auto& b = as<BlockIQ1_M_R4>(p);
        g.d[0] = 0.125f * static_cast<float>(b.scales[k] & 15);
        g.d[1] = 0.125f * static_cast<float>(b.scales[k] >> 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned h = b.qh[4 * (t >> 1) + k] >> 4 * (t & 1);
            set_shifted(g, t, b.qs[4 * t + k] | (h & 7) << 8, h & 8);
        }
    }
};

}  // namespace ikpy::cuda
