// Selective spaces (Mamba-1): each channel forgets each number of its state at a pace of its own; and recurrent units
// (RG-LRU), whose channels have one number each.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "activation.h"
#include "states.h"

namespace {

struct Selection {
    const MixStates& what;
    const Batch& batch;
    const StateMixer& mixer;
    const StateCache& cache;

    // Some channels over all rows of a sequence. A row: gates, inputs, B, C, time steps.
    void go_on(int sequence, int first, int count) const {
        int dim = mixer.state_dim, begin = batch.query_starts[sequence], end = batch.query_starts[sequence + 1];
        int64_t channels = mixer.heads;
        float* states = cache.states + (what.slots[sequence] * channels + first) * dim;
        const float* decays = mixer.decay + int64_t(first) * dim;
        if (batch.context_lens[sequence] == end - begin) memset(states, 0, size_t(count) * dim * sizeof(float));
        F bias = load_some(mixer.step_bias + first, count), skip = load_some(mixer.skip + first, count);
        for (int at = begin; at < end; ++at) {
            const float* row = what.projected + at * what.projected_stride;
            const float *b = row + 2 * channels, *c = b + dim;
            F x = load_some(row + channels + first, count), step = softplus(load_some(c + dim + first, count) + bias);
            float steps[kLanes], given[kLanes], read[kLanes] = {};
            store(steps, step);
            store(given, step * x);
            for (int e = 0; e < count; ++e)
                read[e] = advance(states + int64_t(e) * dim, decays + int64_t(e) * dim, b, c, steps[e], given[e]);
            F gated = fma(skip, x, load(read)) * silu(load_some(row + first, count));
            store_some(what.out + at * what.out_stride + first, gated, count);
        }
    }

    // state = exp(step * decay) * state + given * b, of one channel → what c reads of it.
    float advance(float* state, const float* decay, const float* b, const float* c, float step, float given) const {
        int dim = mixer.state_dim, n = 0;
        F read = zeros(), by = all(step), more = all(given);
        for (; n + kLanes <= dim; n += kLanes) {
            F s = fma(exp(by * load(decay + n)), load(state + n), more * load(b + n));
            store(state + n, s);
            read = fma(s, load(c + n), read);
        }
        float total = n ? sum(read) : 0.0f;
        for (; n < dim; ++n) {
            state[n] = std::exp(step * decay[n]) * state[n] + given * b[n];
            total += state[n] * c[n];
        }
        return total;
    }
};

// Some channels of a recurrent unit over all rows of a sequence. A row: how much is taken, how fast is forgotten, inputs.
void recur(const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache, int sequence, int first, int count) {
    int begin = batch.query_starts[sequence], end = batch.query_starts[sequence + 1];
    int64_t channels = mixer.heads;
    float* states = cache.states + what.slots[sequence] * channels + first;
    bool begins = batch.context_lens[sequence] == end - begin;
    F state = begins ? zeros() : load_some(states, count), decay = load_some(mixer.decay + first, count);
    for (int at = begin; at < end; ++at) {
        const float* row = what.projected + at * what.projected_stride + first;
        F taken = sigmoid(load_some(row, count)) * load_some(row + 2 * channels, count);
        F left = exp(sigmoid(load_some(row + channels, count)) * decay);
        if (!begins || at > begin) {
            float share[kLanes];
            store(share, larger(all(1.0f) - left * left, zeros()));
            for (float& each : share) each = std::sqrt(each);
            taken = taken * load(share);
        }
        state = fma(left, state, taken);
        store_some(what.out + at * what.out_stride + first, state, count);
    }
    store_some(states, state, count);
}

}  // namespace

void recur_states(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache) {
    each_sequence(pool, batch, mixer.heads, kLanes, [&](int sequence, int first, int count) { recur(what, batch, mixer, cache, sequence, first, count); });
}

void select_states(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache) {
    Selection selection{what, batch, mixer, cache};
    each_sequence(pool, batch, mixer.heads, kLanes, [&](int sequence, int first, int count) { selection.go_on(sequence, first, count); });
}
