// Which products of the tile unit (AMX) this process may use.
#include "ikpy/ops.hpp"

#if defined(__AVX512F__) && defined(__linux__)

#include <cpuid.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "kernels/simd/amx_halves.hpp"

namespace ikpy {
namespace {

bool wanted(const char* value) {
    const char* found = std::getenv("IKPY_AMX");
    return found && std::strcmp(found, value) == 0;
}

// Linux hands out the tile registers on request, once for the whole process.
bool request_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    constexpr unsigned kVbmi = 1u << 1, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if ((c & kVbmi) == 0 || (d & kAmxBf16) == 0 || (d & kAmxTile) == 0) return false;
    return !wanted("0") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool lists_halves() {
    constexpr unsigned kAmxFp16 = 1u << 21;
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAmxFp16) != 0;
}

IKPY_AMX void multiply_halves(const uint16_t* left, const uint16_t* right, float* sums) {
    load_tile_config(kTileHeight);
    _tile_zero(0);
    _tile_loadd(4, left, 64);
    _tile_loadd(5, right, 64);
    tile_dpfp16ps<0, 4, 5>();
    _tile_stored(0, sums, 64);
    asm volatile("" ::: "memory");  // tile stores do not tell the compiler what they write
}

// The right values are subnormal halves; all sums are exact.
bool multiplies_halves() {
    alignas(64) uint16_t left[kTileValues], right[kTileValues];
    alignas(64) float sums[kTileHeight * kTileHeight] = {};
    const auto left_at = [](int i, int k) { return 1 + (i ^ k); };
    const auto right_at = [](int k, int j) { return 7 * k + j; };
    for (int i = 0; i < kTileHeight; ++i)
        for (int k = 0; k < kTileDepth; ++k) {
            left[i * kTileDepth + k] = f32_to_f16(static_cast<float>(left_at(i, k)));
            right[k / 2 * kTileDepth + 2 * i + k % 2] = static_cast<uint16_t>(right_at(k, i));
        }
    multiply_halves(left, right, sums);
    for (int i = 0; i < kTileHeight; ++i)
        for (int j = 0; j < kTileHeight; ++j) {
            int sum = 0;
            for (int k = 0; k < kTileDepth; ++k) sum += left_at(i, k) * right_at(k, j);
            if (sums[i * kTileHeight + j] != static_cast<float>(sum) * 0x1p-24f) return false;
        }
    return true;
}

sigjmp_buf refused;

void leave_trial(int) { siglongjmp(refused, 1); }

// Whether the instruction works although the CPU does not list it: hypervisors hide bits that they do not
// know. A CPU without it raises an illegal instruction.
bool halves_work() {
    struct sigaction trial = {}, before;
    trial.sa_handler = leave_trial;
    sigemptyset(&trial.sa_mask);
    if (sigaction(SIGILL, &trial, &before) != 0) return false;
    bool works = false;
    if (sigsetjmp(refused, 1) == 0) works = multiplies_halves();
    release_tiles();
    sigaction(SIGILL, &before, nullptr);
    return works;
}

}  // namespace

bool has_amx() {
    static const bool available = request_tiles();
    return available;
}

bool has_amx_halves() {
    static const bool available =
        has_amx() && !wanted("bf16") && (lists_halves() || (wanted("fp16") && halves_work()));
    return available;
}

bool rounds_f16_activations() {
    static const bool asked = has_amx_halves() && wanted("fp16");
    return asked;
}

}  // namespace ikpy

#else

namespace ikpy {
bool has_amx() { return false; }
bool has_amx_halves() { return false; }
bool rounds_f16_activations() { return false; }
}  // namespace ikpy

#endif
