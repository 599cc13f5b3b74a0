// State-space layers (Mamba-2): what is between a mixer's two projections.
#pragma once
#include "attention.h"

// H heads of P elements in G groups, N numbers of state for each element; C = H * P + 2 * G * N channels.
struct StateSpace {
    int heads;
    int head_dim;
    int groups;
    int state_dim;
    int kernel;
    const float* conv_weight;  // [kernel, C], the oldest token's first
    const float* conv_bias;    // [C]
    const float* decay;        // [H]
    const float* skip;         // [H]
    const float* step_bias;    // [H]
    const float* norm;         // [H * P]
    float eps;

    int inner() const { return heads * head_dim; }
    int shared() const { return groups * state_dim; }
    int channels() const { return inner() + 2 * shared(); }
    int projected() const { return inner() + channels() + heads; }
};

// One layer's states, by slot.
struct StateCache {
    float* windows;  // [slots, kernel - 1, C]
    float* states;   // [slots, H, P, N]
};

struct MixStates {
    const float* projected;  // [rows, H * P + C + H]: gates, the convolution's inputs, time steps
    const int64_t* slots;    // [sequences]
    float* out;              // [rows, H * P]
};

// Token by token, as the recurrence is written down: a row's result depends on the rows of its own sequence alone, to the
// last bit, not on how they are cut into steps.
void mix_states(Pool& pool, const MixStates& what, const Batch& batch, const StateSpace& space, const StateCache& cache);
