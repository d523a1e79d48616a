#include "kernels/cpu_makers.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "ikpy/ops.hpp"

namespace ikpy {
namespace {

bool listed_as_amd() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

// Zen 5 and later: those before it have no dot products of bytes in 256 bits without AVX-512.
bool has_avx_vnni() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#else
    return false;
#endif
}

bool is_for_zen5() { return is_for_amd() && has_avx_vnni(); }

#if defined(__x86_64__)
constexpr int kTurns = 64;

// Ticks of gathers of four quadwords.
__attribute__((target("avx2"))) uint64_t ticks_of_gathers() {
    alignas(64) static const long long table[8] = {};
    __m128i index = _mm_setr_epi32(0, 2, 5, 7);
    __m256i sum = _mm256_setzero_si256();
    _mm_lfence();
    const uint64_t start = __builtin_ia32_rdtsc();
    for (int i = 0; i < kTurns; ++i) {
        sum = _mm256_xor_si256(sum, _mm256_i32gather_epi64(table, index, 8));
        asm volatile("" : "+x"(sum), "+x"(index));
    }
    _mm_lfence();
    return __builtin_ia32_rdtsc() - start;
}

// Ticks of products of which each takes three cycles after the one before.
uint64_t ticks_of_products() {
    uint64_t product = 3;
    _mm_lfence();
    const uint64_t start = __builtin_ia32_rdtsc();
    for (int i = 0; i < kTurns; ++i) {
        product *= product;
        asm volatile("" : "+r"(product));
    }
    _mm_lfence();
    return __builtin_ia32_rdtsc() - start;
}

// Whether four quadwords take more than 15 cycles: 5 on Intel's CPUs, but 30 on those up to Ice Lake whose
// microcode clears what a gather leaves behind, which virtual machines do not tell of. 0.1 ms.
bool waits_for_gathers() {
    if (!__builtin_cpu_supports("avx2")) return false;
    uint64_t gathers = ~uint64_t{0}, products = gathers;
    for (int i = 0; i < 16; ++i) {
        gathers = std::min(gathers, ticks_of_gathers());
        products = std::min(products, ticks_of_products());
    }
    return gathers > 5 * products;
}
#else
bool waits_for_gathers() { return false; }
#endif

PrefetchDistances from_pages(PrefetchDistances distances) {
    distances.from_pages = fetches_from_pages();
    return distances;
}

#if defined(__x86_64__)
bool has_tiles() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1);
}

// Ice Lake and others of Intel's with AVX-512. Newer ones were not measured.
bool is_without_tiles() { return !is_for_amd() && __builtin_cpu_supports("avx512vnni") && !has_tiles(); }
#else
bool is_without_tiles() { return false; }
#endif

}  // namespace

bool is_for_amd() {
    static const bool amd = [] {
        const char* wanted = std::getenv("IKPY_MAKER");
        return wanted && *wanted ? std::strcmp(wanted, "amd") == 0 : listed_as_amd();
    }();
    return amd;
}

bool fetches_from_pages() {
    static const bool pages = [] {
        const char* wanted = std::getenv("IKPY_FETCH");
        return wanted && *wanted ? std::strcmp(wanted, "pages") == 0 : is_without_tiles();
    }();
    return pages;
}

const PrefetchDistances& prefetch_distances() {
    constexpr PrefetchDistances kIntel = {3072, 1024, 1024, 2048, false},
                                kZen = {8192, 2048, 2048, 8192, false},
                                kZen5 = {8192, 256, 2048, 8192, false};
    static const PrefetchDistances distances = from_pages(is_for_zen5()  ? kZen5
                                                          : is_for_amd() ? kZen
                                                                         : kIntel);
    return distances;
}

AttentionSteps attention_steps(int64_t n_rows) {
    constexpr AttentionSteps kShort = {32 << 10, 16}, kShortest = {32 << 10, 8}, kLong = {128 << 10, 16};
    if (!fetches_cells_into_l1()) return kShort;
    return n_rows == 1 ? kShortest : kLong;
}

bool fetches_cells_into_l1() {
    static const bool zen5 = is_for_zen5();
    return zen5;
}

bool has_slow_gathers() {
    static const bool slow = [] {
        const char* wanted = std::getenv("IKPY_GATHERS");
        return wanted && *wanted ? std::strcmp(wanted, "slow") == 0 : waits_for_gathers();
    }();
    return slow;
}

bool has_fast_gathers() { return !is_for_amd() && !has_slow_gathers(); }
bool has_fast_pair_permutes() { return is_for_amd(); }
bool has_free_broadcasts() { return !is_for_zen5(); }

bool has_fast_bf16_dots() {
#if defined(__x86_64__)
    return is_for_amd() && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

}  // namespace ikpy
