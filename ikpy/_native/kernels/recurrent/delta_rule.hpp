// Gated delta rule (arXiv:2412.06464, arXiv:2510.26692): one token after the other on columns of a head's
// state.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/simd/simd_f32.hpp"

namespace ikpy {
namespace delta {

// A row of a tile is kColumns values of the state. Groups of kGroup tokens meet a row at once, which is
// loaded and stored once for them. Sums of a single token's products are kSums chains per vector: with fewer
// products per row than an FMA takes cycles, they would wait for each other. AVX2 has no registers for
// groups.
#if defined(__AVX512F__)
constexpr int kVectors = 2, kGroup = 4, kSums = 2;
#else
constexpr int kVectors = 4, kGroup = 1, kSums = 1;
#endif
constexpr int64_t kColumns = kVectors * simd::kLanes;

// What all columns of a head need of a token. The state is held as the rows of a tile times their decay since
// the tile was last brought up to date, so that a token costs three products per element: `keys` and
// `queries` are multiplied with that decay, `updates` divided by it.
struct Token {
    const float *keys, *queries, *updates;
    const float* decay;  // what rows are multiplied with before the update; null = none due
    const float* v;
    float* out;
    float beta;
    float qk;                                   // scale * q.k
    float keys_of[kGroup], queries_of[kGroup];  // products with the updates of those before it in its group
};

// Number of tokens that meet the tile together: the first Group ones if all but the last let it be, or one.
template <int Group>
inline int64_t group_size(const Token* tokens, int64_t n) {
    if (Group == 1 || n < Group) return 1;
    for (int g = 0; g + 1 < Group; ++g)
        if (tokens[g].decay) return 1;
    return Group;
}

// Sums of N tokens' products.
template <int N>
struct Sums {
    static constexpr int kChains = N == 1 ? kSums : 1;
    simd::V keys[N * kChains][kVectors], queries[N * kChains][kVectors];

    explicit Sums(const Token* tokens) {
        for (int g = 0; g < N; ++g) {
            k_[g] = tokens[g].keys;
            q_[g] = tokens[g].queries;
        }
        for (int s = 0; s < N * kChains; ++s)
            for (int j = 0; j < kVectors; ++j) keys[s][j] = queries[s][j] = simd::zero();
    }

    void add(int chain, int64_t i, const simd::V* row) {
        for (int g = 0; g < N; ++g) {
            const simd::V k = simd::set1(k_[g][i]), q = simd::set1(q_[g][i]);
            const int s = g * kChains + chain;
            for (int j = 0; j < kVectors; ++j) {
                keys[s][j] = simd::fma(k, row[j], keys[s][j]);
                queries[s][j] = simd::fma(q, row[j], queries[s][j]);
            }
        }
    }

    // The sums of token g.
    void total(int g, simd::V* key_sum, simd::V* query_sum) const {
        for (int j = 0; j < kVectors; ++j) {
            key_sum[j] = keys[g * kChains][j];
            query_sum[j] = queries[g * kChains][j];
            for (int s = 1; s < kChains; ++s) {
                key_sum[j] = simd::add(key_sum[j], keys[g * kChains + s][j]);
                query_sum[j] = simd::add(query_sum[j], queries[g * kChains + s][j]);
            }
        }
    }

  private:
    const float *k_[N], *q_[N];
};

// What N tokens change in every row; Decay: the last one of them multiplies it first. Copies, as the compiler
// takes stores of vectors for changes of anything that is not local.
template <int N, bool Decay>
class Update {
  public:
    Update(const Token* tokens, const simd::V (*change)[kVectors]) : decay_(tokens[N - 1].decay) {
        for (int g = 0; g < N; ++g) {
            factors_[g] = tokens[g].updates;
            std::copy_n(change[g], kVectors, change_[g]);
        }
    }

    void operator()(int64_t i, simd::V* row) const {
        for (int g = 0; g < N; ++g) {
            const simd::V factor = simd::set1(factors_[g][i]);
            for (int j = 0; j < kVectors; ++j) {
                if (Decay && g == N - 1) row[j] = simd::mul(row[j], simd::set1(decay_[i]));
                row[j] = simd::fma(factor, change_[g][j], row[j]);
            }
        }
    }

  private:
    simd::V change_[N][kVectors];
    const float* factors_[N];
    const float* const decay_;
};

// n columns of a head's state, n <= kColumns; rows are `stride` floats apart.
struct Columns {
    float* state;
    int64_t stride, n, first;
};

// Loads or stores what columns there are; the others are 0.
template <bool Whole>
inline void load_columns(const float* p, int64_t n, simd::V* v) {
    float padded[kColumns] = {};
    if (!Whole) p = static_cast<float*>(std::memcpy(padded, p, n * sizeof(float)));
    for (int j = 0; j < kVectors; ++j) v[j] = simd::load(p + j * simd::kLanes);
}

template <bool Whole>
inline void store_columns(float* p, int64_t n, const simd::V* v) {
    float padded[kColumns];
    float* const to = Whole ? p : padded;
    for (int j = 0; j < kVectors; ++j) simd::store(to + j * simd::kLanes, v[j]);
    if (!Whole) std::memcpy(p, padded, n * sizeof(float));
}

// Calls row(i, s) for every row, s being the chain of sums it belongs to.
template <int Chains, class Row>
inline void for_rows(int64_t dk, Row&& row) {
    int64_t i = 0;
    for (; i + Chains <= dk; i += Chains)
        for (int s = 0; s < Chains; ++s) row(i + s, s);
    if (Chains > 1)
        for (; i < dk; ++i) row(i, 0);
}

template <bool Whole, int Group>
class Tile {
  public:
    // tile: kColumns floats for each of dk rows.
    Tile(const Columns& columns, int64_t dk, float* tile) : c_(columns), dk_(dk), tile_(tile) {}

