// A tile keeps sixteen elements' states of one head in the first-level cache while it goes over a sequence's rows.
#include "states.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "activation.h"

namespace {

constexpr int kRowsOfTile = 8;
constexpr int kElementsOfTile = 16;
constexpr int kElementsAtOnce = 2;
constexpr float kLengthEps = 1e-6f;  // added to the squared length of a key or a query; all checkpoints have this one

// Of the pass under way; grows once and is kept.
struct Scratch {
    std::vector<float> mixed;   // [rows, C] what the convolution gives
    std::vector<float> steps;   // [rows, H] time steps; of a delta net how much of what is missing is written
    std::vector<float> kept;    // [rows, H] what is left of a state; by element [rows, H, N]
    std::vector<float> asked;   // [rows, H, N], by element: keys times that, by which the state before is read
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
    const StateMixer& mixer;
    const StateCache& cache;
    Scratch& scratch;

    int first_row(int sequence) const { return batch.query_starts[sequence]; }
    int end_row(int sequence) const { return batch.query_starts[sequence + 1]; }
    bool begins(int sequence) const { return batch.context_lens[sequence] == end_row(sequence) - first_row(sequence); }
    const float* row(int row) const { return what.projected + int64_t(row) * what.projected_stride; }
    const float* inputs(int row) const { return this->row(row) + (alone() || lightning() ? 0 : mixer.inner()); }
    float* out(int row) const { return what.out + int64_t(row) * what.out_stride; }
    float* window(int sequence) const {
        return cache.windows + what.slots[sequence] * int64_t(mixer.kernel - 1) * mixer.channels();
    }

    // The convolution's input `back` tokens before a row; null where its sequence had not begun.
    const float* before(int row, int sequence, int back) const {
        if (row - back >= first_row(sequence)) return inputs(row - back);
        if (begins(sequence)) return nullptr;
        int missing = back - (row - first_row(sequence));  // 1: the last one of the window
        return window(sequence) + int64_t(mixer.kernel - 1 - missing) * mixer.channels();
    }

    void convolve(int at) const {
        int sequence = scratch.sequence[at], channels = mixer.channels();
        const float* seen[64];
        for (int k = 0; k < mixer.kernel; ++k) seen[k] = before(at, sequence, mixer.kernel - 1 - k);
        float* to = alone() ? out(at) : scratch.mixed.data() + int64_t(at) * channels;
        int c = 0;
        for (; c + kLanes <= channels; c += kLanes) {
            F total = load(mixer.conv_bias + c);
            for (int k = 0; k < mixer.kernel; ++k)
                if (seen[k]) total = fma(load(seen[k] + c), load(mixer.conv_weight + int64_t(k) * channels + c), total);
            store(to + c, silu(total));
        }
        for (; c < channels; ++c) {
            float total = mixer.conv_bias[c];
            for (int k = 0; k < mixer.kernel; ++k)
                if (seen[k]) total += seen[k][c] * mixer.conv_weight[int64_t(k) * channels + c];
            to[c] = total / (1.0f + std::exp(-total));
        }
        if (alone() || by_element()) return;
        if (lightning()) return even_steps(at);
        const float* raw = inputs(at) + channels;
        for (int h = 0; h < mixer.heads; ++h) {
            float x = raw[h] + mixer.step_bias[h];
            float step = x > 20.0f ? x : std::log1p(std::exp(x));
            scratch.kept[size_t(at) * mixer.heads + h] = std::exp(step * mixer.decay[h]);
            float written = delta() ? mixer.most_written / (1.0f + std::exp(-raw[mixer.heads + h])) : step;
            scratch.steps[size_t(at) * mixer.heads + h] = written;
        }
        if (delta())
            for (int group = 0; group < 2 * mixer.groups; ++group)
                make_unit(to + mixer.inner() + group * mixer.state_dim, group < mixer.groups ? 1.0f : scale_of_queries());
    }

    void even_steps(int at) const {
        for (int h = 0; h < mixer.heads; ++h) {
            scratch.kept[size_t(at) * mixer.heads + h] = std::exp(mixer.decay[h]);
            scratch.steps[size_t(at) * mixer.heads + h] = 1.0f;
        }
    }

