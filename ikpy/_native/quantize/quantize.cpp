#include "quantize.hpp"

#include <vector>

#include "encoders.hpp"
#include "search.hpp"

namespace ikpy::quantize {
namespace {

struct PlainType {
    int id, block_elements, block_bytes, header_bytes;
};

// quant-formats section 3.
constexpr PlainType PLAIN_TYPES[] = {
    {1, 1, 2, 0},       {2, 32, 18, 0},     {3, 32, 20, 0},     {6, 32, 22, 0},     {7, 32, 24, 0},
    {8, 32, 34, 0},     {10, 256, 84, 0},   {11, 256, 110, 0},  {12, 256, 144, 0},  {13, 256, 176, 0},
    {14, 256, 210, 0},  {16, 256, 66, 0},   {17, 256, 74, 0},   {18, 256, 98, 0},   {19, 256, 50, 0},
    {20, 32, 18, 0},    {21, 256, 110, 0},  {22, 256, 82, 0},   {23, 256, 136, 0},  {29, 256, 56, 0},
    {30, 1, 2, 0},      {39, 32, 17, 0},    {41, 128, 18, 0},   {133, 32, 26, 0},   {134, 64, 13, 2},
    {135, 64, 16, 4},   {137, 256, 76, 0},  {138, 256, 110, 0}, {139, 256, 144, 0}, {140, 256, 176, 0},
    {141, 256, 212, 0}, {144, 256, 136, 4}, {145, 256, 70, 2},  {146, 256, 128, 4}, {151, 32, 32, 8},
    {152, 256, 168, 4}, {153, 256, 68, 4},  {154, 256, 100, 4}, {155, 256, 128, 4}, {156, 256, 102, 2},
    {157, 256, 86, 2},  {158, 256, 56, 4},
};

const PlainType* plain_type(int type) {
    for (const PlainType& p : PLAIN_TYPES) {
        if (p.id == type) return &p;
    }
    return nullptr;
}

Encoder encoder(int type) {
    for (const auto& family : {simple_encoder, legacy_encoder, kquant_encoder, iqk_encoder, row_scale_encoder}) {
        if (const Encoder e = family(type)) return e;
    }
    return nullptr;
}

}  // namespace

bool can_quantize(int type) { return encoder(type) != nullptr; }

int row_group(int type) { return can_quantize(type) ? 1 : 0; }

int quantize_rows(int type, const float* src, int64_t ne0, int64_t n_rows, const float* imatrix, uint8_t* dst) {
    const Encoder encode = encoder(type);
    const PlainType* plain = plain_type(type);
    if (!encode || !plain) return UNSUPPORTED_TYPE;
    if (ne0 <= 0 || ne0 % plain->block_elements) return BAD_ROW_LENGTH;
    std::vector<float> w;
    importance_weights(imatrix, ne0, w);
    const int64_t row_bytes = plain->header_bytes + plain->block_bytes * (ne0 / plain->block_elements);
    encode(Rows{src, ne0, n_rows, w.data(), imatrix != nullptr, dst, row_bytes});
    return OK;
}

}  // namespace ikpy::quantize
