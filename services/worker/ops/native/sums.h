// What a product is made of, and how its sums leave the registers. Knows no weights and no threads.
#pragma once
#include <type_traits>

#include "activation.h"
#include "digits.h"
#include "linear.h"
#include "quad.h"
#include "tile.h"

namespace {

// Steps of a block: 6 rows of 512 steps are 12 kB, which stay in the first-level cache (32 kB or more) while the
// weights, 128 kB for a group, are read again from the second level (1 MB or more) for each tile of rows.
constexpr int kBlockSteps = 512;
// Rows of a block at most, those of digits counted. A group's weights come from memory once for each block of rows, its sums
// (32 kB) stay in cache.
constexpr int kBlockRows = 128;

struct Product {
    Rows x;
    Linear linear;
    Target target;
    int steps;
    // Of whole numbers: x as digits, from which of its rows on.
    const DigitRows* rounded = nullptr;
    int64_t first = 0;
    // Where weights have offsets and are not multiplied in whole numbers: the sum of each of a row's groups of inputs, for each
    // row of those that `first` counts.
    const float* group_sums = nullptr;

    // Rows of items that tiles read for each row of x.
    int digits() const { return rounded ? linear.digits : 1; }
};

template <class T> BATON_INLINE const T* at_or_null(const T* items, int64_t at) { return items ? items + at : nullptr; }

// A block of rows times one group.
struct Block {
    int row;
    int rows;
    int group;
    const F* gates;  // [rows][kGroupColumns], where the group's outputs are to be gated by them
    F* to_gates;     // where the sums are not written out but kept as gates
    // Of the blocks of rows that the group is multiplied by one after the other, which this one is.
    int turn = 0;
    int turns = 1;
};

// The sums of some rows and columns of a tile.
template <int R, int C> struct Sums {
    F at[R][C];
};

template <int R, int C> BATON_INLINE void keep(F* to, const Sums<R, C>& sums) {
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) to[r * kGroupColumns + c] = sums.at[r][c];
}
template <int R, int C> BATON_INLINE void resume(const F* kept, Sums<R, C>& sums) {
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums.at[r][c] = kept[r * kGroupColumns + c];
}
template <int R, int C> BATON_INLINE void clear(Sums<R, C>& sums) {
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums.at[r][c] = zeros();
}

template <class Item, int R, int C>
BATON_INLINE void write_gated(const Product& p, int row, int column, const F* gates, const Sums<R, C>& sums) {
    int half = p.linear.out / 2;
    auto* to = (Item*)p.target.data + row * p.target.stride + column - half;
    const float* bias = p.linear.bias;
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            F gate = gates[r * kGroupColumns + c], up = sums.at[r][c];
            if (bias) gate = gate + load(bias + column - half + c * kLanes), up = up + load(bias + column + c * kLanes);
            store(to + r * p.target.stride + c * kLanes, gated(p.target.activation, gate, up));
        }
}

// The end of a row of outputs, where fewer than 16 are left.
void write_some(const Product& p, float* to, int column, int count, F sums) {
    float lane[kLanes];
    store(lane, sums);
    for (int i = 0; i < count; ++i) {
        float sum = p.linear.bias ? lane[i] + p.linear.bias[column + i] : lane[i];
        to[i] = p.target.kind == Out::kAdded ? to[i] + sum : sum;
    }
}

template <int R, int C> BATON_INLINE void write_floats(const Product& p, int row, int column, const Sums<R, C>& sums) {
    float* to = (float*)p.target.data + row * p.target.stride + column;
    const float* bias = p.linear.bias;
    bool whole = column + C * kLanes <= p.linear.out, added = p.target.kind == Out::kAdded;
    if (whole && !bias && !added) {
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) store(to + r * p.target.stride + c * kLanes, sums.at[r][c]);
        return;
    }
    for (int r = 0; r < R; ++r, to += p.target.stride)
        for (int c = 0; c < C; ++c) {
            int at = column + c * kLanes, count = p.linear.out - at;
            if (count < kLanes) {
                write_some(p, to + c * kLanes, at, count, sums.at[r][c]);
                continue;
            }
            F sum = bias ? sums.at[r][c] + load(bias + at) : sums.at[r][c];
            store(to + c * kLanes, added ? load(to + c * kLanes) + sum : sum);
        }
}