    // A convolution, whose outputs are all that is asked for.
    bool alone() const { return mixer.rule == StateRule::kConvolution; }
    bool lightning() const { return mixer.rule == StateRule::kLightning; }
    bool delta() const { return mixer.rule == StateRule::kGatedDelta || by_element(); }
    bool by_element() const { return mixer.rule == StateRule::kElementDelta; }
    float scale_of_queries() const { return 1.0f / std::sqrt(float(mixer.state_dim)); }

    // Of a row and a head: its key and query, what is left of each element of its state, and how much is written.
    void keep_elements(int at, int head) const {
        int dim = mixer.state_dim, channels = mixer.channels();
        int64_t of_head = int64_t(at) * mixer.heads + head;
        float* key = scratch.mixed.data() + int64_t(at) * channels + mixer.inner() + head * dim;
        make_unit(key, 1.0f), make_unit(key + mixer.shared(), scale_of_queries());
        const float* steps = inputs(at) + channels;
        scratch.steps[size_t(of_head)] = mixer.most_written / (1.0f + std::exp(-steps[mixer.shared() + head]));
        const float *own = steps + head * dim, *bias = mixer.step_bias + head * dim;
        float *kept = scratch.kept.data() + of_head * dim, *asked = scratch.asked.data() + of_head * dim;
        for (int n = 0; n < dim; n += kLanes) {
            F left = left_of(load_some(own + n, dim - n) + load_some(bias + n, dim - n), all(mixer.decay[head]));
            store_some(kept + n, left, dim - n);
            store_some(asked + n, left * load_some(key + n, dim - n), dim - n);
        }
    }

    // Of elements of a state, by their time steps.
    F left_of(F steps, F decay) const {
        if (mixer.lower_bound == 0.0f) return exp(softplus(steps) * decay);
        return exp(all(mixer.lower_bound) * sigmoid(zeros() - steps * decay));
    }

    // A key or a query, of length 1 and then scaled.
    void make_unit(float* row, float scale) const {
        F squares = zeros();
        int dim = mixer.state_dim, n = 0;
        for (; n + kLanes <= dim; n += kLanes) squares = fma(load(row + n), load(row + n), squares);
        float total = sum(squares);
        for (; n < dim; ++n) total += row[n] * row[n];
        scale /= std::sqrt(total + kLengthEps);
        for (n = 0; n < dim; ++n) row[n] *= scale;
    }

    // The inputs that the next row's convolution sees. In place: whatever is kept moves to a lower address.
    void leave_window(int sequence) const {
        int kept = mixer.kernel - 1, channels = mixer.channels();
        float* to = window(sequence);
        for (int k = 0; k < kept; ++k, to += channels) {
            const float* from = before(end_row(sequence) - 1, sequence, kept - 1 - k);
            if (from) memmove(to, from, size_t(channels) * sizeof(float));
            else memset(to, 0, size_t(channels) * sizeof(float));
        }
    }

