// Layers with states (Mamba-1 and 2, gated delta nets, short convolutions): what is between a mixer's projections.
#pragma once
#include <algorithm>

#include "attention.h"

enum class StateRule : int {
    kStateSpace = 0,
    kGatedDelta = 1,
    kConvolution = 2,
    kSelective = 3,
    kGatedConvolution = 4,
    kLightning = 5,  // a state space whose convolution sees one token, with time steps of 1, neither gated nor normed here
    kElementDelta = 6,
    kRecurrence = 7,  // of a recurrent unit (RG-LRU)
};

// H heads of P elements in G groups, N numbers of state for each element; C = H * P + 2 * G * N channels. Of a delta net:
// heads of values, groups with a key and a query each, N elements of these; channels are values, keys and queries. Of one by
// element (Kimi Delta Attention), whose groups are heads, each of the N is forgotten at a rate of its own.
// Of a selective space: as many heads as it has channels, each of one element; its convolution is a mixer of its own, which
// has neither groups nor states. Nor has a gated short convolution. A recurrent unit is as a selective space, with one number
// for each channel.
struct StateMixer {
    StateRule rule;
    int heads;
    int head_dim;
    int groups;
    int state_dim;
    int kernel;
    const float* conv_weight;  // [kernel, C], the oldest token's first
    const float* conv_bias;    // [C]
    const float* decay;        // [H]; of a selective space [H, N]
    const float* skip;         // [H]; a delta net has none
    const float* step_bias;    // [H]; of a delta net by element [H, N]
    const float* norm;         // [H * P], null: outputs are only gated; of a delta net [P]
    float eps;
    float most_written;        // of a delta net: how much of what is missing is written at the most
    float lower_bound;         // of a delta net by element, whose rates have a bound: the logarithm of what is left at the least; else 0

    int inner() const { return heads * head_dim; }
    int shared() const { return groups * state_dim; }
    int channels() const { return inner() + 2 * shared(); }
};

// One layer's states, by slot.
struct StateCache {
    float* windows;  // [slots, kernel - 1, C]
    float* states;   // [slots, H, P, N]
};

struct MixStates {
    // [rows, H * P + C + H]: gates, the convolution's inputs, time steps (of a delta net by element H * N); of a delta net H
    // more: how much is written; of a selective space gates, inputs, B, C, time steps; of its convolution what goes into it; of
    // a gated one gates of what goes in, gates of what comes out, what goes in; of lightning attention the convolution's inputs
    // alone; of a recurrent unit how much is taken, how fast is forgotten, inputs
    const float* projected;
    int64_t projected_stride;
    const int64_t* slots;  // [sequences]
    float* out;            // [rows, H * P]
    int64_t out_stride;
};

// Token by token, as the recurrence is written down: a row's result depends on the rows of its own sequence alone, to the
// last bit, not on how they are cut into steps.
void mix_states(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache);
// The same of a selective space, behind its convolution.
void select_states(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache);
// The same of a recurrent unit, behind its convolution and its products.
void recur_states(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache);
// The same of a gated short convolution.
void convolve_gated(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache);

// Calls work(sequence, first, count) for each sequence and each `width` of its channels, which are computed by themselves.
template <class Work> void each_sequence(Pool& pool, const Batch& batch, int channels, int width, const Work& work) {
    int tiles = (channels + width - 1) / width;
    int most = std::max(1, Pool::kMaxTiles / tiles - 1);  // sequences of one job
    for (int from = 0; from < batch.sequences; from += most)
        pool.run(std::min(most, batch.sequences - from) * tiles, [&](int tile, int) {
            int first = tile % tiles * width;
            work(from + tile / tiles, first, std::min(channels - first, width));
        });
}
