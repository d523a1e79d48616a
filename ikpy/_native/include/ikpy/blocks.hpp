// One struct per block type, plain and row-interleaved (quant-formats.md#table-of-types).
//
// All members are bytes or arrays of bytes, so structs have alignment 1 and exactly the size of the block:
// blocks in files are not aligned. Row headers are not part of a block. Comments give the fields' meaning
// only where the name does not.
#pragma once

#include <cstdint>
#include <cstring>

#include "ikpy/half.hpp"

namespace ikpy {

// A little-endian 16-bit field.
struct Word {
    uint8_t bytes[2];
    uint16_t get() const { return load_unaligned<uint16_t>(bytes); }
    void set(uint16_t value) { std::memcpy(bytes, &value, sizeof value); }
    float as_f16() const { return f16_to_f32(get()); }
};

// 32 elements per block (q1_0_g128: 128, bitnet: 64)

struct BlockQ4_0 {
    Word d;
    uint8_t qs[16];
};
struct BlockQ4_1 {
    Word d, m;
    uint8_t qs[16];
};
struct BlockQ5_0 {
    Word d;
    uint8_t qh[4], qs[16];
};
struct BlockQ5_1 {
    Word d, m;
    uint8_t qh[4], qs[16];
};
struct BlockQ6_0 {
    Word d;
    uint8_t qh[8], qs[16];
};
struct BlockQ8_0 {
    Word d;
    uint8_t qs[32];
};
struct BlockIQ4_NL {
    Word d;
    uint8_t qs[16];
};
struct BlockMXFP4 {
    uint8_t e, qs[16];
};
struct BlockNVFP4 {
    uint8_t s[4], qs[32];
};
struct BlockQ8_KV {  // row header: f32 d, i32 sum of the row
    uint8_t qs[32];
};
struct BlockQ1_0_G128 {
    Word d;
    uint8_t qs[16];
};
struct BlockIQ1_BN {  // row header: f16 d
    uint8_t ql[12], extra;
};
struct BlockIQ2_BN {  // row header: f32 d
    uint8_t qs[16];
};

// 256 elements per block

struct BlockTQ1_0 {
    uint8_t qs[52];  // runs of 32, 16 and 4 bytes
    Word d;
};
struct BlockTQ2_0 {
    uint8_t qs[64];
    Word d;
};
struct BlockQ2_K {
    uint8_t scales[16], qs[64];
    Word d, dmin;
};
struct BlockQ3_K {
    uint8_t hmask[32], qs[64], scales[12];
    Word d;
};
struct BlockQ4_K {
    Word d, dmin;
    uint8_t scales[12], qs[128];
};
struct BlockQ5_K {
    Word d, dmin;
    uint8_t scales[12], qh[32], qs[128];
};
struct BlockQ6_K {
    uint8_t ql[128], qh[64], scales[16];
    Word d;
};
struct BlockQ8_K {  // activations; the layout of this dialect
    uint8_t d[4], sum[4], qs[256], bsums[32];
};
struct BlockIQ4_XS {
    Word d;
    uint8_t scales_h[2], scales_l[4], qs[128];
};
struct BlockIQ2_XXS {
    Word d;
    struct {
        uint8_t index[4], signs_scale[4];
    } sub[8];
};
struct BlockIQ2_XS {
    Word d, qs[32];
    uint8_t scales[8];
};
struct BlockIQ2_S {
    Word d;
    uint8_t qs[32], signs[32], qh[8], scales[8];
};
struct BlockIQ3_XXS {
    Word d;
    uint8_t qs[64], signs_scale[8][4];
};
struct BlockIQ3_S {
    Word d;
    uint8_t qs[64], qh[8], signs[32], scales[4];
};
struct BlockIQ1_S {
    Word d;
    uint8_t qs[32];
    Word qh[8];
};
struct BlockIQ1_M {
    uint8_t qs[32], qh[16];
    Word scales[4];  // the top nibbles are the f16 block scale
};
struct BlockIQ2_K {
    Word d;
    uint8_t extra[2], scales[8], qs[64];
};
struct BlockIQ3_K {
    Word d;
    uint8_t extra[2], scales_h[2], scales_l[8], qs[64], qh[32];
};
struct BlockIQ4_K {
    Word d;
    uint8_t extra[2], scales_h[4], scales_l[8], qs[128];
};
struct BlockIQ5_K {
    Word d;
    uint8_t extra[2], scales_h[4], scales_l[8], qs[128], qh[32];
};
struct BlockIQ6_K {
    Word d;
    uint8_t extra[2], scales[16], qs[128], qh[64];
};
struct BlockIQ2_KS {  // row header: f16 d
    uint8_t extra[2], scales[4], qs[64];
};
struct BlockIQ3_KS {  // row header: f16 d
    uint8_t extra[2], scales[4], qs[64], qh[32];
};
struct BlockIQ4_KS {  // row header: f32 d
    uint8_t scales[8], qs[128];
};
struct BlockIQ5_KS {  // row header: f32 d
    uint8_t scales[8], qs[128], qh[32];
};
struct BlockIQ4_KSS {  // row header: f32 d
    Word qs[64];
};
struct BlockIQ2_KL {  // row header: f16 d
    uint8_t scales_h[2], scales_l[4], qs[64], qh[16];
};
struct BlockIQ1_KT {  // row header of all trellis types: f32 d
    uint8_t sh[8], ql[32], qh[16];
};
struct BlockIQ2_KT {
    uint8_t scales[4];
    Word ql[32];
};
struct BlockIQ3_KT {
    uint8_t scales[4];
    Word ql[32];
    uint8_t qh[32];
};
struct BlockIQ4_KT {
    uint8_t shb[8][4], ql[64], qh[32];
};

// row-interleaved: one group block of R rows

template <int R>
struct BlockQ4_0_Arm {
    Word d[R];
    uint8_t qs[16 * R];
};
struct BlockQ4_0_R8 {
    Word d[8];
    uint8_t qs[128];
};
struct BlockQ5_0_R4 {
    Word d[4];
    uint8_t qh[16], qs[64];
};
struct BlockQ6_0_R4 {
    Word d[4];
    uint8_t qh[32], qs[64];
};
struct BlockQ8_0_R8 {
    Word d[8];
    uint8_t qs[256];
};
struct BlockIQ4_NL_R4 {
    Word d[4];
    uint8_t qs[64];
};
struct BlockMXFP4_R8 {
    uint8_t e[8], qs[128];
};
struct BlockQ8_KV_R8 {  // group header: f32 d[8]
    uint8_t qs[256];
};
struct BlockIQ2_BN_R4 {  // group header: f32 d[4]
    uint8_t qs[64];
};
struct BlockQ2_K_R4 {
    Word d[4], dmin[4];
    uint8_t scales[64], qs[256];
};
struct BlockQ3_K_R4 {
    Word d[4];
    uint8_t scales_h[16], scales_l[32], qh[128], qs[256];
};
struct BlockQ4_K_R4 {
    Word d[4], dmin[4];
    uint8_t scales_h[16], scales_l[32], qs[512];
};
struct BlockQ5_K_R4 {
    Word d[4], dmin[4];
    uint8_t scales_h[16], scales_l[32], qh[128], qs[512];
};
struct BlockQ6_K_R4 {
    Word d[4];
    uint8_t scales[64], qh[256], qs[512];
};
struct BlockIQ4_XS_R8 {
    Word d[8];
    uint8_t scales_h[16], scales_l[32], qs[1024];
};
struct BlockIQ2_XXS_R4 {
    Word d[4];
    uint8_t sas[128], qs[128];  // sas: sign codes and scale bits
};
struct BlockIQ2_XS_R4 {
    Word d[4], qs[128];
    uint8_t scales[32];
};
struct BlockIQ2_S_R4 {
    Word d[4];
    uint8_t qs[128], qh[32], signs[128], scales[32];
};
struct BlockIQ3_XXS_R4 {
    Word d[4];
    uint8_t sas[128], qs[256];
};
struct BlockIQ3_S_R4 {
    Word d[4];
    uint8_t qs[256], qh[32], signs[128], scales[16];
};
struct BlockIQ1_S_R4 {  // 32 columns; group header: f16 d[4]
    uint8_t qs[16];
    Word qh[4];
};
struct BlockIQ1_M_R4 {  // 32 columns; group header: f16 d[4]
    uint8_t qs[16], qh[8], scales[4];
};
struct BlockIQ2_K_R4 {
    Word d[4];
    uint8_t extra[8], scales[32], qs[256];
};
struct BlockIQ3_K_R4 {
    Word d[4];
    uint8_t extra[8], scales_h[8], scales_l[32], qs[256], qh[128];
};
struct BlockIQ4_K_R4 {
    Word d[4];
    uint8_t extra[8], scales_h[16], scales_l[32], qs[512];
};
struct BlockIQ5_K_R4 {
    Word d[4];
    uint8_t extra[8], scales_h[16], scales_l[32], qs[512], qh[128];
};
struct BlockIQ4_KS_R4 {  // group header: f32 d[4]
    uint8_t scales[32], qs[512];
};
struct BlockIQ5_KS_R4 {  // group header: f32 d[4]
    uint8_t scales[32], qs[512], qh[128];
};
struct BlockQ8_K_R8 {
    Word d[8];
    uint8_t qs[2048];
};
struct BlockQ8_K_R16 {  // levels offset by 128
    Word d[16];
    uint8_t qs[4096];
};
struct BlockBF16_R16 {  // two columns
    Word values[16][2];
};

#define IKPY_BLOCK_SIZE(type, size) static_assert(sizeof(type) == (size) && alignof(type) == 1, #type)
IKPY_BLOCK_SIZE(BlockQ4_0, 18);
IKPY_BLOCK_SIZE(BlockQ4_1, 20);
IKPY_BLOCK_SIZE(BlockQ5_0, 22);
IKPY_BLOCK_SIZE(BlockQ5_1, 24);
IKPY_BLOCK_SIZE(BlockQ6_0, 26);
IKPY_BLOCK_SIZE(BlockQ8_0, 34);
IKPY_BLOCK_SIZE(BlockIQ4_NL, 18);
IKPY_BLOCK_SIZE(BlockMXFP4, 17);
IKPY_BLOCK_SIZE(BlockNVFP4, 36);
IKPY_BLOCK_SIZE(BlockQ8_KV, 32);
IKPY_BLOCK_SIZE(BlockQ1_0_G128, 18);
IKPY_BLOCK_SIZE(BlockIQ1_BN, 13);
IKPY_BLOCK_SIZE(BlockIQ2_BN, 16);
IKPY_BLOCK_SIZE(BlockTQ1_0, 54);
IKPY_BLOCK_SIZE(BlockTQ2_0, 66);
IKPY_BLOCK_SIZE(BlockQ2_K, 84);
IKPY_BLOCK_SIZE(BlockQ3_K, 110);
IKPY_BLOCK_SIZE(BlockQ4_K, 144);
IKPY_BLOCK_SIZE(BlockQ5_K, 176);
IKPY_BLOCK_SIZE(BlockQ6_K, 210);
IKPY_BLOCK_SIZE(BlockQ8_K, 296);
IKPY_BLOCK_SIZE(BlockIQ4_XS, 136);
IKPY_BLOCK_SIZE(BlockIQ2_XXS, 66);
IKPY_BLOCK_SIZE(BlockIQ2_XS, 74);
IKPY_BLOCK_SIZE(BlockIQ2_S, 82);
IKPY_BLOCK_SIZE(BlockIQ3_XXS, 98);
IKPY_BLOCK_SIZE(BlockIQ3_S, 110);
IKPY_BLOCK_SIZE(BlockIQ1_S, 50);
IKPY_BLOCK_SIZE(BlockIQ1_M, 56);
IKPY_BLOCK_SIZE(BlockIQ2_K, 76);
IKPY_BLOCK_SIZE(BlockIQ3_K, 110);
IKPY_BLOCK_SIZE(BlockIQ4_K, 144);
IKPY_BLOCK_SIZE(BlockIQ5_K, 176);
IKPY_BLOCK_SIZE(BlockIQ6_K, 212);
IKPY_BLOCK_SIZE(BlockIQ2_KS, 70);
IKPY_BLOCK_SIZE(BlockIQ3_KS, 102);
IKPY_BLOCK_SIZE(BlockIQ4_KS, 136);
IKPY_BLOCK_SIZE(BlockIQ5_KS, 168);
IKPY_BLOCK_SIZE(BlockIQ4_KSS, 128);
IKPY_BLOCK_SIZE(BlockIQ2_KL, 86);
IKPY_BLOCK_SIZE(BlockIQ1_KT, 56);
IKPY_BLOCK_SIZE(BlockIQ2_KT, 68);
IKPY_BLOCK_SIZE(BlockIQ3_KT, 100);
IKPY_BLOCK_SIZE(BlockIQ4_KT, 128);
IKPY_BLOCK_SIZE(BlockQ4_0_Arm<4>, 72);
IKPY_BLOCK_SIZE(BlockQ4_0_Arm<8>, 144);
IKPY_BLOCK_SIZE(BlockQ4_0_R8, 144);
IKPY_BLOCK_SIZE(BlockQ5_0_R4, 88);
IKPY_BLOCK_SIZE(BlockQ6_0_R4, 104);
IKPY_BLOCK_SIZE(BlockQ8_0_R8, 272);
IKPY_BLOCK_SIZE(BlockIQ4_NL_R4, 72);
IKPY_BLOCK_SIZE(BlockMXFP4_R8, 136);
IKPY_BLOCK_SIZE(BlockQ8_KV_R8, 256);
IKPY_BLOCK_SIZE(BlockIQ2_BN_R4, 64);
IKPY_BLOCK_SIZE(BlockQ2_K_R4, 336);
IKPY_BLOCK_SIZE(BlockQ3_K_R4, 440);
IKPY_BLOCK_SIZE(BlockQ4_K_R4, 576);
IKPY_BLOCK_SIZE(BlockQ5_K_R4, 704);
IKPY_BLOCK_SIZE(BlockQ6_K_R4, 840);
IKPY_BLOCK_SIZE(BlockIQ4_XS_R8, 1088);
IKPY_BLOCK_SIZE(BlockIQ2_XXS_R4, 264);
IKPY_BLOCK_SIZE(BlockIQ2_XS_R4, 296);
IKPY_BLOCK_SIZE(BlockIQ2_S_R4, 328);
IKPY_BLOCK_SIZE(BlockIQ3_XXS_R4, 392);
IKPY_BLOCK_SIZE(BlockIQ3_S_R4, 440);
IKPY_BLOCK_SIZE(BlockIQ1_S_R4, 24);
IKPY_BLOCK_SIZE(BlockIQ1_M_R4, 28);
IKPY_BLOCK_SIZE(BlockIQ2_K_R4, 304);
IKPY_BLOCK_SIZE(BlockIQ3_K_R4, 440);
IKPY_BLOCK_SIZE(BlockIQ4_K_R4, 576);
IKPY_BLOCK_SIZE(BlockIQ5_K_R4, 704);
IKPY_BLOCK_SIZE(BlockIQ4_KS_R4, 544);
IKPY_BLOCK_SIZE(BlockIQ5_KS_R4, 672);
IKPY_BLOCK_SIZE(BlockQ8_K_R8, 2064);
IKPY_BLOCK_SIZE(BlockQ8_K_R16, 4128);
IKPY_BLOCK_SIZE(BlockBF16_R16, 64);
#undef IKPY_BLOCK_SIZE

}  // namespace ikpy
