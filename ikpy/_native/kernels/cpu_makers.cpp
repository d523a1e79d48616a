#include "kernels/cpu_makers.hpp"

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

}  // namespace

bool is_for_amd() {
    static const bool amd = [] {
        const char* wanted = std::getenv("IKPY_MAKER");
        return wanted && *wanted ? std::strcmp(wanted, "amd") == 0 : listed_as_amd();
    }();
    return amd;
}

const PrefetchDistances& prefetch_distances() {
    static const PrefetchDistances distances =
        is_for_amd() ? PrefetchDistances{8192, 2048, 8192} : PrefetchDistances{3072, 1024, 2048};
    return distances;
}

bool has_fast_gathers() { return !is_for_amd(); }
bool has_fast_pair_permutes() { return is_for_amd(); }

bool has_fast_bf16_dots() {
#if defined(__x86_64__)
    return is_for_amd() && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

}  // namespace ikpy