    // Tokens of one sequence in their order; the last one brings the state up to date.
    void run(const Token* tokens, int64_t n) {
        simd::V change[Group][kVectors];
        int64_t before = group_size<Group>(tokens, n);
        if (before == 1) {
            begin<1>(tokens, change);
        } else {
            begin<Group>(tokens, change);
        }
        for (int64_t t = before, size; t < n; t += size) {
            size = group_size<Group>(tokens + t, n - t);
            const Token* const last = tokens + t - before;
            if (before == 1) {
                step<1>(last, tokens + t, size, change);
            } else {
                step<Group>(last, tokens + t, size, change);
            }
            before = size;
        }
        if (before == 1) {
            finish<1>(tokens + n - 1, change);
        } else {
            finish<Group>(tokens + n - Group, change);
        }
    }

  private:
    using Change = simd::V (*)[kVectors];

    void load_row(int64_t i, simd::V* row) const {
        for (int j = 0; j < kVectors; ++j) row[j] = simd::load(tile_ + i * kColumns + j * simd::kLanes);
    }
    void store_row(int64_t i, const simd::V* row) {
        for (int j = 0; j < kVectors; ++j) simd::store(tile_ + i * kColumns + j * simd::kLanes, row[j]);
    }

    // Reads the state once, into the tile: lines of a row are `stride` apart and would push each other out of
    // the first cache.
    template <int N>
    void begin(const Token* tokens, Change change) {
        Sums<N> sums(tokens);
        for_rows<Sums<N>::kChains>(dk_, [&](int64_t i, int s) __attribute__((always_inline)) {
            simd::V row[kVectors];
            load_columns<Whole>(c_.state + i * c_.stride, c_.n, row);
            store_row(i, row);
            sums.add(s, i, row);
        });
        results<N>(tokens, sums, change);
    }

    template <int Before>
    void step(const Token* last, const Token* tokens, int64_t size, Change change) {
        const bool decay = last[Before - 1].decay;
        if (size == 1) {
            decay ? step<Before, true, 1>(last, tokens, change)
                  : step<Before, false, 1>(last, tokens, change);
        } else {
            decay ? step<Before, true, Group>(last, tokens, change)
                  : step<Before, false, Group>(last, tokens, change);
        }
    }

    template <int Before, bool Decay, int N>
    void step(const Token* last, const Token* tokens, Change change) {
        Sums<N> sums(tokens);
        const Update<Before, Decay> update(last, change);
        for_rows<Sums<N>::kChains>(dk_, [&](int64_t i, int s) __attribute__((always_inline)) {
            simd::V row[kVectors];
            load_row(i, row);
            update(i, row);
            store_row(i, row);
            sums.add(s, i, row);
        });
        results<N>(tokens, sums, change);
    }

    // change = beta (v - S^T k), out = S^T q + (q.k) change, where S is decayed but lacks the token. The sums
    // lack the other tokens of the group, too.
    template <int N>
    void results(const Token* tokens, const Sums<N>& sums, Change change) const {
        for (int g = 0; g < N; ++g) {
            const Token& token = tokens[g];
            simd::V v[kVectors], keys[kVectors], out[kVectors];
            load_columns<Whole>(token.v + c_.first, c_.n, v);
            sums.total(g, keys, out);
            for (int j = 0; j < kVectors; ++j) {
                for (int p = 0; p < g; ++p) {
                    keys[j] = simd::fma(simd::set1(token.keys_of[p]), change[p][j], keys[j]);
                    out[j] = simd::fma(simd::set1(token.queries_of[p]), change[p][j], out[j]);
                }
                change[g][j] = simd::mul(simd::set1(token.beta), simd::sub(v[j], keys[j]));
                out[j] = simd::fma(simd::set1(token.qk), change[g][j], out[j]);
            }
            store_columns<Whole>(token.out + c_.first, c_.n, out);
        }
    }

    template <int N>
    void finish(const Token* last, Change change) {
        const Update<N, true> update(last, change);
        for (int64_t i = 0; i < dk_; ++i) {
            simd::V row[kVectors];
            load_row(i, row);
            update(i, row);
            store_columns<Whole>(c_.state + i * c_.stride, c_.n, row);
        }
    }

    const Columns c_;
    const int64_t dk_;
    float* const tile_;
};

}  // namespace delta
}  // namespace ikpy
