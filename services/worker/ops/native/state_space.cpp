// A tile keeps sixteen elements' states of one head in the first-level cache while it goes over a sequence's rows.
#include "state_space.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "activation.h"

namespace {

constexpr int kRowsOfTile = 8;
constexpr int kElementsOfTile = 16;
constexpr int kElementsAtOnce = 2;

// Of the pass under way; grows once and is kept.
struct Scratch {
    std::vector<float> mixed;   // [rows, C] what the convolution gives
    std::vector<float> steps;   // [rows, H]
    std::vector<float> kept;    // [rows, H] what is left of a state
    std::vector<int> sequence;  // [rows]
};

template <class Call> void each_row(Pool& pool, int count, const Call& call) {
    pool.run((count + kRowsOfTile - 1) / kRowsOfTile, [&](int tile, int) {
        int end = std::min(count, (tile + 1) * kRowsOfTile);
        for (int row = tile * kRowsOfTile; row < end; ++row) call(row);
    });
}

struct Pass {
    const MixStates& what;
    const Batch& batch;
    const StateSpace& space;
    const StateCache& cache;
    Scratch& scratch;

    int first_row(int sequence) const { return batch.query_starts[sequence]; }
    int end_row(int sequence) const { return batch.query_starts[sequence + 1]; }
    bool begins(int sequence) const { return batch.context_lens[sequence] == end_row(sequence) - first_row(sequence); }
    const float* row(int row) const { return what.projected + int64_t(row) * space.projected(); }
    const float* inputs(int row) const { return this->row(row) + space.inner(); }
    float* window(int sequence) const {
        return cache.windows + what.slots[sequence] * int64_t(space.kernel - 1) * space.channels();
    }

    // The convolution's input `back` tokens before a row; null where its sequence had not begun.
    const float* before(int row, int sequence, int back) const {
        if (row - back >= first_row(sequence)) return inputs(row - back);
        if (begins(sequence)) return nullptr;
        int missing = back - (row - first_row(sequence));  // 1: the last one of the window
        return window(sequence) + int64_t(space.kernel - 1 - missing) * space.channels();
    }

    void convolve(int at) const {
        int sequence = scratch.sequence[at], channels = space.channels();
        const float* seen[64];
        for (int k = 0; k < space.kernel; ++k) seen[k] = before(at, sequence, space.kernel - 1 - k);
        float* to = scratch.mixed.data() + int64_t(at) * channels;
        int c = 0;
        for (; c + kLanes <= channels; c += kLanes) {
            F total = load(space.conv_bias + c);
            for (int k = 0; k < space.kernel; ++k)
                if (seen[k]) total = fma(load(seen[k] + c), load(space.conv_weight + int64_t(k) * channels + c), total);
            store(to + c, silu(total));
        }
        for (; c < channels; ++c) {
            float total = space.conv_bias[c];
            for (int k = 0; k < space.kernel; ++k)
                if (seen[k]) total += seen[k][c] * space.conv_weight[int64_t(k) * channels + c];
            to[c] = total / (1.0f + std::exp(-total));
        }
        const float* raw = inputs(at) + channels;
        for (int h = 0; h < space.heads; ++h) {
            float x = raw[h] + space.step_bias[h];
            float step = x > 20.0f ? x : std::log1p(std::exp(x));
            scratch.steps[size_t(at) * space.heads + h] = step;
            scratch.kept[size_t(at) * space.heads + h] = std::exp(step * space.decay[h]);
        }
    }

    // The inputs that the next row's convolution sees. In place: whatever is kept moves to a lower address.
    void leave_window(int sequence) const {
        int kept = space.kernel - 1, channels = space.channels();
        float* to = window(sequence);
        for (int k = 0; k < kept; ++k, to += channels) {
            const float* from = before(end_row(sequence) - 1, sequence, kept - 1 - k);
            if (from) memmove(to, from, size_t(channels) * sizeof(float));
            else memset(to, 0, size_t(channels) * sizeof(float));
        }
    }

