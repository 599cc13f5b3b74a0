// Products in pairs of inputs where groups of inputs share a scale: the same sums of whole numbers as of segments.h, scaled in
// the same order, so that results have the same bits. Knows no threads.
#pragma once
#include "pairs.h"
#include "segments.h"

#if defined(BATON_VNNI)

namespace {

// So many segments at most are gone over for one tile of rows after the other.
constexpr int kMaxPairedSegments = kPairedSteps / 4;

// What belongs to the segments of a tile: as SegmentTerms, and what its sums of pairs are too much.
struct PairedTerms {
    SegmentTerms terms;
    const int32_t* pair_sums;          // [segments][rows], as `row_sums` of `terms`
    const U (*pairs)[kPairedColumns];  // [segments]
};

// What `sum` is with a segment more.
template <Code code> BATON_INLINE F add_paired(F sum, U products, const PairedTerms& own, int row, int column) {
    int32_t row_sum = own.terms.row_sums[row];
    uint32_t excess = uint32_t(own.pair_sums[row]);
    Sixteen<RegI> whole{{(RegI)(products.part[0] - ((*own.pairs)[column].part[0] + excess))}};
    if (code == Code::kNibble && own.terms.zeros) whole.part[0] -= load_integers(own.terms.zeros + column * kLanes).part[0] * row_sum;
    sum = fma(floats_of(whole), load(own.terms.scales + column * kLanes), sum);
    return own.terms.offsets ? fma(all(float(row_sum)), load(own.terms.offsets + column * kLanes), sum) : sum;
}

// As multiply_segments.
template <Code code, int R>
__attribute__((noinline)) void multiply_paired_segments(const int16_t* x, const uint8_t* w, int steps, int segments, PairedTerms own,
                                                        Ahead ahead, TermsAhead terms_ahead, F sums[R][kPairedColumns]) {
    for (int segment = 0; segment < segments; ++segment) {
        for (int i = 0; i < ahead.lines; ++i, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
        terms_ahead.fetch(own.terms);
        U sum[R][kPairedColumns];
        BATON_UNROLLED
        for (int r = 0; r < R; ++r)
            BATON_UNROLLED
            for (int c = 0; c < kPairedColumns; ++c) sum[r][c] = all_bits(0);
#pragma GCC unroll 2
        for (int step = 0; step < steps; ++step, w += kPairedStepBytes<code>, x += Quad::kItems * R)
            multiply_paired_step<code, R>(x, w, sum);
        BATON_UNROLLED
        for (int r = 0; r < R; ++r)
            BATON_UNROLLED
            for (int c = 0; c < kPairedColumns; ++c) sums[r][c] = add_paired<code>(sums[r][c], sum[r][c], own, r, c);
        own.terms.scales += kGroupOutputs;
        if (own.terms.zeros) own.terms.zeros += kGroupOutputs;
        if (own.terms.offsets) own.terms.offsets += kGroupOutputs;
        own.terms.row_sums += R;
        own.pair_sums += R;
        ++own.pairs;
    }
}

// Some segments of some rows times some columns.
struct SegmentedPairs {
    SegmentRange range;
    int row;
    int column;
    const uint8_t* weights;
    const U (*pairs)[kPairedColumns];
    Ahead ahead;
    TermsAhead terms_ahead;
};

template <Code code, int R> void run_segmented_pairs(const Product& p, const Block& block, const SegmentedPairs& tile, F* kept) {
    int all_segments = p.linear.in / p.linear.scaled;
    int64_t row = p.first + block.row + tile.row;
    const int16_t* x = p.rounded->pairs(row) + int64_t(tile.range.first) * p.linear.scaled * R;
    int64_t at = (int64_t(block.group) * all_segments + tile.range.first) * kGroupOutputs + tile.column * kLanes;
    SegmentTerms terms{p.linear.scales + at, at_or_null(p.linear.offsets, at), at_or_null(p.linear.zeros, at),
                       p.rounded->segment_sums(row) + tile.range.first * R, 0};
    PairedTerms own{terms, p.rounded->pair_sums(row) + tile.range.first * R, tile.pairs};
    Sums<R, kPairedColumns> sums;
    F* part = kept + tile.row * kPairedColumns;
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kPairedColumns; ++c) sums.at[r][c] = tile.range.first ? part[r * kPairedColumns + c] : zeros();
    int output = block.group * kGroupOutputs + tile.column * kLanes;
    if (tile.range.last) expect<Quad, 2 * R, kPairedColumns>(p, block, tile.row, output);
    multiply_paired_segments<code, R>(x, tile.weights, p.linear.scaled / Quad::kItems, tile.range.count, own,
                                      tile.ahead, tile.terms_ahead, sums.at);
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < kPairedColumns; ++c) {
            if (tile.range.last) sums.at[r][c] = sums.at[r][c] * all(*p.rounded->scales(row + r));
            else part[r * kPairedColumns + c] = sums.at[r][c];
        }
    if (tile.range.last) finish<Quad>(p, block, tile.row, tile.column, sums);
}

using SegmentedPairsCall = void (*)(const Product&, const Block&, const SegmentedPairs&, F*);
template <Code code, int R = kMinPairedRows> SegmentedPairsCall segmented_pairs_of(int rows) {
    if constexpr (R > kPairedRows) return nullptr;
    else return rows == R ? &run_segmented_pairs<code, R> : segmented_pairs_of<code, R + 1>(rows);
}

// A block of rows times one group, as `run_segmented_block`.
template <Code code> void run_paired_segments(const Product& p, const Block& block) {
    int steps = p.linear.scaled / Quad::kItems, segments = p.linear.in / p.linear.scaled;
    int tiles = tiles_of_rows(block.rows, 1, kPairedRows);
    int64_t segment_bytes = int64_t(steps) * segment_step_bytes(code);
    auto* group = (const uint8_t*)p.linear.groups + int64_t(block.group) * segments * segment_bytes;
    const char* next = (const char*)group + segments * segment_bytes;
    int most = kPairedSteps / steps, lines = int(segment_bytes / 64) * kPairedColumns / (kGroupColumns * tiles) + 1;
    F kept[kBlockRows / 2 * kPairedColumns];
    U pairs[kMaxPairedSegments][kPairedColumns];
    PairedBlock weights;
    for (int column = 0; column < kGroupColumns; column += kPairedColumns)
        for (int first = 0; first < segments; first += most) {
            SegmentRange range{first, std::min(most, segments - first), first + most >= segments};
            const uint8_t* w = group + first * segment_bytes + column * (segment_step_bytes(code) / kGroupColumns);
            for (int i = 0; i < range.count; ++i)
                take_pairs<code>(w + i * segment_bytes, steps, weights.bytes + i * steps * kPairedStepBytes<code>, pairs[i]);
            for (int tile = 0; tile < tiles; ++tile, next += range.count * lines * 64) {
                int from = block.rows * tile / tiles, to = block.rows * (tile + 1) / tiles;
                TermsAhead terms_ahead = column ? TermsAhead{0, 1, 0} : TermsAhead{tile, tiles, int64_t(range.count) * kGroupOutputs};
                segmented_pairs_of<code>(to - from)(p, block, {range, from, column, weights.bytes, pairs, {next, lines}, terms_ahead}, kept);
            }
        }
}

}  // namespace

#endif
