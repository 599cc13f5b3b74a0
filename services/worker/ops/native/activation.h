// The MLP's activations, on sixteen lanes.
#pragma once


#include "linear.h"

BATON_INLINE F silu(F x) { return x / (all(1.0f) + exp(zeros() - x)); }
// Hendrycks and Gimpel, "Gaussian Error Linear Units" (arXiv:1606.08415), the tanh form.
BATON_INLINE F gelu_tanh(F x) {
    F inner = all(0.7978845608028654f) * fma(all(0.044715f) * x * x, x, x);
    return all(0.5f) * x * (all(1.0f) + tanh(inner));
}
BATON_INLINE F activated(Activation kind, F x) { return int(kind) == 0 ? silu(x) : gelu_tanh(x); }
