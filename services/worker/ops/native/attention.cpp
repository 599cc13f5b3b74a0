// Attention over paged keys and values: chunk after chunk of the context, softmax within, merged across.
#include "attention.h"

#include <algorithm>
#include <cmath>

#include "fp8.h"
#include "softmax.h"
#include "tile.h"

namespace {

constexpr int kChunkPages = kChunkTokens / kPageTokens;
// Query rows (times heads of a group) of a task: enough to use each key and value often, few enough to spread.
constexpr int kTaskRows = 48;
constexpr float kCount[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

int first_seen(int position, int window) { return window > 0 ? std::max(0, position - window + 1) : 0; }

// A line that is read a chunk later, for the second-level cache: the first one has not the room, and keeps too few reads under
// way for memory to be busy.
BATON_INLINE void ask_for(const void* line) { __builtin_prefetch(line, 0, 2); }
constexpr int kLine = 64;

// Where a chunk's pages lie, and those that are read a chunk later. Each of their lines is asked for beside one of these: blocks
// lie anywhere in memory, so the processor cannot guess where it goes on, and asked for at once, lines hold up a product's loads.
struct ChunkPages {
    const char *keys[kChunkPages], *values[kChunkPages];
    const char *later_keys[kChunkPages], *later_values[kChunkPages];  // where there is none, the page itself
};

// What a thread works on; grows once and is kept.
struct Scratch {
    std::vector<F> floats;
    float* scores = nullptr;  // [rows][kChunkTokens]
    Bf16* weights = nullptr;  // the same, where values are bf16
    float* mixed = nullptr;   // [rows][padded dim], the chunk's
    float* sums = nullptr;    // [rows][padded dim], so far
    void* pages = nullptr;    // the chunk's keys, then its values, where they are kept as codes
    float* key_scales = nullptr;    // [kChunkTokens], of codes that have any
    float* value_scales = nullptr;  // the same
    ChunkPages chunk;                 // in hand
    std::vector<State> states;        // of the task
    std::vector<State> chunk_states;  // of the chunk in hand

    void fit(int rows, int padded, int64_t coded_items) {
        size_t scores_at = 0, weights_at = scores_at + size_t(rows) * kChunkTokens / kLanes;
        size_t mixed_at = weights_at + size_t(rows) * kChunkTokens / kLanes;
        size_t sums_at = mixed_at + size_t(rows) * padded / kLanes, end = sums_at + size_t(rows) * padded / kLanes;
        size_t pages_at = end, key_scales_at = pages_at + size_t(coded_items) / kLanes;
        size_t value_scales_at = key_scales_at + (coded_items ? kChunkTokens / kLanes : 0);
        end = value_scales_at + (coded_items ? kChunkTokens / kLanes : 0);
        if (floats.size() < end) floats.resize(end);
        scores = (float*)(floats.data() + scores_at);
        weights = (Bf16*)(floats.data() + weights_at);
        mixed = (float*)(floats.data() + mixed_at);
        sums = (float*)(floats.data() + sums_at);
        pages = floats.data() + pages_at;
        key_scales = (float*)(floats.data() + key_scales_at);
        value_scales = (float*)(floats.data() + value_scales_at);
        if (states.size() < size_t(rows)) states.resize(size_t(rows)), chunk_states.resize(size_t(rows));
    }
};

template <class Kind> struct Task {
    using Item = typename Kind::Item;
    const Attention& what;
    const Batch& batch;
    const Cache& cache;
    const AttentionTask& task;
    const AttentionTask* next;  // what the thread is likely to do then, or null
    Scratch& scratch;
    int group;  // query heads of the key/value head
    int padded;

    int count() const { return task.rows * group; }
    int query_head(int row) const { return task.head * group + row % group; }
    int position(int row) const { return batch.positions[task.row + row / group]; }
    int last_seen(int row) const { return batch.last_seen(task.row + row / group); }
    const Item* query(int row) const {
        int64_t at = (task.row + row / group) * what.query_stride + query_head(row) * cache.head_dim;
        return (const Item*)what.queries + at;
    }
    const int* table(int sequence) const { return batch.block_tables + int64_t(sequence) * batch.table_width; }
    bool coded() const { return cache.code != Code::kPlain; }
    bool scaled() const { return cache.code == Code::kInt8; }
    // Page `index` of the chunk, as products read it.
    Item* decoded(int index) const { return (Item*)scratch.pages + index * cache.page_items(); }
    const Item* keys(int index) const { return coded() ? decoded(index) : (const Item*)scratch.chunk.keys[index]; }
    const Item* values(int index) const { return coded() ? decoded(index) : (const Item*)scratch.chunk.values[index]; }
    // What the product of the first rows with a page asks for. Where there are codes it is decoding them that does.
    const Item* later_keys(int row, int index) const { return row || coded() ? keys(index) : (const Item*)scratch.chunk.later_keys[index]; }
    const Item* later_values(int row, int index) const {
        return row || coded() ? values(index) : (const Item*)scratch.chunk.later_values[index];
    }
    void find(const AttentionTask& of, int chunk, int count, const char** keys, const char** values) const {
        for (int index = 0; index < count; ++index) {
            int64_t at = cache.at(table(of.sequence), of.head, chunk * kChunkPages + index) * (coded() ? 1 : int64_t(sizeof(Item)));
            keys[index] = (const char*)cache.keys + at;
            values[index] = (const char*)cache.values + at;
        }
    }
    // The chunk's pages, and those of the task's next chunk or of the next task's first.
    void find_pages(int chunk, int count) const {
        ChunkPages& found = scratch.chunk;
        find(task, chunk, count, found.keys, found.values);
        int there = 0;
        bool more = chunk + 1 < task.first_chunk + task.chunks;
        if (more || next) {
            const AttentionTask& of = more ? task : *next;
            int later = more ? chunk + 1 : next->first_chunk;
            there = std::min(count, pages_of(of, later));
            find(of, later, there, found.later_keys, found.later_values);
        }
        for (; there < count; ++there) found.later_keys[there] = found.keys[there], found.later_values[there] = found.values[there];
    }
    int pages_of(const AttentionTask& of, int chunk) const {
        int last = batch.last_seen(of.row + of.rows - 1) / kPageTokens;
        return std::min(last + 1 - chunk * kChunkPages, kChunkPages);
    }
    const Item* weights(int row) const {
        if constexpr (Kind::kItems == 2) return scratch.weights + row * kChunkTokens;
        else return scratch.scores + row * kChunkTokens;
    }
};

// Two numbers of each lane as a step of a product has them.
BATON_INLINE void store_pair(float* to, int distance, F first, F second) {
    store(to, first);
    store(to + distance, second);
}
BATON_INLINE void store_pair(Bf16* to, int, F first, F second) {  // which have no more bits than bf16
    U low = bits_of(first), high = bits_of(second);
    BATON_EACH low.part[i_] = (low.part[i_] >> 16) | (high.part[i_] & 0xffff0000u);
    store((float*)to, floats_of(low));
}

// What codes stand for, before they are scaled: bf16 holds it exactly.
template <Code code> BATON_INLINE F number_of(Sixteen<RegI> codes) {
    if constexpr (code == Code::kInt8) return floats_of(codes);
    else return floats_of_fp8(codes);
}

// The codes of a page's keys as products read them: words of four elements of one token become two steps of bf16 or four of
// floats. Done for the first rows of a task, others find them.
template <Code code, class Kind> void decode_keys(const Task<Kind>& t, int index) {
    auto* from = (const uint8_t*)t.scratch.chunk.keys[index];
    const char* later = t.scratch.chunk.later_keys[index];
    auto* to = t.decoded(index);
    for (int d = 0; d < t.cache.head_dim; d += 4, from += kLine, later += kLine, to += 4 * kPageTokens) {
        ask_for(later);
        U words = load_bits(from);
        Sixteen<RegI> moved;
        F each[4];
        for (int i = 0; i < 4; ++i) {
            BATON_EACH moved.part[i_] = (RegI)(words.part[i_] << (24 - 8 * i)) >> 24;
            each[i] = number_of<code>(moved);
        }
        store_pair(to, kPageTokens, each[0], each[1]);
        store_pair(to + 2 * kPageTokens, kPageTokens, each[2], each[3]);
    }
    if (t.scaled()) ask_for(later);
}

// The same of values, two tokens at a time.
template <Code code, class Kind> void decode_values(const Task<Kind>& t, int index) {
    auto* from = (const uint8_t*)t.scratch.chunk.values[index];
    const char* later = t.scratch.chunk.later_values[index];
    int stored = t.cache.padded_stored_dim();
    auto* to = t.decoded(index);
    for (int token = 0; token < kPageTokens; token += 2, from += 2 * stored, later += 2 * stored, to += 2 * t.padded) {
        for (int line = 0; line < 2 * stored; line += kLine) ask_for(later + line);
        for (int d = 0; d < t.padded; d += kLanes) {
            F first = number_of<code>(load_integers(from + d)), second = number_of<code>(load_integers(from + stored + d));
            store_pair(to + d * Kind::kItems, t.padded, first, second);
        }
    }
}

// What a page's codes are multiplied by: keys have it in the word behind a token's last one, values behind its last code.
template <class Kind> void read_scales(const Task<Kind>& t, int index) {
    int to = index * kPageTokens;
    memcpy(t.scratch.key_scales + to, t.scratch.chunk.keys[index] + t.cache.head_dim * kPageTokens, kPageTokens * 4);
    const char* values = t.scratch.chunk.values[index] + t.cache.head_dim;
    for (int token = 0; token < kPageTokens; ++token)
        memcpy(t.scratch.value_scales + to + token, values + token * t.cache.padded_stored_dim(), 4);
}

// multiply_step, and beside its lines it asks for those of other pages, `later`.
template <class Kind, int R, int C>
BATON_INLINE void multiply_asking(const typename Kind::Item* const x[R], const typename Kind::Item* const w[C],
                                  const typename Kind::Item* const later[C], int step, int weight_step, F sums[R][C]) {
    BATON_UNROLLED
    for (int c = 0; c < C; ++c) ask_for(later[c] + size_t(step) * weight_step);
    multiply_step<Kind, R, C>(x, w, step, weight_step, sums);
}

// Scores of R rows and the keys of C pages of the chunk, from page `page` on.
template <class Kind, int R, int C> void score_tile(const Task<Kind>& t, int row, int page) {
    const typename Kind::Item *x[R], *w[C], *later[C];
    F sums[R][C];
    BATON_UNROLLED
    for (int r = 0; r < R; ++r) {
        x[r] = t.query(row + r);
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) sums[r][c] = zeros();
    }
    BATON_UNROLLED
    for (int c = 0; c < C; ++c) w[c] = t.keys(page + c), later[c] = t.later_keys(row, page + c);
    if (row == 0 && t.coded())
        for (int c = 0; c < C; ++c) {
            if (t.scaled()) decode_keys<Code::kInt8>(t, page + c);
            else decode_keys<Code::kFp8>(t, page + c);
        }
    int steps = t.cache.head_dim / Kind::kItems;
    for (int step = 0; step < steps; ++step) multiply_asking<Kind, R, C>(x, w, later, step, kPageTokens * Kind::kItems, sums);
    float* to = t.scratch.scores + row * kChunkTokens + page * kPageTokens;
    BATON_UNROLLED
    for (int r = 0; r < R; ++r)
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) store(to + r * kChunkTokens + c * kPageTokens, sums[r][c]);
}

