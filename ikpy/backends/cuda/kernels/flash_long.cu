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

// Sums of the parts of a split, one block per (head, token).
IKPY_KERNEL flash_combine(Attention a) {
    const int head = blockIdx.x, token = blockIdx.y, dv = a.dst.ne[0];
    const long long part = static_cast<long long>(a.q.ne[2]) * a.q.ne[1] * (dv + 2);
    const float* rows = a.partials + (static_cast<long long>(token) * a.q.ne[1] + head) * (dv + 2);
    float top = kNoMaximum, sum = 0.0f;
    for (int i = 0; i < a.n_parts; ++i) top = fmaxf(top, rows[i * part + dv]);
    for (int i = 0; i < a.n_parts; ++i) sum += exp2f(rows[i * part + dv] - top) * rows[i * part + dv + 1];
    const float norm = normalizer(a, head, top, sum);
    float* out = a.dst.row<float>(head, token);
    for (int d = threadIdx.x; d < dv; d += blockDim.x) {
        float v = 0.0f;
        for (int i = 0; i < a.n_parts; ++i) v += exp2f(rows[i * part + dv] - top) * rows[i * part + d];
        out[d] = norm * v;
    }
}
IKPY_EXPORT(flash_combine);
