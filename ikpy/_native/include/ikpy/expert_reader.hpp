// Reads the pages of experts while the products before them run.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace ikpy {

// Weights of all experts in a mapped file: expert e has nbytes bytes from data + e * stride on. Matrices of
// one stage are multiplied together, those of the next stage afterwards.
struct ExpertMatrix {
    const uint8_t* data;
    int64_t stride, nbytes;
    int32_t stage;
};

// Threads that ask the system for the pages of the experts that tokens were sent to, expert by expert in the
// order in which the products use them. A page fault waits for one read; these keep a drive busy with many.
class ExpertReader {
  public:
    // Throws std::system_error if the threads cannot be started.
    explicit ExpertReader(int n_threads);
    ~ExpertReader();
    ExpertReader(const ExpertReader&) = delete;
    ExpertReader& operator=(const ExpertReader&) = delete;

    // Adds a layer, behind those that run before it; its matrices are in the order of their stages. Returns
    // its number. A layer that is there already keeps its number.
    int add_layer(const std::vector<ExpertMatrix>& matrices, int n_experts);

    // Reads the experts e of a layer with offsets[e] < offsets[e + 1] from now on, and nothing that was asked
    // for before. Where most experts are wanted, as by prompts, all those of the next layer follow.
    void ask(int layer, const int32_t* offsets);

    // Bytes that the system was asked for so far.
    int64_t bytes_asked() const;

  private:
    struct Layer {
        std::vector<ExpertMatrix> matrices;
        int n_experts;
    };
    struct Range {
        const uint8_t* data;
        int64_t nbytes;
    };

    void serve();
    void stop();
    void list(int layer, const int32_t* offsets);

    mutable std::mutex mutex_;
    std::condition_variable wanted_;
    std::deque<Layer> layers_;
    std::vector<Range> ranges_;  // what is to be read, in order
    size_t next_ = 0;            // the first of them that no thread has taken
    int following_ = -1;         // the layer that is read after them, -1: none
    int64_t bytes_ = 0;
    bool ends_ = false;
    int process_;
    std::vector<std::thread> threads_;
};

}  // namespace ikpy
