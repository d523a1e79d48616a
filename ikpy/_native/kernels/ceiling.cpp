#include "ikpy/ceiling.hpp"

#include <omp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "kernels/matmul/gemm_amx.hpp"
#include "kernels/simd/amx_tiles.hpp"
#include "kernels/simd/half_rows.hpp"

namespace ikpy {
namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Short bursts: on a busy machine some of them run undisturbed.
constexpr int kRepeats = 30;
constexpr int kChains = 12;
constexpr int64_t kSteps = 100000;
constexpr int64_t kHugePage = int64_t{2} << 20;

// Best rate over some repeats of `work`, which performs `operations` per thread.
template <class F>
double best_rate(int n_threads, double operations, F work, int repeats = kRepeats) {
    double best = 0.0;
    for (int r = 0; r < repeats; ++r) {
        double seconds = 0.0;
#pragma omp parallel num_threads(n_threads) reduction(max : seconds)
        {
#pragma omp barrier
            const double start = now();
            work();
            seconds = now() - start;
        }
        best = std::max(best, operations * n_threads / seconds * 1e-9);
    }
    return best;
}

#if defined(__AVX512F__)
constexpr int kFloats = 16;
#elif defined(__AVX2__)
constexpr int kFloats = 8;
#else
constexpr int kFloats = 4;
#endif
typedef float Vec __attribute__((vector_size(kFloats * sizeof(float))));

#if defined(__AVX512F__)
#define IKPY_VECTOR(value) "+v"(value)  // any of the 32 vector registers
#else
#define IKPY_VECTOR(value) "+x"(value)
#endif

// Runs kChains independent accumulators through `step`; start values and operand are hidden from the
// optimizer, which would otherwise compute equal chains once.
#define IKPY_CHAINS(Accumulator, zero, operand, step)                           \
    Accumulator a[kChains];                                                     \
    _Pragma("GCC unroll 12") for (int j = 0; j < kChains; ++j) {                \
        a[j] = zero;                                                            \
        asm volatile("" : IKPY_VECTOR(a[j]));                                   \
    }                                                                           \
    for (int64_t i = 0; i < kSteps; ++i) {                                      \
        asm volatile("" : IKPY_VECTOR(operand));                                \
        _Pragma("GCC unroll 12") for (int j = 0; j < kChains; ++j) a[j] = step; \
    }                                                                           \
    _Pragma("GCC unroll 12") for (int j = 0; j < kChains; ++j) asm volatile("" : IKPY_VECTOR(a[j]));

void fma_chains() {
    Vec b = Vec{} + 0.5f;
    const Vec c = Vec{} + 0.25f;
    IKPY_CHAINS(Vec, Vec{}, b, a[j] * b + c)
}

#if defined(__AVX512VNNI__)
constexpr double kDotOperations = 128.0;
void dot_chains() {
    __m512i b = _mm512_set1_epi8(3);
    IKPY_CHAINS(__m512i, _mm512_setzero_si512(), b, _mm512_dpbusd_epi32(a[j], b, b))
}
#elif defined(__AVXVNNI__)
constexpr double kDotOperations = 64.0;
void dot_chains() {
    __m256i b = _mm256_set1_epi8(3);
    IKPY_CHAINS(__m256i, _mm256_setzero_si256(), b, _mm256_dpbusd_avx_epi32(a[j], b, b))
}
#elif defined(__AVX2__)
constexpr double kDotOperations = 64.0;
inline __m256i dot_step(__m256i a, __m256i b, __m256i ones) {
    a = _mm256_add_epi32(b, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
    asm volatile("" : "+x"(a));
    return a;
}
void dot_chains() {
    __m256i b = _mm256_set1_epi8(3);
    const __m256i ones = _mm256_set1_epi16(1);
    // The products of equal operands would be computed once for all chains: each takes its own sum as
    // operand. Steps that the compiler mixes need more registers than there are (two thirds of the rate).
    IKPY_CHAINS(__m256i, _mm256_setzero_si256(), b, dot_step(a[j], b, ones))
}
#else
constexpr double kDotOperations = 32.0;
void dot_chains() {
    int8_t a[16], b[16];
    std::memset(a, 3, sizeof(a));
    std::memset(b, 5, sizeof(b));
    int32_t sums[kChains] = {};
    for (int64_t i = 0; i < kSteps; ++i)
        for (int j = 0; j < kChains; ++j) {
            asm volatile("" : "+m"(a), "+m"(b));
            int32_t s = 0;
            for (int k = 0; k < 16; ++k) s += a[k] * b[k];
            sums[j] += s;
        }
    asm volatile("" ::"m"(sums));
}
#endif

#if defined(__AVX512F__)
__attribute__((target("avx512bf16"))) void bf16_chains() {
    __m512i bits = _mm512_set1_epi16(0x3F80);
    IKPY_CHAINS(__m512, _mm512_setzero_ps(), bits, _mm512_dpbf16_ps(a[j], (__m512bh)bits, (__m512bh)bits))
}
#endif

#if defined(IKPY_AMX)
constexpr double kTileOperations = 4.0 * kTileHeight * kTileHeight * kTileDepth * 2;
IKPY_AMX void tile_chains() {
    load_tile_config(kTileHeight);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t i = 0; i < kSteps; ++i) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    release_tiles();
}
#endif

uint64_t sum_words(const uint64_t* p, int64_t n) {
    uint64_t s = 0;
    for (int64_t i = 0; i < n; ++i) s ^= p[i];
    return s;
}

// Reads [p, p + n) as `streams` interleaved sequential streams, with prefetches `ahead` words before use.
uint64_t read_streams(const uint64_t* p, int64_t n, int streams, int64_t ahead) {
    constexpr int64_t kPiece = 64;  // words; 512 bytes per stream and turn
    const int64_t part = n / streams / kPiece * kPiece;
    uint64_t s = 0;
    for (int64_t i = 0; i < part; i += kPiece)
        for (int j = 0; j < streams; ++j) {
            const uint64_t* q = p + j * part + i;
            if (ahead > 0)
                for (int64_t w = 0; w < kPiece; w += 8) __builtin_prefetch(q + ahead + w);
            s ^= sum_words(q, kPiece);
        }
    return s;
}

}  // namespace

