// Products in tiles where groups of inputs share a scale: the same sums of whole numbers as of segments.h, scaled in the same
// order, so that results have the same bits. Knows no threads.
#pragma once
#include "segments.h"
#include "tiled.h"

#if defined(BATON_TILES)

namespace {

struct SegmentBytes {
    alignas(64) char bytes[kMaxScaled / Quad::kItems * kStepBytes];
};

// A segment's weights as tiles read them: bytes where they lie, or half bytes made ones.
template <Code code> const char* tile_weights(const uint8_t* w, int steps) {
    if constexpr (code == Code::kQuad) return (const char*)w;
    char* bytes = thread_memory<SegmentBytes>().bytes;
    for (int step = 0; step < steps; ++step, w += segment_step_bytes(code)) {
        U weights[kGroupColumns];
        load_quads<code, kGroupColumns>(w, weights);
        for (int c = 0; c < kGroupColumns; ++c) store_bits(bytes + step * kStepBytes + c * 64, weights[c]);
    }
    return bytes;
}

// sums [rows][kGroupColumns] += what a segment's sums of digits stand for.
template <Code code>
void add_segments(const Product& p, const Block& block, const RowTiles& tiles, int segment, const F* digits, F* sums) {
    int64_t at = (int64_t(block.group) * (p.linear.in / p.linear.scaled) + segment) * kGroupOutputs;
    SegmentTerms terms{p.linear.scales + at, at_or_null(p.linear.offsets, at), at_or_null(p.linear.zeros, at), nullptr, 0};
    for (int row = 0; row < block.rows; ++row) {
        int32_t row_sum = p.rounded->segment_sums(p.first + block.row + row)[segment];
        Sums<2, kGroupColumns> both = kept_sums<2>(tiles, digits, row);
        for (int c = 0; c < kGroupColumns; ++c, ++sums)
            *sums = add_segment<code>(*sums, bits_of(both.at[0][c]), bits_of(both.at[1][c]), terms, c, row_sum);
    }
}

// A block of rows times one group, as `run_segmented_block`.
template <Code code> void run_tiled_segments(const Product& p, const Block& block) {
    int steps = p.linear.scaled / Quad::kItems, segments = p.linear.in / p.linear.scaled;
    int64_t segment_bytes = int64_t(steps) * segment_step_bytes(code);
    RowTiles tiles(block.rows * p.digits());
    F digits[kBlockRows * kGroupColumns], sums[kBlockRows / 2 * kGroupColumns];
    for (F& sum : sums) sum = zeros();
    auto* w = (const uint8_t*)p.linear.groups + int64_t(block.group) * segments * segment_bytes;
    // A segment is a tile of 8 steps, or whole ones.
    int depth = std::min(steps, kTileSteps);
    shape_tiles(tiles.height, depth);
    Upcoming next = upcoming(block, tiles, (const char*)w, segments * segment_bytes, depth * segment_step_bytes(code));
    for (int segment = 0; segment < segments; ++segment, w += segment_bytes) {
        TileWeights weights{tile_weights<code>(w, steps), steps / depth, nullptr};
        run_pass<Quad>(p, block, tiles, {segment * steps, steps, weights, false}, digits, next);
        add_segments<code>(p, block, tiles, segment, digits, sums);
    }
    release_tiles();
    for (int row = 0; row < block.rows; ++row) {
        Sums<1, kGroupColumns> scaled;
        F row_scale = all(*p.rounded->scales(p.first + block.row + row));
        for (int c = 0; c < kGroupColumns; ++c) scaled.at[0][c] = sums[row * kGroupColumns + c] * row_scale;
        finish<Quad>(p, block, row, 0, scaled);
    }
}

}  // namespace

#endif
