#include "kernels/matmul/gemm_ahead_amx.hpp"

#include <algorithm>
#include <stdexcept>

#include "kernels/matmul/activations.hpp"
#include "kernels/matmul/tile_tokens.hpp"

namespace ikpy {

namespace {

constexpr int64_t kTokenBytes = int64_t{1} << 20;
constexpr int64_t kPass = 32;  // tokens whose sums are in registers

}  // namespace

int64_t ahead_tokens(int64_t n_in) {
    return std::clamp<int64_t>(kTokenBytes / (2 * round_up(n_in, 32)) / kPass * kPass, kPass, kMaxTokens);
}

int64_t ahead_kept_tokens(int64_t n_in) {
    const int64_t n = ahead_tokens(n_in);
    return n > 2 * kPass ? n : 0;
}

#if defined(__AVX512F__) && defined(__linux__)

namespace {

constexpr int64_t kChunkSteps = kAheadColumns / kTileDepth;
constexpr int64_t kStepValues = 2 * kTileValues;  // both halves
constexpr int64_t kChunkValues = kChunkSteps * kStepValues;
constexpr int64_t kSums = kTileHeight * kTileHeight;
constexpr int kStepFills =
    kBlockRows / kChunkSteps / kAheadRows;  // as many rows are unpacked as are multiplied

// The weights of some blocks, unpacked in order: chunks of a block, and rows of a chunk. A lone pass reads
// them once, so two chunks in the first-level cache do; several passes read them from the second level.
class Unpacked {
  public:
    Unpacked(AheadFn fill, const RowBlock* blocks, int n_blocks, bool once, uint16_t* memory)
        : fill_(fill),
          block_(blocks),
          n_chunks_((blocks[0].n_in + kAheadColumns - 1) / kAheadColumns),
          n_slots_(once ? 2 : 2 * n_chunks_),
          end_(n_blocks * n_chunks_),
          memory_(memory),
          slot_(memory) {}

    static int64_t values(int64_t n_in) { return 2 * round_up(n_in, kAheadColumns) * kBlockRows; }

    int64_t n_chunks() const { return n_chunks_; }

    // All of a chunk, counted over all blocks.
    const uint16_t* chunk(int64_t i) {
        while (chunk_ <= i) unpack_rows();
        return memory_ + i % n_slots_ * kChunkValues;
    }

    // The next rows if they lie before chunk `end`.
    void unpack_before(int64_t end) {
        if (chunk_ < std::min(end, end_)) unpack_rows();
    }

  private:
    // Without divisions, which would take as long as a row's scales.
    void unpack_rows() {
        fill_(*block_, row_ / kHalfRows, row_ % kHalfRows, k0_, slot_);
        if ((row_ += kAheadRows) < block_->halves() * kHalfRows) return;
        row_ = 0;
        ++chunk_;
        slot_ = ++slot_number_ < n_slots_ ? slot_ + kChunkValues : memory_;
        if (slot_ == memory_) slot_number_ = 0;
        if ((k0_ += kAheadColumns) < n_chunks_ * kAheadColumns) return;
        k0_ = 0;
        ++block_;
    }

    const AheadFn fill_;
    const RowBlock* block_;
    const int64_t n_chunks_, n_slots_, end_;
    uint16_t* const memory_;
    uint16_t* slot_;
    int64_t chunk_ = 0, slot_number_ = 0, k0_ = 0;
    int row_ = 0;
};

// The sums of the last pass, transposed one tile at a time between the steps of the next one.
class Sums {
  public:
    explicit Sums(float* memory) : memory_(memory) {}

    bool waiting() const { return next_ < end_; }

    IKPY_AMX void take(const RowBlock& block, int n_tokens, float* out) {
        flush();
        _tile_stored(0, memory_, 64);
        _tile_stored(1, memory_ + kSums, 64);
        if (n_tokens > kTileHeight) {
            _tile_stored(2, memory_ + 2 * kSums, 64);
            _tile_stored(3, memory_ + 3 * kSums, 64);
        }
        asm volatile("" ::: "memory");  // tile stores do not tell the compiler what they write
        n_halves_ = block.halves();
        n_tokens_ = n_tokens;
        out_ = out;
        next_ = 0;
        end_ = (n_tokens + kTileHeight - 1) / kTileHeight * n_halves_;
    }

    void store_next() {
        const int tile = next_ / n_halves_, h = next_ % n_halves_, t = tile * kTileHeight;
        store_sums(memory_ + (2 * tile + h) * kSums, nullptr, std::min(kTileHeight, n_tokens_ - t),
                   out_ + t * kBlockRows + h * kHalfRows);
        ++next_;
    }

    void flush() {
        while (waiting()) store_next();
    }

  private:
    float* const memory_;
    float* out_ = nullptr;
    int n_halves_ = 0, n_tokens_ = 0, next_ = 0, end_ = 0;
};

// Tokens [16-token tile][step] as right operands, weights, and the sums of a pass [16-token tile][half].
struct Work {
    uint16_t* tokens;
    uint16_t* weights;
    float* sums;

