// Grids as the byte permutations want them: short codes instead of magnitudes.
#pragma once
#include <algorithm>
#include <cstdint>

#include "quantize/tables.hpp"

namespace ikpy::points {

// Point i of N is the fields of first[i] and second[i], each holding half of its elements.
template <int N>
struct SplitCodes {
    alignas(64) uint8_t first[N] = {};
    alignas(64) uint8_t second[N] = {};

    // `levels`: the magnitudes in the order of their codes of `bits` bits.
    template <int Levels>
    SplitCodes(const int8_t* grid, int size, int bits, const int8_t (&levels)[Levels]) {
        for (int i = 0; i < N; ++i)
            for (int e = 0; e < size; ++e) {
                const auto code = std::find(levels, levels + Levels, grid[i * size + e]) - levels;
                uint8_t& field = e < size / 2 ? first[i] : second[i];
                field = static_cast<uint8_t>(field | code << (bits * (e % (size / 2))));
            }
    }
};

constexpr int8_t kLevels2[3] = {8, 25, 43};
constexpr int8_t kLevels3XXS[8] = {4, 12, 20, 28, 36, 44, 52, 62};
constexpr int8_t kLevels3S[8] = {1, 3, 5, 7, 9, 11, 13, 15};

static const SplitCodes<256> iq2xxs_codes(tables::iq2xxs_grid, 8, 2, kLevels2);
static const SplitCodes<256> iq3xxs_codes(tables::iq3xxs_grid, 4, 4, kLevels3XXS);
static const SplitCodes<512> iq3s_codes(tables::iq3s_grid, 4, 4, kLevels3S);

// Point i of N is a word of eight codes of two bits, elements 0 .. 3 in its low byte; `twice`: in both halves
// of a dword.
template <int N>
struct WordCodes {
    SplitCodes<N> halves;
    alignas(64) uint32_t twice[N];

    template <int Levels>
    WordCodes(const int8_t* grid, const int8_t (&levels)[Levels]) : halves(grid, 8, 2, levels) {
        for (int i = 0; i < N; ++i) twice[i] = 0x10001u * (halves.first[i] + 256u * halves.second[i]);
    }
};

// N values of which 128 runs change at most once inside of a run.
template <int N>
struct Runs {
    static constexpr int kRuns = 128, kLength = N / kRuns;
    alignas(64) uint8_t before[kRuns], after[kRuns];
    alignas(64) uint8_t from[kRuns];  // low byte of the index of the first value after the change

    explicit Runs(const uint8_t* values) {
        for (int r = 0; r < kRuns; ++r) {
            const uint8_t* run = values + r * kLength;
            before[r] = run[0];
            after[r] = run[kLength - 1];
            from[r] = static_cast<uint8_t>(std::find(run, run + kLength - 1, after[r]) - values);
        }
    }
};

constexpr int8_t kTrits[3] = {-1, 0, 1};

static const WordCodes<512> iq2xs_codes(tables::iq2xs_grid, kLevels2);
static const WordCodes<1024> iq2s_codes(tables::iq2s_grid, kLevels2);
static const WordCodes<2048> iq1s_codes(tables::iq1s_grid, kTrits);
// Points are sorted by their last elements first.
static const Runs<2048> iq1s_second(iq1s_codes.halves.second);

}  // namespace ikpy::points
