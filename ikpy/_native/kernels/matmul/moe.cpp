// Mixture-of-experts routing, grouping of tokens by expert, and the weighted sum.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "ikpy/expert_reader.hpp"
#include "ikpy/ops.hpp"

namespace ikpy {

namespace {

enum Gating {
    kGateSoftmax = 1,
    kGateSigmoid = 2,
    kGateSelectedSoftmax = 3,
    kGateSqrtSoftplus = 4,
    kGateSelectedSigmoid = 5,
    kGateSparseMixer = 6
};
constexpr int kMaxExperts = 1024;
constexpr float kNear = 0.02f;  // of a sparse mixer: twice the jitter that published models were trained with

struct Score {
    float value;
    int32_t expert;
};

// Descending by score; of equal scores the larger expert index comes first.
bool better(const Score& a, const Score& b) {
    return a.value > b.value || (a.value == b.value && a.expert > b.expert);
}

void softmax(float* p, int64_t n) {
    const float top = *std::max_element(p, p + n);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(p[i] = std::exp(p[i] - top));
    const float scale = static_cast<float>(1.0 / sum);
    for (int64_t i = 0; i < n; ++i) p[i] *= scale;
}

void probabilities(const float* logits, float* p, int64_t n, int gating) {
    std::copy(logits, logits + n, p);
    switch (gating) {
        case kGateSoftmax:
            softmax(p, n);
            break;
        case kGateSigmoid:
            for (int64_t i = 0; i < n; ++i) p[i] = 1.0f / (1.0f + std::exp(-p[i]));
            break;
        case kGateSqrtSoftplus:
            for (int64_t i = 0; i < n; ++i) {
                p[i] = std::sqrt(std::max(p[i], 0.0f) + std::log1p(std::exp(-std::fabs(p[i]))));
            }
            break;
        default:  // the selected-... kinds and the sparse mixer choose by logits
            break;
    }
}

// Keeps only the experts of the n_used best groups; a group's score is the sum of its two largest scores.
// Returns the number of candidates left in scores.
int64_t limit_groups(Score* scores, int64_t n_expert, int n_group, int n_used) {
    Score groups[kMaxExperts];
    const int64_t size = n_expert / n_group;
    for (int g = 0; g < n_group; ++g) {
        float first = -INFINITY, second = -INFINITY;
        for (int64_t i = g * size; i < (g + 1) * size; ++i) {
            const float v = scores[i].value;
            if (v > first) {
                second = first;
                first = v;
            } else if (v > second) {
                second = v;
            }
        }
        groups[g] = {size > 1 ? first + second : first, g};
    }
    std::partial_sort(groups, groups + n_used, groups + n_group, better);
    bool kept[kMaxExperts] = {};
    for (int g = 0; g < n_used; ++g) kept[groups[g].expert] = true;
    return std::remove_if(scores, scores + n_expert, [&](const Score& s) { return !kept[s.expert / size]; }) -
           scores;
}

// Experts of a token as its row of a table says; -1 where there is no such token or expert.
void fixed_experts(const Tensor& table, int64_t token, int k, int64_t n_expert, int32_t* id) {
    const bool is_known = token >= 0 && token < table.ne[1];
    for (int j = 0; j < k; ++j) {
        const int32_t e = is_known ? row<const int32_t>(table, token)[j] : -1;
        id[j] = e >= 0 && e < n_expert ? e : -1;
    }
}

// The k best experts by p + bias.
void best_experts(const Op& op, const float* p, const float* bias, int64_t n_expert, int32_t* id) {
    const int k = op.ip[0], n_group = op.ip[3], n_group_used = op.ip[4], ser_min = op.ip[5];
    const float ser_threshold = op.fp[1];
    Score scores[kMaxExperts];
    for (int64_t e = 0; e < n_expert; ++e)
        scores[e] = {bias ? p[e] + bias[e] : p[e], static_cast<int32_t>(e)};
    int64_t candidates = n_expert;
    if (n_group > 1) candidates = limit_groups(scores, n_expert, n_group, n_group_used);
    std::partial_sort(scores, scores + std::min<int64_t>(k, candidates), scores + candidates, better);
    for (int j = 0; j < k; ++j) id[j] = candidates >= k ? scores[j].expert : j;
    if (ser_min > 0 && ser_threshold > 0) {
        for (int j = ser_min; j < k; ++j) {
            if (scores[j].value < ser_threshold * scores[0].value) id[j] = -1;
        }
    }
}

// Sparse mixer (arXiv:2409.12136): the share of each chosen expert in the softmax over those that are not
// chosen before it and whose logits are near its own.
void mix_sparsely(const float* logits, int64_t n_expert, const int32_t* id, int k, float* w) {
    bool taken[kMaxExperts] = {};
    for (int j = 0; j < k; ++j) {
        if (id[j] < 0) continue;
        const float own = logits[id[j]];
        double sum = 0;
        for (int64_t e = 0; e < n_expert; ++e) {
            const bool is_far = (own - logits[e]) / std::max(std::fabs(logits[e]), own) > kNear;
            if (!taken[e] && !is_far) sum += static_cast<double>(std::exp(logits[e] - own));
        }
        w[j] = static_cast<float>(1.0 / sum);
        taken[id[j]] = true;
    }
}

// Weights of the chosen experts; 0 of those that are none.
void weigh_experts(const Op& op, const float* p, int64_t n_expert, const int32_t* id, float* w) {
    const int k = op.ip[0], gating = op.ip[1];
    const float scale = op.fp[0], epsilon = op.fp[2];
    const float none = gating == kGateSelectedSoftmax ? -INFINITY : 0.0f;  // no part of the softmax
    for (int j = 0; j < k; ++j) w[j] = id[j] >= 0 ? p[id[j]] : none;
    if (gating == kGateSelectedSoftmax) softmax(w, k);
    if (gating == kGateSelectedSigmoid) {
        for (int j = 0; j < k; ++j) w[j] = 1.0f / (1.0f + std::exp(-w[j]));
    }
    if (gating == kGateSparseMixer) mix_sparsely(p, n_expert, id, k, w);
    for (int j = 0; j < k; ++j) w[j] = id[j] >= 0 ? w[j] : 0.0f;
    if (op.ip[2]) {
        float sum = epsilon;
        for (int j = 0; j < k; ++j) sum += w[j];
        const float inverse = sum > 0 ? 1.0f / sum : 0.0f;
        for (int j = 0; j < k; ++j) w[j] *= inverse;
    }
    if (std::fabs(scale - 1.0f) > 1e-5f) {
        for (int j = 0; j < k; ++j) w[j] *= scale;
    }
}

}  // namespace

// src0 = router logits [E, T], src1 = selection bias [E] (optional), src2 = weights out f32 [K, T], src3 and
// src4 (optional) = table of experts i32 [K, V] and tokens i32 [T] whose rows are taken instead of the best
// experts; dst = ids i32 [K, T]. ip: K, gating, normalise, n_group, n_group_used, ser_min; fp: scale,
// ser_threshold, normaliser epsilon. n_group <= 1 means no group limit; ser_min <= 0 means no smart expert
// reduction.
void op_moe_route(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& logits = ts[op.src[0]];
    const float* bias = op.src[1] >= 0 ? reinterpret_cast<const float*>(ts[op.src[1]].data) : nullptr;
    const int64_t n_expert = logits.ne[0];
    float p[kMaxExperts];
    int64_t begin, end;
    split_range(logits.ne[1], ctx.ith, ctx.nth, 1, &begin, &end);
    for (int64_t t = begin; t < end; ++t) {
        int32_t* id = row<int32_t>(ts[op.dst], t);
        probabilities(row<const float>(logits, t), p, n_expert, op.ip[1]);
        if (op.src[3] >= 0) {
            const int32_t token = row<const int32_t>(ts[op.src[4]], 0)[t];
            fixed_experts(ts[op.src[3]], token, op.ip[0], n_expert, id);
        } else {
            best_experts(op, p, bias, n_expert, id);
        }
        weigh_experts(op, p, n_expert, id, row<float>(ts[op.src[2]], t));
    }
}

// src0 = ids i32 [K, T]; dst = i32: E + 1 offsets, then token*K + slot of every assignment, by expert. ip: E,
// 1 + number of the layer for the reader of experts (0: none).
void op_moe_group(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime& runtime) {
    if (ctx.ith != 0) return;
    const Tensor& ids = ts[op.src[0]];
    const int64_t k = ids.ne[0], n_expert = op.ip[0];
    int32_t* offsets = reinterpret_cast<int32_t*>(ts[op.dst].data);
    int32_t* entries = offsets + n_expert + 1;
    std::fill(offsets, offsets + n_expert + 1, 0);
    for (int64_t t = 0; t < ids.ne[1]; ++t) {
        const int32_t* id = row<const int32_t>(ids, t);
        for (int64_t j = 0; j < k; ++j) {
            if (id[j] >= 0) ++offsets[id[j] + 1];
        }
    }
    for (int64_t e = 0; e < n_expert; ++e) offsets[e + 1] += offsets[e];
    if (runtime.reader && op.ip[1]) runtime.reader->ask(op.ip[1] - 1, offsets);
    int32_t next[kMaxExperts];
    std::copy(offsets, offsets + n_expert, next);
    for (int64_t t = 0; t < ids.ne[1]; ++t) {
        const int32_t* id = row<const int32_t>(ids, t);
        for (int64_t j = 0; j < k; ++j) {
            if (id[j] >= 0) entries[next[id[j]]++] = static_cast<int32_t>(t * k + j);
        }
    }
}

// dst [D, T] = sum over slots of weight * expert output. src0 = outputs [D, K, T], src1 = weights [K, T]
// (optional: plain sum), src2 = ids, src3 = addend [D, T] (shared expert, optional).
void op_moe_combine(const ThreadContext& ctx, const Op& op, const Tensor* ts, const Runtime&) {
    const Tensor& dst = ts[op.dst];
    const Tensor& out = ts[op.src[0]];
    const int64_t k = out.ne[1];
    int64_t begin, end;
    split_range(dst.ne[0], ctx.ith, ctx.nth, 16, &begin, &end);
    for (int64_t t = 0; t < dst.ne[1]; ++t) {
        float* y = row<float>(dst, t);
        const int32_t* id = row<const int32_t>(ts[op.src[2]], t);
        const float* w = op.src[1] >= 0 ? row<const float>(ts[op.src[1]], t) : nullptr;
        bool first = true;
        for (int64_t j = 0; j < k; ++j) {
            if (id[j] < 0) continue;
            const float* x = row<const float>(out, j, t);
            const float s = w ? w[j] : 1.0f;
            if (first) {
                for (int64_t i = begin; i < end; ++i) y[i] = s * x[i];
            } else {
                for (int64_t i = begin; i < end; ++i) y[i] += s * x[i];
            }
            first = false;
        }
        if (first) std::fill(y + begin, y + end, 0.0f);
        if (op.src[3] >= 0) {
            const float* a = row<const float>(ts[op.src[3]], t);
            for (int64_t i = begin; i < end; ++i) y[i] += a[i];
        }
    }
}

}  // namespace ikpy
