// Copies blocks between a rank's caches and the slots of a KV store's arena. One thread's work, beside the kernels'.
#pragma once
#include <cstdint>

// A rank's caches, laid out as attention.h says.
struct KvMemory {
    int item_bytes;  // 4, 2 or 1
    int layers;
    int kv_heads;
    int head_dim;
    int pages;  // of a block
    void* const* keys;  // of each layer
    void* const* values;
};

// Where the rank's cells of slot 0 lie, which are the layers of `KvMemory` of each of its heads; see
// kvstore/core/layout.py.
struct KvArena {
    void* generations;
    void* checksums;
    void* payloads;
    int64_t header_stride;
    int64_t payload_stride;
    int64_t head_stride;      // bytes from a head to the next: all layers of the model
    int64_t checksum_stride;  // the same among checksums
};

// Cells in an arena's order, [block][head][layer], for devices that bring their blocks into it themselves.
struct KvCells {
    int layers;
    int kv_heads;
    int64_t cell_bytes;  // whole lines of 64, and enough for a checksum
    void* cells;         // aligned so, too
};

struct KvBlocks {
    int count;
    const int* blocks;
    const uint32_t* slots;
    const uint64_t* generations;  // that the slots must have
};

enum class KvCopied : int {
    kAll = 0,
    kOtherGeneration = 1,  // the slot is not what it was, before or after
    kOtherChecksum = 2,    // what was read is not what was written
};

// The slot's generation is looked at before and after each block, and again before its checksums are written: so that a
// writer that was stopped for long never leaves contents with checksums that fit them in a slot that is another's. A
// block that was written to such a slot loses its checksums, so that nobody takes it for whole.
KvCopied save_blocks(const KvMemory& memory, const KvArena& arena, const KvBlocks& what);
// Checksums are verified while the bytes pass by. What could not be loaded is zeros then.
KvCopied load_blocks(const KvMemory& memory, const KvArena& arena, const KvBlocks& what);
// The same of cells, of which the blocks are the first, the second and so on, and what could not be loaded is undefined.
KvCopied save_cells(const KvCells& memory, const KvArena& arena, const KvBlocks& what);
KvCopied load_cells(const KvCells& memory, const KvArena& arena, const KvBlocks& what);
