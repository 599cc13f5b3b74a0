// Products in whole numbers where groups of inputs share a scale: each group's sums become floats, scaled, before the next
// one's begin. Rows have two digits. Knows no threads.
#pragma once
#include <algorithm>

#include "sums.h"

namespace {

// Bytes of a step of a group of outputs: of kNibble, low halves of bytes are one column's and high halves the next one's.
constexpr int segment_step_bytes(Code code) { return code == Code::kNibble ? kStepBytes / 2 : kStepBytes; }

// A step's weights of Columns columns, as Quad multiplies them.
template <Code code, int Columns> BATON_INLINE void load_quads(const uint8_t* w, decltype(Quad::weights_of(U{})) weights[Columns]) {
    if constexpr (code == Code::kQuad) {
        for (int c = 0; c < Columns; ++c) weights[c] = Quad::weights_of(load_bits(w + c * 64));
    } else {
        static_assert(Columns % 2 == 0);
        for (int c = 0; c < Columns; c += 2) {
            U low = load_bits(w + c * 32), high = low;
            BATON_EACH {
                low.part[i_] = low.part[i_] & 0x0f0f0f0fu;
                high.part[i_] = high.part[i_] >> 4 & 0x0f0f0f0fu;
            }
            weights[c] = Quad::weights_of(low);
            weights[c + 1] = Quad::weights_of(high);
        }
    }
}

// What belongs to the segments of some columns: [segments][64] each, and each row's [segments].
struct SegmentTerms {
    const float* scales;
    const float* offsets;     // or null
    const uint8_t* zeros;     // of kNibble, or null: 8 everywhere
    const int32_t* row_sums;  // of the first row
    int64_t row_stride;
};

// Which lines of the terms that come next one of several tiles fetches while it goes over its own. Without this a group's
// first tile waits for memory at each segment. A lone tile reads its terms as it reads its weights: in order.
struct TermsAhead {
    int tile;
    int tiles;
    int64_t distance;  // from the terms in hand to those fetched, in items of `scales`

