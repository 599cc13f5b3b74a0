// Latent attention: one head of keys for all query heads, whose latents are the values too.
#pragma once
#include "attention.h"

// One layer's cache: latents [block][token][rank], and rotated keys with an indexer's behind them
// [block][token][rope_dim + index_dim].
struct LatentCache {
    Number number;
    void* latents;
    void* rotated;
    int rank;
    int rope_dim;
    int index_dim;  // 0: there is no indexer
    int page_bits;  // a block has 1 << page_bits pages

    int beside() const { return rope_dim + index_dim; }
    // Of token `offset` of page `index` of a sequence with this block table.
    int64_t token(const int* table, int index, int offset) const {
        return ((int64_t(table[index >> page_bits]) << page_bits) + (index & ((1 << page_bits) - 1))) * kPageTokens + offset;
    }
};

struct StoreLatents {
    const float* latents;  // [rows, rank + rope_dim + index_dim]
    float* queries;        // [rows, heads, query_dim]: the last rope_dim of each are rotated where they are
    int heads;
    int query_dim;
    const float* cos_sin;  // [positions, rope_dim]
    const float* norm;     // [rank]
    float eps;
    QueryGrowth growth = {};
};

// Norms latents, rotates what follows them, and the last rope_dim elements of an indexer's keys, and writes all to the rows' slots.
void store_latents(Pool& pool, const StoreLatents& what, const Batch& batch, const LatentCache& cache);

struct LatentAttention {
    const float* queries;  // [rows, heads, rank + rope_dim]
    int heads;
    float scale;
    float* out;  // [rows, heads, rank]
};

// As `attend`, by a plan for one key/value head; so is what a row's result depends on.
void attend_latents(Pool& pool, const LatentAttention& what, const Batch& batch, const LatentCache& cache, const AttentionPlan& plan);
