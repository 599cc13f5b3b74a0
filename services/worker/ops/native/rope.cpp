// Rotary positions, and the writing of keys and values.
#include <algorithm>
#include <cmath>

#include "fp8.h"
#include "latent.h"

namespace {

constexpr int kMaxHeadDim = 1024;
constexpr int kRowsOfTile = 8;

float sum_of_squares(const float* x, int count) {
    F squares = zeros();
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        F v = load(x + i);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; i < count; ++i) total += x[i] * x[i];
    return total;
}

// RoFormer's rotation in the NeoX pairing: element i with i + dim / 2. `to` may be `from`.
void rotate(float* to, const float* from, const float* cos_sin, int dim) {
    int half = dim / 2, i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        F low = load(from + i), high = load(from + half + i), c = load(cos_sin + i), s = load(cos_sin + half + i);
        store(to + i, low * c - high * s);
        store(to + half + i, high * c + low * s);
    }
    for (; i < half; ++i) {
        float low = from[i], high = from[half + i], c = cos_sin[i], s = cos_sin[half + i];
        to[i] = low * c - high * s;
        to[half + i] = high * c + low * s;
    }
}

// Asks for a row that is read next. Of a long prompt rows have left the first caches, and the processor finds the next one's
// beginning only when it is read.
void fetch_row(const float* row, int items) {
    for (int i = 0; i < items; i += 64 / int(sizeof(float))) __builtin_prefetch(row + i, 0, 3);
}

template <class Item> void narrow(Item* to, const float* from, int count) {
    if constexpr (sizeof(Item) == 4) {
        memcpy(to, from, size_t(count) * 4);
    } else if constexpr (sizeof(Item) == 1) {
        for (int i = 0; i < count; ++i) to[i] = fp8_of(from[i]);
    } else {
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
        for (; i < count; ++i) to[i] = bf16_of(from[i]);
    }
}

// One head of one row: a copy of it, normed and rotated.
template <class Item>
void prepare(Item* to, const float* from, const float* norm, float eps, const float* cos_sin, int dim) {
    alignas(64) float x[kMaxHeadDim];
    if (norm) {
        float scale = 1.0f / std::sqrt(sum_of_squares(from, dim) / float(dim) + eps);
        for (int i = 0; i < dim; ++i) x[i] = from[i] * scale * norm[i];
        from = x;
    }
    rotate(x, from, cos_sin, dim);
    narrow(to, x, dim);
}

// A row's queries by its position.
template <class Item> void grow(Item* queries, int count, float scale) {
    if (scale == 1) return;
    for (int i = 0; i < count; i += kLanes) store_some(queries + i, load_some(queries + i, count - i) * all(scale), count - i);
}

template <class Item> void store_key(Item* page, int offset, const Item* key, int dim) {
    constexpr int kItems = 4 / int(sizeof(Item));
    for (int d = 0; d < dim; d += kItems) memcpy(page + d * kPageTokens + offset * kItems, key + d, 4);
}

// A pair's second half is cleared with its first where nothing follows yet: what an earlier owner of the page left
// there must not meet the weight 0 of a token that does not exist, for 0 * infinity is not 0.
template <class Item> void store_value(Item* page, int offset, const Item* value, int dim, int padded, bool followed) {
    constexpr int kItems = sizeof(Item) == 2 ? 2 : 1;
    Item* to = page + offset / kItems * padded * kItems + offset % kItems;
    bool clear = kItems == 2 && offset % 2 == 0 && !followed;
    for (int d = 0; d < dim; ++d) {
        to[d * kItems] = value[d];
        if (clear) to[d * kItems + 1] = 0;
    }
}

// A head's elements as whole numbers of 127 steps to its largest, and behind them the size of a step, as a float. What is too
// large, or no number, becomes the largest: no step is infinite.
void quantize(uint8_t* to, const float* from, int dim) {
    float largest = 0;
    for (int d = 0; d < dim; ++d) {
        float size = from[d] < 0 ? -from[d] : from[d];
        size = size < 1e30f ? size : 1e30f;
        largest = size > largest ? size : largest;
    }
    float step = largest / 127, inverse = largest > 1e-30f ? 127 / largest : 0;
    for (int d = 0; d < dim; ++d) {
        float code = from[d] * inverse;
        code = code < 127 ? code : 127;
        to[d] = uint8_t(int8_t(std::nearbyint(code > -127 ? code : -127)));
    }
    memcpy(to + dim, &step, 4);
}

template <class Item, class Cached> void store_row(const RopeAndStore& what, const Batch& batch, const Cache& cache, int row) {
    int dim = cache.head_dim;
    const float* from = what.qkv + row * what.qkv_stride;
    if (row + 1 < batch.rows) fetch_row(from + what.qkv_stride, (what.heads + 2 * cache.kv_heads) * dim);
    const float* cos_sin = batch.rotations ? batch.rotations + int64_t(row) * dim
                                           : what.cos_sin + int64_t(batch.positions[row]) * dim;
    Item* query = (Item*)what.queries + row * what.query_stride;
    for (int h = 0; h < what.heads; ++h) prepare(query + h * dim, from + h * dim, what.q_norm, what.eps, cos_sin, dim);
    grow(query, what.heads * dim, what.growth.at(batch.positions[row]));
    int slot = batch.slots[row], page = slot / kPageTokens, block = page >> cache.page_bits;
    bool followed = row + 1 < batch.rows && batch.slots[row + 1] == slot + 1;
    alignas(64) Cached item[kMaxHeadDim + kScaleItems];
    for (int h = 0; h < cache.kv_heads; ++h) {
        int64_t at = cache.at(block, h, page - (block << cache.page_bits));
        const float *key = from + (what.heads + h) * dim, *value = key + cache.kv_heads * dim;
        bool whole = false;
        if constexpr (sizeof(Cached) == 1) {
            whole = cache.code == Code::kInt8;
            if (whole) {
                alignas(64) float exact[kMaxHeadDim];
                prepare(exact, key, what.k_norm, what.eps, cos_sin, dim);
                quantize(item, exact, dim);
            }
        }
        if (!whole) prepare(item, key, what.k_norm, what.eps, cos_sin, dim);
        store_key((Cached*)cache.keys + at, slot % kPageTokens, item, cache.stored_dim());
        if constexpr (sizeof(Cached) == 1)
            if (whole) quantize(item, value, dim);
        if (!whole) narrow(item, value, dim);
        store_value((Cached*)cache.values + at, slot % kPageTokens, item, cache.stored_dim(), cache.padded_stored_dim(), followed);
    }
}

