// Products in tiles (AMX): 16 rows times 16 steps of 16 outputs at a time. Weights lie as for other instructions: a step is a
// row of a tile. Knows no threads.
#pragma once
#include <algorithm>

#include "row_copies.h"
#include "sums.h"
#include "thread_memory.h"
#include "tiles.h"

#if defined(BATON_TILES)

namespace {

// Steps of a tile of weights, which all four columns of a group have side by side.
constexpr int kTileSteps = kTileHeight;
constexpr int kTileWeightBytes = kTileSteps * kStepBytes;
// Steps of a pass: two tiles of rows are 16 kB, and so is half of a group's weights, which stay in the first-level cache for
// the second half and for more rows.
constexpr int kPassSteps = 128;

// Weights that come next, some lines of which are asked for beside each product, so that memory is busy all of the time and
// not only where weights are read first. A processor foresees readings in the order of memory; tiles read every fourth line.
struct Upcoming {
    const char* at;
    int64_t lines;  // for each quarter of a tile's products; at least one, as compilers copy loops for none

    BATON_INLINE void fetch() {
        const char* end = at + lines * 64;
        do __builtin_prefetch(at, 0, 2);
        while ((at += 64) != end);
    }
};
// How far ahead of those that are multiplied.
constexpr int kFetchedAhead = kPassSteps * kStepBytes;
// Groups of at most so many bytes are fetched as a whole, while rows are multiplied by the one before.
constexpr int64_t kFetchedGroup = 512 << 10;

// Rows of a block as tiles of one height, so that tiles are shaped once: the last one begins among the rows of the one before
// where they are not a multiple. What a row's sums go through does not depend on the tile or the place in it.
struct RowTiles {
    int rows;
    int count;
    int height;

