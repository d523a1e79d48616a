// Where CPUs with the same instructions differ by their makers (is_for_amd of ops.hpp).
#pragma once
#include <cstdint>

namespace ikpy {

// Bytes from the weights that are being multiplied to those that are asked for.
struct PrefetchDistances {
    int64_t into_l2, into_l1;
    int64_t beside_into_l1;  // of rows that are read side by side
    int64_t of_groups;       // into L2, of kernels that ask for nothing else
    bool from_pages;         // instead of all of these (prefetch_from_pages of weight_prefetch.hpp)
};

// By the processor. Of products of one token of Llama 3.2 1B on 2 threads of an Intel Xeon (33 GB/s can be
// read), 8 KiB ahead into L1 only against into L2 first: Q8_0 28.8 and 30.8 GB/s, Q4_K 26.9 and 29.4. Other
// distances into L2 lose 2 to 10 % there. AMD's want them to be longer, Zen 5 lines in L1 hardly before they
// are needed (docs/performance-kernels.md).
const PrefetchDistances& prefetch_distances();

// What a token meets at a time of K, and then of V, while the next cells are fetched: up to so many bytes,
// but so many cells at least.
struct AttentionSteps {
    int64_t bytes, fewest_cells;
};

// With so many query rows per K head. Intel's CPUs read short steps faster, 16 cells of 2 KiB at 15 GB/s
// where 64 are at 10 (17 can be read), Zen 5 long ones, 20 and 34 of 41 with four rows, but of single rows,
// which take no longer than memory does, steps that fit into L1: 28 and 20.
AttentionSteps attention_steps(int64_t n_rows);
// Whether the next cells are fetched into L1, or what is left of it, instead of L2. On Zen 5 four rows of f16
// read 34 instead of 30 GB/s, rows of 64 elements 30 instead of 24, single rows of q8_0 25 instead of 22; on
// Intel's CPUs such prefetches would hold its few fill buffers.
bool fetches_cells_into_l1();

// Whether a gather of eight quadwords is faster than computing them. Zen 4 takes 10.7 cycles for it and 21
// for a gather of 16 dwords, Intel's CPUs 8 for the latter, but up to Ice Lake 30 (has_slow_gathers of
// ops.hpp).
bool has_fast_gathers();
// Whether byte and word permutations over two registers are single operations, as on Zen 4.
bool has_fast_pair_permutes();
// Whether 16 or 32 bytes are loaded to all of a vector of 64 as fast as 64 bytes. Zen 5 permutes them.
bool has_free_broadcasts();
// Whether the CPU multiplies pairs of bf16 numbers as fast as floats, as Zen 4 does; Intel's CPUs take four
// times as long.
bool has_fast_bf16_dots();

}  // namespace ikpy
