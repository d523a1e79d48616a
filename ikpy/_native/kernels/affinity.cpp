#include "ikpy/affinity.hpp"

#include <algorithm>
#include <atomic>

#if defined(__linux__)
#include <sched.h>
#endif

namespace ikpy {

#if defined(__linux__)

namespace {

struct ThreadSet {
    std::vector<cpu_set_t> groups;
    int priority = 0;
    int spins = kSpins;
};

ThreadSet sets[kThreadSets];
std::atomic<int> version{0};  // of the sets; 0 = never set

std::vector<cpu_set_t> to_sets(const std::vector<std::vector<int>>& groups) {
    std::vector<cpu_set_t> result;
    for (const std::vector<int>& group : groups) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (const int cpu : group) CPU_SET(cpu, &set);
        result.push_back(set);
    }
    return result;
}

// Threads that a real-time one starts are none: they would keep the rest of the program from its CPUs.
void set_priority(int priority) {
    constexpr int kRealTime[] = {40, 80, 90};
    sched_param param{};
    int policy = priority < 0 ? SCHED_BATCH : SCHED_OTHER;
    if (priority > 0) {
        param.sched_priority = kRealTime[std::min(priority, 3) - 1];
        policy = SCHED_FIFO | SCHED_RESET_ON_FORK;
    }
    sched_setscheduler(0, policy, &param);
}

}  // namespace

void set_thread_cpus(const std::vector<std::vector<int>>& groups) {
    for (ThreadSet& set : sets) set.groups = to_sets(groups);
    version.fetch_add(1, std::memory_order_release);
}

void set_thread_set(int set, const std::vector<std::vector<int>>& groups, int priority, int spins) {
    sets[set] = {to_sets(groups), priority, spins};
    version.fetch_add(1, std::memory_order_release);
}

void bind_thread(int ith, int set) {
    // A worker keeps its number while its team lives, but a team of another size gives it a new one.
    thread_local int bound_version = 0, bound_ith = -1, bound_set = -1, bound_priority = 0;
    const int current = version.load(std::memory_order_acquire);
    if (bound_version == current && (current == 0 || (bound_ith == ith && bound_set == set))) return;
    bound_version = current;
    bound_ith = ith;
    bound_set = set;
    const ThreadSet& own = sets[set];
    // On failure the thread runs where, and as, the system lets it: slower, not wrong.
    if (!own.groups.empty()) sched_setaffinity(0, sizeof(cpu_set_t), &own.groups[ith % own.groups.size()]);
    if (own.priority != bound_priority) set_priority(bound_priority = own.priority);
}

int place_of_thread(int ith, int nth, int set) {
    const int n = std::max(1, static_cast<int>(sets[set].groups.size())), own = ith % n;
    return own * (nth / n) + std::min(own, nth % n) + ith / n;
}

int thread_spins(int set) { return sets[set].spins; }

#else

void set_thread_cpus(const std::vector<std::vector<int>>&) {}
void set_thread_set(int, const std::vector<std::vector<int>>&, int, int) {}
void bind_thread(int, int) {}
int place_of_thread(int ith, int, int) { return ith; }
int thread_spins(int) { return kSpins; }

#endif

}  // namespace ikpy
