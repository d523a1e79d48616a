// Shared memory, cp.async, mbarrier and bulk copies.
#include <cstring>

#include "warp_ops.hpp"

namespace ptx {

uint8_t* Shared::at(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what) const {
    const std::string where = std::string(what) + ": shared address " + std::to_string(address);
    if (address % alignment) throw Fault(where + " is not a multiple of " + std::to_string(alignment));
    if (uint64_t(address) + bytes > size)
        throw Fault(where + ", " + std::to_string(bytes) + " bytes, is outside of the " +
                    std::to_string(size) + " bytes of the block");
    return base + address;
}

ProxyWrites::ProxyWrites(uint32_t shared_bytes, int threads)
    : words_((shared_bytes + 3) / 4), fences_(size_t(threads), 0) {}

void ProxyWrites::generic_write(uint32_t address, uint32_t bytes, int thread) {
    for (uint32_t word = address / 4; word <= (address + bytes - 1) / 4; ++word)
        words_.at(word) = {uint32_t(thread), fences_.at(size_t(thread)), barriers_, true};
}

void ProxyWrites::fence(int thread) {
    ++fences_.at(size_t(thread));
    fenced_barriers_ = barriers_;
}

void ProxyWrites::barrier() { ++barriers_; }

void ProxyWrites::check_async(uint32_t address, uint32_t bytes, const char* what) const {
    for (uint32_t word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
        const Write& write = words_.at(word);
        if (!write.pending || fences_[write.thread] > write.fences || fenced_barriers_ > write.barriers)
            continue;
        throw Fault(std::string(what) + ": shared address " + std::to_string(4 * word) +
                    " holds what thread " + std::to_string(write.thread) +
                    " wrote by the generic proxy, and no fence.proxy.async follows");
    }
}

void ProxyWrites::async_write(uint32_t address, uint32_t bytes) {
    for (uint32_t word = address / 4; word <= (address + bytes - 1) / 4; ++word)
        words_.at(word).pending = false;
}

// cp.async

void AsyncCopies::perform(const std::vector<Copy>& copies) const {
    for (const Copy& copy : copies) {
        std::memcpy(copy.to, copy.from, copy.valid);
        std::memset(copy.to + copy.valid, 0, copy.size - copy.valid);
    }
}

void AsyncCopies::copy(const Shared& shared, uint32_t to, const uint8_t* from, uint32_t size,
                       uint32_t valid) {
    if (size != 4 && size != 8 && size != 16)
        throw Fault("cp.async: size of " + std::to_string(size) + " bytes");
    if (valid > size)
        throw Fault("cp.async: source of " + std::to_string(valid) + " bytes for " + std::to_string(size));
    uint8_t* target = shared.at(to, size, size, "cp.async");
    if (reinterpret_cast<uintptr_t>(from) % size) throw Fault("cp.async: global address is not aligned");
    if (shared.proxies) shared.proxies->generic_write(to, size, thread_);
    const Copy made{target, from, size, valid};
    if (timing_ == Timing::early)
        perform({made});
    else
        current_.push_back(made);
}

void AsyncCopies::commit() {
    groups_.push_back(std::move(current_));
    current_.clear();
}

void AsyncCopies::wait(int groups) {
    for (; groups_.size() > size_t(groups); groups_.pop_front()) perform(groups_.front());
}

void AsyncCopies::wait_all() {
    commit();
    wait(0);
}

// mbarrier: bits 0-19 pending arrivals, 20-39 expected arrivals, 40-60 transaction bytes + 2^20, 61
// parity of the running phase, 62-63 the marker 2.

namespace {

constexpr uint32_t kMaxCount = (1u << 20) - 1;
constexpr int64_t kMaxBytes = (1 << 20) - 1;

struct State {
    uint32_t pending, expected;
    int64_t bytes;
    uint32_t parity;
};

State load(const uint64_t* barrier) {
    uint64_t word;
    std::memcpy(&word, barrier, 8);
    if (word >> 62 != 2) throw Fault("mbarrier: the memory holds no initialised mbarrier object");
    return {uint32_t(word & kMaxCount), uint32_t(word >> 20 & kMaxCount),
            int64_t(word >> 40 & 0x1fffff) - (1 << 20), uint32_t(word >> 61 & 1)};
}

uint64_t encoded(const State& s) {
    return s.pending | uint64_t(s.expected) << 20 | uint64_t(s.bytes + (1 << 20)) << 40 |
           uint64_t(s.parity) << 61 | uint64_t(2) << 62;
}

/// Stores, after the phase has completed if nothing is pending.
void store(uint64_t* barrier, State s) {
    if (!s.pending && !s.bytes) {
        s.pending = s.expected;
        s.parity ^= 1;
    }
    const uint64_t word = encoded(s);
    std::memcpy(barrier, &word, 8);
}

void add_bytes(State& s, int64_t bytes) {
    s.bytes += bytes;
    if (s.bytes > kMaxBytes || s.bytes < -kMaxBytes)
        throw Fault("mbarrier: transaction bytes beyond 2^20 - 1");
}

void subtract_arrivals(State& s, uint32_t count) {
    if (!count || count > s.pending)
        throw Fault("mbarrier: " + std::to_string(count) + " arrivals, " + std::to_string(s.pending) +
                    " pending of " + std::to_string(s.expected));
    s.pending -= count;
}

}  // namespace

void mbarrier_init(uint64_t* barrier, uint32_t count) {
    if (!count || count > kMaxCount) throw Fault("mbarrier.init: count of " + std::to_string(count));
    uint64_t word;
    std::memcpy(&word, barrier, 8);
    if (word >> 62 == 2)
        throw Fault("mbarrier.init: the memory holds an mbarrier object, and no mbarrier.inval came");
    word = encoded({count, count, 0, 0});
    std::memcpy(barrier, &word, 8);
}

void mbarrier_invalidate(uint64_t* barrier) {
    load(barrier);
    std::memset(barrier, 0, 8);
}

uint64_t mbarrier_arrive(uint64_t* barrier, uint32_t count) {
    State s = load(barrier);
    const uint64_t before = encoded(s);
    subtract_arrivals(s, count);
    store(barrier, s);
    return before;
}

void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes) {
    State s = load(barrier);
    add_bytes(s, bytes);
    store(barrier, s);
}

