// Which cached cells each query may see: f16 mask rows of 0 and -inf, and the visible
// range.
#include <algorithm>

#include "ikpy/ops.hpp"

namespace ikpy {
namespace {

constexpr uint16_t kMinusInfinity = 0xfc00;  // f16

// Cells with lowest <= position <= highest are visible, if they carry the sequence.
struct Visible {
    int32_t lowest, highest;
    uint64_t sequence;
};

// until: the last position that is visible behind the token's own.
Visible visible_to(const Op& op, int32_t pos, int32_t seq, int32_t until) {
    Visible v{0, INT32_MAX, 0};
    if (seq >= 0 && seq < 64) v.sequence = uint64_t(1) << seq;
    if (op.ip[2]) v.highest = pos;
    const int32_t n_swa = op.ip[1];
    if (op.ip[0] == 1 && n_swa > 0 && pos >= n_swa) v.lowest = pos - n_swa + 1;
    if (op.ip[0] == 2 && n_swa > 0) v.lowest = pos - pos % n_swa;
    if (op.ip[0] == 3 && n_swa > 0) {
        v.lowest = std::max(0, pos - n_swa / 2);
        v.highest = int32_t(std::min<int64_t>(v.highest, int64_t(pos) + n_swa / 2));
    }
    v.highest = std::max(v.highest, until);
    return v;
}

// What is left of it on one side of the end of the encoder's text: all positions before it (side 1), or those
// from it on (2).
void keep_side(Visible& v, int32_t side, int32_t end) {
    if (side == 1) {
        v.lowest = 0;
        v.highest = end - 1;
    } else {
        v.lowest = std::max(v.lowest, end);
    }
}

constexpr int64_t kBlock = 64;    // cells that sequences fill for themselves while there are empty ones
constexpr int64_t kChunk = 2048;  // cells that all tokens meet before the next ones: 24 KiB

// Sets the mask of n cells; whether any is visible.
bool mask_cells(const Visible& v, const int32_t* cell_pos, const uint64_t* cell_seq, int64_t n,
                uint16_t* mask) {
    uint16_t all = kMinusInfinity;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
        const bool see =
            (cell_pos[i] >= v.lowest) & (cell_pos[i] <= v.highest) & ((cell_seq[i] & v.sequence) != 0);
        mask[i] = see ? uint16_t(0) : kMinusInfinity;
        all &= mask[i];
    }
    return all == 0;
}

// Widens a range by the zeros of n cells from `cell` on, of which there are some. An empty range ends at 0.
void widen_range(const uint16_t* mask, int64_t cell, int64_t n, int32_t* range) {
    int64_t first = 0, last = n;
    while (mask[first] != 0) ++first;
    while (mask[last - 1] != 0) --last;
    if (range[1] == 0) range[0] = int32_t(cell + first);
    range[1] = int32_t(cell + last);
}

// At most kChunk cells, with the sequences that each block holds; first: the place of the first one in masks.
struct Chunk {
    const int32_t* pos;
    const uint64_t* seq;
    int64_t first, n;
    uint64_t blocks[kChunk / kBlock];

    Chunk(const int32_t* cell_pos, const uint64_t* cell_seq, int64_t first_cell, int64_t n_cells)
        : pos(cell_pos), seq(cell_seq), first(first_cell), n(n_cells), blocks() {
        for (int64_t i = 0; i < n; ++i) blocks[i / kBlock] |= seq[i];
    }

    // The part of a token's mask that belongs to these cells. Blocks of other sequences are not looked at.
    void mask_token(const Visible& v, uint16_t* mask, int32_t* range) const {
        for (int64_t c = 0; c < n; c += kBlock) {
            const int64_t size = std::min(kBlock, n - c);
            uint16_t* const part = mask + first + c;
            if (!(blocks[c / kBlock] & v.sequence)) {
                std::fill_n(part, size, kMinusInfinity);
            } else if (mask_cells(v, pos + c, seq + c, size, part)) {
                widen_range(part, first + c, size, range);
            }
        }
    }
};

// Tokens of a thread, and what they share.
struct Tokens {
    const Tensor &mask, &ranges;
    const int32_t *pos, *seq, *until, *turned;
    int64_t begin, end;
};

// The part of the masks that belongs to n cells, whose places begin at `first`.
void mask_all(const Op& op, const Tokens& tokens, const Tensor& cell_pos, const Tensor& cell_seq, int64_t n,
              int64_t first, bool windowed) {
    const int32_t* pos = row<int32_t>(cell_pos, 0);
    const uint64_t* seq = row<uint64_t>(cell_seq, 0);
    for (int64_t c = 0; c < n; c += kChunk) {
        const Chunk chunk(pos + c, seq + c, first + c, std::min(kChunk, n - c));
        for (int64_t t = tokens.begin; t < tokens.end; ++t) {
            const int32_t pos = tokens.pos[t];
            Visible v = visible_to(op, pos, tokens.seq[t], tokens.until ? tokens.until[t] : pos);
            if (tokens.turned) keep_side(v, op.ip[4], tokens.turned[t] - pos);
            if (!windowed) v.lowest = 0;  // a window to both sides has no further cells
            chunk.mask_token(v, row<uint16_t>(tokens.mask, t), row<int32_t>(tokens.ranges, t));
        }
    }
}

}  // namespace

// ip: window kind, window size, causal, whether all cells count (a window's own cells) or the first n_kv.
// src 5, 6: further cells behind these, to which no window applies. src 7: i32 [T], the last position
// that each token sees, its own or one behind it. src 8: i32 [T], positions of the tokens plus the length of
// the encoder's text before them; ip[4]: whether that is seen (1), or what follows it (2).
void op_kq_mask(const ThreadContext& ctx, const Op& op, const Tensor* tensors, const Runtime& runtime) {
    Tokens tokens{tensors[op.dst],
                  tensors[op.src[4]],
                  row<int32_t>(tensors[op.src[2]], 0),
                  row<int32_t>(tensors[op.src[3]], 0),
                  op.src[7] < 0 ? nullptr : row<int32_t>(tensors[op.src[7]], 0),
                  op.src[8] < 0 ? nullptr : row<int32_t>(tensors[op.src[8]], 0),
                  0,
                  0};
    split_range(tokens.mask.ne[1], ctx.ith, ctx.nth, 1, &tokens.begin, &tokens.end);
    if (tokens.begin == tokens.end) return;
    for (int64_t t = tokens.begin; t < tokens.end; ++t) std::fill_n(row<int32_t>(tokens.ranges, t), 2, 0);
    const int64_t n_cells = tensors[op.src[0]].ne[0];
    const int64_t n = op.ip[3] ? n_cells : std::min(runtime.n_kv, n_cells);
    mask_all(op, tokens, tensors[op.src[0]], tensors[op.src[1]], n, 0, true);
    if (op.src[5] < 0) return;
    mask_all(op, tokens, tensors[op.src[5]], tensors[op.src[6]], tensors[op.src[5]].ne[0], n_cells, false);
}

}  // namespace ikpy
