// Words of which products with the trits of IQ1_BN are made without unpacking them.
//
// Trit e of byte b is 3 * (b * 3^e mod 256) / 256 = F[e + 1] - 3 * F[e] with F[e] = b * 3^e / 256, all
// divisions rounded down. So the products of the trits with activations y[e] are the sum over e = 1 .. 5 of
// F[e] * (y[e - 1] - 3 * y[e]), y[5] = 0: a word product for F, and one with factors that are prepared once
// per token.
#pragma once
#include "unpack/small_blocks.hpp"

namespace ikpy {
namespace trits {

constexpr int kPowers = 5, kBlocks = 4, kBlockBytes = UnpackIQ1_BN::kBlockBytes;

// Which bytes make up word w of a vector: 8 words (with a spare one) for each 32 columns; the byte that two
// of these share comes twice.
struct Word {
    int block, group;  // of 64 columns; pair of 16-groups
    int slot;          // 0 .. 5: own bytes, 6: trits of the shared one, 7: spare
    explicit constexpr Word(int w) : block(w / 16), group(w / 8 & 1), slot(w & 7) {}
    constexpr int byte() const {
        return kBlockBytes * block + (slot < 6 ? 6 * group + slot : kBlockBytes - 1);
    }
    // Column of the trit that has the power e, -1 if there is none.
    constexpr int column(int e) const {
        const int first = 64 * block + 32 * group, shared = 4 - e - 2 * group;
        if (slot < 6 && e >= 0 && e < kPowers) return first + slot / 3 * 16 + slot % 3 * 5 + 4 - e;
        return slot == 6 && (shared == 0 || shared == 1) ? first + 16 * shared + 15 : -1;
    }
};

}  // namespace trits
}  // namespace ikpy
