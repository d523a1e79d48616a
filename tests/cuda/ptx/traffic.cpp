// How many sectors, lines and passes the accesses of a warp take (CUDA programming guide, "Device Memory
// Accesses" and "Shared Memory").
#include <algorithm>

#include "machine.hpp"

namespace ptx {
namespace {

constexpr uint32_t kSector = 32, kLine = 128, kBanks = 32;

uint64_t distinct(std::vector<uint64_t> values) {
    std::sort(values.begin(), values.end());
    return std::unique(values.begin(), values.end()) - values.begin();
}

// Lanes that access 8 or 16 bytes each are served by halves or quarters of a warp.
int lanes_at_once(uint32_t bytes) { return kLanes / std::max(1u, bytes / 4); }

// Lanes that read the same word share it.
void add_passes(Traffic& t, const uint64_t* addresses, uint32_t bytes, uint32_t some) {
    const int lanes = lanes_at_once(bytes);
    for (int first = 0; first < kLanes; first += lanes) {
        std::vector<uint64_t> banks[kBanks];
        for (int l = first; l < first + lanes; ++l)
            if (some >> l & 1)
                for (uint64_t word = addresses[l] / 4; word <= (addresses[l] + bytes - 1) / 4; ++word)
                    banks[word % kBanks].push_back(word);
        uint64_t passes = 0;
        for (const auto& words : banks) passes = std::max(passes, distinct(words));
        t.passes += passes;
        t.least_passes += passes > 0;
    }
}

void add_sectors(Traffic& t, const uint64_t* addresses, uint32_t bytes, uint32_t some) {
    std::vector<uint64_t> starts, sectors;
    const int lanes = lanes_at_once(bytes);
    for (int first = 0; first < kLanes; first += lanes) {
        std::vector<uint64_t> lines;
        for (int l = first; l < first + lanes; ++l) {
            if (!(some >> l & 1)) continue;
            starts.push_back(addresses[l]);
            sectors.push_back(addresses[l] / kSector);
            lines.push_back(addresses[l] / kLine);
        }
        t.lines += distinct(lines);
    }
    t.bytes += distinct(starts) * bytes;
    t.sectors += distinct(sectors);
}

}  // namespace

void Warp::count(const Instruction& i, Space space, const uint64_t* addresses, uint32_t bytes,
                 uint32_t some) {
    // In other orders lanes do not keep step, and what devices do at once is divided.
    if (program->traffic.empty() || !some || block->launch.order) return;
    if (space == kGeneric) {
        const uint64_t one = addresses[std::countr_zero(some)];
        space = one & kSharedWindow ? kShared : one & kLocalWindow ? kLocal : kGlobal;
    }
    Traffic& t = program->traffic[&i - program->code.data()];
    if (space == kShared) add_passes(t, addresses, bytes, some);
    if (space == kGlobal) add_sectors(t, addresses, bytes, some);
    t.requests += space == kShared || space == kGlobal;
}

}  // namespace ptx
