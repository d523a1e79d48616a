// Tables of levels (IQ4_NL, IQ2_K ... IQ6_K) and the rounding to them, a candidate per lane.
#pragma once

#include "search.hpp"

namespace ikpy::quantize {

// A sorted table of integer levels in -128..127 and the rounding to it.
class LevelTable {
  public:
    LevelTable(const int8_t* values, int count) : count_(count) {
        for (int i = 0; i < count; i++) value_[i] = values[i];
        for (int i = 0; i + 1 < count; i++) {
            middle_[i] = 0.5f * (value_[i] + value_[i + 1]);
            step_[i] = value_[i + 1] - value_[i];
        }
        // Middles are multiples of 1/2, so half-unit cells contain none and the look-up is exact.
        for (int cell = 0; cell < CELLS; cell++) {
            const float v = (cell - CELLS / 2 + 0.5f) * 0.5f;
            cell_index_[cell] = static_cast<uint8_t>(scalar_index(v));
            cell_value_[cell] = value_[cell_index_[cell]];
        }
#if defined(__AVX512F__)
        if (count == 8) set_wide_cells();
        if (count > 8) set_groups();
#endif
    }

    int count() const { return count_; }
    float value(int i) const { return value_[i]; }
    float first() const { return value_[0]; }
    float last() const { return value_[count_ - 1]; }

    // Index of the level nearest to v.
    int scalar_index(float v) const {
        int lo = 0, hi = count_ - 1;
        while (lo < hi) {
            const int mid = (lo + hi) / 2;
            if (v > middle_[mid])
                lo = mid + 1;
            else
                hi = mid;
        }
        return lo;
    }

    // The same by the cells: v between two levels counts to the upper one.
    int index(float v) const {
        return cell_index_[static_cast<int>(std::clamp(v * 2.0f + CELLS / 2, 0.0f, CELLS - 1.0f))];
    }

    // Value of the level nearest to v in every lane, for tables of COUNT levels.
    template <int COUNT>
    FloatVector nearest(FloatVector v) const {
#if defined(__AVX512F__)
        if constexpr (COUNT == 8) return look_up_wide(v);
        if constexpr (COUNT > 8) return look_up_groups<COUNT>(v);
#endif
        if constexpr (COUNT > MOST_COMPARED) {
            return look_up(v);
        } else {
            FloatVector t = broadcast(value_[0]);
#pragma GCC unroll 16
            for (int i = 0; i < COUNT - 1; i++) {
                t += (FloatVector)((v > broadcast(middle_[i])) & (IntVector)broadcast(step_[i]));
            }
            return t;
        }
    }

  private:
    static constexpr int CELLS = 512;
#if defined(__AVX2__)
    static constexpr int MOST_COMPARED =
        8;  // with gather instructions 15 comparisons take longer than the look-up
#else
    static constexpr int MOST_COMPARED = 16;
#endif

    static FloatVector cell_of(FloatVector v) {
        return clamp(v * 2.0f + static_cast<float>(CELLS / 2), 0.0f, CELLS - 1.0f);
    }

    FloatVector look_up(FloatVector v) const {
        return gather(cell_value_, __builtin_convertvector(cell_of(v), IntVector));
    }

#if defined(__AVX512F__)
    // Eight levels lie so far apart that 16 cells hold at most one middle each; the cell's permutation index
    // is the low bits of the float after the rounding addition.
    void set_wide_cells() {
        const bool narrow = first() >= -64 && last() < 64;
        cells_per_unit_ = narrow ? 0.125f : 0.0625f;
        for (int cell = 0; cell < 16; cell++) {
            const float low = (cell - 8) / cells_per_unit_, high = low + 1 / cells_per_unit_;
            cell_low_[cell] = value_[scalar_index(low + 0.125f)];
            cell_high_[cell] = value_[scalar_index(high - 0.125f)];
            cell_middle_[cell] = 0.5f * (cell_low_[cell] + cell_high_[cell]);
        }
    }

