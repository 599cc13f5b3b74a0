// What attention does with chunks of a context: each row's softmax within a chunk, merged across them.
#pragma once
#include <algorithm>
#include <limits>
#include <type_traits>

#include "tile.h"

// Tokens of a chunk. A chunk's scores are 1 kB for each row and its keys and values 64 kB for heads of 64: they stay in
// the second-level cache. Part of the results' definition: sums are merged at its bounds.
constexpr int kChunkTokens = 256;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// The state of one row's softmax: exp(score - greatest) summed up, and the values mixed by that.
struct State {
    float greatest;
    float total;
};

// state, sums: those of all chunks so far and of one more.
inline void merge(State& state, float* sums, State chunk, const float* mixed, int padded) {
    if (state.total == 0) {
        state = chunk;
        memcpy(sums, mixed, size_t(padded) * 4);
        return;
    }
    float most = std::max(state.greatest, chunk.greatest);
    F shrink = exp(all(state.greatest - most)), other = exp(all(chunk.greatest - most));
    float keep[kLanes], add[kLanes];
    store(keep, shrink);
    store(add, other);
    state = {most, state.total * keep[0] + chunk.total * add[0]};
    for (int d = 0; d < padded; d += kLanes) store(sums + d, load(sums + d) * shrink + load(mixed + d) * other);
}

// Calls with as many of `rows` rows at a time as a tile has, and with fewer of the last ones.
template <class Call, int R = kTileRows> void by_rows(int rows, const Call& call, int row = 0) {
    for (; row + R <= rows; row += R) call(row, std::integral_constant<int, R>());
    if constexpr (R > 1) by_rows<Call, R - 1>(rows, call, row);
}
