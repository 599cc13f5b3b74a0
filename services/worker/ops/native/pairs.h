// Products of codes and rows of 16 bits, two inputs for each multiplication (S. Winograd, "A New Algorithm for Inner Product",
// 1968): a x + b y = (a + y) (b + x) - a b - x y. Whole numbers, so that sums are those of two digits to the bit. A processor that
// adds beside multiplications, as Zen 4 does, needs 1.5 cycles for what are two products of digits. Knows no threads.
#pragma once
#include <algorithm>

#include "segments.h"
#include "sums.h"

namespace {

// Rows and columns of a tile: of 32 registers 22 are sums, 4 weights, 2 inputs, 2 sums of both. Blocks of kPairsFrom rows and
// more have no lower tiles.
constexpr int kPairedRows = 11, kMinPairedRows = 8;
constexpr int kPairedColumns = 2;

#if defined(BATON_VNNI)

// Sums of so many inputs fit into 32 bits, whatever the codes are.
constexpr int kPairedSteps = kPairedInputs / Quad::kItems;

// Weights of a step of a column, of inputs 0 and 2 and of 1 and 3: 128 more than they are multiplied as, as rows are 128 less.
struct PairedWeights {
    __m512i even, odd;
};

// Bytes of a step of a tile's columns: columns beside them are left out, as what is read lies in all sets of the cache so.
template <Code code> constexpr int kPairedStepBytes = segment_step_bytes(code) * kPairedColumns / kGroupColumns;
struct PairedBlock {
    alignas(64) uint8_t bytes[kPairedSteps * kPairedStepBytes<Code::kQuad>];
};

template <Code code> BATON_INLINE void load_paired(const uint8_t* w, PairedWeights weights[kPairedColumns]) {
    if constexpr (code == Code::kQuad) {
        for (int c = 0; c < kPairedColumns; ++c) {
            __m512i bytes = _mm512_loadu_si512(w + c * 64);
            weights[c] = {_mm512_and_si512(bytes, _mm512_set1_epi16(0xff)), _mm512_srli_epi16(bytes, 8)};
        }
    } else {
        const __m512i half = _mm512_set1_epi16(0xf);
        __m512i halves = _mm512_loadu_si512(w);
        weights[0] = {_mm512_and_si512(halves, half), _mm512_and_si512(_mm512_srli_epi16(halves, 8), half)};
        weights[1] = {_mm512_and_si512(_mm512_srli_epi16(halves, 4), half), _mm512_srli_epi16(halves, 12)};
    }
}

BATON_INLINE RegU add_products(RegU sum, __m512i a, __m512i b) { return (RegU)_mm512_dpwssd_epi32((__m512i)sum, a, b); }

BATON_INLINE __m512i paired_inputs(const int16_t* x) {
    int32_t both;
    memcpy(&both, x, 4);
    return _mm512_set1_epi32(both);
}

// sum[r][c] += the products of row r and column c of a step, and of the pairs of either.
template <Code code, int R>
BATON_INLINE void multiply_paired_step(const int16_t* x, const uint8_t* w, U sum[R][kPairedColumns]) {
    PairedWeights weights[kPairedColumns];
    load_paired<code>(w, weights);
    BATON_UNROLLED
    for (int r = 0; r < R; ++r) {
        __m512i odd = paired_inputs(x + 4 * r), even = paired_inputs(x + 4 * r + 2);
        BATON_UNROLLED
        for (int c = 0; c < kPairedColumns; ++c)
            sum[r][c].part[0] = add_products(sum[r][c].part[0], _mm512_add_epi16(weights[c].even, odd), _mm512_add_epi16(weights[c].odd, even));
    }
}

// The same of some steps, from zeros on.
template <int R>
__attribute__((noinline)) void multiply_pairs(const int16_t* x, const uint8_t* w, int steps, Ahead ahead, U sums[R][kPairedColumns]) {
    U sum[R][kPairedColumns];
    BATON_UNROLLED
    for (int r = 0; r < R; ++r)
        BATON_UNROLLED
        for (int c = 0; c < kPairedColumns; ++c) sum[r][c] = all_bits(0);
    auto step = [&] {
        multiply_paired_step<Code::kQuad, R>(x, w, sum);
        w += kPairedStepBytes<Code::kQuad>;
        x += Quad::kItems * R;
    };
    for (; steps >= kChunk; steps -= kChunk) {
        for (int i = 0; i < ahead.lines; ++i, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
#pragma GCC unroll 2
        for (int i = 0; i < kChunk; ++i) step();
    }
    for (; steps > 0; --steps) step();
    BATON_UNROLLED
    for (int r = 0; r < R; ++r)
        BATON_UNROLLED
        for (int c = 0; c < kPairedColumns; ++c) sums[r][c] = sum[r][c];
}

// Copies a group's weights of a tile's columns, and makes the sums of products of their own pairs.
template <Code code> void take_pairs(const uint8_t* w, int steps, uint8_t* to, U sums[kPairedColumns]) {
    const __m512i excess = _mm512_set1_epi16(128);
    U even[kPairedColumns], odd[kPairedColumns];  // of steps by turns: a sum waits for the one before
    for (int c = 0; c < kPairedColumns; ++c) even[c] = odd[c] = all_bits(0);
    auto add_step = [&](U sum[kPairedColumns]) {
        PairedWeights weights[kPairedColumns];
        load_paired<code>(w, weights);
        for (int c = 0; c < kPairedColumns; ++c)
            sum[c].part[0] = add_products(sum[c].part[0], _mm512_sub_epi16(weights[c].even, excess), _mm512_sub_epi16(weights[c].odd, excess));
        memcpy(to, w, kPairedStepBytes<code>);
        to += kPairedStepBytes<code>;
        w += segment_step_bytes(code);
    };
    for (; steps >= 2; steps -= 2) add_step(even), add_step(odd);
    if (steps) add_step(even);
    for (int c = 0; c < kPairedColumns; ++c) sums[c].part[0] = even[c].part[0] + odd[c].part[0];
}

// Some steps of some rows times some columns.
struct PairedTile {
    int row;
    int column;
    int first;
    int steps;
    Ahead ahead;
    const uint8_t* weights;
    const U* pairs;  // of the columns
};

// Sums of whole numbers as two parts that floats hold: 65,536 * high + low.
struct Parts {
    Sixteen<RegI> high, low;
};

template <int R> void run_paired_tile(const Product& p, const Block& block, const PairedTile& tile, Parts* kept) {
    int64_t x_row = p.first + block.row + tile.row;
    const int16_t* x = p.rounded->pairs(x_row) + tile.first * Quad::kItems * R;
    bool last = tile.first + tile.steps == p.steps;
    int output = block.group * kGroupOutputs + tile.column * kLanes;
    if (last) expect<Quad, 2 * R, kPairedColumns>(p, block, tile.row, output);
    U sums[R][kPairedColumns];
    multiply_pairs<R>(x, tile.weights, tile.steps, tile.ahead, sums);
    Sums<R, kPairedColumns> numbers;
    const int32_t* pair_sums = p.rounded->pair_sums(x_row) + tile.first / kPairedSteps * R;
    for (int r = 0; r < R; ++r) {
        uint32_t excess = uint32_t(pair_sums[r]);
        for (int c = 0; c < kPairedColumns; ++c) {
            RegI sum = (RegI)(sums[r][c].part[0] - (tile.pairs[c].part[0] + excess));
            Parts& part = kept[(tile.row + r) * kPairedColumns + c];
            Parts now{{sum >> 16}, {sum & 0xffff}};
            if (tile.first) now.high.part[0] += part.high.part[0], now.low.part[0] += part.low.part[0];
            if (last) {
                F scale = all(*p.rounded->scales(x_row + r)) * load(p.linear.scales + output + c * kLanes);
                numbers.at[r][c] = number_of_parts(now.high, now.low) * scale;
            } else {
                part = now;
            }
        }
    }
    if (last) finish<Quad>(p, block, tile.row, tile.column, numbers);
}

using PairedCall = void (*)(const Product&, const Block&, const PairedTile&, Parts*);
template <int R = kMinPairedRows> PairedCall paired_tile_of(int rows) {
    if constexpr (R > kPairedRows) return nullptr;
    else return rows == R ? &run_paired_tile<R> : paired_tile_of<R + 1>(rows);
}

// A block of rows times one group, as `run_block` of linear.cpp.
void run_paired_block(const Product& p, const Block& block) {
    int tiles = tiles_of_rows(block.rows, 1, kPairedRows);
    auto* group = (const uint8_t*)p.linear.groups + int64_t(block.group) * p.steps * kStepBytes;
    const char* next = (const char*)group + int64_t(p.steps) * kStepBytes;
    int lines = kChunk * kPairedColumns / tiles + 1;
    Parts kept[kBlockRows / 2 * kPairedColumns];
    U pairs[kPairedColumns];
    PairedBlock weights;
    for (int column = 0; column < kGroupColumns; column += kPairedColumns)
        for (int first = 0; first < p.steps; first += kPairedSteps) {
            int steps = std::min(kPairedSteps, p.steps - first);
            take_pairs<Code::kQuad>(group + first * kStepBytes + column * 64, steps, weights.bytes, pairs);
            for (int tile = 0; tile < tiles; ++tile) {
                int from = block.rows * tile / tiles, to = block.rows * (tile + 1) / tiles;
                paired_tile_of(to - from)(p, block, {from, column, first, steps, {next, lines}, weights.bytes, pairs}, kept);
                next += steps / kChunk * lines * 64;
            }
        }
}

#endif

}  // namespace
