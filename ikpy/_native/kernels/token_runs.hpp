// Which tokens of a batch continue each recurrent state, and which states are copied on the way.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ikpy/tensor.hpp"

namespace ikpy {

// Tokens of every state slot as linked lists in the order of the batch. All threads make their own.
class TokenRuns {
  public:
    static size_t nbytes(int64_t n_slots, int64_t n_tokens) {
        return (2 * n_slots + n_tokens) * sizeof(int32_t);
    }

    // slots: of n_tokens tokens, each 0 .. n_slots-1; memory: nbytes() of them.
    TokenRuns(const int32_t* slots, int64_t n_slots, int64_t n_tokens, uint8_t* memory)
        : first_(reinterpret_cast<int32_t*>(memory)), used_(first_ + n_slots), next_(used_ + n_slots) {
        std::fill_n(first_, n_slots, -1);
        for (int64_t t = n_tokens - 1; t >= 0; --t) {
            int32_t& head = first_[slots[t]];
            if (head < 0) used_[n_used_++] = slots[t];
            next_[t] = head;
            head = int32_t(t);
        }
    }

    // Number of slots that have tokens, and which they are.
    int64_t size() const { return n_used_; }
    int32_t slot(int64_t i) const { return used_[i]; }
    // Tokens of a slot: the first one, and what follows each, -1 behind the last.
    int32_t first(int32_t slot) const { return first_[slot]; }
    int32_t next(int32_t token) const { return next_[token]; }
    bool has_at_most(int32_t slot, int64_t n) const {
        int32_t t = first_[slot];
        for (; t >= 0 && n > 0; --n) t = next_[t];
        return t < 0;
    }

  private:
    int32_t *first_, *used_, *next_;
    int64_t n_used_ = 0;
};

// Slots that get copies of the states behind tokens: states like those of the op, -1 = none; null where the
// op keeps no copies.
struct KeptStates {
    const Tensor* states = nullptr;
    const int32_t* slots = nullptr;

    // Sources `first` and `first` + 1 of an op, if there are any.
    KeptStates(const Op& op, const Tensor* ts, int first) {
        if (op.src[first] < 0) return;
        states = &ts[op.src[first]];
        slots = row<const int32_t>(ts[op.src[first + 1]], 0);
    }
    int32_t behind(int64_t token) const { return slots ? slots[token] : -1; }
};

}  // namespace ikpy
