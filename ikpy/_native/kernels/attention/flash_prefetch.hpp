// Software prefetch of cache rows while another step computes.
#pragma once
#include <cstdint>

#include "kernels/cpu_makers.hpp"

namespace ikpy {
namespace flash {

inline const bool kCellsIntoL1 = fetches_cells_into_l1();

// Of a line of the cache.
[[gnu::always_inline]] inline void prefetch_cells(const uint8_t* p) {
    if (kCellsIntoL1)
        __builtin_prefetch(p, 0, 3);
    else
        __builtin_prefetch(p, 0, 2);
}

// Rows that a later step reads, fetched a few at a time.
struct Prefetch {
    const uint8_t* at;
    int64_t stride, bytes, rows;

    void advance(int64_t n) {
        if (n > rows) n = rows;
        for (int64_t i = 0; i < n; ++i)
            for (int64_t b = 0; b < bytes; b += 64) prefetch_cells(at + i * stride + b);
        at += n * stride;
        rows -= n;
    }
};

// Adjacent lines of the cache that a later step reads. A core has 16 misses under way at most: products fetch
// as many lines as they consume, a few at a time, or their own loads wait. Copied into the kernels, so that
// its state stays in registers.
struct PrefetchLines {
    const uint8_t *at, *end;

    int64_t lines() const { return (end - at + 63) / 64; }
    void one() {
        prefetch_cells(at);
        at = end - at > 64 ? at + 64 : end;
    }
    void advance(int64_t n) {
        for (; n > 0 && at < end; --n) one();
    }
};

// The same without a branch for each line, which products of few steps wait for: lines beyond the end are
// fetched too, and without any to fetch one that is in use is, again and again.
struct StraightLines {
    const uint8_t* at;
    int64_t step;

    StraightLines(const PrefetchLines& from, const uint8_t* in_use)
        : at(from.at < from.end ? from.at : in_use), step(from.at < from.end ? 64 : 0) {}
    void fetch(int n) {
        for (int i = 0; i < n; ++i, at += step) prefetch_cells(at);
    }
    void leave(PrefetchLines& to) const {
        if (step) to.at = at < to.end ? at : to.end;
    }
};

// Lines fetched at an even pace: n of them in that many ticks.
struct PacedLines {
    PrefetchLines lines;
    uint64_t pace;  // lines per kWhole ticks
    uint64_t due = 0;

    static constexpr uint64_t kWhole = 256;
    PacedLines(const PrefetchLines& from, int64_t n, int64_t ticks)
        : lines(from), pace(uint64_t(n) * kWhole / uint64_t(ticks) + 1) {}
    void tick() {
        due += pace;
        lines.advance(int64_t(due / kWhole));
        due %= kWhole;
    }
    void skip_to(const uint8_t* at) {
        if (lines.at < at) lines.at = at;
    }
    void finish() { lines.advance(lines.lines()); }
};

// Lines to fetch along with `bytes` of the cache.
constexpr int lines_of(int64_t bytes) { return bytes > 96 ? int((bytes + 32) / 64) : 1; }
// Steps of `bytes` for each line where a step is shorter than a line.
constexpr int64_t steps_per_line(int64_t bytes) { return bytes > 48 ? 1 : (64 + bytes / 2) / bytes; }

}  // namespace flash
}  // namespace ikpy
