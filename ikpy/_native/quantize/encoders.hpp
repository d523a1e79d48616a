// Row encoders by family. Each encodes n_rows rows of ne0 floats with the column weights w; src and dst are
// contiguous.
#pragma once

#include <cstdint>

namespace ikpy::quantize {

struct Rows {
    const float* src;
    int64_t ne0, n_rows;
    const float* w;  // ne0 column weights; not set for simple and 8-bit types
    uint8_t* dst;
    int64_t row_bytes;
};

using Encoder = void (*)(const Rows&);

// The encoder of a type that is not made by permuting another's rows, or null. One function per family, in
// its own file.
Encoder simple_encoder(int type);
Encoder eight_bit_encoder(int type);
Encoder legacy_encoder(int type);
Encoder kquant_encoder(int type);
Encoder iquant_encoder(int type);
Encoder iqk_encoder(int type);
Encoder row_scale_encoder(int type);
Encoder trellis_encoder(int type);

}  // namespace ikpy::quantize