    // Elements [first, end) of a head, over all rows of a sequence.
    void scan(int sequence, int head, int first, int end) const {
        int dim = space.state_dim, inner = space.inner(), group = head / (space.heads / space.groups);
        int64_t place = (what.slots[sequence] * space.heads + head) * int64_t(space.head_dim);
        float* states = cache.states + (place + first) * dim;
        if (begins(sequence)) memset(states, 0, size_t(end - first) * dim * sizeof(float));
        for (int at = first_row(sequence); at < end_row(sequence); ++at) {
            const float* mixed = scratch.mixed.data() + int64_t(at) * space.channels();
            const float* b = mixed + inner + group * dim;
            const float* c = b + space.shared();
            float step = scratch.steps[size_t(at) * space.heads + head], kept = scratch.kept[size_t(at) * space.heads + head];
            float* out = what.out + int64_t(at) * inner + head * space.head_dim;
            const float* x = mixed + head * space.head_dim;
            Token token{b, c, x, out, kept, step, space.skip[head], dim};
            int p = first;
            for (; p + kElementsAtOnce <= end; p += kElementsAtOnce)
                advance<kElementsAtOnce>(states + int64_t(p - first) * dim, token, p);
            for (; p < end; ++p) advance<1>(states + int64_t(p - first) * dim, token, p);
        }
    }

    // What one token writes to the states of a head, and reads from them.
    struct Token {
        const float* b;
        const float* c;
        const float* x;
        float* out;
        float kept, step, skip;
        int dim;
    };

    // state = kept * state + step * x * b, and what c reads of it: of `Count` neighbouring elements, whose sums do not
    // wait for each other. Each is computed in the same order whatever `Count` is.
    template <int Count> static void advance(float* state, const Token& token, int p) {
        F read[Count], given[Count], kept = all(token.kept);
        float* own[Count];
        for (int e = 0; e < Count; ++e) {
            read[e] = zeros();
            given[e] = all(token.step * token.x[p + e]);
            own[e] = state + int64_t(e) * token.dim;
        }
        int n = 0;
        for (; n + kLanes <= token.dim; n += kLanes) {
            F b = load(token.b + n), c = load(token.c + n);
            for (int e = 0; e < Count; ++e) {
                F s = fma(load(own[e] + n), kept, given[e] * b);
                store(own[e] + n, s);
                read[e] = fma(s, c, read[e]);
            }
        }
        for (int e = 0; e < Count; ++e) {
            float total = sum(read[e]), more = token.step * token.x[p + e];
            for (int i = n; i < token.dim; ++i) {
                own[e][i] = own[e][i] * token.kept + more * token.b[i];
                total += own[e][i] * token.c[i];
            }
            token.out[p + e] = total + token.skip * token.x[p + e];
        }
    }

    void gate_and_norm(int at) const {
        int inner = space.inner(), size = inner / space.groups;
        float* out = what.out + int64_t(at) * inner;
        const float* gate = row(at);
        for (int group = 0; group < space.groups; ++group, out += size, gate += size) {
            F squares = zeros();
            int i = 0;
            for (; i + kLanes <= size; i += kLanes) {
                F gated = load(out + i) * silu(load(gate + i));
                store(out + i, gated);
                squares = fma(gated, gated, squares);
            }
            float total = sum(squares);
            for (; i < size; ++i) {
                out[i] *= gate[i] / (1.0f + std::exp(-gate[i]));
                total += out[i] * out[i];
            }
            float scale = 1.0f / std::sqrt(total / float(size) + space.eps);
            for (i = 0; i < size; ++i) out[i] = out[i] * scale * space.norm[group * size + i];
        }
    }
};

}  // namespace

void mix_states(Pool& pool, const MixStates& what, const Batch& batch, const StateSpace& space, const StateCache& cache) {
    static thread_local Scratch scratch;
    scratch.mixed.resize(std::max(scratch.mixed.size(), size_t(batch.rows) * space.channels()));
    scratch.steps.resize(std::max(scratch.steps.size(), size_t(batch.rows) * space.heads));
    scratch.kept.resize(scratch.steps.size());
    scratch.sequence.resize(std::max(scratch.sequence.size(), size_t(batch.rows)));
    Pass pass{what, batch, space, cache, scratch};
    for (int sequence = 0; sequence < batch.sequences; ++sequence)
        std::fill(scratch.sequence.begin() + pass.first_row(sequence), scratch.sequence.begin() + pass.end_row(sequence), sequence);
    each_row(pool, batch.rows, [&](int row) { pass.convolve(row); });
    for (int sequence = 0; sequence < batch.sequences; ++sequence) pass.leave_window(sequence);
    int parts = (space.head_dim + kElementsOfTile - 1) / kElementsOfTile, tiles = space.heads * parts;
    int most = std::max(1, Pool::kMostTiles / tiles - 1);  // sequences of one job
    for (int from = 0; from < batch.sequences; from += most)
        pool.run(std::min(most, batch.sequences - from) * tiles, [&](int tile, int) {
            int first = tile % parts * kElementsOfTile;
            pass.scan(from + tile / tiles, tile / parts % space.heads, first, std::min(space.head_dim, first + kElementsOfTile));
        });
    each_row(pool, batch.rows, [&](int row) { pass.gate_and_norm(row); });
}
