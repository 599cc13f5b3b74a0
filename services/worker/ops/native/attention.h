// Paged keys and values, and causal attention over them.
#pragma once
#include <vector>

#include "lanes.h"
#include "linear.h"
#include "threads.h"

constexpr int kPageTokens = 16;
// Codes of kInt8 are steps of a size of each head of each token, a float that lies behind them as four more would. Keys' sizes
// are multiplied with scores and values' with weights, so that products have whole numbers, which bf16 holds.
constexpr int kScaleItems = 4;

// One layer's caches: blocks of one, two or four pages of 16 tokens for each key/value head, laid out as weights of a
// product, so that the tiles of linear layers also score keys and mix values. A page's keys are
// [head_dim / items][16 tokens][items], its values [16 / items][padded head_dim][items], with two items for bf16 and one
// for floats. Where they are kept as codes of a byte (kFp8, kInt8), keys have four items, values one: a page becomes floats
// or bf16, as they lie for a product, when a chunk of the context is read.
struct Cache {
    Number number;
    void* keys;
    void* values;
    int kv_heads;
    int head_dim;
    int page_bits;  // a block has 1 << page_bits pages
    Code code;      // kPlain: as `number` says; kFp8; kInt8

    int padded_dim() const { return padded(head_dim); }
    // Of a token, with the size of its steps.
    int stored_dim() const { return head_dim + (code == Code::kInt8 ? kScaleItems : 0); }
    int padded_stored_dim() const { return padded(stored_dim()); }
    // Items from one page of a head to its next one.
    int64_t page_items() const { return int64_t(kPageTokens) * padded_stored_dim(); }
    // Of page `page` of a head's block.
    int64_t at(int block, int head, int page) const {
        return ((((int64_t(block) * kv_heads + head) << page_bits) + page)) * page_items();
    }
    static int padded(int dim) { return (dim + kLanes - 1) / kLanes * kLanes; }
    // Of page `index` of a sequence with this block table.
    int64_t at(const int* table, int head, int index) const {
        return at(table[index >> page_bits], head, index & ((1 << page_bits) - 1));
    }
};

// Slots whose keys and values go to others, too: services.worker.ops.drafts.SlotCopies.
struct SlotCopies {
    int count;
    const int* sources;
    const int* targets;
};

// How rows fall into sequences: services.worker.ops.interface.BatchMeta.
struct Batch {
    int rows;
    int sequences;
    const int* query_starts;
    const int* context_lens;
    const int* block_tables;
    int table_width;
    const int* slots;
    const int* positions;
    const int* lasts;  // [rows] or null: the last position that each row sees, where that is not its own
    const float* rotations;  // [rows, head_dim] or null: cosines and sines of each row, not those at its position
    SlotCopies copies;       // made once the rows are stored, before any is read

    int last_seen(int row) const { return lasts ? lasts[row] : positions[row]; }
};

// What queries are multiplied by, once they are rotated, at a position: `scales[position / length]`, of their kind.
struct QueryGrowth {
    const float* scales = nullptr;  // null: they are left as they are
    int length = 1;

    float at(int position) const { return scales ? scales[position / length] : 1.0f; }
};

struct RopeAndStore {
    const float* qkv;  // [rows, (heads + 2 * kv_heads) * head_dim]
    int64_t qkv_stride;
    int heads;
    const float* cos_sin;  // [positions, head_dim]
    const float* q_norm;   // [head_dim] or null, as is k_norm
    const float* k_norm;
    float eps;
    void* queries;  // [rows, heads * head_dim] in the caches' kind
    int64_t query_stride;
    QueryGrowth growth = {};
};

// Norms and rotates queries and keys, writes keys and values to the rows' slots; then makes the batch's copies.
void rope_and_store(Pool& pool, const RopeAndStore& what, const Batch& batch, const Cache& cache);

// Copies the keys and values of slots to others, those of all heads.
void copy_slots(Pool& pool, const Cache& cache, const SlotCopies& copies);

struct Attention {
    const void* queries;  // as RopeAndStore leaves them
    int64_t query_stride;
    int heads;
    float scale;
    int window;     // 0: none
    float softcap;  // 0: none
    void* out;      // [rows, heads * head_dim] in the caches' kind
    int64_t out_stride;
    const float* sinks = nullptr;         // [heads] or null: scores that take part in a softmax and have no value
    const float* alibi_slopes = nullptr;  // [heads] or null: a score falls by so much for each token of distance
    const float* distance_biases = nullptr;  // [heads, distances] or null: what is added to a score at that distance, the
    int distances = 0;                       // last one at all that are greater
};

// Work of one thread: some rows of a sequence, all query heads of one key/value head, and some chunks of the context.
struct AttentionTask {
    int sequence;
    int head;
    int row;   // in the batch
    int rows;
    int first_chunk;
    int chunks;
    int partial;  // where its unfinished result goes, or kWhole
    static constexpr int kWhole = -1;
};

struct AttentionPlan {
    std::vector<AttentionTask> tasks;
    std::vector<AttentionTask> merges;  // over the partials of tasks that were cut
    int partial_rows = 0;
};

// Cuts a batch's attention for `threads` threads. The same for all layers with the same window.
AttentionPlan plan_attention(const Batch& batch, int threads, int heads, int kv_heads, int window);

// Each row's softmax runs over chunks of the context whose bounds are fixed, in ascending order: its result does not
// depend on the batch, on how a prompt is cut into steps, or on the number of threads.
void attend(Pool& pool, const Attention& what, const Batch& batch, const Cache& cache, const AttentionPlan& plan);
