// Kernels of a quantized weight type, written once over its unpacker.
#pragma once
#include "matmul_mma.cuh"
#include "matvec.cuh"
#include "weight_rows.cuh"

// The kernels of a type; name as in the table of tensor types, in lower case.
#define IKPY_WEIGHT_TYPE(name, U)                                                                     \
    IKPY_KERNEL rows_##name(ikpy::cuda::View dst, ikpy::cuda::View src, const int* ids, int out_type, \
                            const int* runtime) {                                                     \
        ikpy::cuda::rows_body<ikpy::cuda::U>(dst, src, ids, out_type, runtime);                       \
    }                                                                                                 \
    IKPY_EXPORT(rows_##name);                                                                         \
    IKPY_KERNEL __launch_bounds__(128, (ikpy::cuda::kVectorBlocks<ikpy::cuda::U, 1>))                 \
        matvec1_##name(const IKPY_PARAMETER ikpy::cuda::Products ps) {                                \
        ikpy::cuda::matvec_body<ikpy::cuda::U, 1>(ps);                                                \
    }                                                                                                 \
    IKPY_EXPORT(matvec1_##name);                                                                      \
    IKPY_KERNEL __launch_bounds__(128, (ikpy::cuda::kVectorBlocks<ikpy::cuda::U, 4>))                 \
        matvec4_##name(const IKPY_PARAMETER ikpy::cuda::Products ps) {                                \
        ikpy::cuda::matvec_body<ikpy::cuda::U, 4>(ps);                                                \
    }                                                                                                 \
    IKPY_EXPORT(matvec4_##name);                                                                      \
    IKPY_KERNEL __launch_bounds__(256, 2) matmul_##name(ikpy::cuda::Product p) {                      \
        ikpy::cuda::matmul_body<ikpy::cuda::U>(p);                                                    \
    }                                                                                                 \
    IKPY_EXPORT(matmul_##name)
