// Draws of tokens from logits, for CPUs; services/worker/sampling/sampler.py says what a draw is, races.py how it is decided.
#pragma once
#include <cstdint>

#include "changes.h"
#include "threads.h"

// How each of `count` rows is drawn.
struct Draws {
    const float* logits;  // [count, vocab]
    int vocab;
    int count;
    const uint32_t* keys;      // [count, 2]
    const float* temperature;  // [count] 0: the first of the greatest logits, whatever else is said
    const int64_t* top_k;      // [count] vocab or more keeps all
    const float* top_p;        // [count] 1 keeps all
    const float* min_p;        // [count] 0 keeps all
    const Changes* changes;    // [count] what each row is drawn from; null: the logits as they are
    int steps;                 // see `change_logits`
};

// The two halves of what the token at an output position is drawn by: services/worker/sampling/random_numbers.py.
void race_key(uint64_t seed, uint32_t position, uint32_t* halves);

// tokens [count]: 0 for a row of NaNs.
void draw(Pool& pool, const Draws& draws, int64_t* tokens);

// The first of the greatest logits of each row of [count, vocab], and whether there is a NaN among them, where its token means
// nothing.
void find_likeliest(Pool& pool, const float* logits, int vocab, int count, int64_t* tokens, bool* undefined);
// The same of one row, by the thread that calls.
int64_t likeliest_of(const float* logits, int vocab, bool* undefined);