// Whether a kind multiplies rows that were rounded to its items.
template <class Kind> constexpr bool kRounds = std::is_same_v<Kind, Quad>;

// 65,536 * high + low, rounded once where both are below 2^24.
BATON_INLINE F number_of_parts(Sixteen<RegI> high, Sixteen<RegI> low) { return fma(floats_of(high), all(65536.0f), floats_of(low)); }

// 256 * first + second, of so many inputs, rounded once.
BATON_INLINE F number_of_digits(Sixteen<RegI> first, Sixteen<RegI> second, int in) {
    constexpr int kHeldByFloats = 1024;  // 128 * 128 * 1,024 is 2^24
    if (in <= kHeldByFloats) return fma(floats_of(first), all(256.0f), floats_of(second));
    Sixteen<RegI> high, low;
    BATON_EACH {
        high.part[i_] = (first.part[i_] >> 8) + (second.part[i_] >> 16);
        low.part[i_] = ((first.part[i_] & 255) << 8) + (second.part[i_] & 0xffff);
    }
    return number_of_parts(high, low);
}

// What the sums of whole numbers stand for: `row` is the first in x, R its digits and those of the rows behind it. kExcess:
// sums began with zeros, not with Quad::first_sum.
template <int Digits, bool kExcess, int R, int C>
BATON_INLINE Sums<R / Digits, C> numbers_of(const Product& p, int64_t row, const float* weight_scales, const Sums<R, C>& sums) {
    Sums<R / Digits, C> numbers;
    for (int r = 0; r < R / Digits; ++r)
        for (int c = 0; c < C; ++c) {
            Sixteen<RegI> whole[Digits];
            for (int digit = 0; digit < Digits; ++digit) {
                U sum = bits_of(sums.at[r * Digits + digit][c]);
                BATON_EACH whole[digit].part[i_] = (RegI)sum.part[i_];
                if constexpr (kExcess) {
                    U first = Quad::first_sum(p.rounded->sums(row + r), digit);
                    BATON_EACH whole[digit].part[i_] = (RegI)(sum.part[i_] + first.part[i_]);
                }
            }
            F number = Digits == 1 ? floats_of(whole[0]) : number_of_digits(whole[0], whole[Digits - 1], p.linear.in);
            numbers.at[r][c] = number * (all(*p.rounded->scales(row + r)) * load(weight_scales + c * kLanes));
        }
    return numbers;
}

template <class Kind> bool writes_halves(const Product& p) { return Kind::kItems == 2 || p.linear.number == Number::kHalf; }

// Has the lines that will be written brought near while the tile is computed. Without this 2,048 rows' gated outputs took 6%
// longer (4,096 outputs, 768 inputs, bf16; Zen 5, loaded, one thread).
template <class Kind, int R, int C> BATON_INLINE void expect(const Product& p, const Block& block, int row, int output) {
    if (block.to_gates) return;
    int64_t size = block.gates && writes_halves<Kind>(p) ? 2 : 4, first = block.gates ? output - p.linear.out / 2 : output;
    const char* to = (const char*)p.target.data + ((block.row + row) * p.target.stride + first) * size;
    for (int r = 0; r < R / p.digits(); ++r)
        for (int64_t at = 0; at < C * kLanes * size; at += 64) __builtin_prefetch(to + r * p.target.stride * size + at, 1, 3);
}

// The end of a tile's sums. `row` is in the block. A function of its own, which all kinds of weights share: once a tile, on sums
// that are in memory already, and inlined in each it was a third of the time of compiling.
template <class Kind, int R, int C>
__attribute__((noinline)) void finish(const Product& p, const Block& block, int row, int column, const Sums<R, C>& sums) {
    int output = block.group * kGroupOutputs + column * kLanes, at = row * kGroupColumns + column;
    if (block.to_gates) keep(block.to_gates + at, sums);
    else if (block.gates && writes_halves<Kind>(p)) write_gated<Bf16>(p, block.row + row, output, block.gates + at, sums);
    else if (block.gates) write_gated<float>(p, block.row + row, output, block.gates + at, sums);
    else write_floats(p, block.row + row, output, sums);
}

// Tiles of about the same height: 7 rows are 4 and 3, not 6 and 1.
inline int tiles_of_rows(int rows, int digits, int tile_rows = kTileRows) {
    int most = tile_rows / digits;
    return (rows + most - 1) / most;
}

}  // namespace