    explicit RowTiles(int rows) : rows(rows), count((rows + kTileHeight - 1) / kTileHeight), height((rows + count - 1) / count) {}
    int first(int tile) const { return std::min(tile * height, rows - height); }
    // Where a row's sums are, if each tile has `height` rows for its own.
    int kept(int row) const { return row + row / height * height - first(row / height); }
};

// One tile of rows times a group's four columns.
template <class Kind> BATON_INLINE void add_wide(const char* x, int64_t stride, const char* w, Upcoming& next) {
    load_tile<4>(x, stride);
    load_tile<6>(w, kStepBytes);
    next.fetch();
    add_tiles<Kind, 0, 4, 6>();
    load_tile<7>(w + 64, kStepBytes);
    next.fetch();
    add_tiles<Kind, 1, 4, 7>();
    load_tile<6>(w + 128, kStepBytes);
    next.fetch();
    add_tiles<Kind, 2, 4, 6>();
    load_tile<7>(w + 192, kStepBytes);
    next.fetch();
    add_tiles<Kind, 3, 4, 7>();
}
// Two tiles of rows times two columns: as many loads as products.
template <class Kind> BATON_INLINE void add_square(const char* x, const char* y, int64_t stride, const char* w, Upcoming& next) {
    load_tile<4>(x, stride);
    load_tile<6>(w, kStepBytes);
    next.fetch();
    add_tiles<Kind, 0, 4, 6>();
    load_tile<7>(w + 64, kStepBytes);
    next.fetch();
    add_tiles<Kind, 1, 4, 7>();
    load_tile<5>(y, stride);
    next.fetch();
    add_tiles<Kind, 2, 5, 6>();
    next.fetch();
    add_tiles<Kind, 3, 5, 7>();
}

// What a pass multiplies: `whole` tiles of weights, and a last one of its own where steps are left.
struct TileWeights {
    const char* at;
    int whole;
    const char* last;  // or null
};

// Functions of their own, as `multiply_panel`. They return what comes next then.
template <class Kind> __attribute__((noinline)) Upcoming multiply_wide(const char* x, int64_t stride, TileWeights w, Upcoming next) {
    for (int i = 0; i < w.whole; ++i, x += kTileRowBytes, w.at += kTileWeightBytes) add_wide<Kind>(x, stride, w.at, next);
    if (w.last) add_wide<Kind>(x, stride, w.last, next);
    return next;
}
template <class Kind>
__attribute__((noinline)) Upcoming multiply_square(const char* x, const char* y, int64_t stride, TileWeights w, Upcoming next) {
    for (int i = 0; i < w.whole; ++i, x += kTileRowBytes, y += kTileRowBytes, w.at += kTileWeightBytes)
        add_square<Kind>(x, y, stride, w.at, next);
    if (w.last) add_square<Kind>(x, y, stride, w.last, next);
    return next;
}

// Four sums wait as floats or whole numbers, 256 bytes for each row of a group.
template <int T> BATON_INLINE void resume_tile(bool resumed, const F* kept) {
    if (resumed) load_tile<T>(kept, kStepBytes);
    else zero_tile<T>();
}
BATON_INLINE void resume_tiles(bool resumed, F* const kept[4]) {
    resume_tile<0>(resumed, kept[0]);
    resume_tile<1>(resumed, kept[1]);
    resume_tile<2>(resumed, kept[2]);
    resume_tile<3>(resumed, kept[3]);
}
BATON_INLINE void keep_tiles(F* const kept[4]) {
    store_tile<0>(kept[0], kStepBytes);
    store_tile<1>(kept[1], kStepBytes);
    store_tile<2>(kept[2], kStepBytes);
    store_tile<3>(kept[3], kStepBytes);
}

// Some steps of all rows of a block. Those of whole numbers are where they were rounded; others are read where they lie if
// tiles can, or copied.
struct Pass {
    int first;
    int count;
    TileWeights weights;
    bool resumed;  // whether sums go on from those that were kept
};

// Rows of one or two tiles as tiles read them.
struct TileInputs {
    const char* at[2];
    int64_t stride;  // in bytes
};

template <class Kind> struct TileCopies {
    static constexpr int kStride = (kPassSteps + kTileSteps) * Kind::kItems;
    alignas(64) typename Kind::Item rows[2][kTileHeight * kStride];
};

template <class Kind> TileInputs inputs_of(const Product& p, const Block& block, const RowTiles& tiles, const Pass& pass, int tile, int count) {
    using Item = typename Kind::Item;
    constexpr int kItems = kTileSteps * Kind::kItems;
    TileInputs inputs{};
    if constexpr (kRounds<Kind>) {
        inputs.stride = p.rounded->stride();
        for (int i = 0; i < count; ++i)
            inputs.at[i] = (const char*)p.rounded->items(p.first + block.row) + tiles.first(tile + i) * inputs.stride + pass.first * Kind::kItems;
    } else if (readable<Kind>(p) && p.linear.in % kItems == 0) {
        inputs.stride = p.x.stride * int64_t(sizeof(Item));
        for (int i = 0; i < count; ++i)
            inputs.at[i] = (const char*)p.x.data + (block.row + tiles.first(tile + i)) * inputs.stride + pass.first * Kind::kItems * int64_t(sizeof(Item));
    } else {
        constexpr int kStride = TileCopies<Kind>::kStride;
        auto& copied = thread_memory<TileCopies<Kind>>().rows;
        int begin = pass.first * Kind::kItems, padded = (pass.count + kTileSteps - 1) / kTileSteps * kItems;
        int items = std::min(padded, p.linear.in - begin);
        inputs.stride = kStride * int64_t(sizeof(Item));
        for (int i = 0; i < count; ++i) {
            inputs.at[i] = (const char*)copied[i];
            for (int row = 0; row < tiles.height; ++row)
                copy_row(copied[i] + row * kStride, p.x, block.row + tiles.first(tile + i) + row, begin, items, padded);
        }
    }
    return inputs;
}

template <class Kind> void run_pass(const Product& p, const Block& block, const RowTiles& tiles, const Pass& pass, F* kept, Upcoming& next) {
    for (int tile = 0; tile < tiles.count; tile += 2) {
        bool square = tile + 1 < tiles.count;
        TileInputs x = inputs_of<Kind>(p, block, tiles, pass, tile, square ? 2 : 1);
        F* sums = kept + tile * tiles.height * kGroupColumns;
        if (!square) {
            F* const wide[] = {sums, sums + 1, sums + 2, sums + 3};
            resume_tiles(pass.resumed, wide);
            next = multiply_wide<Kind>(x.at[0], x.stride, pass.weights, next);
            keep_tiles(wide);
            continue;
        }
        F* below = sums + tiles.height * kGroupColumns;
        for (int column = 0; column < kGroupColumns; column += 2) {
            F* const both[] = {sums + column, sums + column + 1, below + column, below + column + 1};
            TileWeights half = pass.weights;
            half.at += column * 64;
            if (half.last) half.last += column * 64;
            resume_tiles(pass.resumed, both);
            next = multiply_square<Kind>(x.at[0], x.at[1], x.stride, half, next);
            keep_tiles(both);
        }
    }
}

// The sums of a row, of its R digits.
template <int R> BATON_INLINE Sums<R, kGroupColumns> kept_sums(const RowTiles& tiles, const F* kept, int row) {
    Sums<R, kGroupColumns> sums;
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kGroupColumns; ++c) sums.at[r][c] = kept[tiles.kept(row * R + r) * kGroupColumns + c];
    return sums;
}

