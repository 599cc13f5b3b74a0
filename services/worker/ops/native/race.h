// The draw of a token as a race, for CPUs; services/worker/sampling/races.py says what it is.
#pragma once
#include <cstdint>

#include "threads.h"

struct Race {
    const float* weights;  // [count, width]; zeros cannot win
    int width;             // a multiple of kLanes
    int count;
    const uint32_t* keys;  // [count, 2]
};

// winners [count]: of each row the token with the greatest weight / time, the first of several; 0 of a row of NaNs.
void run_race(Pool& pool, const Race& race, int64_t* winners);
