// Records shared with Python: ikpy/graph/plan.py mirrors them as numpy structured dtypes.
#pragma once
#include <cstddef>
#include <cstdint>

namespace ikpy {

enum TypeId : int32_t {
    kF32 = 0,
    kF16 = 1,
    kQ8_0 = 8,
    kBF16 = 30,
};

// A strided view; ne[0] is contiguous unless an op says otherwise. nb are byte strides of each dimension;
// for quantized types nb[0] is unused and nb[1] is the row size.
struct Tensor {
    uint8_t* data;
    int32_t type;
    int32_t unused;
    int64_t ne[4];
    int64_t nb[4];
};
static_assert(sizeof(Tensor) == 80, "mirrored in Python");

constexpr int kMaxSources = 11;
constexpr int kMaxIntParams = 16;
constexpr int kMaxFloatParams = 12;

struct Op {
    int32_t kind;
    int32_t dst;                // index into the plan's tensors
    int32_t src[kMaxSources];   // -1 = absent
    int32_t ip[kMaxIntParams];  // meaning per op, see ops.hpp
    float fp[kMaxFloatParams];
    int32_t above, upto;  // runs only where above < n_kv <= upto; 0: no limit
};
static_assert(sizeof(Op) == 172, "mirrored in Python");

class ExpertReader;

// What changes between two runs of one plan.
struct Runtime {
    int64_t n_kv;                    // attended cache cells, padded
    ExpertReader* reader = nullptr;  // is told which experts' weights come next; null: nobody is
};

template <typename T>
inline T* row(const Tensor& t, int64_t i1, int64_t i2 = 0, int64_t i3 = 0) {
    return reinterpret_cast<T*>(t.data + i1 * t.nb[1] + i2 * t.nb[2] + i3 * t.nb[3]);
}

inline int64_t n_rows(const Tensor& t) { return t.ne[1] * t.ne[2] * t.ne[3]; }

}  // namespace ikpy