template <class Kind> void finish_rows(const Product& p, const Block& block, const RowTiles& tiles, const F* kept) {
    for (int row = 0; row < block.rows; ++row) {
        if constexpr (kRounds<Kind>) {
            int64_t x_row = p.first + block.row + row;
            const float* scales = p.linear.scales + block.group * kGroupOutputs;
            if (p.digits() == 1) finish<Kind>(p, block, row, 0, numbers_of<1, true>(p, x_row, scales, kept_sums<1>(tiles, kept, row)));
            else finish<Kind>(p, block, row, 0, numbers_of<2, true>(p, x_row, scales, kept_sums<2>(tiles, kept, row)));
        } else {
            finish<Kind>(p, block, row, 0, kept_sums<1>(tiles, kept, row));
        }
    }
}

// What a block fetches while it goes over `bytes` of weights at `group`, a tile of which is `tile_bytes`: what follows closely,
// or, where several blocks go over them, each its share of the next group.
inline Upcoming upcoming(const Block& block, const RowTiles& tiles, const char* group, int64_t bytes, int tile_bytes) {
    bool shares = block.turns > 1 && bytes <= kFetchedGroup;
    if (block.turn && !shares) return {group, 1};  // near already
    // A tile of weights is gone over once for each tile of rows, half of it at a time for two of those.
    int times = 4 * tiles.count * (shares ? block.turns : 1);
    return {shares ? group + bytes + bytes / block.turns * block.turn : group + kFetchedAhead, (tile_bytes / 64 + times - 1) / times};
}

// A block of rows times one group, as `run_block` of linear.cpp.
template <class Kind> void run_tiled_block(const Product& p, const Block& block) {
    RowTiles tiles(block.rows * p.digits());
    F kept[kBlockRows * kGroupColumns];
    int64_t bytes = int64_t(p.steps) * kStepBytes;
    auto* group = (const char*)p.linear.groups + block.group * bytes;
    int left = p.steps % kTileSteps;
    alignas(64) char last[kTileWeightBytes];
    if (left) {
        memcpy(last, group + int64_t(p.steps - left) * kStepBytes, size_t(left) * kStepBytes);
        memset(last + left * kStepBytes, 0, size_t(kTileSteps - left) * kStepBytes);
    }
    shape_tiles(tiles.height, kTileSteps);
    Upcoming next = upcoming(block, tiles, group, bytes, kTileWeightBytes);
    for (int first = 0; first < p.steps; first += kPassSteps) {
        int count = std::min(kPassSteps, p.steps - first);
        TileWeights weights{group + int64_t(first) * kStepBytes, count / kTileSteps, count % kTileSteps ? last : nullptr};
        run_pass<Kind>(p, block, tiles, {first, count, weights, first > 0}, kept, next);
    }
    release_tiles();
    finish_rows<Kind>(p, block, tiles, kept);
}

}  // namespace

#endif
