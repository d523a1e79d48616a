// wgmma.mma_async: operands in shared memory by descriptors, accumulators in registers, groups that are
// waited for.
#include <algorithm>
#include <cstdio>

#include "numbers.hpp"
#include "warp_ops.hpp"

namespace ptx {
namespace {

constexpr int kRows = 16;          // of A and D, those of one warp
constexpr int kOperandBytes = 32;  // of one row of A or column of B along k, in all forms

struct Form {
    uint32_t n : 9, a : 3, b : 3, d : 3, satfinite : 1;
};

Form form_of(int kind) {
    Form form;
    std::memcpy(&form, &kind, 4);
    return form;
}

int depth(const Form& form) { return kOperandBytes * 8 / bits_of(Element(form.a)); }

bool known(const Form& form) {
    const bool integer = form.a == s8 || form.a == u8;
    if (form.n < 8 || form.n > 256 || form.n % 8) return false;
    if (integer) return (form.b == s8 || form.b == u8) && form.d == s32 && (form.n % 16 == 0 || form.n <= 24);
    if (form.satfinite || form.a != form.b) return false;
    if (form.a == f16) return form.d == f16 || form.d == f32;
    return (form.a == bf16 || form.a == tf32) && form.d == f32;
}

/// The fields of a matrix descriptor.
struct Descriptor {
    uint32_t start, leading, stride, base_offset, swizzle_bytes;  // swizzle_bytes 0: none
};

Descriptor decoded(uint64_t bits) {
    constexpr uint32_t kSwizzle[] = {0, 128, 64, 32};
    if (bits & 0x3ff1c000c000c000) throw Fault("wgmma: reserved bits of a matrix descriptor are set");
    const auto field = [&](int shift) { return uint32_t(bits >> shift & 0x3fff) << 4; };
    return {field(0), field(16), field(32), uint32_t(bits >> 49 & 7), kSwizzle[bits >> 62]};
}

/// The swizzle repeats every 8 rows of swizzle_bytes; a descriptor starts in row 0 of such a pattern.
void check_start(const Descriptor& d, bool mn_major) {
    if (!d.swizzle_bytes) {
        if (d.base_offset) throw Fault("wgmma: base offset without swizzle");
        return;
    }
    const uint32_t within = (d.start - (d.base_offset << 7)) % (8 * d.swizzle_bytes);
    if (within >= d.swizzle_bytes)
        throw Fault("wgmma: start address " + std::to_string(d.start) + " with base offset " +
                    std::to_string(d.base_offset) + " is not in the first row of the " +
                    std::to_string(d.swizzle_bytes) + " byte swizzle pattern");
    if (!mn_major && within + kOperandBytes > d.swizzle_bytes)
        throw Fault("wgmma: an operand at start address " + std::to_string(d.start) + " leaves the rows of " +
                    std::to_string(d.swizzle_bytes) + " bytes");
}

/// Address of 16 bytes, `row` along M or N, both indices at the start of the 16 bytes along the major one.
/// `per`: elements in 16 bytes.
uint32_t chunk_address(const Descriptor& d, bool mn_major, uint32_t per, uint32_t row, uint32_t k) {
    const uint32_t span = d.swizzle_bytes;
    uint32_t address = d.start;
    if (!mn_major && !span)
        address += row % 8 * 16 + row / 8 * d.stride + k / per * d.leading;
    else if (!mn_major)
        address += row % 8 * span + row / 8 * d.stride + k / per * 16;
    else if (!span)
        address += row / per * d.stride + k % 8 * 16 + k / 8 * d.leading;
    else
        address += row / per % (span / 16) * 16 + row / per / (span / 16) * d.leading + k % 8 * span +
                   k / 8 * d.stride;
    if (!span) return address;
    return address ^ ((((address >> 7) - d.base_offset) & (span / 16 - 1)) << 4);
}

/// One operand in shared memory: lines of 32 bytes along k, `first` the first of them along M or N.
class Operand {
  public:
    Operand(const Shared& shared, uint64_t bits, bool mn_major, Element element, int first, int lines)
        : shared_(shared),
          descriptor_(decoded(bits)),
          mn_major_(mn_major),
          bytes_(bits_of(element) / 8),
          first_(first),
          lines_(lines) {
        check_start(descriptor_, mn_major);
    }

