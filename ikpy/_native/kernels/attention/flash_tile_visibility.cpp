// Which cells of a tile its rows see.
#include <algorithm>

#include "kernels/attention/flash_tile.hpp"

namespace ikpy {
namespace row_tiles {

Visibility tile_visibility(const AttentionArgs& a, const Tile& tile, int64_t c0, int64_t n,
                           const TileBuffers& b) {
    uint32_t words[kWideTileRows][kWords];
    const int64_t first = a.token_of(tile.first_row), last = a.token_of(tile.first_row + tile.n_rows - 1);
    bool none = true, all = true;
    for (int64_t t = first; t <= last; ++t) {
        const int visible = visible_bits(a, t, c0, n, words[t - first], kWords);
        none &= visible == 0;
        all &= visible == n;
    }
    if (all) return Visibility::kAll;
    if (none && a.flash) return Visibility::kNone;
    int64_t token = 0, in_token = tile.first_row % a.heads_per_kv;
    for (int64_t m = 0; m < b.lanes; ++m) {
        for (int w = 0; w < kWords; ++w) b.bits[w * b.lanes + m] = words[token][w];
        if (++in_token == a.heads_per_kv && m + 1 < tile.n_rows) {
            in_token = 0;
            ++token;
        }
    }
    return Visibility::kSome;
}

Visibility tile_visibility(const AttentionArgs& a, const Tile& tile, int64_t i, int64_t c0, int64_t n,
                           const TileBuffers& b) {
    uint8_t& known = b.known[tile.index * b.kv_tiles + i];
    if (known && Visibility(known - 1) != Visibility::kSome) return Visibility(known - 1);
    const Visibility seen = tile_visibility(a, tile, c0, n, b);
    known = uint8_t(1 + int(seen));
    return seen;
}

int visible_parts(const TileBuffers& b, Part* parts) {
    int n_parts = 0;
    int64_t first_end = 0;  // of the 16 lanes that the last part began with
    for (int64_t m = 0; m < b.lanes; m += 16) {
        int64_t begin = kTileCells, end = 0;
        for (int w = 0; w < kWords; ++w) {
            uint32_t any = 0;
            for (int i = 0; i < 16; ++i) any |= b.bits[w * b.lanes + m + i];
            if (!any) continue;
            begin = std::min<int64_t>(begin, 32 * w + __builtin_ctz(any));
            end = 32 * w + 32 - __builtin_clz(any);
        }
        // Starts at a multiple of the block height keep the rounded-up last block inside the tile.
        const int64_t step = b.k2.hi ? kDepth : kPad;
        if (end == 0) continue;
        begin = begin / step * step;
        Part* const last = parts + n_parts - 1;
        if (n_parts > 0 && last->m + last->lanes == m && last->begin == begin && end >= first_end &&
            end <= first_end + 16) {
            last->lanes += 16;
            last->end = std::max(last->end, end);
        } else {
            parts[n_parts++] = {m, 16, begin, end};
            first_end = end;
        }
    }
    return n_parts;
}

}  // namespace row_tiles

}  // namespace ikpy
