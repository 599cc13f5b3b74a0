// The tile instructions (AMX): eight registers of up to 16 rows of 64 bytes, and products of them. Knows no weights.
//
// In assembly, with registers by number: GCC's intrinsics take no template's numbers, and nothing can be spilled that a
// compiler does not know of. Tests run these very instructions where the processor has none (tests/support/tiles).
#pragma once
#include "lanes.h"

// Whether this process may use tiles from now on, all of its threads and those that it forks: Linux keeps the 8 kB of a
// thread's tiles only for processes that ask (Documentation/arch/x86/xstate.rst). False where there are none.
bool allow_tiles();

#if defined(BATON_BF16) && defined(BATON_VNNI) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define BATON_TILES 1

// Rows and bytes of a row of a whole tile. As weights, it is so many steps of 16 outputs.
constexpr int kTileHeight = 16;
constexpr int kTileRowBytes = 64;

// What LDTILECFG reads (Intel SDM, volume 2).
struct alignas(64) TileShapes {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

// Tiles 0 to 3 for the sums of `height` rows, 4 and 5 for those rows and 6 and 7 for weights, of `steps`; all are zeros then.
BATON_INLINE void shape_tiles(int height, int steps) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.row_bytes[tile] = uint16_t(tile == 4 || tile == 5 ? 4 * steps : kTileRowBytes);
        shapes.rows[tile] = uint8_t(tile < 6 ? height : steps);
    }
    asm volatile("ldtilecfg %0" : : "m"(shapes));
}
// By whoever has shaped them, when done: threads without tiles are switched faster.
BATON_INLINE void release_tiles() { asm volatile("tilerelease"); }

template <int T> BATON_INLINE void zero_tile() { asm volatile("tilezero %%tmm%c0" : : "i"(T)); }
// Rows `stride` bytes apart.
template <int T> BATON_INLINE void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> BATON_INLINE void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
// Sum [m][n] += X [m][k] times W [k][n] of pairs of bf16: the products of a pair's first numbers are added up over k, those
// of its second ones beside them, then both, then to the sum (Intel SDM, volume 2: TDPBF16PS).
template <int Sum, int X, int W> BATON_INLINE void add_half_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
}
// The same for fours of bytes, those of X with a sign and those of W without; sums are whole numbers of 32 bits.
template <int Sum, int X, int W> BATON_INLINE void add_byte_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
}

template <class Kind, int Sum, int X, int W> BATON_INLINE void add_tiles() {
    if constexpr (Kind::kItems == Half::kItems) add_half_tiles<Sum, X, W>();
    else add_byte_tiles<Sum, X, W>();
}

#endif