    /// Calls use(line, k, 16 bytes) for all chunks.
    template <typename Use>
    void chunks(Use use) const {
        const int per = 16 / bytes_, depth = kOperandBytes / bytes_;
        const int line_step = mn_major_ ? per : 1, k_step = mn_major_ ? 1 : per;
        for (int line = 0; line < lines_; line += line_step)
            for (int k = 0; k < depth; k += k_step) {
                const uint32_t address = chunk_address(descriptor_, mn_major_, uint32_t(per),
                                                       uint32_t(first_ + line), uint32_t(k));
                const uint8_t* chunk = shared_.at(address, 16, 16, "wgmma");
                if (shared_.proxies) shared_.proxies->check_async(address, 16, "wgmma");
                use(line, k, chunk);
            }
    }

    void check() const {
        chunks([](int, int, const uint8_t*) {});
    }

    /// Stores put(line, k, element in the low bits of a word).
    template <typename Put>
    void read(Put put) const {
        chunks([&](int line, int k, const uint8_t* chunk) {
            for (int i = 0; i < 16 / bytes_; ++i) {
                uint32_t word = 0;
                std::memcpy(&word, chunk + i * bytes_, size_t(bytes_));
                put(mn_major_ ? line + i : line, mn_major_ ? k : k + i, word);
            }
        });
    }

