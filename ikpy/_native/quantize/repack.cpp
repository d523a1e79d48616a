// Repacking moves every block through its content: read with one layout, written with the other.
#include "repack.hpp"

#include <algorithm>
#include <cstring>

#include "layouts_grid.hpp"
#include "layouts_legacy.hpp"
#include "layouts_super_interleaved.hpp"

namespace ikpy {

namespace formats {

namespace {

// types that only repacking reads or writes by content

struct ColumnPair {
    uint16_t bf16[2] = {};
};
struct WordPair {
    Word values[2];
};

struct BF16 : TypeInfo<30, 2, WordPair, ColumnPair> {
    template <class Io, class B, class C>
    static void layout(B& b, int, C& c) {
        for (int i = 0; i < 2; ++i) Io::word(b.values[i], c.bf16[i]);
    }
};

struct F16 : TypeInfo<1, 2, WordPair, ColumnPair> {
    template <class Io>
    static void layout(const Block& b, int, Content& c) {
        for (int i = 0; i < 2; ++i) c.bf16[i] = static_cast<uint16_t>(f32_bits(b.values[i].as_f16()) >> 16);
    }
};

struct BF16_R16 : TypeInfo<230, 2, BlockBF16_R16, ColumnPair, Header::kNone, 16> {
    template <class Io, class B, class C>
    static void layout(B& b, int k, C& c) {
        for (int i = 0; i < 2; ++i) Io::word(b.values[k][i], c.bf16[i]);
    }
};

struct Q8_K : TypeInfo<15, 256, BlockQ8_K, Levels<256>> {
    template <class Io>
    static void layout(const Block& b, int, Content& c) {
        c.d = f32_to_f16(load_unaligned<float>(b.d));
        std::memcpy(c.q, b.qs, sizeof b.qs);
    }
};

struct Q8_K_R8 : TypeInfo<399, 256, BlockQ8_K_R8, Levels<256>, Header::kNone, 8> {
    template <class Io>
    static void layout(Block& b, int k, Content& c) {
        Io::word(b.d[k], c.d);
        q8x<Io, 8>(b.qs, k, c.q, 256);
    }
};

struct Q8_K_R16 : TypeInfo<397, 256, BlockQ8_K_R16, Levels<256>, Header::kNone, 16> {
    template <class Io>
    static void layout(Block& b, int k, Content& c) {
        uint8_t offset[256];
        for (int e = 0; e < 256; ++e) offset[e] = c.q[e] ^ 128;
        Io::word(b.d[k], c.d);
        q8x<Io, 16>(b.qs, k, offset, 256);
    }
};

// row headers

// Adds a block's signed levels; only rows of Q8_KV need it.
template <class Content>
int32_t level_sum(const Content& content) {
    int32_t sum = 0;
    if constexpr (std::is_same_v<Content, Levels<32>>)
        for (uint8_t q : content.q) sum += static_cast<int8_t>(q);
    return sum;
}

template <class From, class To>
void move_header(const uint8_t* from, int from_k, uint8_t* to, int to_k, int32_t sum) {
    constexpr size_t kFrom = header_nbytes(From::kHeader), kTo = header_nbytes(To::kHeader);
    constexpr size_t kScale = std::min<size_t>({kFrom, kTo, 4});
    std::memcpy(to + kTo * to_k, from + kFrom * from_k, kScale);
    if constexpr (To::kHeader == Header::kF32Sum) std::memcpy(to + kTo * to_k + 4, &sum, sizeof sum);
}

// one matrix

template <class From, class To>
void convert_rows(const uint8_t* src, int64_t ne0, int64_t n_rows, uint8_t* dst) {
    static_assert(From::kElements == To::kElements);
    const int64_t n_blocks = ne0 / From::kElements;
    std::memset(dst, 0, n_rows / To::kRows * group_nbytes<To>(ne0));
    for (int64_t row = 0; row < n_rows; ++row) {
        const int from_k = static_cast<int>(row % From::kRows), to_k = static_cast<int>(row % To::kRows);
        const uint8_t* from = src + row / From::kRows * group_nbytes<From>(ne0);
        uint8_t* to = dst + row / To::kRows * group_nbytes<To>(ne0);
        auto* read =
            reinterpret_cast<const typename From::Block*>(from + From::kRows * header_nbytes(From::kHeader));
        auto* write = reinterpret_cast<typename To::Block*>(to + To::kRows * header_nbytes(To::kHeader));
        int32_t sum = 0;
        for (int64_t b = 0; b < n_blocks; ++b) {
            typename From::Content content;
            From::template layout<Reader>(read[b], from_k, content);
            To::template layout<Writer>(write[b], to_k, content);
            if constexpr (To::kHeader == Header::kF32Sum) sum += level_sum(content);
        }
        if constexpr (From::kHeader != Header::kNone) move_header<From, To>(from, from_k, to, to_k, sum);
    }
}

struct RepackRow {
    int from, to, elements, rows;
    void (*convert)(const uint8_t* src, int64_t ne0, int64_t n_rows, uint8_t* dst);
};

template <class From, class To>
constexpr RepackRow one_way() {
    return {From::kId, To::kId, From::kElements, std::max(From::kRows, To::kRows), convert_rows<From, To>};
}

#define IKPY_BOTH_WAYS(Plain, Packed) one_way<Plain, Packed>(), one_way<Packed, Plain>()

constexpr RepackRow kRows[] = {
    IKPY_BOTH_WAYS(Q4_0, Q4_0_4x4),    IKPY_BOTH_WAYS(Q4_0, Q4_0_4x8),    IKPY_BOTH_WAYS(Q4_0, Q4_0_8x8),
    IKPY_BOTH_WAYS(Q4_0, Q4_0_R8),     IKPY_BOTH_WAYS(Q5_0, Q5_0_R4),     IKPY_BOTH_WAYS(Q6_0, Q6_0_R4),
    IKPY_BOTH_WAYS(Q8_0, Q8_0_R8),     IKPY_BOTH_WAYS(Q8_KV, Q8_KV_R8),   IKPY_BOTH_WAYS(MXFP4, MXFP4_R8),
    IKPY_BOTH_WAYS(IQ4_NL, IQ4_NL_R4), IKPY_BOTH_WAYS(IQ2_BN, IQ2_BN_R4), IKPY_BOTH_WAYS(Q2_K, Q2_K_R4),
    IKPY_BOTH_WAYS(Q3_K, Q3_K_R4),     IKPY_BOTH_WAYS(Q4_K, Q4_K_R4),     IKPY_BOTH_WAYS(Q5_K, Q5_K_R4),
    IKPY_BOTH_WAYS(Q6_K, Q6_K_R4),     IKPY_BOTH_WAYS(IQ4_XS, IQ4_XS_R8), IKPY_BOTH_WAYS(IQ2_XXS, IQ2_XXS_R4),
    IKPY_BOTH_WAYS(IQ2_XS, IQ2_XS_R4), IKPY_BOTH_WAYS(IQ2_S, IQ2_S_R4),   IKPY_BOTH_WAYS(IQ3_XXS, IQ3_XXS_R4),
    IKPY_BOTH_WAYS(IQ3_S, IQ3_S_R4),   IKPY_BOTH_WAYS(IQ2_K, IQ2_K_R4),   IKPY_BOTH_WAYS(IQ3_K, IQ3_K_R4),
    IKPY_BOTH_WAYS(IQ4_K, IQ4_K_R4),   IKPY_BOTH_WAYS(IQ5_K, IQ5_K_R4),   IKPY_BOTH_WAYS(IQ4_KS, IQ4_KS_R4),
    IKPY_BOTH_WAYS(IQ5_KS, IQ5_KS_R4), IKPY_BOTH_WAYS(BF16, BF16_R16),    one_way<F16, BF16_R16>(),
    one_way<Q8_K, Q8_K_R8>(),          one_way<Q8_K, Q8_K_R16>(),
};

#undef IKPY_BOTH_WAYS

const RepackRow* find_repack(int from, int to) {
    for (const RepackRow& row : kRows)
        if (row.from == from && row.to == to) return &row;
    return nullptr;
}

}  // namespace

}  // namespace formats

bool can_repack(int from, int to) { return formats::find_repack(from, to) != nullptr; }

bool repack_rows(int from, int to, const uint8_t* src, int64_t ne0, int64_t n_rows, uint8_t* dst) {
    const formats::RepackRow* row = formats::find_repack(from, to);
    if (!row || ne0 < 0 || n_rows < 0 || ne0 % row->elements || n_rows % row->rows) return false;
    row->convert(src, ne0, n_rows, dst);
    return true;
}

}  // namespace ikpy
