// The part of GCC's OpenMP runtime that the native modules call, made of plain threads, to be loaded before
// libgomp under ThreadSanitizer: that runtime is not instrumented and synchronizes by futexes, so that its
// regions and barriers would be reported as races.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace {

struct Team {
    explicit Team(unsigned n) : size(n) { pthread_barrier_init(&barrier, nullptr, n); }
    ~Team() { pthread_barrier_destroy(&barrier); }
    const unsigned size;
    pthread_barrier_t barrier;
    std::atomic<long> next{0};  // iterations handed out by the only loop of the region
};

// A loop of a region: the iterations first, first + step, ... before last, `chunk` at a time.
struct Loop {
    long first = 0, last = 0, step = 1, chunk = 1;
};

struct Worker {
    Team* team = nullptr;
    unsigned number = 0;
    Loop loop;
};

thread_local Worker self;

void run(void (*body)(void*), void* data, unsigned n_threads, const Loop& loop) {
    // A region within another one has one thread, as is usual.
    Team team(self.team ? 1 : std::max(n_threads, 1u));
    const auto work = [&](unsigned number) {
        const Worker outer = self;
        self = {&team, number, loop};
        body(data);
        self = outer;
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < team.size; ++i) others.emplace_back(work, i);
    work(0);
    for (std::thread& other : others) other.join();
}

}  // namespace

extern "C" {

int omp_get_thread_num() { return static_cast<int>(self.number); }

int omp_get_num_threads() { return self.team ? static_cast<int>(self.team->size) : 1; }

void GOMP_barrier() {
    if (self.team) pthread_barrier_wait(&self.team->barrier);
}

void GOMP_parallel(void (*body)(void*), void* data, unsigned n_threads, unsigned) {
    run(body, data, n_threads, {});
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* begin, long* end) {
    const Loop& loop = self.loop;
    const long count = (loop.last - loop.first + loop.step - 1) / loop.step;
    const long taken = self.team->next.fetch_add(loop.chunk);
    if (taken >= count) return false;
    *begin = loop.first + taken * loop.step;
    *end = loop.first + std::min(taken + loop.chunk, count) * loop.step;
    return true;
}

bool GOMP_loop_nonmonotonic_dynamic_start(long first, long last, long step, long chunk, long* begin,
                                          long* end) {
    self.loop = {first, last, step, chunk};
    return GOMP_loop_nonmonotonic_dynamic_next(begin, end);
}

void GOMP_parallel_loop_nonmonotonic_dynamic(void (*body)(void*), void* data, unsigned n_threads, long first,
                                             long last, long step, long chunk, unsigned) {
    run(body, data, n_threads, {first, last, step, chunk});
}

void GOMP_loop_end_nowait() {}
}
