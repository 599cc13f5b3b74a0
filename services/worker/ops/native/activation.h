// The MLP's activations, on sixteen lanes.
#pragma once


#include "linear.h"

BATON_INLINE F sigmoid(F x) { return all(1.0f) / (all(1.0f) + exp(zeros() - x)); }
BATON_INLINE F silu(F x) { return x / (all(1.0f) + exp(zeros() - x)); }
// log(1 + exp(x)). With t = exp(-|x|), log(1 + t) is twice the inverse hyperbolic tangent of t / (2 + t), which is 1/3 at
// the most: a short series.
BATON_INLINE F softplus(F x) {
    F t = exp(zeros() - larger(x, zeros() - x)), s = t / (all(2.0f) + t), squared = s * s, series = all(1.0f / 15.0f);
    for (int odd = 13; odd >= 1; odd -= 2) series = fma(series, squared, all(1.0f / float(odd)));
    return fma(all(2.0f) * s, series, larger(x, zeros()));
}
// Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), the tanh form.
BATON_INLINE F gelu_tanh(F x) {
    F inner = all(0.7978845608028654f) * fma(all(0.044715f) * x * x, x, x);
    return all(0.5f) * x * (all(1.0f) + tanh(inner));
}
BATON_INLINE F within(F x, F limit) { return larger(smaller(x, limit), zeros() - limit); }
// gpt-oss's: gates up to a limit, ups between that and its negative, of which none is left out.
BATON_INLINE F swigluoai(F gate, F up, F limit) {
    constexpr float kAlpha = 1.702f;
    gate = smaller(gate, limit);
    return gate / (all(1.0f) + exp(gate * all(-kAlpha))) * (within(up, limit) + all(1.0f));
}
// What an MLP makes of its gates and ups. DeepSeek-V4 limits gates, Ling 3 what is made of them; both limit ups as above.
BATON_INLINE F gated(Activation activation, F gate, F up) {
    F limit = all(activation.limit);
    switch (activation.kind) {
        case ActivationKind::kSiluLimited: return silu(smaller(gate, limit)) * within(up, limit);
        case ActivationKind::kSwigluStep: return smaller(silu(gate), limit) * within(up, limit);
        case ActivationKind::kSwigluOai: return swigluoai(gate, up, limit);
        case ActivationKind::kSilu: return silu(gate) * up;
        default: return gelu_tanh(gate) * up;
    }
}