    // Elements [first, end) of a head, over all rows of a sequence.
    void scan(int sequence, int head, int first, int end) const {
        int dim = mixer.state_dim, inner = mixer.inner(), group = head / (mixer.heads / mixer.groups);
        int64_t place = (what.slots[sequence] * mixer.heads + head) * int64_t(mixer.head_dim);
        float* states = cache.states + (place + first) * dim;
        if (begins(sequence)) memset(states, 0, size_t(end - first) * dim * sizeof(float));
        if (delta()) return correct_by_rows(sequence, head, first, end, states);
        for (int at = first_row(sequence); at < end_row(sequence); ++at) {
            const float* mixed = scratch.mixed.data() + int64_t(at) * mixer.channels();
            const float* b = mixed + inner + group * dim;
            const float* c = b + mixer.shared();
            float step = scratch.steps[size_t(at) * mixer.heads + head], kept = scratch.kept[size_t(at) * mixer.heads + head];
            float* out = this->out(at) + head * mixer.head_dim;
            const float* x = mixed + head * mixer.head_dim;
            Token token{b, c, x, out, kept, step, mixer.skip[head], dim};
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

    // Elements [first, end) of a delta net's head, over all rows of a sequence: what a row's key reads of the state is
    // known from the row before, where the state was written, so that each row goes over it once.
    void correct_by_rows(int sequence, int head, int first, int end, float* states) const {
        int dim = mixer.state_dim, last = end_row(sequence) - 1;
        int64_t key_at = mixer.inner() + int64_t(head / (mixer.heads / mixer.groups)) * dim;
        float known[kElementsOfTile];
        for (int at = first_row(sequence); at <= last; ++at) {
            const float* mixed = scratch.mixed.data() + int64_t(at) * mixer.channels();
            const float *key = mixed + key_at, *query = key + mixer.shared();
            int64_t of_head = int64_t(at) * mixer.heads + head;
            const float *left = nullptr, *asked = key, *next = key + mixer.channels();
            if (by_element()) {
                left = scratch.kept.data() + of_head * dim, asked = scratch.asked.data() + of_head * dim;
                next = asked + int64_t(mixer.heads) * dim;
            }
            if (at == first_row(sequence))
                for (int p = first; p < end; ++p) known[p - first] = product(states + int64_t(p - first) * dim, asked);
            if (at == last) next = nullptr;
            Correction row{key, query, next, left, left ? 1.0f : scratch.kept[of_head], scratch.steps[of_head], dim};
            const float* values = mixed + int64_t(head) * mixer.head_dim;
            float* out = this->out(at) + int64_t(head) * mixer.head_dim;
            int p = first;
            for (; p + kElementsAtOnce <= end; p += kElementsAtOnce)
                correct<kElementsAtOnce>(states + int64_t(p - first) * dim, row, values + p, known + p - first, out + p);
            for (; p < end; ++p) correct<1>(states + int64_t(p - first) * dim, row, values + p, known + p - first, out + p);
        }
    }

    // By the same order of sums as `correct` reads for the next row.
    float product(const float* state, const float* key) const {
        F read = zeros();
        int n = 0;
        for (; n + kLanes <= mixer.state_dim; n += kLanes) read = fma(load(state + n), load(key + n), read);
        float total = sum(read);
        for (; n < mixer.state_dim; ++n) total += state[n] * key[n];
        return total;
    }

    // What one token does to the states of a head.
    struct Correction {
        const float* key;
        const float* query;
        const float* next;  // the next token's key, times what it leaves by element; null: it is none of this step
        const float* left;  // by element; null: `kept` is left of all
        float kept, rate;
        int dim;
    };

    // state = kept * state + rate * (value - kept * known) * key, and what the query and the next key read of it: of
    // `Count` neighbouring elements. Each is computed in the same order whatever `Count` is.
    template <int Count>
    static void correct(float* state, const Correction& row, const float* values, float* known, float* out) {
        if (row.left) {
            if (row.next) correct<Count, true, true>(state, row, values, known, out);
            else correct<Count, false, true>(state, row, values, known, out);
        } else if (row.next) correct<Count, true, false>(state, row, values, known, out);
        else correct<Count, false, false>(state, row, values, known, out);
    }
    template <int Count, bool GoesOn, bool ByElement>
    static void correct(float* state, const Correction& row, const float* values, float* known, float* out) {
        F read[Count], ahead[Count], written[Count], kept = all(row.kept);
        float more[Count];
        for (int e = 0; e < Count; ++e) {
            read[e] = ahead[e] = zeros();
            more[e] = row.rate * (values[e] - row.kept * known[e]);
            written[e] = all(more[e]);
        }
        int n = 0;
        for (; n + kLanes <= row.dim; n += kLanes) {
            F key = load(row.key + n), query = load(row.query + n), next = GoesOn ? load(row.next + n) : zeros();
            if (ByElement) kept = load(row.left + n);
            for (int e = 0; e < Count; ++e) {
                float* own = state + int64_t(e) * row.dim + n;
                F s = fma(load(own), kept, written[e] * key);
                store(own, s);
                read[e] = fma(s, query, read[e]);
                if (GoesOn) ahead[e] = fma(s, next, ahead[e]);
            }
        }
        for (int e = 0; e < Count; ++e) {
            float* own = state + int64_t(e) * row.dim;
            float total = sum(read[e]), total_ahead = GoesOn ? sum(ahead[e]) : 0.0f;
            for (int i = n; i < row.dim; ++i) {
                own[i] = own[i] * (ByElement ? row.left[i] : row.kept) + more[e] * row.key[i];
                total += own[i] * row.query[i];
                if (GoesOn) total_ahead += own[i] * row.next[i];
            }
            out[e] = total;
            known[e] = total_ahead;
        }
    }

    // Each head of a delta net.
    void norm_and_gate(int at) const {
        int dim = mixer.head_dim;
        float* out = this->out(at);
        const float* gate = row(at);
        for (int head = 0; head < mixer.heads; ++head, out += dim, gate += dim) {
            F squares = zeros();
            int i = 0;
            for (; i + kLanes <= dim; i += kLanes) squares = fma(load(out + i), load(out + i), squares);
            float total = sum(squares);
            for (; i < dim; ++i) total += out[i] * out[i];
            float scale = 1.0f / std::sqrt(total / float(dim) + mixer.eps);
            for (i = 0; i + kLanes <= dim; i += kLanes) {
                F from = load(gate + i);
                store(out + i, load(out + i) * all(scale) * load(mixer.norm + i) * (by_element() ? sigmoid(from) : silu(from)));
            }
            for (; i < dim; ++i) out[i] = out[i] * scale * mixer.norm[i] * ((by_element() ? 1.0f : gate[i]) / (1.0f + std::exp(-gate[i])));
        }
    }

    void gate_and_norm(int at) const {
        if (delta()) return norm_and_gate(at);
        int inner = mixer.inner(), size = inner / mixer.groups;
        float* out = this->out(at);
        const float* gate = row(at);
        for (int group = 0; group < mixer.groups; ++group, out += size, gate += size) {
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
            if (!mixer.norm) continue;
            float scale = 1.0f / std::sqrt(total / float(size) + mixer.eps);
            for (i = 0; i < size; ++i) out[i] = out[i] * scale * mixer.norm[group * size + i];
        }
    }
};

}  // namespace

void mix_states(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache) {
    if (mixer.rule == StateRule::kSelective) return select_states(pool, what, batch, mixer, cache);
    if (mixer.rule == StateRule::kRecurrence) return recur_states(pool, what, batch, mixer, cache);
    if (mixer.rule == StateRule::kGatedConvolution) return convolve_gated(pool, what, batch, mixer, cache);
    static thread_local Scratch scratch;
    scratch.mixed.resize(std::max(scratch.mixed.size(), size_t(batch.rows) * mixer.channels()));
    scratch.steps.resize(std::max(scratch.steps.size(), size_t(batch.rows) * mixer.heads));
    bool by_element = mixer.rule == StateRule::kElementDelta;
    size_t kept = size_t(batch.rows) * mixer.heads * (by_element ? mixer.state_dim : 1);
    scratch.kept.resize(std::max(scratch.kept.size(), kept));
    if (by_element) scratch.asked.resize(std::max(scratch.asked.size(), kept));
    scratch.sequence.resize(std::max(scratch.sequence.size(), size_t(batch.rows)));
    Pass pass{what, batch, mixer, cache, scratch};
    for (int sequence = 0; sequence < batch.sequences; ++sequence)
        std::fill(scratch.sequence.begin() + pass.first_row(sequence), scratch.sequence.begin() + pass.end_row(sequence), sequence);
    each_row(pool, batch.rows, [&](int row) { pass.convolve(row); });
    for (int sequence = 0; sequence < batch.sequences; ++sequence) pass.leave_window(sequence);
    if (pass.alone()) return;
    if (by_element)
        each_row(pool, batch.rows * mixer.heads, [&](int number) { pass.keep_elements(number / mixer.heads, number % mixer.heads); });
    int parts = (mixer.head_dim + kElementsOfTile - 1) / kElementsOfTile, tiles = mixer.heads * parts;
    int most = std::max(1, Pool::kMaxTiles / tiles - 1);  // sequences of one job
    for (int from = 0; from < batch.sequences; from += most)
        pool.run(std::min(most, batch.sequences - from) * tiles, [&](int tile, int) {
            int first = tile % parts * kElementsOfTile;
            pass.scan(from + tile / tiles, tile / parts % mixer.heads, first, std::min(mixer.head_dim, first + kElementsOfTile));
        });
    if (pass.lightning()) return;
    each_row(pool, batch.rows, [&](int row) { pass.gate_and_norm(row); });
}
