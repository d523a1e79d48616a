// Tensor-core and asynchronous instructions of a machine that executes PTX, written from the PTX ISA
// documentation alone (sections "Warp-Level Matrix Instructions", "Asynchronous Warpgroup-Level Matrix
// Instructions", "Data Movement and Conversion Instructions" and "mbarrier"). Nothing here is shared with the
// library's own kernels. A program that breaks a rule of the ISA ends with a Fault that names the rule.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
using Register = std::array<uint32_t, kLanes>;  // one .b32 register of a warp
using Wide = std::array<uint64_t, kLanes>;      // one .b64 register of a warp

/// Ends the launch with this text.
struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Writes of the generic proxy (st.shared, cp.async, mbarrier.init) to the shared memory of one block that
/// the async proxy (wgmma operands, bulk copies) may not see yet: fence.proxy.async by the writing thread, or
/// by any thread after a barrier that follows the write, has to come between. Kept for words of 4 bytes, the
/// last writer.
class ProxyWrites {
  public:
    ProxyWrites(uint32_t shared_bytes, int threads);
    void generic_write(uint32_t address, uint32_t bytes, int thread);
    void fence(int thread);  // fence.proxy.async
    void barrier();          // a barrier of the block completed (bar.sync, or an mbarrier phase)
    /// Fault when the bytes hold a generic write that no fence made visible; what: the instruction's name.
    void check_async(uint32_t address, uint32_t bytes, const char* what) const;
    void async_write(uint32_t address, uint32_t bytes);  // these bytes hold what the async proxy wrote

  private:
    struct Write {
        uint32_t thread = 0, fences = 0, barriers = 0;
        bool pending = false;
    };
    std::vector<Write> words_;
    std::vector<uint32_t> fences_;  // of each thread
    uint32_t barriers_ = 1;         // completed, plus one
    uint32_t fenced_barriers_ = 0;  // the count of barriers at the last fence by anyone
};

/// The shared memory of a block: address 0 of the shared window is base. proxies is optional.
struct Shared {
    uint8_t* base;
    uint32_t size;
    ProxyWrites* proxies = nullptr;
    /// Host address of bytes at a shared address. Fault when they are outside or not aligned.
    uint8_t* at(uint32_t address, uint32_t bytes, uint32_t alignment, const char* what) const;
};

// mma.sync and ldmatrix

/// Kind of mma.sync by its suffix (".sync.aligned" may be there), as "m16n8k16.row.col.f32.f16.f16.f32" or
/// "m8n8k16.row.col.satfinite.s32.s8.u8.s32". Fault for forms that are unknown here.
int mma_kind(const std::string& suffix);

/// Registers per thread of each operand.
struct MmaRegisters {
    int a, b, c, d;
};
MmaRegisters mma_registers(int kind);

/// d = a * b + c of one warp; a, b, c, d as many registers as mma_registers says; d may be c. Products of
/// floating point are exact, the sum is c + the products in ascending order of k, each step rounded to
/// float32 (to nearest even; tensor cores add in another order and truncate). tf32 operands lose their low 13
/// bits. Integers wrap around, or clamp the final sum with .satfinite.
void mma_sync(int kind, const Register* a, const Register* b, const Register* c, Register* d);

/// ldmatrix .m8n8.b16 with count 1, 2 or 4 matrices; out: count registers. every_lane: all 32 addresses must
/// be valid, as sm_75 demands.
void ldmatrix(const Shared& shared, const Register& addresses, int count, bool transposed, Register* out,
              bool every_lane = false);

// cp.async

/// When asynchronous work takes effect: at its instruction, or only when a wait retires it.
enum class Timing { early, late };

/// cp.async of one thread.
class AsyncCopies {
  public:
    explicit AsyncCopies(int thread = 0, Timing timing = Timing::late) : thread_(thread), timing_(timing) {}
    /// size: 4, 8 or 16 bytes (only 16 for .cg); valid: bytes read from global memory, the rest become zero.
    void copy(const Shared& shared, uint32_t to, const uint8_t* from, uint32_t size, uint32_t valid);
    void commit();
    void wait(int groups);  // cp.async.wait_group: at most so many of the latest groups stay pending
    void wait_all();        // cp.async.wait_all, which takes uncommitted copies as well
    bool pending() const { return !current_.empty() || !groups_.empty(); }

  private:
    struct Copy {
        uint8_t* to;
        const uint8_t* from;
        uint32_t size, valid;
    };
    void perform(const std::vector<Copy>& copies) const;
    int thread_;
    Timing timing_;
    std::vector<Copy> current_;
    std::deque<std::vector<Copy>> groups_;
};

// mbarrier and bulk copies
//
// An mbarrier object is the 64 bits in shared memory: pending arrivals, expected arrivals, transaction bytes
// and the parity of the running phase. Memory that was never initialised is told from a barrier by two marker
// bits.

