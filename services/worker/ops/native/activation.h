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
// gpt-oss's: gates up to a limit, ups between that and its negative, of which none is left out.
BATON_INLINE F swigluoai(F gate, F up) {
    constexpr float kAlpha = 1.702f, kLimit = 7.0f;
    gate = smaller(gate, all(kLimit)), up = larger(smaller(up, all(kLimit)), all(-kLimit));
    return gate / (all(1.0f) + exp(gate * all(-kAlpha))) * (up + all(1.0f));
}
// DeepSeek-V4's: gates up to a limit, ups between that and its negative.
BATON_INLINE F silu_limited(F gate, F up) {
    constexpr float kLimit = 10.0f;
    return silu(smaller(gate, all(kLimit))) * larger(smaller(up, all(kLimit)), all(-kLimit));
}
// What an MLP makes of its gates and ups.
BATON_INLINE F gated(Activation kind, F gate, F up) {
    if (kind == Activation::kSiluLimited) return silu_limited(gate, up);
    if (kind == Activation::kSwigluOai) return swigluoai(gate, up);
    return (kind == Activation::kSilu ? silu(gate) : gelu_tanh(gate)) * up;
}
