// Low-rank products of many adapters (LoRA) beside one matrix: each row is multiplied with those of its own slot.
#pragma once
#include "linear.h"

// What one adapter adds to one part of a matrix: to += b (a x).
struct LowRank {
    int rank;  // 0: nothing
    // [groups of 16 ranks][steps of inputs][16], a step being two bf16 numbers of each or one float; the rest zeros.
    const void* a;
    // [outputs of the part, rank] as a `Linear` has its weights: groups of 64 outputs.
    const void* b;
};

struct LowRankTable {
    Number number;  // of a and b
    int in;
    int parts;
    const int* starts;        // [parts + 1] the outputs of each, one behind the other
    const LowRank* products;  // [slots][parts]
};

// Adds to row i of `to` what slots[i] adds for row i of x; a negative slot adds nothing.
//
// Each element's sums run in an order that depends on `in` and the rank alone: a row's result is the same to the last bit
// whatever the other rows are and whose adapters they have, and for any number of threads.
void add_low_rank(Pool& pool, const Rows& x, const LowRankTable& table, const int* slots, float* to, int64_t to_stride);
