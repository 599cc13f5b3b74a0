// Attention over paged latents. A page is made floats once for all rows of a task, which are many: every query head reads
// the same key. For scores its elements lie [elements][16 tokens], for values [16 tokens][rank].
#include "latent.h"

#include "softmax.h"

namespace {

constexpr int kChunkPages = kChunkTokens / kPageTokens;

int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// What a thread works on; grows once and is kept.
struct Scratch {
    std::vector<F> floats;
    float* keys = nullptr;    // [kTileColumns][rank + rope_dim][16 tokens]
    float* values = nullptr;  // [16 tokens][padded rank]
    float* scores = nullptr;  // [rows][kChunkTokens], then what they weigh
    float* mixed = nullptr;   // [rows][padded rank], the chunk's
    float* sums = nullptr;    // [rows][padded rank], so far
    std::vector<State> states;
    std::vector<State> chunk_states;

    void fit(int rows, const LatentCache& cache) {
        size_t dim = size_t(cache.rank + cache.rope_dim), rank = size_t(padded(cache.rank));
        size_t sizes[] = {kTileColumns * dim * kPageTokens, kPageTokens * rank, size_t(rows) * kChunkTokens, rows * rank, rows * rank};
        float** parts[] = {&keys, &values, &scores, &mixed, &sums};
        size_t all = 0;
        for (size_t size : sizes) all += size;
        if (floats.size() < all / kLanes) floats.resize(all / kLanes);
        float* at = (float*)floats.data();
        for (int i = 0; i < 5; at += sizes[i++]) *parts[i] = at;
        if (states.size() < size_t(rows)) states.resize(size_t(rows)), chunk_states.resize(size_t(rows));
    }
};

// `count` items as floats, and zeros up to whole lanes.
template <class Item> void widen(float* to, const Item* from, int count) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    for (; i < padded(count); ++i) {
        if constexpr (sizeof(Item) == 2) to[i] = i < count ? float_of(from[i]) : 0.0f;
        else to[i] = i < count ? from[i] : 0.0f;
    }
}

template <class Item> float as_float(Item x) {
    if constexpr (sizeof(Item) == 2) return float_of(x);
    else return x;
}

template <class Item> struct Task {
    const LatentAttention& what;
    const Batch& batch;
    const LatentCache& cache;
    const AttentionTask& task;
    Scratch& scratch;

    int count() const { return task.rows * what.heads; }
    int dim() const { return cache.rank + cache.rope_dim; }
    int width() const { return padded(cache.rank); }
    int position(int row) const { return batch.positions[task.row + row / what.heads]; }
    int64_t query_row(int row) const { return int64_t(task.row) * what.heads + row; }
    const float* query(int row) const { return what.queries + query_row(row) * dim(); }
    // Where 16 tokens lie.
    int64_t page(int index) const {
        return cache.token(batch.block_tables + int64_t(task.sequence) * batch.table_width, index, 0);
    }
    // to[elements][16 tokens]
    void transpose_page(int index, float* to) const {
        int64_t first = page(index);
        const Item* latents = (const Item*)cache.latents + first * cache.rank;
        const Item* rotated = (const Item*)cache.rotated + first * cache.beside();
        transpose(latents, cache.rank, cache.rank, to);
        transpose(rotated, cache.rope_dim, cache.beside(), to + int64_t(cache.rank) * kPageTokens);
    }
    // Of tokens `width` apart, the first `elements` of each.
    static void transpose(const Item* from, int elements, int width, float* to) {
        for (int d = 0; d < elements; ++d)
            for (int token = 0; token < kPageTokens; ++token) to[d * kPageTokens + token] = as_float(from[int64_t(token) * width + d]);
    }
    void widen_page(int index) const {
        const Item* latents = (const Item*)cache.latents + page(index) * cache.rank;
        for (int token = 0; token < kPageTokens; ++token)
            widen(scratch.values + token * width(), latents + int64_t(token) * cache.rank, cache.rank);
    }
};

