// Where threads that run plans run, how urgent they are, and how long they wait actively.
#pragma once

#include <vector>

namespace ikpy {

// Plans for single tokens and for more, of a model and of its drafter.
constexpr int kThreadSets = 4;

// Pauses after which a thread that waits for others gives up its core: some 40 microseconds.
constexpr int kSpins = 1500;

// From its next run on, thread i of every plan runs on the CPUs groups[i % groups.size()]; empty: threads
// stay where they are. Without effect where the system cannot bind threads. Not to be called while a plan
// runs.
void set_thread_cpus(const std::vector<std::vector<int>>& groups);

// The same for the plans of one set, with a priority (0 is the usual one, 1 to 3 are real-time ones, -1 is
// that of work in the background) and the pauses after which a waiting thread gives up its core.
void set_thread_set(int set, const std::vector<std::vector<int>>& groups, int priority, int spins);

// Moves the calling thread, number ith of a plan of that set, to its CPUs and its priority unless it has
// them already.
void bind_thread(int ith, int set);

// Place of thread ith of nth in an order in which those with the same CPUs are neighbours.
int place_of_thread(int ith, int nth, int set);

int thread_spins(int set);

}  // namespace ikpy