  private:
    const Shared& shared_;
    Descriptor descriptor_;
    bool mn_major_;
    int bytes_, first_, lines_;
};

/// A of one warp from its four registers: register r holds row lane / 4 + 8 (r % 2) and, of the half r / 2 of
/// k, the elements of the lane's place in its group of four.
template <typename Put>
void read_registers(Register* const* a, Element element, Put put) {
    const int per = 32 / bits_of(element);
    for (int r = 0; r < 4; ++r)
        for (int lane = 0; lane < kLanes; ++lane)
            for (int i = 0; i < per; ++i)
                put(lane / 4 + 8 * (r % 2), r / 2 * 4 * per + lane % 4 * per + i,
                    (*a[r])[lane] >> (i * 32 / per));
}

/// The matrices of one warp: a (16, depth), b (depth, n), the product (16, n).
template <typename Value>
struct Matrices {
    Value a[kRows * kOperandBytes], b[kOperandBytes * 256], product[kRows * 256];
};

/// Adds a * b to the product, in ascending order of k.
template <typename Value>
void multiply(Matrices<Value>& m, int n, int depth) {
    for (int row = 0; row < kRows; ++row)
        for (int k = 0; k < depth; ++k)
            for (int j = 0; j < n; ++j) m.product[row * n + j] += m.a[row * depth + k] * m.b[k * n + j];
}

/// Fills a and b; value_a, value_b: (element in the low bits of a word) -> Value.
template <typename Value, typename ValueA, typename ValueB>
void read_operands(Matrices<Value>& m, const Shared& shared, const WgmmaCall& call, Register* const* a,
                   int rank, ValueA value_a, ValueB value_b) {
    const Form form = form_of(call.kind);
    const int k_count = depth(form), n = form.n;
    const auto put_a = [&](int row, int k, uint32_t word) { m.a[row * k_count + k] = value_a(word); };
    if (a)
        read_registers(a, Element(form.a), put_a);
    else
        Operand(shared, call.a_descriptor, call.transpose_a, Element(form.a), kRows * rank, kRows)
            .read(put_a);
    Operand(shared, call.b_descriptor, call.transpose_b, Element(form.b), 0, n)
        .read([&](int column, int k, uint32_t word) { m.b[k * n + column] = value_b(word); });
}

/// Calls use(register, element of it, lane, place in a (16, n) matrix) for the accumulators of one warp.
template <typename Use>
void accumulators(int n, int per, Use use) {
    for (int e = 0; e < n / 2; ++e)
        for (int lane = 0; lane < kLanes; ++lane) {
            const int row = lane / 4 + 8 * (e / 2 % 2), column = 8 * (e / 4) + 2 * (lane % 4) + e % 2;
            use(e / per, e % per, lane, row * n + column);
        }
}

void multiply_floats(const Shared& shared, const WgmmaCall& call, Register* const* a, Register* const* d,
                     int rank) {
    const Form form = form_of(call.kind);
    const Element kind = Element(form.a), result = Element(form.d);
    const int n = form.n, per = 32 / bits_of(result);
    static thread_local Matrices<float> m;
    read_operands(
        m, shared, call, a, rank,
        [&](uint32_t word) { return float(call.scale_a) * floating(kind, word, 0); },
        [&](uint32_t word) { return float(call.scale_b) * floating(kind, word, 0); });
    accumulators(n, per, [&](int r, int i, int lane, int place) {
        m.product[place] = call.accumulate ? floating(result, (*d[r])[lane], i) : 0.0f;
    });
    multiply(m, n, depth(form));
    accumulators(n, per, [&](int r, int i, int lane, int place) {
        uint32_t& word = (*d[r])[lane];
        const float value = m.product[place];
        if (per == 1)
            word = bits_of_float(value);
        else
            word = (word & (i ? 0xffffu : 0xffff0000u)) | uint32_t(half_of_float(value)) << 16 * i;
    });
}

void multiply_integers(const Shared& shared, const WgmmaCall& call, Register* const* a, Register* const* d,
                       int rank) {
    const Form form = form_of(call.kind);
    const int n = form.n;
    static thread_local Matrices<int32_t> m;
    read_operands(
        m, shared, call, a, rank, [&](uint32_t word) { return int32_t(integer(Element(form.a), word, 0)); },
        [&](uint32_t word) { return int32_t(integer(Element(form.b), word, 0)); });
    std::fill(m.product, m.product + kRows * n, 0);
    multiply(m, n, depth(form));
    accumulators(n, 1, [&](int r, int, int lane, int place) {
        uint32_t& word = (*d[r])[lane];
        const int64_t sum = int64_t(m.product[place]) + (call.accumulate ? int32_t(word) : 0);
        word = form.satfinite ? uint32_t(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX)) : uint32_t(sum);
    });
}

void check_immediates(const WgmmaCall& call) {
    const WgmmaRegisters form = wgmma_registers(call.kind);
    const auto sign = [](int scale) { return scale == 1 || scale == -1; };
    if (!sign(call.scale_a) || !sign(call.scale_b)) throw Fault("wgmma: imm-scale has to be 1 or -1");
    if (!form.scaled && (call.scale_a != 1 || call.scale_b != 1))
        throw Fault("wgmma: no imm-scale in this form");
    if (!form.half && (call.transpose_a || call.transpose_b))
        throw Fault("wgmma: only 16 bit types transpose");
    if (call.a && call.transpose_a) throw Fault("wgmma: A in registers has no imm-trans-a");
}

bool same(const WgmmaCall& x, const WgmmaCall& y) {
    return x.kind == y.kind && x.b_descriptor == y.b_descriptor && (x.a != nullptr) == (y.a != nullptr) &&
           (x.a || x.a_descriptor == y.a_descriptor) && x.accumulate == y.accumulate &&
           x.scale_a == y.scale_a && x.scale_b == y.scale_b && x.transpose_a == y.transpose_a &&
           x.transpose_b == y.transpose_b;
}

}  // namespace

int wgmma_kind(const std::string& suffix) {
    std::vector<std::string> parts = parts_of(suffix);
    const Fault fault("wgmma.mma_async: form not known here: " + suffix);
    const auto saturate = std::find(parts.begin(), parts.end(), "satfinite");
    Form form{};
    form.satfinite = saturate != parts.end();
    if (form.satfinite) parts.erase(saturate);
    unsigned n = 0, k = 0;
    if (parts.size() != 4 || std::sscanf(parts[0].c_str(), "m64n%uk%u", &n, &k) != 2 || n > 256) throw fault;
    form.n = n;
    form.d = element_of(parts[1]), form.a = element_of(parts[2]), form.b = element_of(parts[3]);
    if (!known(form) || int(k) != depth(form)) throw fault;
    int kind = 0;
    std::memcpy(&kind, &form, 4);
    return kind;
}