template <class Kind, int R> void score_rows(const Task<Kind>& t, int row, int pages) {
    int page = 0;
    for (; page + kTileColumns <= pages; page += kTileColumns) score_tile<Kind, R, kTileColumns>(t, row, page);
    for (; kTileColumns > 2 && page + 2 <= pages; page += 2) score_tile<Kind, R, 2>(t, row, page);
    for (; page < pages; ++page) score_tile<Kind, R, 1>(t, row, page);
}

// Values of R rows, 16 * C elements from `column` on, mixed over the chunk's first `tokens` tokens.
template <class Kind, int R, int C> void mix_tile(const Task<Kind>& t, int row, int tokens, int column) {
    F sums[R][C];
    BATON_UNROLLED
    for (int r = 0; r < R; ++r)
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) sums[r][c] = zeros();
    const typename Kind::Item* weights = t.weights(row);
    for (int page = 0; page * kPageTokens < tokens; ++page, weights += kPageTokens) {
        if (row == 0 && column == 0 && t.coded()) {
            if (t.scaled()) decode_values<Code::kInt8>(t, page);
            else decode_values<Code::kFp8>(t, page);
        }
        const typename Kind::Item *x[R], *w[C], *later[C];
        BATON_UNROLLED
        for (int r = 0; r < R; ++r) x[r] = weights + r * kChunkTokens;
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) {
            int at = (column + c * kLanes) * Kind::kItems;
            w[c] = t.values(page) + at, later[c] = t.later_values(row, page) + at;
        }
        int steps = (std::min(kPageTokens, tokens - page * kPageTokens) + Kind::kItems - 1) / Kind::kItems;
        for (int step = 0; step < steps; ++step) multiply_asking<Kind, R, C>(x, w, later, step, t.padded * Kind::kItems, sums);
    }
    float* to = t.scratch.mixed + row * t.padded + column;
    BATON_UNROLLED
    for (int r = 0; r < R; ++r)
        BATON_UNROLLED
        for (int c = 0; c < C; ++c) store(to + r * t.padded + c * kLanes, sums[r][c]);
}