// Scores of R rows and the keys of the `pages` pages in the scratch.
template <class Item, int R, int C> void score_tile(const Task<Item>& t, int row, int to) {
    const float *x[R], *w[C];
    F sums[R][C];
    BATON_UNROLLED
    for (int r = 0; r < R; ++r) {
        x[r] = t.query(row + r);
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) sums[r][c] = zeros();
    }
    BATON_UNROLLED
    for (int c = 0; c < C; ++c) w[c] = t.scratch.keys + int64_t(c) * t.dim() * kPageTokens;
    multiply_tile<Single, R, C>(x, w, t.dim(), kPageTokens, sums);
    BATON_UNROLLED
    for (int r = 0; r < R; ++r)
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) store(t.scratch.scores + (row + r) * kChunkTokens + to + c * kPageTokens, sums[r][c]);
}

template <class Item, int C> void score_pages(const Task<Item>& t, int first_page, int at) {
    BATON_UNROLLED
    for (int c = 0; c < C; ++c) t.transpose_page(first_page + at + c, t.scratch.keys + int64_t(c) * t.dim() * kPageTokens);
    by_rows(t.count(), [&](int row, auto rows) { score_tile<Item, decltype(rows)::value, C>(t, row, at * kPageTokens); });
}

// Adds 16 * C elements from `column` on of R rows: the latents of the page in the scratch, weighted.
template <class Item, int R, int C> void mix_tile(const Task<Item>& t, int row, int page, int tokens, int column) {
    const float *x[R], *w[C];
    F sums[R][C];
    BATON_UNROLLED
    for (int r = 0; r < R; ++r) {
        x[r] = t.scratch.scores + (row + r) * kChunkTokens + page * kPageTokens;
        BATON_UNROLLED
        for (int c = 0; c < C; ++c)
            sums[r][c] = page ? load(t.scratch.mixed + (row + r) * t.width() + column + c * kLanes) : zeros();
    }
    BATON_UNROLLED
    for (int c = 0; c < C; ++c) w[c] = t.scratch.values + column + c * kLanes;
    multiply_tile<Single, R, C>(x, w, tokens, t.width(), sums);
    BATON_UNROLLED
    for (int r = 0; r < R; ++r)
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) store(t.scratch.mixed + (row + r) * t.width() + column + c * kLanes, sums[r][c]);
}

template <class Item, int R> void mix_rows(const Task<Item>& t, int row, int page, int tokens) {
    int column = 0;
    for (; column + kTileColumns * kLanes <= t.width(); column += kTileColumns * kLanes)
        mix_tile<Item, R, kTileColumns>(t, row, page, tokens, column);
    for (; column < t.width(); column += kLanes) mix_tile<Item, R, 1>(t, row, page, tokens, column);
}

// Turns a row's scores into weights exp(score - greatest); the row sees the first `seen` of the chunk's `tokens`.
template <class Item> State soften(const Task<Item>& t, int row, int seen, int tokens) {
    float* scores = t.scratch.scores + row * kChunkTokens;
    F scale = all(t.what.scale), most = all(kNone), total = zeros();
    for (int i = 0; i < tokens; i += kLanes) {
        F score = load(scores + i) * scale;
        if (i + kLanes > seen) score = within(score, i, 0, seen, kNone);
        most = larger(most, score);
        store(scores + i, score);
    }
    F top = all(greatest(most));
    for (int i = 0; i < tokens; i += kLanes) {
        F weight = exp(load(scores + i) - top);
        total = total + weight;
        store(scores + i, weight);
    }
    return {greatest(most), sum(total)};
}