void mbarrier_init(uint64_t* barrier, uint32_t count);
void mbarrier_invalidate(uint64_t* barrier);
/// All arrivals return the state before them (the operand that mbarrier.test_wait without .parity takes).
uint64_t mbarrier_arrive(uint64_t* barrier, uint32_t count = 1);
void mbarrier_expect_tx(uint64_t* barrier, uint32_t bytes);
uint64_t mbarrier_arrive_expect_tx(uint64_t* barrier, uint32_t bytes);
void mbarrier_complete_tx(uint64_t* barrier, uint32_t bytes);
/// Whether the phase of this parity has completed: parity of the running phase gives false, the other one
/// true.
bool mbarrier_test(const uint64_t* barrier, uint32_t parity);
bool mbarrier_test_state(const uint64_t* barrier, uint64_t state);
/// Pending arrivals and transaction bytes, for messages about programs that hang.
std::string mbarrier_text(const uint64_t* barrier);

/// cp.async.bulk shared <- global of one block, completing transaction bytes on an mbarrier.
class BulkCopies {
  public:
    explicit BulkCopies(Timing timing = Timing::late) : timing_(timing) {}
    /// Addresses of 16 bytes alignment, bytes a multiple of 16, barrier a shared address of an mbarrier.
    void copy(const Shared& shared, uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier);
    /// Performs the pending copy at this place (0: the oldest); the order in which copies arrive is open.
    void deliver(const Shared& shared, size_t place = 0);
    size_t pending() const { return pending_.size(); }

  private:
    struct Copy {
        uint32_t to;
        const uint8_t* from;
        uint32_t bytes, barrier;
    };
    Timing timing_;
    std::deque<Copy> pending_;
};

// wgmma

/// Kind of wgmma.mma_async by its suffix, as "m64n128k16.f32.bf16.bf16" or "m64n64k32.satfinite.s32.s8.s8".
int wgmma_kind(const std::string& suffix);

struct WgmmaRegisters {
    int d;        // accumulators per thread
    int a;        // registers per thread when A is not in shared memory
    bool half;    // the form takes imm-trans-a and imm-trans-b (f16 and bf16)
    bool scaled;  // the form takes imm-scale-a and imm-scale-b (floating point)
};
WgmmaRegisters wgmma_registers(int kind);

/// Operands of one wgmma.mma_async. Descriptors are the values of the program.
struct WgmmaCall {
    int kind = 0;
    uint64_t a_descriptor = 0, b_descriptor = 0;
    Register* const* a = nullptr;  // registers that hold A; then a_descriptor is not used
    bool accumulate = true;        // scale-d
    int scale_a = 1, scale_b = 1;  // 1 or -1
    bool transpose_a = false, transpose_b = false;
};

/// What the four warps of a warp group have to agree on: their i-th wgmma.mma_async must be the same
/// instruction with the same descriptors and scale-d.
class WarpGroup {
  public:
    void issue(int rank, const WgmmaCall& call);
    void finish() const;  // at the end of the block: Fault when a warp issued fewer than the others

  private:
    std::deque<WgmmaCall> calls_;
    std::array<uint64_t, 4> issued_{};
    uint64_t first_ = 0;
};

/// The wgmma instructions of one warp, the rank-th (0..3) of its warp group. A warp computes rows 16 rank ...
/// 16 rank
/// + 15 of D, which depend on no other warp, so warps need not run in step.
class WgmmaQueue {
  public:
    explicit WgmmaQueue(int rank, WarpGroup* group = nullptr, Timing timing = Timing::late)
        : rank_(rank), group_(group), timing_(timing) {}
    /// d: wgmma_registers(kind).d pointers to registers that stay where they are until the wait. Late timing
    /// reads shared memory and writes D at the wait that retires the group.
    void issue(const Shared& shared, const WgmmaCall& call, Register* const* d);
    void fence();           // wgmma.fence
    void commit();          // wgmma.commit_group
    void wait(int groups);  // wgmma.wait_group
    bool pending() const { return !current_.empty() || !groups_.empty(); }
    /// Another instruction reads or writes a register that some wgmma of the kernel names as accumulator or
    /// as A: Fault while a wgmma in flight owns it; the next wgmma on it needs a wgmma.fence.
    void touch(const Register* reg);
    /// At the end of the kernel. Fault when wgmmas are in flight.
    void finish() const;

  private:
    struct Issued {
        Shared shared;
        WgmmaCall call;
        std::vector<Register*> a, d;
    };
    struct Use {
        int in_flight = 0;     // wgmmas that own the register
        int kind = -1;         // of the last wgmma since a fence that had it as accumulator
        bool touched = false;  // by another instruction since a fence
    };
    void check(const Issued& issued) const;
    void perform(const Issued& issued) const;
    int rank_;
    WarpGroup* group_;
    Timing timing_;
    bool fenced_ = false;  // a wgmma.fence has been executed
    std::vector<Issued> current_;
    std::deque<std::vector<Issued>> groups_;
    std::unordered_map<const Register*, Use> registers_;
};

}  // namespace ptx