template <class Kind, int R> void mix_rows(const Task<Kind>& t, int row, int tokens) {
    int column = 0;
    for (; column + kTileColumns * kLanes <= t.padded; column += kTileColumns * kLanes)
        mix_tile<Kind, R, kTileColumns>(t, row, tokens, column);
    for (; kTileColumns > 2 && column + 2 * kLanes <= t.padded; column += 2 * kLanes) mix_tile<Kind, R, 2>(t, row, tokens, column);
    for (; column < t.padded; column += kLanes) mix_tile<Kind, R, 1>(t, row, tokens, column);
}

// What a row's head adds to the scores of tokens from `token` on.
template <class Kind> F distance_biases(const Task<Kind>& t, int row, int token) {
    const float* biases = t.what.distance_biases + int64_t(t.query_head(row)) * t.what.distances;
    float each[kLanes];
    for (int i = 0; i < kLanes; ++i) each[i] = biases[std::clamp(t.position(row) - token - i, 0, t.what.distances - 1)];
    return load(each);
}

// Turns a row's scores into weights exp(score - greatest); the row sees the chunk's tokens [low, high) of `tokens`, of
// which the first is the sequence's token `start`.
template <class Kind> State soften(const Task<Kind>& t, int row, int start, int low, int high, int tokens) {
    float* scores = t.scratch.scores + row * kChunkTokens;
    F scale = all(t.what.scale), most = all(kNone), slope = zeros(), count = load(kCount);
    if (t.what.alibi_slopes) slope = all(t.what.alibi_slopes[t.query_head(row)]);
    float behind = float(start - t.position(row));
    for (int i = 0; i < tokens; i += kLanes) {
        F score = load(scores + i) * scale;
        if (t.scaled()) score = score * load(t.scratch.key_scales + i);
        if (t.what.softcap > 0) score = all(t.what.softcap) * tanh(score / all(t.what.softcap));
        if (t.what.alibi_slopes) score = fma(slope, count + all(behind + float(i)), score);
        if (t.what.distance_biases) score = score + distance_biases(t, row, start + i);
        if (i < low || i + kLanes > high) score = within(score, i, low, high, kNone);
        most = larger(most, score);
        store(scores + i, score);
    }
    F top = all(greatest(most)), total = zeros();
    for (int i = 0; i < tokens; i += kLanes) {
        F weight = exp(load(scores + i) - top);
        total = total + weight;
        if (t.scaled()) weight = weight * load(t.scratch.value_scales + i);
        if constexpr (Kind::kItems == 2) store(t.scratch.weights + row * kChunkTokens + i, weight);
        else store(scores + i, weight);
    }
    return {greatest(most), sum(total)};
}

