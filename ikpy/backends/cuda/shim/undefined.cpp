// What the language leaves undefined: the handlers that the compiler calls where the kernels are built with
// -fsanitize=alignment, bounds, float-cast-overflow, integer-divide-by-zero, shift-exponent and
// signed-integer-overflow (the sanitizer's own library is not linked). A device does something else there
// than the host: shifts by 32 and more give zeros, numbers that an integer cannot hold become its largest or
// 0.
#include <cstdio>

#include "machine.hpp"

namespace {

using ikpy::shim::present;

// What the data of every check begins with.
struct Place {
    const char* file;
    uint32_t line, column;
};

char message[200];

void found(const void* data, const char* what) {
    if (!present.running) return;
    const auto* place = static_cast<const Place*>(data);
    const char* file = place->file ? place->file : "?";
    if (const char* name = std::strrchr(file, '/')) file = name + 1;
    std::snprintf(message, sizeof message, "%s at %s:%u, thread %d", what, file, place->line, present.thread);
    ikpy::shim::fail(message);
}

}  // namespace

extern "C" {
// Registers of a device have no alignment.
void __ubsan_handle_type_mismatch_v1(void* data, void* p) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    if (address < present.private_begin || address >= present.private_end) found(data, "misaligned access");
}
void __ubsan_handle_out_of_bounds(void* data, void*) { found(data, "an index beyond an array"); }
void __ubsan_handle_shift_out_of_bounds(void* data, void*, void*) { found(data, "a shift by too many bits"); }
void __ubsan_handle_divrem_overflow(void* data, void*, void*) { found(data, "a division by zero"); }
void __ubsan_handle_add_overflow(void* data, void*, void*) { found(data, "a sum beyond its type"); }
void __ubsan_handle_sub_overflow(void* data, void*, void*) { found(data, "a difference beyond its type"); }
void __ubsan_handle_mul_overflow(void* data, void*, void*) { found(data, "a product beyond its type"); }
void __ubsan_handle_negate_overflow(void* data, void*) { found(data, "a negation beyond its type"); }
void __ubsan_handle_float_cast_overflow(void* data, void*) { found(data, "a float beyond an integer"); }
}
