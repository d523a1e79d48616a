// What the generic row loops need to know about a type.
//
// A type is a struct with kId, kElements (per block), kRows (interleaved rows), kHeader, Block (the bytes of
// a block of kRows rows), Content (fields of one row's block) and
//   layout<Io>(block, k, content)   moves the fields of row k between block and content
//   values(content, row scale, y)   kElements floats
// or, where Content is void, decode(block, k, row scale, y) directly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "bit_io.hpp"

namespace ikpy::formats {

enum class Header { kNone, kF16, kF32, kF32Sum };

constexpr size_t header_nbytes(Header header) {
    return header == Header::kNone ? 0 : header == Header::kF16 ? 2 : header == Header::kF32 ? 4 : 8;
}

inline float row_scale(Header header, const uint8_t* headers, int k) {
    switch (header) {
        case Header::kNone:
            return 1.0f;
        case Header::kF16:
            return f16_to_f32(load_unaligned<uint16_t>(headers + 2 * k));
        default:
            return load_unaligned<float>(headers + header_nbytes(header) * k);
    }
}

template <class T>
constexpr size_t group_nbytes(int64_t ne0) {
    return T::kRows * header_nbytes(T::kHeader) + sizeof(typename T::Block) * (ne0 / T::kElements);
}

// Constants of a plain type; its Content decides how blocks are decoded.
template <int Id, int Elements, class BlockType, class ContentType, Header H = Header::kNone, int Rows = 1>
struct TypeInfo {
    static constexpr int kId = Id, kElements = Elements, kRows = Rows;
    static constexpr Header kHeader = H;
    static constexpr float kComputeScale = 1.0f;
    using Block = BlockType;
    using Content = ContentType;
};

// Constants of an interleaved type that shares the content and the value formula of a plain one.
template <class Plain, int Id, class BlockType, int Rows, Header H = Plain::kHeader>
struct InterleavedInfo {
    static constexpr int kId = Id, kElements = Plain::kElements, kRows = Rows;
    static constexpr Header kHeader = H;
    static constexpr float kComputeScale = 1.0f;
    using Block = BlockType;
    using Content = typename Plain::Content;
    static void values(const Content& content, float d, float* y) { Plain::values(content, d, y); }
};

// One row of the table of native decoders.
struct DecoderRow {
    int id;
    int elements, rows;
    size_t row_header, block_nbytes;  // per row
    void (*decode)(const uint8_t* matrix, int64_t ne0, int64_t row0, int64_t n_rows, float* dst,
                   int64_t dst_stride, bool compute_scale);
};

template <class T>
void decode_block(const typename T::Block& block, int k, float d, float* y) {
    if constexpr (std::is_void_v<typename T::Content>) {
        T::decode(block, k, d, y);
    } else {
        typename T::Content content;
        T::template layout<Reader>(block, k, content);
        T::values(content, d, y);
    }
}

template <class T>
void decode_rows(const uint8_t* matrix, int64_t ne0, int64_t row0, int64_t n_rows, float* dst,
                 int64_t dst_stride, bool compute_scale) {
    using Block = typename T::Block;
    const int64_t n_blocks = ne0 / T::kElements;
    for (int64_t r = 0; r < n_rows; ++r) {
        const int k = static_cast<int>((row0 + r) % T::kRows);
        const uint8_t* group = matrix + (row0 + r) / T::kRows * group_nbytes<T>(ne0);
        float d = row_scale(T::kHeader, group, k);
        if (compute_scale) d *= T::kComputeScale;
        const Block* blocks = reinterpret_cast<const Block*>(group + T::kRows * header_nbytes(T::kHeader));
        float* y = dst + r * dst_stride;
        for (int64_t b = 0; b < n_blocks; ++b) decode_block<T>(blocks[b], k, d, y + b * T::kElements);
    }
}

template <class T>
constexpr DecoderRow decoder_row() {
    return {T::kId,
            T::kElements,
            T::kRows,
            header_nbytes(T::kHeader),
            sizeof(typename T::Block) / T::kRows,
            decode_rows<T>};
}

// The rows of one family of types.
struct DecoderTable {
    const DecoderRow* rows;
    int count;
};

DecoderTable legacy_decoders();
DecoderTable kquant_decoders();
DecoderTable iquant_decoders();
DecoderTable iqk_decoders();
DecoderTable trellis_decoders();
DecoderTable interleaved_decoders();

}  // namespace ikpy::formats