template <class Kind> void clear_weights(const Task<Kind>& t, int row, int tokens) {
    for (int i = 0; i < tokens; i += kLanes) {
        if constexpr (Kind::kItems == 2) store(t.scratch.weights + row * kChunkTokens + i, zeros());
        else store(t.scratch.scores + row * kChunkTokens + i, zeros());
    }
}

template <class Kind> void run_chunk(const Task<Kind>& t, int chunk) {
    int count = t.count(), start = chunk * kChunkTokens;
    // Tokens that the last row sees: rows before it see no more.
    int tokens = std::min(kChunkTokens, t.last_seen(count - 1) + 1 - start);
    int pages = (tokens + kPageTokens - 1) / kPageTokens, padded_tokens = pages * kPageTokens;
    t.find_pages(chunk, pages);
    by_rows(count, [&](int row, auto rows) { score_rows<Kind, decltype(rows)::value>(t, row, pages); });
    if (t.scaled())
        for (int page = 0; page < pages; ++page) read_scales(t, page);
    auto& chunk_states = t.scratch.chunk_states;
    for (int row = 0; row < count; ++row) {
        int low = std::max(0, first_seen(t.position(row), t.what.window) - start);
        int high = std::min(tokens, t.last_seen(row) + 1 - start);
        chunk_states[row] = {kNone, 0};
        if (low < high) chunk_states[row] = soften(t, row, start, low, high, padded_tokens);
        else clear_weights(t, row, padded_tokens);
    }
    by_rows(count, [&](int row, auto rows) { mix_rows<Kind, decltype(rows)::value>(t, row, tokens); });
    for (int row = 0; row < count; ++row) {
        if (chunk_states[row].greatest == kNone) continue;
        merge(t.scratch.states[row], t.scratch.sums + row * t.padded, chunk_states[row], t.scratch.mixed + row * t.padded, t.padded);
    }
}

