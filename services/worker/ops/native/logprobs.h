// Log-probabilities of tokens, and the likeliest ones of a row; services/worker/sampling/logprobs.py says what for.
#pragma once
#include <cstdint>

#include "threads.h"

constexpr int kMaxTopLogprobs = 64;

// Which of whose are asked for.
struct Logprobs {
    const float* logits;  // [.., vocab]
    int vocab;
    const int64_t* rows;    // [count] of the logits
    const int64_t* tokens;  // [count]
    int count;
    int likeliest;  // of each row, at most kMaxTopLogprobs and vocab
};

// totals [count]: what a row's logits are more than log-probabilities, the logarithm of the sum of all exponentials; ranks [count]:
// how many tokens are as likely as the row's, itself included; ids and values [count, likeliest]: the likeliest tokens, of equal
// ones the lower first, and their log-probabilities.
void find_logprobs(Pool& pool, const Logprobs& what, float* totals, int64_t* ranks, int64_t* ids, float* values);
