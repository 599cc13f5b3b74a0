// What this machine could do at best, for the benchmark: reading memory, and multiplying in registers.
#include "probe.h"

#include "tile.h"
#include "tiles.h"

namespace {

constexpr int64_t kPiece = 256 << 10;

// Keeps the compiler from computing ahead of time or twice what changes nothing.
template <class R> BATON_INLINE void opaque(Sixteen<R>& x) {
#if defined(__x86_64__)
    BATON_EACH asm volatile("" : "+v"(x.part[i_]));
#elif defined(__aarch64__)
    BATON_EACH asm volatile("" : "+w"(x.part[i_]));
#else
    asm volatile("" : "+m"(x));
#endif
}

template <class Kind> float multiply_registers(int64_t steps, const typename Kind::Item* items) {
    F sums[kTileRows][kTileColumns];
    for (int r = 0; r < kTileRows; ++r)
        for (int c = 0; c < kTileColumns; ++c) sums[r][c] = zeros();
    auto weights = Kind::weights(items);
    auto factor = Kind::broadcast(items);
    for (int64_t step = 0; step < steps; ++step) {
        opaque(factor);
        for (int r = 0; r < kTileRows; ++r)
            for (int c = 0; c < kTileColumns; ++c) sums[r][c] = Kind::multiply(sums[r][c], weights, factor);
    }
    F total = zeros();
    for (int r = 0; r < kTileRows; ++r)
        for (int c = 0; c < kTileColumns; ++c) total = total + sums[r][c];
    return sum(total);
}

}  // namespace

float probe_reading(Pool& pool, const void* from, int64_t bytes) {
    std::vector<F> seen(size_t(pool.threads()), zeros());
    pool.run(int(bytes / kPiece), [&](int piece, int thread) {
        const float* at = (const float*)((const char*)from + piece * kPiece);
        F a = zeros(), b = zeros(), c = zeros(), d = zeros();
        for (int64_t i = 0; i < kPiece / 4; i += 4 * kLanes) {
            a = larger(a, load(at + i));
            b = larger(b, load(at + i + kLanes));
            c = larger(c, load(at + i + 2 * kLanes));
            d = larger(d, load(at + i + 3 * kLanes));
        }
        seen[thread] = larger(larger(a, b), larger(c, d));
    });
    return greatest(seen[0]);
}

int64_t probe_multiplying(Pool& pool, Number number, int64_t steps) {
    alignas(64) static const float items[kLanes] = {1.0f};
    int threads = pool.threads();
    std::vector<float> results(size_t(8 * threads));
    pool.run(8 * threads, [&](int tile, int) {
        if (number == Number::kHalf) results[tile] = multiply_registers<Half>(steps / 8, (const Bf16*)items);
        else results[tile] = multiply_registers<Single>(steps / 8, items);
    });
    int items_of_step = number == Number::kHalf ? Half::kItems : Single::kItems;
    return int64_t(threads) * 8 * (steps / 8) * kTileRows * kTileColumns * kLanes * items_of_step * 2;
}

int64_t probe_tiles(Pool& pool, int64_t steps) {
#if defined(BATON_TILES)
    int threads = pool.threads();
    pool.run(8 * threads, [&](int, int) {
        shape_tiles(kTileHeight, kTileHeight);
        for (int64_t step = 0; step < steps / 8; ++step) {
            add_half_tiles<0, 4, 6>();
            add_half_tiles<1, 4, 7>();
            add_half_tiles<2, 5, 6>();
            add_half_tiles<3, 5, 7>();
        }
        release_tiles();
    });
    constexpr int kProducts = 4, kInputs = kTileRowBytes / int(sizeof(Bf16));
    return int64_t(threads) * 8 * (steps / 8) * kProducts * kTileHeight * kLanes * kInputs * 2;
#else
    return 0;
#endif
}
