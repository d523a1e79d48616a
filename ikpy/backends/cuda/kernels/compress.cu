// Compressed cache entries: weighted means over the cells of a stretch of positions.
#include "common.cuh"

using namespace ikpy::cuda;

// What says which cells an entry is made of.
struct Stretches {
    const int* cell_pos;
    const unsigned long long* cell_seq;
    const int* pos;
    const int* seq;
    const int* ends;
    int n_cells, n_tokens, ratio;
};

namespace {

// The cell of each of n positions up to that of the entry's token, -1 where there is none. By all threads of
// a block; ends with a barrier.
__device__ __forceinline__ void find_cells(const Stretches& s, int entry, int n, int* cells) {
    for (int o = threadIdx.x; o < n; o += blockDim.x) cells[o] = -1;
    __syncthreads();
    const int t = s.ends[entry];
    const int sequence = t >= 0 && t < s.n_tokens ? s.seq[t] : -1;
    if (sequence >= 0 && sequence < 64) {
        const int last = s.pos[t];
        for (int c = threadIdx.x; c < s.n_cells; c += blockDim.x) {
            const int p = s.cell_pos[c];
            // Below 2^31, as neither is negative.
            if (p >= 0 && p <= last && last - p < n && (s.cell_seq[c] >> sequence & 1))
                cells[n - 1 - (last - p)] = c;
        }
    }
    __syncthreads();
}

}  // namespace

// Entries [size, E] from values and gates [w, 1, n_cells] and bias [w, ratio]: means of the cells' values,
// weighted by the softmax of gate + bias, where the stretch before counts as well if w is twice the size.
// grid (entries, blocks of elements).
IKPY_KERNEL compress_cells(View dst, View values, View gates, View bias, Stretches s) {
    IKPY_DYNAMIC_SHARED(memory);
    int* const cells = reinterpret_cast<int*>(memory);
    const int entry = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x, size = dst.ne[0];
    const bool overlaps = values.ne[0] > size;
    const int n = overlaps ? 2 * s.ratio : s.ratio;
    find_cells(s, entry, n, cells);
    if (i >= size) return;
    // The stretch before has the first halves of its cells, the stretch itself the second ones.
    const auto column = [&](int o) { return overlaps && o >= s.ratio ? size + i : i; };
    const auto gate = [&](int o) {
        return gates.row<const float>(0, cells[o])[column(o)] + bias.row<const float>(o % s.ratio)[column(o)];
    };
    float top = -INFINITY;
    bool any = false;
    for (int o = 0; o < n; ++o) {
        if (cells[o] < 0) continue;
        top = fmaxf(top, gate(o));
        any = true;
    }
    float sum = 0, mean = 0;
    for (int o = 0; o < n; ++o) {
        if (cells[o] < 0) continue;
        const float weight = expf(gate(o) - top);
        sum += weight;
        mean += weight * values.row<const float>(0, cells[o])[column(o)];
    }
    dst.row<float>(entry)[i] = any ? mean / sum : 0.0f;
}
IKPY_EXPORT(compress_cells);
