// Flash attention for long heads: 256, and those of latent attention, 192 / 128 with expanded keys and 576 /
// 512 on the cached latents, where values are a part of the key rows. The tiles of 576 / 512 fit the shared
// memory of every device (62 KiB for 16 rows, 83 KiB for 32 rows; the latter from sm_80 on).
#include "flash.cuh"

using namespace ikpy::cuda;

IKPY_FLASH(flash16_256_256, 256, 256, 1, 4, 32, false, 4);
IKPY_FLASH(flash64_256_256, 256, 256, 4, 1, 32, false, 2);
IKPY_FLASH(flash16_192_128, 192, 128, 1, 4, 32, false, 4);
IKPY_FLASH(flash64_192_128, 192, 128, 4, 1, 32, false, 2);
IKPY_FLASH(flash16_576_512, 576, 512, 1, 4, 32, true, 3);
IKPY_FLASH(flash32_576_512, 576, 512, 2, 4, 32, true, 2);

namespace {

// Mirrored in launch/attention.py.
constexpr int kMaxParts = 256, kCombineThreads = 256, kCombineColumns = 128;
constexpr int kColumnPairs = kCombineColumns / 2, kPartGroups = kCombineThreads / kColumnPairs;
static_assert(kMaxParts <= kCombineThreads);

}  // namespace

// Joins the parts of a split. grid (heads, tokens, blocks of columns). One thread looks at one part; then
// groups of threads take parts in turn, two columns per thread, so that dozens of loads are under way. Parts
// that had no cells, as there are while a context is short, are the last ones and left out.
IKPY_KERNEL __launch_bounds__(kCombineThreads) flash_combine(Attention a) {
    __shared__ float weights[kCombineThreads];
    __shared__ float2 sums[kPartGroups][kColumnPairs];
    const int head = blockIdx.x, token = blockIdx.y, thread = threadIdx.x, dv = a.dst.ne[0];
    const long long stride = static_cast<long long>(a.q.ne[2]) * a.q.ne[1] * (dv + 2);
    const float* rows = a.partials + (static_cast<long long>(token) * a.q.ne[1] + head) * (dv + 2);
    const bool is_part = thread < a.n_parts;
    const float maximum = is_part ? rows[thread * stride + dv] : kNoMaximum;
    const float denominator = is_part ? rows[thread * stride + dv + 1] : 0.0f;
    const float top = block_max(maximum), weight = exp2f(maximum - top);
    weights[thread] = weight;
    const float norm = normalizer(a, head, top, block_sum(weight * denominator));
    const int n_parts = static_cast<int>(block_max(denominator != 0.0f ? thread + 1.0f : 0.0f));

    const int pair = thread % kColumnPairs, group = thread / kColumnPairs,
              d = blockIdx.z * kCombineColumns + 2 * pair;
    float2 sum{0.0f, 0.0f};
    if (d < dv) {
#pragma unroll 8
        for (int part = group; part < n_parts; part += kPartGroups) {
            const float2 v = *reinterpret_cast<const float2*>(rows + part * stride + d);
            sum.x += weights[part] * v.x;
            sum.y += weights[part] * v.y;
        }
    }
    sums[group][pair] = sum;
    __syncthreads();
    if (group > 0 || d >= dv) return;
#pragma unroll
    for (int g = 1; g < kPartGroups; ++g) {
        sum.x += sums[g][pair].x;
        sum.y += sums[g][pair].y;
    }
    *reinterpret_cast<float2*>(a.dst.row<float>(head, token) + d) = float2{norm * sum.x, norm * sum.y};
}
IKPY_EXPORT(flash_combine);
