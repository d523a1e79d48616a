// The op set of the executor. Each kernel family implements its ops and says how much work memory they need.
//
// Notation: [a, b, c] lists ne[0], ne[1], ne[2]; T = tokens of the micro-batch; all activations are f32.
#pragma once
#include "ikpy/tensor.hpp"
#include "ikpy/thread.hpp"

namespace ikpy {

// X(enumerator, name seen from Python, kernel function)
#define IKPY_OPS(X)                                                          \
    X(GetRows, get_rows, op_get_rows)                                        \
    X(RmsNorm, rms_norm, op_rms_norm)                                        \
    X(LayerNorm, layer_norm, op_layer_norm)                                  \
    X(Add, add, op_add)                                                      \
    X(Mul, mul, op_mul)                                                      \
    X(Scale, scale, op_scale)                                                \
    X(Unary, unary, op_unary)                                                \
    X(GatedUnary, gated_unary, op_gated_unary)                               \
    X(SoftCap, softcap, op_softcap)                                          \
    X(Copy, copy, op_copy)                                                   \
    X(RopeTable, rope_table, op_rope_table)                                  \
    X(Rope, rope, op_rope)                                                   \
    X(AttentionTemperature, attention_temperature, op_attention_temperature) \
    X(KqMask, kq_mask, op_kq_mask)                                           \
    X(Hadamard, hadamard, op_hadamard)                                       \
    X(KvStore, kv_store, op_kv_store)                                        \
    X(KvShift, kv_shift, op_kv_shift)                                        \
    X(Attention, attention, op_attention)                                    \
    X(ActPrepare, act_prepare, op_act_prepare)                               \
    X(MulMat, mul_mat, op_mul_mat)                                           \
    X(MulMatUpGate, mul_mat_up_gate, op_mul_mat_up_gate)                     \
    X(MoeRoute, moe_route, op_moe_route)                                     \
    X(MoeGroup, moe_group, op_moe_group)                                     \
    X(MulMatId, mul_mat_id, op_mul_mat_id)                                   \
    X(MulMatIdUpGate, mul_mat_id_up_gate, op_mul_mat_id_up_gate)             \
    X(MoeCombine, moe_combine, op_moe_combine)                               \
    X(ActStats, act_stats, op_act_stats)                                     \
    X(ActSimilarity, act_similarity, op_act_similarity)                      \
    X(BlockMaxima, block_maxima, op_block_maxima)                            \
    X(CausalConv, causal_conv, op_causal_conv)                               \
    X(NgramRows, ngram_rows, op_ngram_rows)                                  \
    X(GatedDeltaRule, gated_delta_rule, op_gated_delta_rule)                 \
    X(SsmScan, ssm_scan, op_ssm_scan)                                        \
    X(Wkv, wkv, op_wkv)                                                      \
    X(ChooseCells, choose_cells, op_choose_cells)                            \
    X(ChosenMask, chosen_mask, op_chosen_mask)                               \
    X(ChosenList, chosen_list, op_chosen_list)                               \
    X(StretchCells, stretch_cells, op_stretch_cells)                         \
    X(ChooseBlocks, choose_blocks, op_choose_blocks)                         \
    X(HyperWeights, hyper_weights, op_hyper_weights)                         \
    X(HyperCollapse, hyper_collapse, op_hyper_collapse)                      \
    X(HyperExpand, hyper_expand, op_hyper_expand)                            \
    X(CompressCells, compress_cells, op_compress_cells)

enum OpKind : int32_t {
#define X(id, name, fn) kOp##id,
    IKPY_OPS(X)
#undef X
        kOpCount
};

enum UnaryKind : int32_t {
    kSilu = 0,
    kGelu = 1,
    kRelu = 2,
    kReluSquared = 3,
    kSigmoid = 4,
    kTanh = 5,
    kSwigluOai = 6,
    kGeluErf = 7,
    kSoftplus = 8
};

using Kernel = void (*)(const ThreadContext&, const Op&, const Tensor*, const Runtime&);

#define X(id, name, fn) void fn(const ThreadContext&, const Op&, const Tensor*, const Runtime&);
IKPY_OPS(X)
#undef X

// Work memory in bytes for one op as planned (dynamic dimensions at their maximum); 0 if none.
// matmul family (ActPrepare, MulMat, MulMatUpGate, MulMatId, MulMatIdUpGate)
size_t matmul_scratch_bytes(const Op&, const Tensor*);
size_t matmul_shared_bytes(const Op&, const Tensor*, int n_threads);
// Attention
size_t attention_scratch_bytes(const Op&, const Tensor*);
size_t attention_shared_bytes(const Op&, const Tensor*, int n_threads);
// KvShift
size_t kv_shift_scratch_bytes(const Op&, const Tensor*);
// CausalConv, GatedDeltaRule, SsmScan, Wkv
size_t causal_conv_scratch_bytes(const Op&, const Tensor*);
size_t gated_delta_rule_scratch_bytes(const Op&, const Tensor*);
size_t ssm_scan_scratch_bytes(const Op&, const Tensor*);
size_t wkv_scratch_bytes(const Op&, const Tensor*);
// ChooseCells
size_t choose_cells_scratch_bytes(const Op&, const Tensor*);
size_t choose_cells_shared_bytes(const Op&, const Tensor*, int n_threads);
// StretchCells
size_t stretch_cells_scratch_bytes(const Op&, const Tensor*);
// ChooseBlocks
size_t choose_blocks_scratch_bytes(const Op&, const Tensor*);
size_t choose_blocks_shared_bytes(const Op&, const Tensor*);
// CompressCells
size_t compress_cells_scratch_bytes(const Op&, const Tensor*);

// Activation formats of the matmul family: what ActPrepare writes and the matmuls of that weight type read;
// n_rows = rows of activations that one weight matrix is multiplied with; by_expert: on average, that of an
// expert.
int act_format(int weight_type, int64_t n_rows, bool by_expert);
// Whether this build and CPU have bf16 tiles (AMX) and IKPY_AMX=0 does not forbid them.
bool has_amx();
// Whether those tiles multiply halves too (AMX-FP16): the CPU lists it, or IKPY_AMX=fp16 asks for a trial and
// the instruction works. IKPY_AMX=bf16 does without.
bool has_amx_halves();
// Whether F16 weights meet them as halves: one product instead of three of bf16, for activations rounded to
// f16. Only IKPY_AMX=fp16 asks for that: numbers of F16 models move by more than the reference is off.
bool rounds_f16_activations();

// Whether products of few tokens use byte permutations (VBMI, GFNI): the CPU has them and
// IKPY_VBMI is not 0.
bool has_byte_permutes();
// Whose CPU kernels of the same instructions are chosen for: AMD's, or Intel's, for which all others are
// taken; IKPY_MAKER=amd or intel decides otherwise.
bool is_for_amd();
// Whether a gather takes so long that single loads are faster; IKPY_GATHERS=slow or fast decides otherwise.
bool has_slow_gathers();
// Whether weights are fetched from eight pages in turn instead of line after line: on Intel's CPUs with
// AVX-512 but no tiles; IKPY_FETCH=pages or lines decides otherwise.
bool fetches_from_pages();
// Whether matmuls of this weight type have an unpacker of their own; other types are decoded to float first.
bool has_unpacker(int weight_type);
size_t act_nbytes(int format, int64_t n_in, int64_t n_rows, int64_t n_batch);

}  // namespace ikpy