uint64_t mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes) {
    State s = load(barrier);
    const uint64_t before = encoded(s);
    add_bytes(s, bytes);
    subtract_arrivals(s, 1);
    store(barrier, s);
    return before;
}

void mbarrier_complete_tx(uint64_t* barrier, uint32_t bytes) {
    State s = load(barrier);
    add_bytes(s, -int64_t(bytes));
    store(barrier, s);
}

bool mbarrier_test(const uint64_t* barrier, uint32_t parity) {
    if (parity > 1) throw Fault("mbarrier.test_wait: parity of " + std::to_string(parity));
    return load(barrier).parity != parity;
}

bool mbarrier_test_state(const uint64_t* barrier, uint64_t state) {
    return load(barrier).parity != (state >> 61 & 1);
}

std::string mbarrier_text(const uint64_t* barrier) {
    const State s = load(barrier);
    return "mbarrier in phase of parity " + std::to_string(s.parity) + ", " + std::to_string(s.pending) +
           " of " + std::to_string(s.expected) + " arrivals and " + std::to_string(s.bytes) +
           " bytes pending";
}

// cp.async.bulk

void BulkCopies::copy(const Shared& shared, uint32_t to, const uint8_t* from, uint32_t bytes,
                      uint32_t barrier) {
    if (bytes % 16) throw Fault("cp.async.bulk: " + std::to_string(bytes) + " bytes, not a multiple of 16");
    if (reinterpret_cast<uintptr_t>(from) % 16)
        throw Fault("cp.async.bulk: global address is not a multiple of 16");
    shared.at(to, bytes, 16, "cp.async.bulk");
    load(reinterpret_cast<uint64_t*>(shared.at(barrier, 8, 8, "cp.async.bulk, mbarrier")));
    if (shared.proxies) {
        if (bytes) shared.proxies->check_async(to, bytes, "cp.async.bulk");
        shared.proxies->check_async(barrier, 8, "cp.async.bulk, mbarrier");
    }
    pending_.push_back({to, from, bytes, barrier});
    if (timing_ == Timing::early) deliver(shared, pending_.size() - 1);
}

void BulkCopies::deliver(const Shared& shared, size_t place) {
    const Copy copy = pending_.at(place);
    pending_.erase(pending_.begin() + std::ptrdiff_t(place));
    std::memcpy(shared.base + copy.to, copy.from, copy.bytes);
    if (shared.proxies && copy.bytes) shared.proxies->async_write(copy.to, copy.bytes);
    mbarrier_complete_tx(reinterpret_cast<uint64_t*>(shared.base + copy.barrier), copy.bytes);
}

}  // namespace ptx