    static int64_t token_values(int64_t n_in) {
        return round_up(ahead_tokens(n_in), kTileHeight) * round_up(n_in, kTileDepth);
    }

    Work(uint8_t* base, int64_t n_in) {
        tokens = reinterpret_cast<uint16_t*>(base);
        weights = tokens + token_values(n_in);
        sums = reinterpret_cast<float*>(weights + Unpacked::values(n_in));
    }
};

// Both halves in tiles 4 and 5 times 16 tokens, sums in tiles 0 and 1, and 16 more, sums in 2 and 3.
template <int TokenTiles>
IKPY_AMX inline void add_step(const uint16_t* weights, const uint16_t* tokens, int64_t second_tokens) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, weights + kTileValues, 64);
    _tile_loadd(6, tokens, 64);
    if (TokenTiles == 2) _tile_loadd(7, tokens + second_tokens, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (TokenTiles == 2) {
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// What the vector units do between the steps of a pass: they unpack rows of chunks before `end`, on average
// fills / steps times kAheadRows per step, and store the sums of the pass before.
struct Between {
    int64_t end;
    int fills, steps;
};

// A lone pass, and the first one of the first block, unpack the chunk that they need next; others share the
// next block.
Between work_between(int64_t n_chunks, int64_t n_passes, int64_t block, int64_t pass, int64_t chunk) {
    if (n_passes == 1) return {block * n_chunks + chunk + 2, kStepFills, 1};
    if (block > 0) return {(block + 2) * n_chunks, kStepFills, static_cast<int>(n_passes)};
    if (pass == 0) return {n_chunks, kStepFills, 1};
    return {2 * n_chunks, kStepFills, static_cast<int>(n_passes - 1)};
}

template <int TokenTiles>
IKPY_AMX void add_chunk(Unpacked* unpacked, Sums* sums, const Between& between, const uint16_t* weights,
                        const uint16_t* tokens, int64_t n_steps, int64_t row_steps) {
    int due = 0;
    for (int64_t s = 0; s < n_steps; ++s) {
        asm volatile("" ::: "memory");  // tile loads do not tell the compiler what they read
        add_step<TokenTiles>(weights + s * kStepValues, tokens + s * kTileValues, row_steps * kTileValues);
        if (sums->waiting()) sums->store_next();
        for (due += between.fills; due >= between.steps; due -= between.steps)
            unpacked->unpack_before(between.end);
    }
}

}  // namespace

size_t ahead_work_bytes(int64_t n_in) {
    return (Work::token_values(n_in) + Unpacked::values(n_in)) * sizeof(uint16_t) + 4 * kSums * sizeof(float);
}

IKPY_AMX void ahead_product(AheadFn fill, const RowBlock* blocks, int n_blocks, const TokenSet& tokens,
                            float* out, uint8_t* work) {
    const Work at(work, blocks[0].n_in);
    const int64_t row_steps = round_up(blocks[0].n_in, kTileDepth) / kTileDepth;
    if (tokens.fresh)
        for (int t = 0; t < tokens.n; t += kTileHeight)
            transpose_tokens(tokens.x + t, std::min(kTileHeight, tokens.n - t), 1, 0, row_steps,
                             at.tokens + t * row_steps * kTileDepth);
    const int64_t n_passes = (tokens.n + kPass - 1) / kPass;
    Unpacked unpacked(fill, blocks, n_blocks, n_passes == 1, at.weights);
    Sums sums(at.sums);
    load_tile_config(kTileHeight);
    for (int64_t b = 0; b < n_blocks; ++b) {
        for (int64_t pass = 0; pass < n_passes; ++pass) {
            const int n = static_cast<int>(std::min(kPass, tokens.n - pass * kPass));
            const uint16_t* x = at.tokens + pass * kPass * row_steps * kTileDepth;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t c = 0; c < unpacked.n_chunks(); ++c) {
                const int64_t first = c * kChunkSteps;
                (n > kTileHeight ? add_chunk<2>
                                 : add_chunk<1>)(&unpacked, &sums,
                                                 work_between(unpacked.n_chunks(), n_passes, b, pass, c),
                                                 unpacked.chunk(b * unpacked.n_chunks() + c),
                                                 x + first * kTileValues,
                                                 std::min(kChunkSteps, row_steps - first), row_steps);
            }
            sums.take(blocks[b], n, out + (b * tokens.n + pass * kPass) * kBlockRows);
        }
    }
    sums.flush();
    release_tiles();
}

#else

size_t ahead_work_bytes(int64_t) { return 0; }
void ahead_product(AheadFn, const RowBlock*, int, const TokenSet&, float*, uint8_t*) {
    throw std::logic_error("this build has no tile products");
}

#endif

}  // namespace ikpy
