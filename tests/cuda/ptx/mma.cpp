// mma.sync and ldmatrix.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "numbers.hpp"
#include "warp_ops.hpp"

namespace ptx {
namespace {

/// m x 8 x k of one form; kinds are the bits of this.
struct Form {
    uint32_t m : 6, k : 7, a : 3, b : 3, c : 3, d : 3, satfinite : 1;
};

Form form_of(int kind) {
    Form form;
    std::memcpy(&form, &kind, 4);
    return form;
}

bool known(const Form& form) {
    const bool integer = form.a == s8 || form.a == u8;
    if (integer) {
        const bool types = (form.b == s8 || form.b == u8) && form.c == s32 && form.d == s32;
        return types && ((form.m == 8 && form.k == 16) || (form.m == 16 && (form.k == 16 || form.k == 32)));
    }
    if (form.satfinite || form.b != form.a || form.m != 16) return false;
    const bool single = form.c == f32 && form.d == f32;
    if (form.a == tf32) return single && (form.k == 4 || form.k == 8);
    if (form.a == bf16) return single && (form.k == 8 || form.k == 16);
    if (form.a != f16 || (form.k != 8 && form.k != 16)) return false;
    return single || (form.c == f16 && form.d == f16);
}

/// Rows of A or columns of B, each of k elements. Lane = 4 group + member: its register r covers `per`
/// neighbouring elements of k from 4 per block + per member, where A of 16 rows takes two registers (rows
/// group, group + 8) for each block of 4 per elements.
template <typename Value, typename Read>
void unpack(const Register* registers, int count, int halves, int per, int k, Value* out, Read read) {
    for (int r = 0; r < count; ++r)
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < per; ++i) {
                const int line = lane / 4 + 8 * (r % halves);
                const int column = r / halves * 4 * per + lane % 4 * per + i;
                out[line * k + column] = read(registers[r][lane], i);
            }
}

uint32_t clamp_or_wrap(int64_t sum, bool clamp) {
    if (clamp) sum = std::min<int64_t>(std::max<int64_t>(sum, INT32_MIN), INT32_MAX);
    return uint32_t(sum);
}

void multiply_integers(const Form& form, const MmaRegisters& n, const Register* a, const Register* b,
                       const Register* c, Register* d) {
    int64_t rows[16 * 32], columns[8 * 32];
    const int k = form.k;
    unpack(a, n.a, form.m / 8, 4, k, rows, [&](uint32_t w, int i) { return integer(Element(form.a), w, i); });
    unpack(b, n.b, 1, 4, k, columns, [&](uint32_t w, int i) { return integer(Element(form.b), w, i); });
    for (int r = 0; r < n.d; ++r)
        for (int lane = 0; lane < kLanes; ++lane) {
            const int64_t* row = rows + (lane / 4 + r / 2 * 8) * k;
            const int64_t* column = columns + (lane % 4 * 2 + r % 2) * k;
            int64_t sum = int32_t(c[r][lane]);
            for (int j = 0; j < k; ++j) sum += row[j] * column[j];
            d[r][lane] = clamp_or_wrap(sum, form.satfinite);
        }
}

float dot(float sum, const float* row, const float* column, int k) {
    for (int j = 0; j < k; ++j) sum += row[j] * column[j];
    return sum;
}

void multiply_floats(const Form& form, const MmaRegisters& n, const Register* a, const Register* b,
                     const Register* c, Register* d) {
    float rows[16 * 16], columns[8 * 16];
    const int k = form.k, per = 32 / bits_of(Element(form.a));
    unpack(a, n.a, 2, per, k, rows, [&](uint32_t w, int i) { return floating(Element(form.a), w, i); });
    unpack(b, n.b, 1, per, k, columns, [&](uint32_t w, int i) { return floating(Element(form.b), w, i); });
    for (int lane = 0; lane < kLanes; ++lane) {
        float sums[4];
        for (int e = 0; e < 4; ++e) {
            const float start =
                form.c == f32 ? float_of_bits(c[e][lane]) : floating(f16, c[e / 2][lane], e % 2);
            sums[e] = dot(start, rows + (lane / 4 + e / 2 * 8) * k, columns + (lane % 4 * 2 + e % 2) * k, k);
        }
        for (int r = 0; r < n.d; ++r)
            d[r][lane] = form.d == f32
                             ? bits_of_float(sums[r])
                             : half_of_float(sums[2 * r]) | uint32_t(half_of_float(sums[2 * r + 1])) << 16;
    }
}

}  // namespace

int mma_kind(const std::string& suffix) {
    std::vector<std::string> parts = parts_of(suffix);
    const Fault fault("mma.sync: form not known here: " + suffix);
    Form form{};
    unsigned m = 0, n = 0, k = 0;
    if (parts.empty() || std::sscanf(parts[0].c_str(), "m%un%uk%u", &m, &n, &k) != 3 || n != 8) throw fault;
    const auto saturate = std::find(parts.begin(), parts.end(), "satfinite");
    form.satfinite = saturate != parts.end();
    if (form.satfinite) parts.erase(saturate);
    if (parts.size() != 7 || parts[1] != "row" || parts[2] != "col") throw fault;
    if (m > 16 || k > 32) throw fault;
    form.m = m, form.k = k;
    form.d = element_of(parts[3]), form.a = element_of(parts[4]);
    form.b = element_of(parts[5]), form.c = element_of(parts[6]);
    if (!known(form)) throw fault;
    int kind = 0;
    std::memcpy(&kind, &form, 4);
    return kind;
}

MmaRegisters mma_registers(int kind) {
    const Form form = form_of(kind);
    const int per = 32 / bits_of(Element(form.a));
    const auto outputs = [&](unsigned element) { return int(form.m) * 8 * bits_of(Element(element)) / 1024; };
    return {int(form.m * form.k) / per / kLanes, int(8 * form.k) / per / kLanes, outputs(form.c),
            outputs(form.d)};
}

void mma_sync(int kind, const Register* a, const Register* b, const Register* c, Register* d) {
    const Form form = form_of(kind);
    const MmaRegisters n = mma_registers(kind);
    if (form.d == s32)
        multiply_integers(form, n, a, b, c, d);
    else
        multiply_floats(form, n, a, b, c, d);
}

void ldmatrix(const Shared& shared, const Register& addresses, int count, bool transposed, Register* out,
              bool every_lane) {
    if (count != 1 && count != 2 && count != 4) throw Fault("ldmatrix: .num of " + std::to_string(count));
    const uint8_t* rows[kLanes];
    for (int lane = 0; lane < (every_lane ? kLanes : 8 * count); ++lane)
        rows[lane] = shared.at(addresses[lane], 16, 16, "ldmatrix");
    for (int matrix = 0; matrix < count; ++matrix)
        for (int lane = 0; lane < kLanes; ++lane) {
            uint16_t pair[2];
            for (int i = 0; i < 2; ++i) {
                const int row = transposed ? lane % 4 * 2 + i : lane / 4;
                const int column = transposed ? lane / 4 : lane % 4 * 2 + i;
                std::memcpy(&pair[i], rows[8 * matrix + row] + 2 * column, 2);
            }
            out[matrix][lane] = pair[0] | uint32_t(pair[1]) << 16;
        }
}

}  // namespace ptx
