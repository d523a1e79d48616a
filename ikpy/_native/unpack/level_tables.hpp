// Level tables of the non-linear types as codes (level + 128): first the normal table, then the shifted one.
// Source: quant-formats.md#look-up-tables.
#pragma once
#include <cstdint>

namespace ikpy {

// The two short tables are padded so that 16 bytes from the shifted table on can be read.
alignas(64) inline constexpr uint8_t kIq2Codes[32] = {97, 115, 129, 145, 102, 120, 134, 150};

alignas(64) inline constexpr uint8_t kIq3Codes[32] = {65, 88, 105, 118, 129, 141, 156, 175,
                                                      69, 92, 109, 122, 133, 145, 160, 179};

alignas(64) inline constexpr uint8_t kIq4Codes[32] = {1,   24,  45,  63,  79,  93,  106, 118, 129, 141, 153,
                                                      166, 181, 197, 217, 241, 5,   28,  49,  67,  83,  97,
                                                      110, 122, 133, 145, 157, 170, 185, 201, 221, 245};

alignas(64) inline constexpr uint8_t kIq5Codes[64] = {
    2,   14,  25,  36,  45,  54,  63,  71,  78,  85,  92,  98,  104, 110, 116, 122,
    127, 133, 139, 145, 151, 157, 164, 171, 179, 187, 196, 205, 215, 225, 237, 249,
    4,   16,  27,  38,  47,  56,  65,  73,  80,  87,  94,  100, 106, 112, 118, 124,
    129, 135, 141, 147, 153, 159, 166, 173, 181, 189, 198, 207, 217, 227, 239, 251};

alignas(64) inline constexpr uint8_t kIq6Codes[128] = {
    1,   7,   13,  19,  24,  30,  35,  40,  44,  49,  54,  58,  62,  66,  70,  74,  77,  81,  84,
    88,  91,  94,  97,  100, 103, 106, 109, 112, 115, 117, 120, 123, 126, 128, 131, 134, 137, 140,
    142, 145, 148, 151, 155, 158, 161, 164, 168, 172, 175, 179, 183, 187, 191, 196, 200, 205, 210,
    215, 220, 226, 231, 237, 243, 249, 2,   8,   14,  20,  25,  31,  36,  41,  45,  50,  55,  59,
    63,  67,  71,  75,  78,  82,  85,  89,  92,  95,  98,  101, 104, 107, 110, 113, 116, 118, 121,
    124, 127, 129, 132, 135, 138, 141, 143, 146, 149, 152, 156, 159, 162, 165, 169, 173, 176, 180,
    184, 188, 192, 197, 201, 206, 211, 216, 221, 227, 232, 238, 244, 250};

// Levels of the first table as signed bytes.
struct SignedLevels {
    uint8_t of[32];
};
constexpr SignedLevels signed_levels(const uint8_t* codes, int n) {
    SignedLevels levels{};
    for (int i = 0; i < n; ++i) levels.of[i] = static_cast<uint8_t>(codes[i] ^ 128);
    return levels;
}
alignas(32) inline constexpr SignedLevels kIq4Signed = signed_levels(kIq4Codes, 16);
alignas(32) inline constexpr SignedLevels kIq5Signed = signed_levels(kIq5Codes, 32);

// Types whose codes are the levels.
alignas(16) inline constexpr uint8_t kPlainLevels[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                         8, 9, 10, 11, 12, 13, 14, 15};

// Tables of levels that span less than 128 as level - lowest level: products of such codes need no signs on
// AVX2.
struct LowCodes {
    uint8_t of[32];
};
constexpr LowCodes from_lowest(const uint8_t (&codes)[32], int n) {
    LowCodes low{};
    for (int i = 0; i < n; ++i) low.of[i] = static_cast<uint8_t>(codes[i] - codes[0]);
    return low;
}
constexpr int kIq2Zero = 31, kIq3Zero = 63;  // codes of weight 0
alignas(32) inline constexpr LowCodes kIq2Low = from_lowest(kIq2Codes, 8);
alignas(32) inline constexpr LowCodes kIq3Low = from_lowest(kIq3Codes, 16);

}  // namespace ikpy
