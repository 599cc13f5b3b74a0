// What this machine could do at best.
#pragma once
#include "linear.h"
#include "threads.h"

// Reads `bytes` bytes once, by all threads.
float probe_reading(Pool& pool, const void* from, int64_t bytes);
// Multiplies in registers only, `steps` tiles by each thread; returns the floating-point operations that were done.
int64_t probe_multiplying(Pool& pool, Number number, int64_t steps);
// The same in tiles of bf16; 0 where this library has none. The process must have been allowed to use them.
int64_t probe_tiles(Pool& pool, int64_t steps);
