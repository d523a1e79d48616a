// Software prefetch of weights that a kernel reads once, from the first to the last.
#pragma once
#include <cstdint>

#include "kernels/cpu_makers.hpp"
#include "kernels/simd/simd_f32.hpp"

namespace ikpy {

// From memory into L2 first: prefetches into L1 hold its few fill buffers for the whole way.
inline const PrefetchDistances kPrefetch = prefetch_distances();

// Asks for lines of the 32 KiB behind those of p, as many as `Bytes` bytes from p on have: while 32 KiB are
// read from the first to the last, those behind them are asked for in eight places, the pages, in turn. The
// line's number, bits 6 to 14 of its address, is rotated by the three bits of the page.
template <int64_t Bytes>
[[gnu::always_inline]] inline void prefetch_from_pages([[maybe_unused]] const uint8_t* p) {
#if defined(__AVX2__)
    constexpr uint64_t kGroup = 32768, kLines = 0xFC0, kPages = 0x7000;
    for (int64_t b = 0; b < Bytes; b += 64) {
        const uint64_t at = reinterpret_cast<uint64_t>(p) + b;
        const uint64_t line = (at & ~(kGroup - 1)) + (at >> 3 & kLines) + (at << 6 & kPages);
        _mm_prefetch(reinterpret_cast<const char*>(line + kGroup), _MM_HINT_T1);
    }
#endif
}

template <int64_t Bytes, bool IntoL1>
[[gnu::always_inline]] inline void prefetch_bytes([[maybe_unused]] const uint8_t* p) {
#if defined(__AVX2__)
    for (int64_t b = 0; b < Bytes; b += 64)
        _mm_prefetch(reinterpret_cast<const char*>(p + b), IntoL1 ? _MM_HINT_T0 : _MM_HINT_T1);
#endif
}

// Asks for `Bytes` bytes of weights that come so far after p, into L2 and L1: for kernels that are not bound
// by arithmetic. Reads nothing. Inlined early: GCC removes calls of functions that do nothing but prefetch.
template <int64_t Bytes>
[[gnu::always_inline]] inline void prefetch_weights(const uint8_t* p) {
    if (kPrefetch.from_pages) return prefetch_from_pages<Bytes>(p);
    prefetch_bytes<Bytes, false>(p + kPrefetch.into_l2);
    prefetch_bytes<Bytes, true>(p + kPrefetch.into_l1);
}

// Of rows that are read side by side, with what SideBySide adds to either distance. Such rows are places of
// their own: lines from pages gained IQ2_XXS nothing on Ice Lake (0.93 of the rate, two instructions per line
// more).
template <int64_t Bytes>
[[gnu::always_inline]] inline void prefetch_weights_beside(const uint8_t* p, int64_t far, int64_t near) {
    prefetch_bytes<Bytes, false>(p + kPrefetch.into_l2 + far);
    prefetch_bytes<Bytes, true>(p + kPrefetch.into_l1 + near);
}

// Into L2 alone.
template <int64_t Bytes>
[[gnu::always_inline]] inline void prefetch_weights_into_l2(const uint8_t* p, int64_t far = 0) {
    if (kPrefetch.from_pages) return prefetch_from_pages<Bytes>(p);
    prefetch_bytes<Bytes, false>(p + kPrefetch.into_l2 + far);
}

// A line at p, into L1.
[[gnu::always_inline]] inline void prefetch_line([[maybe_unused]] const uint8_t* p) {
#if defined(__AVX2__)
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
#endif
}

// n rows (or groups of rows) of `bytes` bytes, one behind the other, that are read side by side: behind the
// end of one comes not its neighbour, which is being read already, but the one n further on. With 4 KiB of
// F16 rows, products of a token take 0.90 x the time that prefetching the neighbour takes.
class SideBySide {
  public:
    SideBySide(int n, int64_t bytes) : bytes_(bytes), others_((n - 1) * bytes) {}

    // What to add to an address `ahead` bytes after byte `offset` of a row.
    int64_t skip(int64_t offset, int64_t ahead) const {
        int64_t more = 0;
        for (int64_t at = offset + ahead; others_ > 0 && at >= bytes_; at -= bytes_) more += others_;
        return more;
    }

  private:
    const int64_t bytes_, others_;
};

// SideBySide::skip of one distance, moved on from block to block. Counted anew for every block of rows of a
// KiB it took 12 turns of a loop and a wrongly predicted branch: IQ2_XXS on Zen 5 85 -> 93e9 weights/s.
class SideBySideAt {
  public:
    // `ahead` bytes after the first byte of a row.
    SideBySideAt(int n, int64_t bytes, int64_t ahead) : end_(bytes), others_((n - 1) * bytes), at_(ahead) {
        if (others_ <= 0) return;
        skip_ = at_ / end_ * others_;
        at_ %= end_;
    }
    int64_t skip() const { return skip_; }
    // By at most a row.
    void move(int64_t bytes) {
        at_ += bytes;
        const bool beyond = others_ > 0 && at_ >= end_;
        skip_ += beyond ? others_ : 0;
        at_ -= beyond ? end_ : 0;
    }

  private:
    const int64_t end_, others_;
    int64_t at_, skip_ = 0;
};

// Where n rows that are read side by side are asked for while several tokens meet them: one prefetch for a
// line of weights, whose place takes a comparison and an addition. Two of them and SideBySide took a fifth of
// the time of products of 2 to 8 tokens with F16 rows of 256 to 1,024 bytes, and a tenth with 2 KiB.
class LinesAhead {
  public:
    LinesAhead(int n, int64_t bytes)
        : turn_(bytes - kAhead), later_(turn_ > 0 ? kAhead + (n - 1) * bytes : n * bytes) {
        while (later_ < kAhead) later_ += n * bytes;
    }

    // What to add to the address of a row whose byte `offset` is being read.
    int64_t at(int64_t offset) const { return offset + (offset < turn_ ? kAhead : later_); }

  private:
    static constexpr int64_t kAhead = 2048;
    const int64_t turn_;
    int64_t later_;
};

}  // namespace ikpy