template <class Kind> void write_row(const Task<Kind>& t, int row, State state, const float* sums) {
    int64_t at = (t.task.row + row / t.group) * t.what.out_stride + t.query_head(row) * t.cache.head_dim;
    auto* to = (typename Kind::Item*)t.what.out + at;
    F total = all(state.total);
    if (t.what.sinks) total = total + exp(all(t.what.sinks[t.query_head(row)] - state.greatest));
    int dim = t.cache.head_dim, d = 0;
    for (; d + kLanes <= dim; d += kLanes) store(to + d, load(sums + d) / total);
    if (d == dim) return;
    float rest[kLanes];
    store(rest, load(sums + d) / total);
    for (int i = 0; d + i < dim; ++i) {
        if constexpr (Kind::kItems == 2) to[d + i] = bf16_of(rest[i]);
        else to[d + i] = rest[i];
    }
}

// The unfinished results of tasks that hold a part of the context: a state and sums for each row.
struct Partials {
    std::vector<F> sums;
    std::vector<State> states;
};

template <class Kind> void run_task(const Task<Kind>& t, Partials& partials) {
    for (int row = 0; row < t.count(); ++row) t.scratch.states[row] = {kNone, 0};
    for (int chunk = t.task.first_chunk; chunk < t.task.first_chunk + t.task.chunks; ++chunk) run_chunk(t, chunk);
    for (int row = 0; row < t.count(); ++row) {
        const float* sums = t.scratch.sums + row * t.padded;
        if (t.task.partial == AttentionTask::kWhole) {
            write_row(t, row, t.scratch.states[row], sums);
            continue;
        }
        partials.states[t.task.partial + row] = t.scratch.states[row];
        memcpy((float*)partials.sums.data() + int64_t(t.task.partial + row) * t.padded, sums, size_t(t.padded) * 4);
    }
}

