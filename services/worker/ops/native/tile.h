// The micro-kernel: a tile of rows times a tile of packed weights, summed in registers. Knows no threads.
#pragma once
#include "lanes.h"

// Rows and 16-lane columns of a full tile: as many sums as fit in the registers beside the weights of a step and a
// factor, and at least six (a multiplication takes 4 to 6 cycles, one or two start each cycle). Four columns for six
// rows need the fewest loads: measured 98% of the multipliers' peak on Zen 4, where 12 x 2 gave 93% and 24 x 1 65%.
#if defined(BATON_AVX512)
constexpr int kTileRows = 6;  // 32 registers: 24 sums, 4 weights, 1 factor
constexpr int kTileColumns = 4;
#elif defined(BATON_AVX2)
constexpr int kTileRows = 3;  // 16 registers, two for each 16 lanes: 12 sums, 2 weights, 1 factor
constexpr int kTileColumns = 2;
#elif defined(__aarch64__)
constexpr int kTileRows = 3;  // 32 registers, four for each 16 lanes: 24 sums, 4 weights, 1 factor
constexpr int kTileColumns = 2;
#else
constexpr int kTileRows = 2;  // 16 registers, four for each 16 lanes
constexpr int kTileColumns = 2;
#endif

// What to fetch into the second-level cache while a tile is computed, spread over it: the weights that come next. The
// processor's own prefetcher starts anew on each page, and without this each first reading waits for memory.
struct Ahead {
    const char* from;
    int lines;  // for each chunk of kChunk steps
};
constexpr int kChunk = 8;  // more at once stall the loads of the tile itself

template <class Kind, int Rows, int Columns>
BATON_INLINE void multiply_step(const typename Kind::Item* const x[Rows], const typename Kind::Item* const w[Columns],
                                int step, int weight_step, F sum[Rows][Columns]) {
    decltype(Kind::weights(w[0])) weights[Columns];
    BATON_UNROLLED
    for (int c = 0; c < Columns; ++c) weights[c] = Kind::weights(w[c] + size_t(step) * weight_step);
    BATON_UNROLLED
    for (int r = 0; r < Rows; ++r) {
        auto factor = Kind::broadcast(x[r] + step * Kind::kItems);
        BATON_UNROLLED
        for (int c = 0; c < Columns; ++c) sum[r][c] = Kind::multiply(sum[r][c], weights[c], factor);
    }
}

// sums[r][c] += the product of row r and column c over `steps` steps, in ascending order: what each sum goes through
// does not depend on the tile's shape. `weight_step` is the distance of two steps' weights, in items.
template <class Kind, int Rows, int Columns>
BATON_INLINE void multiply_tile(const typename Kind::Item* const x[Rows], const typename Kind::Item* const w[Columns],
                                int steps, int weight_step, F sums[Rows][Columns]) {
    F sum[Rows][Columns];
    BATON_UNROLLED
    for (int r = 0; r < Rows; ++r)
        BATON_UNROLLED
        for (int c = 0; c < Columns; ++c) sum[r][c] = sums[r][c];
    for (int step = 0; step < steps; ++step) multiply_step<Kind, Rows, Columns>(x, w, step, weight_step, sum);
    BATON_UNROLLED
    for (int r = 0; r < Rows; ++r)
        BATON_UNROLLED
        for (int c = 0; c < Columns; ++c) sums[r][c] = sum[r][c];
}

// The same for rows `stride` items apart and columns that lie side by side in steps of kStep items; unless kResumed, sums begin
// with what `row_sums`, of each row, make them (Kind::first_sum). A function of its own with few arguments: inlined among
// others, compilers run out of registers and keep weights on the stack. Eight steps unrolled have GCC read weights across steps,
// out of the order they lie in: memory's own prefetcher loses the thread, and one row of int8 with two digits reads 22 GB/s
// instead of 28 (measured on Zen 4).
template <class Kind, int Rows, int Columns, int kStep, bool kResumed>
__attribute__((noinline)) void multiply_panel(const typename Kind::Item* x, int64_t stride, const typename Kind::Item* w, int steps,
                                              Ahead ahead, const int32_t* row_sums, F sums[Rows][Columns]) {
    typename Kind::Sum sum[Rows][Columns];
    BATON_UNROLLED
    for (int r = 0; r < Rows; ++r) {
        if constexpr (!kResumed) sum[r][0] = Kind::first_sum(row_sums, r);
        BATON_UNROLLED
        for (int c = 0; c < Columns; ++c) {
            if constexpr (kResumed) resume(sum[r][c], sums[r][c]);
            else sum[r][c] = sum[r][0];
        }
    }
    auto step = [&] {
        decltype(Kind::weights(w)) weights[Columns];
        BATON_UNROLLED
        for (int c = 0; c < Columns; ++c) {
            weights[c] = Kind::weights(w + c * kLanes * Kind::kItems);
            if constexpr (Rows <= 2) read_in_order(weights[c]);
        }
        BATON_UNROLLED
        for (int r = 0; r < Rows; ++r) {
            auto factor = Kind::broadcast(x + r * stride);
            BATON_UNROLLED
            for (int c = 0; c < Columns; ++c) sum[r][c] = Kind::multiply(sum[r][c], weights[c], factor);
        }
        w += kStep;
        x += Kind::kItems;
    };
    for (; steps >= kChunk; steps -= kChunk) {
        for (int i = 0; i < ahead.lines; ++i, ahead.from += 64) __builtin_prefetch(ahead.from, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < kChunk; ++i) step();
    }
    for (; steps > 0; --steps) step();
    BATON_UNROLLED
    for (int r = 0; r < Rows; ++r)
        BATON_UNROLLED
        for (int c = 0; c < Columns; ++c) sums[r][c] = kept(sum[r][c]);
}