// One head's key and value at a slot, as they lie at another. The other half of a pair of values is left as it is: what follows
// a copied token is stored in the same step, or is there.
template <class Item> void copy_slot(const Cache& cache, int head, int from, int to) {
    constexpr int kKeyItems = 4 / int(sizeof(Item)), kPair = sizeof(Item) == 2 ? 2 : 1;
    auto page = [&](void* items, int slot) {
        int number = slot / kPageTokens, block = number >> cache.page_bits;
        return (Item*)items + cache.at(block, head, number - (block << cache.page_bits));
    };
    int dim = cache.stored_dim(), padded = cache.padded_stored_dim(), at = from % kPageTokens, goes = to % kPageTokens;
    const Item* key = page(cache.keys, from) + at * kKeyItems;
    Item* key_to = page(cache.keys, to) + goes * kKeyItems;
    for (int d = 0; d < dim; d += kKeyItems) memcpy(key_to + d * kPageTokens, key + d * kPageTokens, 4);
    const Item* value = page(cache.values, from) + at / kPair * padded * kPair + at % kPair;
    Item* value_to = page(cache.values, to) + goes / kPair * padded * kPair + goes % kPair;
    for (int d = 0; d < dim; ++d) value_to[d * kPair] = value[d * kPair];
}

template <class Item> void store_latent(const StoreLatents& what, const Batch& batch, const LatentCache& cache, int row) {
    int rank = cache.rank, rope = cache.rope_dim;
    const float* cos_sin = what.cos_sin + int64_t(batch.positions[row]) * rope;
    for (int h = 0; h < what.heads; ++h) {
        float* query = what.queries + (int64_t(row) * what.heads + h + 1) * what.query_dim - rope;
        rotate(query, query, cos_sin, rope);
    }
    int queries = what.heads * what.query_dim;
    grow(what.queries + int64_t(row) * queries, queries, what.growth.at(batch.positions[row]));
    const float* from = what.latents + int64_t(row) * (rank + cache.beside());
    Item* latent = (Item*)cache.latents + int64_t(batch.slots[row]) * rank;
    float scale = 1.0f / std::sqrt(sum_of_squares(from, rank) / float(rank) + what.eps);
    alignas(64) float x[kLanes];
    for (int first = 0; first < rank; first += kLanes) {
        int count = std::min(kLanes, rank - first);
        for (int i = 0; i < count; ++i) x[i] = from[first + i] * scale * what.norm[first + i];
        narrow(latent + first, x, count);
    }
    Item* key = (Item*)cache.rotated + int64_t(batch.slots[row]) * cache.beside();
    prepare(key, from + rank, nullptr, 0, cos_sin, rope);
    if (!cache.index_dim) return;
    int kept = cache.index_dim - rope;
    narrow(key + rope, from + rank + rope, kept);
    prepare(key + rope + kept, from + rank + rope + kept, nullptr, 0, cos_sin, rope);
}

template <class Call> void by_tiles(Pool& pool, int rows, const Call& call) {
    pool.run((rows + kRowsOfTile - 1) / kRowsOfTile, [&](int tile, int) {
        int end = std::min(rows, (tile + 1) * kRowsOfTile);
        for (int row = tile * kRowsOfTile; row < end; ++row) call(row);
    });
}

}  // namespace

void copy_slots(Pool& pool, const Cache& cache, const SlotCopies& copies) {
    if (!copies.count) return;
    by_tiles(pool, copies.count, [&](int index) {
        for (int h = 0; h < cache.kv_heads; ++h) {
            int from = copies.sources[index], to = copies.targets[index];
            if (cache.code != Code::kPlain) copy_slot<uint8_t>(cache, h, from, to);
            else if (cache.number == Number::kHalf) copy_slot<Bf16>(cache, h, from, to);
            else copy_slot<float>(cache, h, from, to);
        }
    });
}

void store_latents(Pool& pool, const StoreLatents& what, const Batch& batch, const LatentCache& cache) {
    by_tiles(pool, batch.rows, [&](int row) {
        if (cache.number == Number::kHalf) store_latent<Bf16>(what, batch, cache, row);
        else store_latent<float>(what, batch, cache, row);
    });
}

void rope_and_store(Pool& pool, const RopeAndStore& what, const Batch& batch, const Cache& cache) {
    by_tiles(pool, batch.rows, [&](int row) {
        bool half = cache.number == Number::kHalf;
        if (cache.code != Code::kPlain) half ? store_row<Bf16, uint8_t>(what, batch, cache, row) : store_row<float, uint8_t>(what, batch, cache, row);
        else half ? store_row<Bf16, Bf16>(what, batch, cache, row) : store_row<float, float>(what, batch, cache, row);
    });
    copy_slots(pool, cache, batch.copies);
}