// Merges the partials of a task's chunks in order, as run_task would have met them.
template <class Kind> void run_merge(const Task<Kind>& t, Partials& partials) {
    for (int row = 0; row < t.count(); ++row) {
        State state{kNone, 0};
        float* sums = t.scratch.sums;
        for (int chunk = 0; chunk < t.task.chunks; ++chunk) {
            int at = t.task.partial + chunk * t.count() + row;
            if (partials.states[at].greatest == kNone) continue;
            merge(state, sums, partials.states[at], (const float*)partials.sums.data() + int64_t(at) * t.padded, t.padded);
        }
        write_row(t, row, state, sums);
    }
}

template <class Kind>
void attend_kind(Pool& pool, const Attention& what, const Batch& batch, const Cache& cache, const AttentionPlan& plan) {
    int group = what.heads / cache.kv_heads, padded = cache.padded_dim();
    Partials partials;
    partials.sums.resize(size_t(plan.partial_rows) * padded / kLanes);
    partials.states.resize(size_t(plan.partial_rows));
    auto run = [&](const std::vector<AttentionTask>& tasks, auto call) {
        pool.run(int(tasks.size()), [&](int index, int) {
            static thread_local Scratch scratch;
            scratch.fit(tasks[index].rows * group, padded, cache.code == Code::kPlain ? 0 : kChunkPages * cache.page_items());
            const AttentionTask* next = index + 1 < int(tasks.size()) ? &tasks[index + 1] : nullptr;
            call(Task<Kind>{what, batch, cache, tasks[index], next, scratch, group, padded}, partials);
        });
    };
    run(plan.tasks, run_task<Kind>);
    if (!plan.merges.empty()) run(plan.merges, run_merge<Kind>);
}

}  // namespace

AttentionPlan plan_attention(const Batch& batch, int threads, int heads, int kv_heads, int window) {
    AttentionPlan plan;
    int most = std::max(1, kTaskRows / (heads / kv_heads));
    for (int s = 0; s < batch.sequences; ++s) {
        for (int head = 0; head < kv_heads; ++head) {
            for (int row = batch.query_starts[s]; row < batch.query_starts[s + 1]; row += most) {
                int rows = std::min(most, batch.query_starts[s + 1] - row);
                int first = first_seen(batch.positions[row], window) / kChunkTokens;
                int last = batch.last_seen(row + rows - 1) / kChunkTokens;
                plan.tasks.push_back({s, head, row, rows, first, last - first + 1, AttentionTask::kWhole});
            }
        }
    }
    // Fewer than a few tasks for each thread: cut long ones by chunks.
    if (threads == 1 || int(plan.tasks.size()) >= 4 * threads) return plan;
    std::vector<AttentionTask> whole;
    whole.swap(plan.tasks);
    for (auto task : whole) {
        if (task.chunks < 3) {
            plan.tasks.push_back(task);
            continue;
        }
        task.partial = plan.partial_rows;
        plan.merges.push_back(task);
        int count = task.rows * (heads / kv_heads);
        for (int chunk = 0; chunk < task.chunks; ++chunk)
            plan.tasks.push_back({task.sequence, task.head, task.row, task.rows, task.first_chunk + chunk, 1, task.partial + chunk * count});
        plan.partial_rows += task.chunks * count;
    }
    return plan;
}

void attend(Pool& pool, const Attention& what, const Batch& batch, const Cache& cache, const AttentionPlan& plan) {
    if (cache.number == Number::kHalf) attend_kind<Half>(pool, what, batch, cache, plan);
    else attend_kind<Single>(pool, what, batch, cache, plan);
}
