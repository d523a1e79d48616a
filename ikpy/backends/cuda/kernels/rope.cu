// Rotary position embedding: a table of cosines and sines per batch, then rotations.
#include "common.cuh"

using namespace ikpy::cuda;

namespace {

// Sections of M-RoPE: none (0), one behind the other (1), or interleaved (2), and how many pairs each has.
struct Sections {
    int kind, time, height, width, fourth;

    // Which of a token's four positions turns pair i.
    __device__ __forceinline__ int part(int i) const {
        if (kind == 1) {
            const int at = i % (time + height + width + fourth);
            return at < time ? 0 : at < time + height ? 1 : at < time + height + width ? 2 : 3;
        }
        if (i % 3 == 1 && i < 3 * height) return 1;
        return i % 3 == 2 && i < 3 * width ? 2 : 0;
    }
};

}  // namespace

// dst f32 [n, T] of (cos, sin) pairs; one block per token, one thread per pair. theta_scale = base^(-2/n);
// inverse: negative sines. pos has four positions per token where there are sections.
// Powers are taken by repeated multiplication, as in the CPU backend: long contexts show the difference.
IKPY_KERNEL rope_table(View dst, const int* pos, const float* factors, float theta_scale, float freq_scale,
                       float ext, float magnitude, float low, float high, int inverse, int kind, int time,
                       int height, int width, int fourth) {
    const int t = blockIdx.x, n = dst.ne[0];
    const Sections sections{kind, time, height, width, fourth};
    float* out = dst.row<float>(t);
    for (int i = threadIdx.x; i < n / 2; i += blockDim.x) {
        const int part = kind ? sections.part(i) : 0;
        float theta = static_cast<float>(pos[kind ? 4 * t + part : t]);
        for (int j = 0; j < i; ++j) theta *= theta_scale;
        const float extrapolated = factors ? theta / factors[i] : theta;
        float angle = freq_scale * extrapolated;
        if (ext != 0) {
            const float ramp = (i - low) / fmaxf(0.001f, high - low);
            const float mix = (1.0f - fminf(1.0f, fmaxf(0.0f, ramp))) * ext;
            angle = angle * (1.0f - mix) + extrapolated * mix;
        }
        out[2 * i] = cosf(angle) * magnitude;
        out[2 * i + 1] = sinf(angle) * (inverse ? -magnitude : magnitude);
    }
}
IKPY_EXPORT(rope_table);

namespace {

// One block per (head, token).
__device__ __forceinline__ void rotate(const View& dst, const View& src, const View& table, int n, int neox,
                                       int offset) {
    const int heads = dst.ne[1], r = blockIdx.x, h = r % heads, t = r / heads;
    if (t >= dst.ne[2]) return;
    const float* x = src.row<const float>(h, t);
    float* y = dst.row<float>(h, t);
    const float* cs = table.row<const float>(t);
    if (x != y) {
        for (int i = threadIdx.x; i < dst.ne[0]; i += blockDim.x)
            if (i < offset || i >= offset + n) y[i] = x[i];
    }
    const int half = n / 2;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const int p = offset + (neox ? i : 2 * i), q = neox ? p + half : p + 1;
        const float a = x[p], b = x[q], c = cs[2 * i], s = cs[2 * i + 1];
        y[p] = a * c - b * s;
        y[q] = a * s + b * c;
    }
}

}  // namespace

// Rotates n elements from `offset` of every head of src [d, H, T]; other elements are copied when dst is
// another tensor.
IKPY_KERNEL rope(View dst, View src, View table, int n, int neox, int offset) {
    rotate(dst, src, table, n, neox, offset);
}
IKPY_EXPORT(rope);

// Two launches of rope at once (launch/merging.py); blockIdx.y says which.
IKPY_KERNEL rope_two(View dst0, View src0, View table0, int n0, int neox0, int offset0, View dst1, View src1,
                     View table1, int n1, int neox1, int offset1) {
    if (blockIdx.y == 0) {
        rotate(dst0, src0, table0, n0, neox0, offset0);
    } else {
        rotate(dst1, src1, table1, n1, neox1, offset1);
    }
}
IKPY_EXPORT(rope_two);