    FloatVector look_up_wide(FloatVector v) const {
        const FloatVector cell = clamp(v * cells_per_unit_ + 7.5f, 0.0f, 15.0f) + broadcast(12582912.0f);
        const __m512i index = (__m512i)cell;
        const __m512 middle = _mm512_maskz_permutexvar_ps(0xFFFF, index, _mm512_load_ps(cell_middle_));
        const __m512 low = _mm512_maskz_permutexvar_ps(0xFFFF, index, _mm512_load_ps(cell_low_));
        const __mmask16 above = _mm512_cmp_ps_mask((__m512)v, middle, _CMP_GT_OQ);
        return (FloatVector)_mm512_mask_permutexvar_ps(low, above, index, _mm512_load_ps(cell_high_));
    }

    // The same values as look_up() has, without a gather (12 cycles on AMD's CPUs): levels lie so far apart
    // that no group of eight cells holds more than one middle, of four with more than 32 levels.
    static constexpr int group_bits(int count) { return count <= 32 ? 3 : 2; }

    void set_groups() {
        for (int code = 0; code < 64; code++) {
            group_value_[code] = code < count_ ? value_[code] : 0;
            group_middle_[code] = code + 1 < count_ ? 2 * middle_[code] + CELLS / 2 : INFINITY;
        }
        for (int cell = 0; cell < CELLS; cell += 1 << group_bits(count_))
            group_code_[cell >> group_bits(count_)] = cell_index_[cell];
    }

    template <int COUNT>
    FloatVector look_up_groups(FloatVector v) const {
        const __m512 cell = (__m512)cell_of(v);
        const __m512i group =
            _mm512_maskz_srli_epi32(0xFFFF, _mm512_maskz_cvttps_epi32(0xFFFF, cell), group_bits(COUNT));
        __m512i low = words_at<0>(group);
        if constexpr (COUNT > 32) {
            const __mmask16 upper = _mm512_test_epi32_mask(group, _mm512_set1_epi32(64));
            low = _mm512_mask_mov_epi32(low, upper, words_at<64>(group));
        }
        const __mmask16 above = _mm512_cmp_ps_mask(cell, floats_at<COUNT>(group_middle_, low), _CMP_GE_OQ);
        const __m512i code = _mm512_mask_add_epi32(low, above, low, _mm512_set1_epi32(1));
        return (FloatVector)floats_at<COUNT>(group_value_, code);
    }

    template <int FIRST>
    __m512i words_at(__m512i index) const {
        return _mm512_maskz_permutex2var_epi16(0x55555555, _mm512_load_si512(group_code_ + FIRST), index,
                                               _mm512_load_si512(group_code_ + FIRST + 32));
    }

    template <int COUNT>
    static __m512 floats_at(const float* table, __m512i index) {
        if constexpr (COUNT <= 16) return _mm512_maskz_permutexvar_ps(0xFFFF, index, _mm512_load_ps(table));
        const __m512 lower =
            _mm512_maskz_permutex2var_ps(0xFFFF, _mm512_load_ps(table), index, _mm512_load_ps(table + 16));
        if constexpr (COUNT <= 32) return lower;
        const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
        return _mm512_mask_mov_ps(lower, upper,
                                  _mm512_maskz_permutex2var_ps(0xFFFF, _mm512_load_ps(table + 32), index,
                                                               _mm512_load_ps(table + 48)));
    }

    alignas(64) float group_value_[64];
    alignas(64) float group_middle_[64];
    alignas(64) uint16_t group_code_[CELLS / 4];
    float cells_per_unit_ = 0;
    alignas(64) float cell_low_[16];
    alignas(64) float cell_high_[16];
    alignas(64) float cell_middle_[16];
#endif

    int count_;
    float value_[64];
    float middle_[64];
    float step_[64];
    float cell_value_[CELLS];
    uint8_t cell_index_[CELLS];
};

}  // namespace ikpy::quantize
