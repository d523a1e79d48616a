#include "kernels/cpu_makers.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

constexpr PrefetchDistances kIntel = {3072, 1024, 1024, 2048}, kZen = {8192, 2048, 2048, 8192},
                            kZen5 = {8192, 256, 2048, 8192};

}  // namespace

bool is_for_amd() {
    static const bool amd = [] {
        const char* wanted = std::getenv("IKPY_MAKER");
        return wanted && *wanted ? std::strcmp(wanted, "amd") == 0 : listed_as_amd();
    }();
    return amd;
}

const PrefetchDistances& prefetch_distances() {
    static const PrefetchDistances& distances = is_for_zen5() ? kZen5 : is_for_amd() ? kZen : kIntel;
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

bool has_fast_gathers() { return !is_for_amd(); }
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