// More than the last-level cache holds: servers have some of hundreds of MiB, from which 256 MiB would be
// read nearly twice as fast as from memory.
int64_t uncached_bytes() {
    int64_t cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    cache = std::max<int64_t>(0, sysconf(_SC_LEVEL3_CACHE_SIZE));
#endif
    return std::clamp<int64_t>(4 * cache, int64_t{256} << 20, int64_t{2} << 30) / kHugePage * kHugePage;
}

double ceiling_int8_dot(int n_threads) {
    return best_rate(n_threads, kDotOperations * kChains * kSteps, dot_chains);
}

double ceiling_bf16_dot(int n_threads) {
#if defined(__AVX512F__)
    if (__builtin_cpu_supports("avx512bf16"))
        return best_rate(n_threads, 64.0 * kChains * kSteps, bf16_chains);
#endif
    return 0.0;
}

double ceiling_amx_bf16([[maybe_unused]] int n_threads) {
#if defined(IKPY_AMX)
    if (has_amx()) return best_rate(n_threads, kTileOperations * kSteps, tile_chains);
#endif
    return 0.0;
}

double ceiling_fp32_fma(int n_threads) {
    return best_rate(n_threads, 2.0 * kFloats * kChains * kSteps, fma_chains);
}

double ceiling_read_bandwidth(int n_threads) {
    const int64_t words = uncached_bytes() / 8;
    std::unique_ptr<uint64_t, decltype(&std::free)> buffer(
        static_cast<uint64_t*>(std::aligned_alloc(kHugePage, words * sizeof(uint64_t))), &std::free);
    if (!buffer) return 0.0;
    uint64_t* data = buffer.get();
#if defined(__linux__)
    madvise(data, words * sizeof(uint64_t), MADV_HUGEPAGE);  // as models that are read into memory
#endif
    const int64_t part = words / n_threads / 4096 * 4096;
    const int repeats = static_cast<int>(std::max<int64_t>(3, kRepeats * (int64_t{32} << 20) / words));
#pragma omp parallel num_threads(n_threads)
    {
        const int64_t first = omp_get_thread_num() * part;
        for (int64_t i = 0; i < part; ++i) data[first + i] = static_cast<uint64_t>(i);
    }
    double best = 0.0;
    for (int streams : {1, 4, 8, 16})
        for (int64_t ahead : {0, 256, 1024})
            best = std::max(best, best_rate(
                                      n_threads, static_cast<double>(part) * sizeof(uint64_t),
                                      [&] {
                                          const uint64_t s = read_streams(data + omp_get_thread_num() * part,
                                                                          part, streams, ahead);
                                          asm volatile("" ::"r"(s));
                                      },
                                      repeats));
    return best;
}

}  // namespace ikpy
