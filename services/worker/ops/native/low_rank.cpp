// Gathered low-rank products: rows are sorted by slot, so that a tile's weights are read once for all of its rows.
#include "low_rank.h"

#include <algorithm>
#include <memory>
#include <vector>

namespace {

// Sums that run beside each other over every fourth step, as one would wait for its own last multiplication.
constexpr int kChains = 4;
// Rows of a tile, where many have the same adapter: few enough that threads share a prompt.
constexpr int kTileRows = 32;
// Groups of 64 outputs of a tile: it should take longer than a thread needs to join (about a microsecond).
constexpr int kTileGroups = 8;

int groups_of(int count, int size) { return (count + size - 1) / size; }

// A part's product for rows `first` to `end` of those gathered, and which groups of it.
struct Tile {
    const LowRank* product;
    int part;
    int first;
    int end;
    int group;
    int end_group;
};

// The rows that have an adapter, by slot, and their bounds where the slot changes or a tile is full.
struct Gathered {
    std::vector<int> rows;
    std::vector<int> bounds;
};

Gathered gather(const int* slots, int count) {
    Gathered found;
    for (int row = 0; row < count; ++row)
        if (slots[row] >= 0) found.rows.push_back(row);
    std::stable_sort(found.rows.begin(), found.rows.end(), [&](int a, int b) { return slots[a] < slots[b]; });
    int first = 0;
    for (int i = 0; i < int(found.rows.size()); ++i)
        if (!i || slots[found.rows[i]] != slots[found.rows[i - 1]] || i - first == kTileRows) found.bounds.push_back(first = i);
    found.bounds.push_back(int(found.rows.size()));
    return found;
}

// `tile` cut into such of at most `most` of its part's `groups`.
void add_tiles(std::vector<Tile>& tiles, Tile tile, int groups, int most) {
    for (int group = 0; group < groups; group += most) {
        tile.group = group;
        tile.end_group = std::min(group + most, groups);
        tiles.push_back(tile);
    }
}

template <class Kind> using ItemOf = typename Kind::Item;

// 16 ranks of one row.
template <class Kind> BATON_INLINE F shrink(const ItemOf<Kind>* x, const ItemOf<Kind>* a, int steps) {
    constexpr int kStep = kLanes * Kind::kItems;
    F sums[kChains] = {zeros(), zeros(), zeros(), zeros()};
    int step = 0;
    for (; step + kChains <= steps; step += kChains, x += kChains * Kind::kItems, a += kChains * kStep)
        for (int c = 0; c < kChains; ++c)
            sums[c] = Kind::multiply(sums[c], Kind::weights(a + c * kStep), Kind::broadcast(x + c * Kind::kItems));
    for (int c = 0; step < steps; ++step, ++c, x += Kind::kItems, a += kStep)
        sums[c] = Kind::multiply(sums[c], Kind::weights(a), Kind::broadcast(x));
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// 64 outputs of one row, `count` of which there are.
template <class Kind> BATON_INLINE void expand(const ItemOf<Kind>* low, const ItemOf<Kind>* b, int steps, int count, float* to) {
    constexpr int kColumn = kLanes * Kind::kItems;
    F sums[kGroupColumns] = {zeros(), zeros(), zeros(), zeros()};
    for (int step = 0; step < steps; ++step, low += Kind::kItems, b += kGroupColumns * kColumn) {
        auto factor = Kind::broadcast(low);
        for (int c = 0; c < kGroupColumns; ++c) sums[c] = Kind::multiply(sums[c], Kind::weights(b + c * kColumn), factor);
    }
    for (int c = 0; c < kGroupColumns && count > 0; ++c, count -= kLanes, to += kLanes) {
        if (count >= kLanes) {
            store(to, load(to) + sums[c]);
            continue;
        }
        float lane[kLanes];
        store(lane, sums[c]);
        for (int i = 0; i < count; ++i) to[i] += lane[i];
    }
}

// The gathered rows of x as the weights' kind reads them: where they lie, or converted.
template <class Kind> class Inputs {
  public:
    using Item = ItemOf<Kind>;

    Inputs(const Rows& x, int in, const std::vector<int>& rows) : x_(x), rows_(rows) {
        if ((x.number == Number::kHalf) == (sizeof(Item) == 2) && in % Kind::kItems == 0) return;
        padded_ = groups_of(in, Kind::kItems) * Kind::kItems;
        copied_.resize(rows.size() * padded_);
        for (size_t i = 0; i < rows.size(); ++i) {
            if (x.number == Number::kHalf) convert((const Bf16*)x.data + rows[i] * x.stride, in, &copied_[i * padded_]);
            else convert((const float*)x.data + rows[i] * x.stride, in, &copied_[i * padded_]);
        }
    }
    const Item* operator[](int i) const {
        return padded_ ? &copied_[size_t(i) * padded_] : (const Item*)x_.data + rows_[i] * x_.stride;
    }

  private:
    template <class From> static void convert(const From* from, int count, Item* to) {
        int i = 0;
        for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
        for (; i < count; ++i) {
            if constexpr (sizeof(From) == sizeof(Item)) to[i] = from[i];
            else if constexpr (sizeof(Item) == 2) to[i] = bf16_of(from[i]);
            else to[i] = float_of(from[i]);
        }
    }

    const Rows& x_;
    const std::vector<int>& rows_;
    size_t padded_ = 0;
    std::vector<Item> copied_;
};

template <class Kind>
void add(Pool& pool, const Rows& x, const LowRankTable& table, const int* slots, float* to, int64_t to_stride) {
    using Item = ItemOf<Kind>;
    Gathered gathered = gather(slots, x.count);
    std::vector<Tile> shrinks, expands;
    int widest = 0;
    for (size_t i = 0; i + 1 < gathered.bounds.size(); ++i) {
        int first = gathered.bounds[i], end = gathered.bounds[i + 1];
        if (first == end) continue;
        for (int part = 0; part < table.parts; ++part) {
            const LowRank* product = table.products + size_t(slots[gathered.rows[first]]) * table.parts + part;
            if (!product->rank) continue;
            widest = std::max(widest, groups_of(product->rank, kLanes) * kLanes);
            Tile tile{product, part, first, end, 0, 0};
            add_tiles(shrinks, tile, groups_of(product->rank, kLanes), 1);
            add_tiles(expands, tile, groups_of(table.starts[part + 1] - table.starts[part], kGroupOutputs), kTileGroups);
        }
    }
    if (shrinks.empty()) return;
    int steps = groups_of(table.in, Kind::kItems);
    int64_t stride = int64_t(table.parts) * widest;
    std::unique_ptr<Item[]> lows(new Item[gathered.rows.size() * stride]);
    Inputs<Kind> inputs(x, table.in, gathered.rows);
    pool.run(int(shrinks.size()), [&](int number, int) {
        const Tile& tile = shrinks[number];
        auto* a = (const Item*)tile.product->a + int64_t(tile.group) * steps * kLanes * Kind::kItems;
        for (int i = tile.first; i < tile.end; ++i)
            store(&lows[i * stride + tile.part * widest + tile.group * kLanes], shrink<Kind>(inputs[i], a, steps));
    });
    pool.run(int(expands.size()), [&](int number, int) {
        const Tile& tile = expands[number];
        int ranks = groups_of(tile.product->rank, Kind::kItems), end = table.starts[tile.part + 1];
        for (int group = tile.group; group < tile.end_group; ++group) {
            auto* b = (const Item*)tile.product->b + int64_t(group) * ranks * kGroupOutputs * Kind::kItems;
            int output = table.starts[tile.part] + group * kGroupOutputs;
            for (int i = tile.first; i < tile.end; ++i)
                expand<Kind>(&lows[i * stride + tile.part * widest], b, ranks, end - output, to + gathered.rows[i] * to_stride + output);
        }
    });
}

}  // namespace

void add_low_rank(Pool& pool, const Rows& x, const LowRankTable& table, const int* slots, float* to, int64_t to_stride) {
    if (table.number == Number::kHalf) add<Half>(pool, x, table, slots, to, to_stride);
    else add<Single>(pool, x, table, slots, to, to_stride);
}