    BATON_INLINE void fetch(const SegmentTerms& terms) const {
        if (tiles == 1) return;
        for (int line = tile; line < kGroupColumns; line += tiles) {
            int64_t at = distance + line * kLanes;
            __builtin_prefetch(terms.scales + at, 0, 2);
            if (terms.offsets) __builtin_prefetch(terms.offsets + at, 0, 2);
            if (terms.zeros && !line) __builtin_prefetch(terms.zeros + at, 0, 2);
        }
    }
};

// What a segment's two sums of digits stand for, less what weights are stored above their value: at most 32,639 * 128 *
// 512, which 32 bits hold; what is beyond them in between comes back.
template <Code code> BATON_INLINE F number_of(U first, U second, const SegmentTerms& terms, int column, int32_t row_sum) {
    Sixteen<RegI> whole;
    if (code == Code::kNibble && terms.zeros) {
        Sixteen<RegI> zero = load_integers(terms.zeros + column * kLanes);
        BATON_EACH whole.part[i_] = (RegI)((first.part[i_] << 8) + second.part[i_] - (RegU)zero.part[i_] * uint32_t(row_sum));
    } else {
        uint32_t excess = uint32_t(row_sum) << (code == Code::kNibble ? 3 : 7);
        BATON_EACH whole.part[i_] = (RegI)((first.part[i_] << 8) + second.part[i_] - excess);
    }
    return floats_of(whole);
}

// What `sum` is with a segment more.
template <Code code> BATON_INLINE F add_segment(F sum, U first, U second, const SegmentTerms& terms, int column, int32_t row_sum) {
    sum = fma(number_of<code>(first, second, terms, column, row_sum), load(terms.scales + column * kLanes), sum);
    return terms.offsets ? fma(all(float(row_sum)), load(terms.offsets + column * kLanes), sum) : sum;
}

// sums[r][c] += the scaled products of row r and column c over `segments` of `steps` steps each, in ascending order. Rows
// are those of the digits, `stride` apart.
template <Code code, int Rows, int Columns>
__attribute__((noinline)) void multiply_segments(const int8_t* x, int64_t stride, const uint8_t* w, int steps, int segments,
                                                 SegmentTerms terms, Ahead ahead, TermsAhead terms_ahead, F sums[Rows / 2][Columns]) {
    for (int segment = 0; segment < segments; ++segment) {
        for (int i = 0; i < ahead.lines; ++i, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
        terms_ahead.fetch(terms);
        U sum[Rows][Columns];
        BATON_UNROLLED
        for (int r = 0; r < Rows; ++r)
            BATON_UNROLLED
            for (int c = 0; c < Columns; ++c) sum[r][c] = all_bits(0);
#pragma GCC unroll 4
        for (int step = 0; step < steps; ++step, w += segment_step_bytes(code), x += Quad::kItems) {
            decltype(Quad::weights_of(U{})) weights[Columns];
            load_quads<code, Columns>(w, weights);
            BATON_UNROLLED
            for (int r = 0; r < Rows; ++r) {
                auto factor = Quad::broadcast(x + r * stride);
                BATON_UNROLLED
                for (int c = 0; c < Columns; ++c) sum[r][c] = Quad::multiply(sum[r][c], weights[c], factor);
            }
        }
        BATON_UNROLLED
        for (int r = 0; r < Rows / 2; ++r)
            BATON_UNROLLED
            for (int c = 0; c < Columns; ++c)
                sums[r][c] = add_segment<code>(sums[r][c], sum[2 * r][c], sum[2 * r + 1][c], terms, c, terms.row_sums[r * terms.row_stride]);
        terms.scales += kGroupOutputs;
        if (terms.zeros) terms.zeros += kGroupOutputs;
        if (terms.offsets) terms.offsets += kGroupOutputs;
        ++terms.row_sums;
    }
}

// Which part of a block's segments a tile goes over.
struct SegmentRange {
    int first;
    int count;
    bool last;
};

// Rows of digits of a tile of half bytes, where there are several: twice as high and half as wide, so that bytes are made of
// them for twice as many products. 64 rows take 4 to 17% less than with flat tiles, and bytes 5% more (Zen 5). A lone tile
// stays flat, to read weights in the order they lie in.
template <Code code> constexpr int kHighTileRows = code == Code::kNibble && kTileRows == 6 ? 12 : kTileRows;
constexpr int columns_of(int rows) { return rows > kTileRows ? kTileColumns / 2 : kTileColumns; }

template <Code code, int R>
void run_segmented_tile(const Product& p, const Block& block, const SegmentRange& range, const uint8_t* w, int row, Ahead ahead,
                        TermsAhead terms_ahead, F* kept) {
    constexpr int C = columns_of(R);
    int steps = p.linear.scaled / Quad::kItems, all_segments = p.linear.in / p.linear.scaled;
    int64_t x_row = p.first + block.row + row;
    const int8_t* x = p.rounded->items(x_row) + int64_t(range.first) * p.linear.scaled;
    int64_t at = (int64_t(block.group) * all_segments + range.first) * kGroupOutputs;
    for (int column = 0; column < kGroupColumns; column += C) {
        int64_t own = at + column * kLanes;
        SegmentTerms terms{p.linear.scales + own, at_or_null(p.linear.offsets, own), at_or_null(p.linear.zeros, own),
                           p.rounded->segment_sums(x_row) + range.first, all_segments};
        Sums<R / 2, C> sums;
        F* part = kept + row * kGroupColumns + column;
        for (int r = 0; r < R / 2; ++r)
            for (int c = 0; c < C; ++c) sums.at[r][c] = range.first ? part[r * kGroupColumns + c] : zeros();
        int output = block.group * kGroupOutputs + column * kLanes;
        if (range.last) expect<Quad, R, C>(p, block, row, output);
        multiply_segments<code, R, C>(x, p.rounded->stride(), w + column * (segment_step_bytes(code) / kGroupColumns), steps,
                                      range.count, terms, column ? Ahead{nullptr, 0} : ahead, column ? TermsAhead{0, 1, 0} : terms_ahead,
                                      sums.at);
        if (!range.last) {
            keep(part, sums);
            continue;
        }
        for (int r = 0; r < R / 2; ++r)
            for (int c = 0; c < C; ++c) sums.at[r][c] = sums.at[r][c] * all(*p.rounded->scales(x_row + r));
        finish<Quad>(p, block, row, column, sums);
    }
}

using SegmentedTile = void (*)(const Product&, const Block&, const SegmentRange&, const uint8_t*, int, Ahead, TermsAhead, F*);

template <Code code, int R = 2> SegmentedTile segmented_tile_of(int rows) {
    if constexpr (R > kHighTileRows<code>) return nullptr;
    else return rows == R ? &run_segmented_tile<code, R> : segmented_tile_of<code, R + 2>(rows);
}

// A block of rows times one group, as `run_block` of linear.cpp.
template <Code code> void run_segmented_block(const Product& p, const Block& block) {
    int steps = p.linear.scaled / Quad::kItems, segments = p.linear.in / p.linear.scaled;
    int tiles = tiles_of_rows(block.rows, 2, block.rows * 2 > kHighTileRows<code> ? kHighTileRows<code> : kTileRows);
    int64_t segment_bytes = int64_t(steps) * segment_step_bytes(code);
    F kept[kBlockRows / 2 * kGroupColumns];
    auto* group = (const uint8_t*)p.linear.groups + int64_t(block.group) * segments * segment_bytes;
    int most = std::max(1, kBlockSteps / steps);
    for (int first = 0; first < segments; first += most) {
        SegmentRange range{first, std::min(most, segments - first), first + most >= segments};
        const uint8_t* w = group + first * segment_bytes;
        int lines = tiles > 1 ? int(segment_bytes / 64) / tiles + 1 : 0;
        for (int tile = 0; tile < tiles; ++tile) {
            int from = block.rows * tile / tiles, to = block.rows * (tile + 1) / tiles;
            Ahead ahead{(const char*)w + (segment_bytes + int64_t(tile) * lines * 64) * range.count, lines};
            TermsAhead terms_ahead{tile, tiles, int64_t(range.count) * kGroupOutputs};
            segmented_tile_of<code>((to - from) * 2)(p, block, range, w, from, ahead, terms_ahead, kept);
        }
    }
}

}  // namespace
