// The instructions for ctypes: every function returns 0, or 1 with the text of the Fault in ptx_fault().
#include <memory>

#include "warp_ops.hpp"

namespace {

std::string fault_text;

template <typename Work>
int guarded(Work work) {
    try {
        work();
        return 0;
    } catch (const std::exception& error) {
        fault_text = error.what();
        return 1;
    }
}

/// One block: its shared memory, the copies of one thread, its bulk copies, one warp group.
struct Block {
    std::vector<uint64_t> memory;
    ptx::ProxyWrites proxies;
    ptx::Shared shared;
    ptx::AsyncCopies copies;
    ptx::BulkCopies bulk;
    ptx::WarpGroup group;
    std::vector<ptx::WgmmaQueue> warps;

    Block(uint32_t bytes, ptx::Timing timing)
        : memory((bytes + 7) / 8), proxies(bytes, 128), copies(0, timing), bulk(timing) {
        shared = {reinterpret_cast<uint8_t*>(memory.data()), bytes, &proxies};
        for (int rank = 0; rank < 4; ++rank) warps.emplace_back(rank, &group, timing);
    }
    uint64_t* barrier(uint32_t address) const {
        return reinterpret_cast<uint64_t*>(shared.at(address, 8, 8, "mbarrier"));
    }
};

}  // namespace

extern "C" {

const char* ptx_fault() { return fault_text.c_str(); }

int ptx_mma(const char* suffix, const ptx::Register* a, const ptx::Register* b, const ptx::Register* c,
            ptx::Register* d) {
    return guarded([&] { ptx::mma_sync(ptx::mma_kind(suffix), a, b, c, d); });
}

int ptx_mma_registers(const char* suffix, int* counts) {
    return guarded([&] {
        const ptx::MmaRegisters n = ptx::mma_registers(ptx::mma_kind(suffix));
        counts[0] = n.a, counts[1] = n.b, counts[2] = n.c, counts[3] = n.d;
    });
}

Block* ptx_block(uint32_t bytes, int late) {
    return new Block(bytes, late ? ptx::Timing::late : ptx::Timing::early);
}
void ptx_block_free(Block* block) { delete block; }
uint8_t* ptx_block_memory(Block* block) { return block->shared.base; }

int ptx_ldmatrix(Block* block, const ptx::Register* addresses, int count, int transposed, int every_lane,
                 ptx::Register* out) {
    return guarded([&] { ptx::ldmatrix(block->shared, *addresses, count, transposed, out, every_lane); });
}

int ptx_copy(Block* block, uint32_t to, const uint8_t* from, uint32_t size, uint32_t valid) {
    return guarded([&] { block->copies.copy(block->shared, to, from, size, valid); });
}
void ptx_copy_commit(Block* block) { block->copies.commit(); }
void ptx_copy_wait(Block* block, int groups) { block->copies.wait(groups); }
void ptx_copy_wait_all(Block* block) { block->copies.wait_all(); }

int ptx_barrier_init(Block* block, uint32_t address, uint32_t count) {
    return guarded([&] {
        ptx::mbarrier_init(block->barrier(address), count);
        block->proxies.generic_write(address, 8, 0);
    });
}
int ptx_barrier_arrive(Block* block, uint32_t address, uint32_t count) {
    return guarded([&] { ptx::mbarrier_arrive(block->barrier(address), count); });
}
int ptx_barrier_expect(Block* block, uint32_t address, uint32_t bytes, int arrive) {
    return guarded([&] {
        if (arrive)
            ptx::mbarrier_arrive_expect_tx(block->barrier(address), bytes);
        else
            ptx::mbarrier_expect_tx(block->barrier(address), bytes);
    });
}
int ptx_barrier_complete(Block* block, uint32_t address, uint32_t bytes) {
    return guarded([&] { ptx::mbarrier_complete_tx(block->barrier(address), bytes); });
}
int ptx_barrier_test(Block* block, uint32_t address, uint32_t parity, int* completed) {
    return guarded([&] { *completed = ptx::mbarrier_test(block->barrier(address), parity); });
}
int ptx_bulk(Block* block, uint32_t to, const uint8_t* from, uint32_t bytes, uint32_t barrier) {
    return guarded([&] { block->bulk.copy(block->shared, to, from, bytes, barrier); });
}
int ptx_bulk_deliver(Block* block, uint32_t place) {
    return guarded([&] { block->bulk.deliver(block->shared, place); });
}

void ptx_generic_write(Block* block, uint32_t address, uint32_t bytes, int thread) {
    block->proxies.generic_write(address, bytes, thread);
}
void ptx_proxy_fence(Block* block, int thread) { block->proxies.fence(thread); }
void ptx_block_barrier(Block* block) { block->proxies.barrier(); }

/// options: scale-d, imm-scale-a, imm-scale-b, imm-trans-a, imm-trans-b; a: four registers, or null for a
/// descriptor.
int ptx_wgmma(Block* block, int rank, const char* suffix, uint64_t a_descriptor, uint64_t b_descriptor,
              ptx::Register* a, const int* options, ptx::Register* d) {
    return guarded([&] {
        ptx::WgmmaCall call;
        call.kind = ptx::wgmma_kind(suffix);
        call.a_descriptor = a_descriptor, call.b_descriptor = b_descriptor;
        call.accumulate = options[0], call.scale_a = options[1], call.scale_b = options[2];
        call.transpose_a = options[3], call.transpose_b = options[4];
        ptx::Register* of_a[4] = {a, a + 1, a + 2, a + 3};
        if (a) call.a = of_a;
        std::vector<ptx::Register*> of_d;
        for (int r = 0; r < ptx::wgmma_registers(call.kind).d; ++r) of_d.push_back(d + r);
        block->warps.at(size_t(rank)).issue(block->shared, call, of_d.data());
    });
}
int ptx_wgmma_wait(Block* block, int rank, int groups) {
    return guarded([&] { block->warps.at(size_t(rank)).wait(groups); });
}
int ptx_wgmma_touch(Block* block, int rank, const ptx::Register* reg) {
    return guarded([&] { block->warps.at(size_t(rank)).touch(reg); });
}
int ptx_wgmma_finish(Block* block, int rank) {
    return guarded([&] { block->warps.at(size_t(rank)).finish(); });
}
int ptx_group_finish(Block* block) {
    return guarded([&] { block->group.finish(); });
}
void ptx_wgmma_fence(Block* block, int rank) { block->warps.at(size_t(rank)).fence(); }
void ptx_wgmma_commit(Block* block, int rank) { block->warps.at(size_t(rank)).commit(); }
}