template <class Item> void run_chunk(const Task<Item>& t, int chunk) {
    int count = t.count(), start = chunk * kChunkTokens, first_page = chunk * kChunkPages;
    int tokens = std::min(kChunkTokens, t.position(count - 1) + 1 - start);
    int pages = (tokens + kPageTokens - 1) / kPageTokens, at = 0;
    for (; at + kTileColumns <= pages; at += kTileColumns) score_pages<Item, kTileColumns>(t, first_page, at);
    for (; at < pages; ++at) score_pages<Item, 1>(t, first_page, at);
    auto& states = t.scratch.chunk_states;
    for (int row = 0; row < count; ++row) {
        int seen = std::min(tokens, t.position(row) + 1 - start);
        states[row] = {kNone, 0};
        if (seen > 0) states[row] = soften(t, row, seen, pages * kPageTokens);
        else memset(t.scratch.scores + row * kChunkTokens, 0, size_t(pages) * kPageTokens * 4);
    }
    for (int page = 0; page < pages; ++page) {
        t.widen_page(first_page + page);
        int left = std::min(kPageTokens, tokens - page * kPageTokens);
        by_rows(count, [&](int row, auto rows) { mix_rows<Item, decltype(rows)::value>(t, row, page, left); });
    }
    for (int row = 0; row < count; ++row) {
        if (states[row].greatest == kNone) continue;
        int64_t from = int64_t(row) * t.width();
        merge(t.scratch.states[row], t.scratch.sums + from, states[row], t.scratch.mixed + from, t.width());
    }
}

template <class Item> void write_row(const Task<Item>& t, int row, State state, const float* sums) {
    float* to = t.what.out + t.query_row(row) * t.cache.rank;
    F total = all(state.total);
    int d = 0;
    for (; d + kLanes <= t.cache.rank; d += kLanes) store(to + d, load(sums + d) / total);
    if (d == t.cache.rank) return;
    float rest[kLanes];
    store(rest, load(sums + d) / total);
    memcpy(to + d, rest, size_t(t.cache.rank - d) * 4);
}

// The unfinished results of tasks that hold a part of the context.
struct Partials {
    std::vector<F> sums;
    std::vector<State> states;
    float* of(int row, int width) { return (float*)sums.data() + int64_t(row) * width; }
};

template <class Item> void run_task(const Task<Item>& t, Partials& partials) {
    for (int row = 0; row < t.count(); ++row) t.scratch.states[row] = {kNone, 0};
    for (int chunk = t.task.first_chunk; chunk < t.task.first_chunk + t.task.chunks; ++chunk) run_chunk(t, chunk);
    for (int row = 0; row < t.count(); ++row) {
        const float* sums = t.scratch.sums + int64_t(row) * t.width();
        if (t.task.partial == AttentionTask::kWhole) {
            write_row(t, row, t.scratch.states[row], sums);
            continue;
        }
        partials.states[t.task.partial + row] = t.scratch.states[row];
        memcpy(partials.of(t.task.partial + row, t.width()), sums, size_t(t.width()) * 4);
    }
}

// Merges the partials of a task's chunks in order, as run_task would have met them.
template <class Item> void run_merge(const Task<Item>& t, Partials& partials) {
    for (int row = 0; row < t.count(); ++row) {
        State state{kNone, 0};
        for (int chunk = 0; chunk < t.task.chunks; ++chunk) {
            int at = t.task.partial + chunk * t.count() + row;
            if (partials.states[at].greatest == kNone) continue;
            merge(state, t.scratch.sums, partials.states[at], partials.of(at, t.width()), t.width());
        }
        write_row(t, row, state, t.scratch.sums);
    }
}

template <class Item>
void attend_items(Pool& pool, const LatentAttention& what, const Batch& batch, const LatentCache& cache, const AttentionPlan& plan) {
    Partials partials;
    partials.sums.resize(size_t(plan.partial_rows) * padded(cache.rank) / kLanes);
    partials.states.resize(size_t(plan.partial_rows));
    auto run = [&](const std::vector<AttentionTask>& tasks, auto call) {
        pool.run(int(tasks.size()), [&](int index, int) {
            static thread_local Scratch scratch;
            scratch.fit(tasks[index].rows * what.heads, cache);
            call(Task<Item>{what, batch, cache, tasks[index], scratch}, partials);
        });
    };
    run(plan.tasks, run_task<Item>);
    if (!plan.merges.empty()) run(plan.merges, run_merge<Item>);
}

}  // namespace

void attend_latents(Pool& pool, const LatentAttention& what, const Batch& batch, const LatentCache& cache, const AttentionPlan& plan) {
    if (cache.number == Number::kHalf) attend_items<Bf16>(pool, what, batch, cache, plan);
    else attend_items<float>(pool, what, batch, cache, plan);
}