WgmmaRegisters wgmma_registers(int kind) {
    const Form form = form_of(kind);
    const bool integer = form.d == s32;
    return {int(form.n) * bits_of(Element(form.d)) / 64, 4, form.a == f16 || form.a == bf16, !integer};
}

void WarpGroup::issue(int rank, const WgmmaCall& call) {
    const uint64_t place = issued_[size_t(rank)]++ - first_;
    if (place == calls_.size())
        calls_.push_back(call);
    else if (!same(calls_[size_t(place)], call))
        throw Fault(
            "wgmma: the warps of a warp group issue different instructions, or with different descriptors");
    const uint64_t done = *std::min_element(issued_.begin(), issued_.end());
    for (; first_ < done; ++first_) calls_.pop_front();
}

void WarpGroup::finish() const {
    if (!calls_.empty())
        throw Fault("wgmma: some warps of a warp group took no part in its last instructions");
}

void WgmmaQueue::issue(const Shared& shared, const WgmmaCall& call, Register* const* d) {
    const WgmmaRegisters form = wgmma_registers(call.kind);
    check_immediates(call);
    if (!fenced_) throw Fault("wgmma: the first wgmma.mma_async of the kernel follows no wgmma.fence");
    Issued issued{shared, call, {}, {d, d + form.d}};
    if (call.a) issued.a.assign(call.a, call.a + form.a);
    for (const Register* reg : issued.d) {
        Use& use = registers_[reg];
        if (use.touched || (use.kind >= 0 && use.kind != call.kind))
            throw Fault("wgmma: an accumulator was accessed and no wgmma.fence follows");
        use.kind = call.kind;
        ++use.in_flight;
    }
    for (const Register* reg : issued.a) {
        Use& use = registers_[reg];
        if (use.touched) throw Fault("wgmma: a register of A was accessed and no wgmma.fence follows");
        ++use.in_flight;
    }
    if (group_) group_->issue(rank_, call);
    if (timing_ == Timing::early)
        perform(issued);
    else
        check(issued);
    current_.push_back(std::move(issued));
}

void WgmmaQueue::check(const Issued& issued) const {
    const WgmmaCall& call = issued.call;
    const Form form = form_of(call.kind);
    if (issued.a.empty())
        Operand(issued.shared, call.a_descriptor, call.transpose_a, Element(form.a), kRows * rank_, kRows)
            .check();
    Operand(issued.shared, call.b_descriptor, call.transpose_b, Element(form.b), 0, int(form.n)).check();
}

void WgmmaQueue::perform(const Issued& issued) const {
    Register* const* a = issued.a.empty() ? nullptr : issued.a.data();
    if (form_of(issued.call.kind).d == s32)
        multiply_integers(issued.shared, issued.call, a, issued.d.data(), rank_);
    else
        multiply_floats(issued.shared, issued.call, a, issued.d.data(), rank_);
}

void WgmmaQueue::fence() {
    fenced_ = true;
    for (auto& entry : registers_) entry.second.touched = false, entry.second.kind = -1;
}

void WgmmaQueue::commit() {
    groups_.push_back(std::move(current_));
    current_.clear();
}

void WgmmaQueue::wait(int groups) {
    for (; groups_.size() > size_t(groups); groups_.pop_front())
        for (const Issued& issued : groups_.front()) {
            if (timing_ == Timing::late) perform(issued);
            for (const Register* reg : issued.d) --registers_[reg].in_flight;
            for (const Register* reg : issued.a) --registers_[reg].in_flight;
        }
}

void WgmmaQueue::touch(const Register* reg) {
    Use& use = registers_[reg];
    if (use.in_flight)
        throw Fault("wgmma: a register of a wgmma.mma_async in flight is accessed before wait_group");
    use.touched = true;
}

void WgmmaQueue::finish() const {
    for (const auto& group : groups_)
        if (!group.empty()) throw Fault("wgmma: the kernel ends with a group that was not waited for");
    if (!current_.empty()) throw Fault("wgmma: the kernel ends with wgmmas that were not committed");
}

}  // namespace ptx
