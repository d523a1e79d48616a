#include "ikpy/expert_reader.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace ikpy {

namespace {

// Starts reading what is not in memory; returns before it is there. Pages that are cost 8 us per MiB.
void start_reading(const uint8_t* data, int64_t nbytes) {
    static const int64_t page = sysconf(_SC_PAGESIZE);
    const int64_t address = reinterpret_cast<int64_t>(data), first = address / page * page;
    madvise(reinterpret_cast<void*>(first), address + nbytes - first, MADV_WILLNEED);
}

bool same(const ExpertMatrix& a, const ExpertMatrix& b) { return a.data == b.data && a.stage == b.stage; }

}  // namespace

ExpertReader::ExpertReader(int n_threads) : process_(getpid()) {
    try {
        for (int i = 0; i < n_threads; ++i) threads_.emplace_back([this] { serve(); });
    } catch (...) {
        stop();
        throw;
    }
}

ExpertReader::~ExpertReader() { stop(); }

void ExpertReader::stop() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ends_ = true;
    }
    wanted_.notify_all();
    // A forked process has the objects of its parent's threads, not the threads.
    for (std::thread& thread : threads_) getpid() == process_ ? thread.join() : thread.detach();
}

int ExpertReader::add_layer(const std::vector<ExpertMatrix>& matrices, int n_experts) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < layers_.size(); ++i) {
        const std::vector<ExpertMatrix>& known = layers_[i].matrices;
        if (known.size() == matrices.size() && std::equal(known.begin(), known.end(), matrices.begin(), same))
            return static_cast<int>(i);
    }
    layers_.push_back({matrices, n_experts});
    ranges_.reserve(std::max(ranges_.capacity(), matrices.size() * n_experts));
    return static_cast<int>(layers_.size()) - 1;
}

// All matrices of a stage for one expert after the other, then those of the next stage. offsets: null for
// all experts.
void ExpertReader::list(int layer, const int32_t* offsets) {
    const auto& [matrices, n_experts] = layers_[layer];
    ranges_.clear();
    next_ = 0;
    for (size_t stage = 0, end = 0; stage < matrices.size(); stage = end) {
        while (end < matrices.size() && matrices[end].stage == matrices[stage].stage) ++end;
        for (int e = 0; e < n_experts; ++e) {
            if (offsets && offsets[e] == offsets[e + 1]) continue;
            for (size_t m = stage; m < end; ++m)
                ranges_.push_back({matrices[m].data + e * matrices[m].stride, matrices[m].nbytes});
        }
    }
}

void ExpertReader::ask(int layer, const int32_t* offsets) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        const int n_layers = static_cast<int>(layers_.size());
        if (layer < 0 || layer >= n_layers) return;
        list(layer, offsets);
        const Layer& asked = layers_[layer];
        const size_t all = asked.matrices.size() * asked.n_experts;
        following_ = ranges_.size() * 4 >= all * 3 && layer + 1 < n_layers ? layer + 1 : -1;
    }
    wanted_.notify_all();
}

int64_t ExpertReader::bytes_asked() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return bytes_;
}

void ExpertReader::serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!ends_) {
        if (next_ == ranges_.size() && following_ >= 0) {
            list(following_, nullptr);
            following_ = -1;
        }
        if (next_ == ranges_.size()) {
            wanted_.wait(lock);
            continue;
        }
        const Range range = ranges_[next_++];
        bytes_ += range.nbytes;
        lock.unlock();
        start_reading(range.data, range.nbytes);
        lock.lock();
    }
}

}  // namespace ikpy
