// Operations that work on each row alone.
#pragma once
#include <algorithm>

#include "lanes.h"
#include "linear.h"
#include "threads.h"

// Rows of a tile: a tile should take longer than a thread needs to join (about a microsecond).
constexpr int kRowsOfTile = 8;

template <class Call> void each_row(Pool& pool, int count, const Call& call) {
    pool.run((count + kRowsOfTile - 1) / kRowsOfTile, [&](int tile, int) {
        int end = std::min(count, (tile + 1) * kRowsOfTile);
        for (int row = tile * kRowsOfTile; row < end; ++row) call(row);
    });
}

// ids [count] → to [count, hidden] floats = table[id] * scale. False where an id is not in [0, vocab).
bool embed(Pool& pool, const int* ids, int count, Number number, const void* table, int vocab, int hidden, float scale,
           float* to, int64_t to_stride);

// The same of a table of packed int8 or int4: what is multiplied is read by rows, too.
bool embed_codes(Pool& pool, const int* ids, int count, const Linear& table, float* to, int64_t to_stride);

struct Norm {
    const float* weight;  // [hidden]
    float eps;
    int hidden;
};

// to = x / sqrt(mean(x^2) + eps) * weight. Where `residual` is given, it becomes x + residual, and its norm is taken.
void norm(Pool& pool, const Rows& x, float* residual, int64_t residual_stride, const Norm& what, Number to_number, void* to,
          int64_t to_stride);

// gate_up [count, 2 * width] floats, gates first → to [count, width] = act(gate) * up; of what has no gates [count, width].
void gate(Pool& pool, const Rows& gate_up, int width, Activation activation, Number to_number, void* to, int64_t to_stride);

// x [count, width] becomes x * sigmoid(gates [count, width]).
void gate_by(Pool& pool, const float* gates, int64_t gates_stride, int width, Number number, void* x, int64_t x_stride, int count);
