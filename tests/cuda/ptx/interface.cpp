// The machine for Python (launcher.py, by ctypes).
#include <algorithm>
#include <map>
#include <numeric>

#include "machine.hpp"

namespace ptx {
namespace {

std::map<std::string, int>& names() {
    static std::map<std::string, int> found;
    return found;
}
std::vector<Handler>& handlers() {
    static std::vector<Handler> found;
    return found;
}
std::string& error() {
    thread_local std::string text;
    return text;
}

void add_all_forms() {
    add_scalar_forms();
    add_conversion_forms();
    add_memory_forms();
    add_control_forms();
    add_tensor_forms();
}

std::vector<uint64_t> block_order(const Launch& launch) {
    std::vector<uint64_t> order(uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2]);
    std::iota(order.begin(), order.end(), 0);
    if (launch.order == 1) std::reverse(order.begin(), order.end());
    if (launch.order > 1) std::shuffle(order.begin(), order.end(), std::mt19937(launch.order));
    return order;
}

// The result of f, or -1 and the text of its fault in error().
template <class F>
int guarded(F f) {
    try {
        return f();
    } catch (const std::exception& fault) {
        error() = fault.what();
        return -1;
    }
}

}  // namespace

void add(const std::string& name, Handler handler) {
    names()[name] = static_cast<int>(handlers().size());
    handlers().push_back(handler);
}

}  // namespace ptx

extern "C" {

const char* ptx_error() { return ptx::error().c_str(); }

// Index of a form, -1 if there is none.
int ptx_form(const char* name) {
    if (ptx::names().empty()) ptx::add_all_forms();
    const auto at = ptx::names().find(name);
    return at == ptx::names().end() ? -1 : at->second;
}
int ptx_mma_kind(const char* suffix) {
    return ptx::guarded([&] { return ptx::mma_kind(suffix); });
}
int ptx_wgmma_kind(const char* suffix) {
    return ptx::guarded([&] { return ptx::wgmma_kind(suffix); });
}

// constants: 32-bit ones, then wide_constants. Freed by ptx_free_program().
void* ptx_program(const int32_t* code, int n_code, const int32_t* operands, int n_operands,
                  const uint32_t* constants, int n_constants, const uint64_t* wide_constants,
                  int n_wide_constants, int registers, int wide_registers) {
    auto* program = new ptx::Program;
    program->code.resize(n_code);
    std::memcpy(static_cast<void*>(program->code.data()), code, n_code * sizeof(ptx::Instruction));
    program->operands.assign(operands, operands + n_operands);
    for (int i = 0; i < n_constants; ++i) program->constants.emplace_back().fill(constants[i]);
    for (int i = 0; i < n_wide_constants; ++i) program->wide_constants.emplace_back().fill(wide_constants[i]);
    program->registers = registers, program->wide_registers = wide_registers;
    for (const auto& instruction : program->code)
        program->handlers.push_back(ptx::handlers()[instruction.op]);
    return program;
}
void ptx_free_program(void* program) { delete static_cast<ptx::Program*>(program); }

// From now on accesses of the program's instructions are counted.
void ptx_measure(void* program) {
    auto* measured = static_cast<ptx::Program*>(program);
    measured->traffic.assign(measured->code.size(), {});
}
// The counts of all instructions, as ptx::Traffic has them.
void ptx_traffic(const void* program, uint64_t* counts) {
    const auto& traffic = static_cast<const ptx::Program*>(program)->traffic;
    std::memcpy(counts, traffic.data(), traffic.size() * sizeof(ptx::Traffic));
}

// sizes: grid, block, bytes of shared, local and parameter memory, order, every_lane; memory: starts and
// ends, sorted.
int ptx_launch(const void* program, const uint32_t* sizes, const uint8_t* parameters, const uint64_t* memory,
               int n_memory) {
    return ptx::guarded([&] {
        ptx::Launch launch{};
        launch.program = static_cast<const ptx::Program*>(program);
        std::copy(sizes, sizes + 3, launch.grid);
        std::copy(sizes + 3, sizes + 6, launch.block);
        launch.shared_bytes = sizes[6], launch.local_bytes = sizes[7], launch.parameter_bytes = sizes[8];
        launch.order = sizes[9], launch.every_lane = sizes[10];
        launch.parameters = parameters;
        for (int i = 0; i < n_memory; ++i) launch.memory.push_back({memory[2 * i], memory[2 * i + 1]});
        ptx::Block block(launch);
        for (const uint64_t number : ptx::block_order(launch)) block.run(number);
        return 0;
    });
}
}
