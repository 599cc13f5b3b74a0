#include "kv_copy.h"

#include <cstring>
#include <memory>
#include <vector>

#include "attention.h"
#include "checksum.h"

namespace {

constexpr int kLine = 64;

// to[kSide][kSide] = from[kSide][kSide] transposed; strides in words.
#if defined(__AVX2__)
constexpr int kSide = 8;

BATON_INLINE __m256 halves(const uint32_t* low, const uint32_t* high) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps((const float*)low)), _mm_loadu_ps((const float*)high), 1);
}

BATON_INLINE void transpose_tile(const uint32_t* from, int from_stride, uint32_t* to, int to_stride) {
    for (int half = 0; half < 8; half += 4) {
        // Row i beside row i + 4: what is left to do is to transpose each half of the registers.
        auto row = [&](int i) { return halves(from + i * from_stride + half, from + (i + 4) * from_stride + half); };
        __m256 a = row(0), b = row(1), c = row(2), d = row(3);
        __m256d ab = _mm256_castps_pd(_mm256_unpacklo_ps(a, b)), cd = _mm256_castps_pd(_mm256_unpacklo_ps(c, d));
        __m256d ef = _mm256_castps_pd(_mm256_unpackhi_ps(a, b)), gh = _mm256_castps_pd(_mm256_unpackhi_ps(c, d));
        auto put = [&](int i, __m256d words) { _mm256_storeu_pd((double*)(to + (half + i) * to_stride), words); };
        put(0, _mm256_unpacklo_pd(ab, cd));
        put(1, _mm256_unpackhi_pd(ab, cd));
        put(2, _mm256_unpacklo_pd(ef, gh));
        put(3, _mm256_unpackhi_pd(ef, gh));
    }
}
#else
constexpr int kSide = 4;

typedef uint32_t Words __attribute__((vector_size(16)));

#if defined(__clang__) || __GNUC__ >= 12
#define BATON_PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define BATON_PICK(a, b, ...) __builtin_shuffle(a, b, Words{__VA_ARGS__})
#endif

BATON_INLINE void transpose_tile(const uint32_t* from, int from_stride, uint32_t* to, int to_stride) {
    Words a, b, c, d;
    memcpy(&a, from, 16), memcpy(&b, from + from_stride, 16);
    memcpy(&c, from + 2 * from_stride, 16), memcpy(&d, from + 3 * from_stride, 16);
    Words ab = BATON_PICK(a, b, 0, 4, 1, 5), cd = BATON_PICK(c, d, 0, 4, 1, 5);
    Words ef = BATON_PICK(a, b, 2, 6, 3, 7), gh = BATON_PICK(c, d, 2, 6, 3, 7);
    auto put = [&](int i, Words words) { memcpy(to + i * to_stride, &words, 16); };
    put(0, BATON_PICK(ab, cd, 0, 1, 4, 5));
    put(1, BATON_PICK(ab, cd, 2, 3, 6, 7));
    put(2, BATON_PICK(ef, gh, 0, 1, 4, 5));
    put(3, BATON_PICK(ef, gh, 2, 3, 6, 7));
}
#endif

// to[columns][rows] = from[rows][columns] transposed; words of 4 bytes, and so is the stride between rows of `from`.
void transpose(const uint32_t* from, int from_stride, uint32_t* to, int rows, int columns) {
    int whole_rows = rows / kSide * kSide, whole_columns = columns / kSide * kSide;
    for (int column = 0; column < whole_columns; column += kSide)
        for (int row = 0; row < whole_rows; row += kSide)
            transpose_tile(from + row * from_stride + column, from_stride, to + column * rows + row, rows);
    for (int row = 0; row < rows; ++row)
        for (int column = row < whole_rows ? whole_columns : 0; column < columns; ++column)
            to[column * rows + row] = from[row * from_stride + column];
}

// A head's page of one layer, keys or values, from its packed form to rows of head_dim and back. What comes out may be
// some of the tokens only: an even number, from an even one on.
struct Packed {
    int item_bytes;
    int dim;
    int padded;
    int key_words() const { return dim * item_bytes / 4; }
    bool plain_values() const { return item_bytes != 2 && dim == padded; }  // they are rows of head_dim as they are

    void keys_out(const char* page, char* rows, int token, int tokens) const {
        transpose((const uint32_t*)page + token, kPageTokens, (uint32_t*)rows, key_words(), tokens);
    }
    void keys_in(char* page, const char* rows) const {
        transpose((const uint32_t*)rows, key_words(), (uint32_t*)page, kPageTokens, key_words());
    }

    void values_out(const char* page, char* rows, int first, int tokens) const {
        if (item_bytes != 2) return copy_rows(page + first * padded * item_bytes, padded, rows, dim, tokens);
        for (int token = 0; token < tokens; token += 2) {
            const uint16_t* __restrict from = (const uint16_t*)page + (first + token) * padded;
            uint16_t* __restrict even = (uint16_t*)rows + token * dim;
            uint16_t* __restrict odd = even + dim;
            for (int i = 0; i < dim; ++i) even[i] = from[2 * i], odd[i] = from[2 * i + 1];
        }
    }
    void values_in(char* page, const char* rows) const {
        if (item_bytes != 2) return copy_rows(rows, dim, page, padded, kPageTokens);
        for (int token = 0; token < kPageTokens; token += 2) {
            uint16_t* __restrict to = (uint16_t*)page + token * padded;
            const uint16_t* __restrict even = (const uint16_t*)rows + token * dim;
            const uint16_t* __restrict odd = even + dim;
            for (int i = 0; i < dim; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
        }
    }
    void copy_rows(const char* from, int from_stride, char* to, int to_stride, int rows) const {
        for (int row = 0; row < rows; ++row)
            memcpy(to + row * to_stride * item_bytes, from + row * from_stride * item_bytes, size_t(dim) * item_bytes);
    }
};

// Copies a line past the processor's caches: what is stored is not read again soon, and lines stored whole need not be
// read before.
BATON_INLINE void stream_line(char* to, const char* from) {
#if defined(BATON_AVX512)
    _mm512_stream_si512((__m512i*)to, _mm512_load_si512(from));
#elif defined(__x86_64__)
    for (int i = 0; i < kLine; i += 16) _mm_stream_si128((__m128i*)(to + i), _mm_load_si128((const __m128i*)(from + i)));
#else
    memcpy(to, from, kLine);
#endif
}

// Whole lines: all of `to`, `from` and `bytes` are multiples of kLine. Meanwhile asks for as much from `next` on, line by
// line: all at once would wait for memory.
void stream(char* to, const char* from, int64_t bytes, const char* next) {
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(next + at, 0, 2), stream_line(to + at, from + at);
}

// The same, and takes the lines into `sum`: that costs little beside stores that wait for memory.
void stream(char* to, const char* from, int64_t bytes, const char* next, Checksum& sum) {
    sum.take(from, bytes, [=](const char* line) {
        __builtin_prefetch(next + (line - from), 0, 2);
        stream_line(to + (line - from), line);
    });
}

void finish_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// A slot of an arena: where a rank's cells and their checksums lie in it, and when what is copied counts (see kv_copy.h).
class Slot {
  public:
    Slot(const KvArena& arena, uint32_t number, int heads, int layers)
        : arena_(arena), number_(number), heads_(heads), layers_(layers) {}

    // The first layer's cell of a head; those of its other layers follow.
    char* payload(int head) const {
        return (char*)arena_.payloads + number_ * arena_.payload_stride + head * arena_.head_stride;
    }
    bool sound(int head, int layer, uint64_t sum) const { return sum == __atomic_load_n(checksums(head) + layer, __ATOMIC_ACQUIRE); }

    // `copy` writes all cells, and their checksums to sums[heads][layers].
    template <class Copy> KvCopied save(uint64_t wanted, Copy copy) const {
        if (generation() != wanted) return KvCopied::kOtherGeneration;
        std::vector<uint64_t> sums(size_t(heads_) * layers_);
        copy(sums.data());
        finish_streaming();
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (generation() == wanted) put_checksums(sums);
        if (generation() == wanted) return KvCopied::kAll;
        put_checksums(std::vector<uint64_t>(sums.size()));
        return KvCopied::kOtherGeneration;
    }

    // `copy` reads all cells until one is not sound, and answers whether all were.
    template <class Copy> KvCopied load(uint64_t wanted, Copy copy) const {
        if (generation() != wanted) return KvCopied::kOtherGeneration;
        bool sound = copy();
        finish_streaming();
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (generation() != wanted) return KvCopied::kOtherGeneration;
        return sound ? KvCopied::kAll : KvCopied::kOtherChecksum;
    }

  private:
    uint64_t* checksums(int head) const {
        return (uint64_t*)((char*)arena_.checksums + number_ * arena_.header_stride + head * arena_.checksum_stride);
    }
    uint64_t generation() const {
        return __atomic_load_n((uint64_t*)((char*)arena_.generations + number_ * arena_.header_stride), __ATOMIC_ACQUIRE);
    }
    void put_checksums(const std::vector<uint64_t>& sums) const {
        for (int head = 0; head < heads_; ++head)
            for (int layer = 0; layer < layers_; ++layer)
                __atomic_store_n(checksums(head) + layer, sums[size_t(head) * layers_ + layer], __ATOMIC_RELEASE);
    }

    const KvArena& arena_;
    const int64_t number_;
    const int heads_, layers_;
};

// A block and its slot.
struct Place {
    int block;
    Slot slot;
};

class Copier {
  public:
    explicit Copier(const KvMemory& memory)
        : memory_(memory),
          heads_(memory.kv_heads),
          packed_{memory.item_bytes, memory.head_dim, (memory.head_dim + kLanes - 1) / kLanes * kLanes},
          page_(int64_t(kPageTokens) * memory.head_dim * memory.item_bytes),
          cached_page_(int64_t(kPageTokens) * packed_.padded * memory.item_bytes),
          half_(page_ * memory.pages),
          cached_(cached_page_ * memory.pages),
          part_(page_ / 2 % kLine ? kPageTokens : kPageTokens / 2),
          staged_(new F[size_t(page_ + cached_page_ + 63) / 64]()) {}

    // Layer after layer: all heads of a block lie side by side there, and are read from the first to the last.
    KvCopied save(const Place& place, uint64_t generation, const Place& after) const {
        return place.slot.save(generation, [&](uint64_t* sums) {
            int pieces = memory_.layers * heads_;
            for (int piece = 0; piece < pieces; ++piece) {
                int next = piece + kAhead;
                sums[piece % heads_ * memory_.layers + piece / heads_] = save_piece(place, piece, next < pieces ? place : after, next % pieces);
            }
        });
    }

    KvCopied load(const Place& place, uint64_t generation) const {
        return place.slot.load(generation, [&] {
            bool sound = true;
            for (int head = 0; head < heads_ && sound; ++head) sound = load_head(place, head);
            return sound;
        });
    }

    void clear(int block) const {
        for (int layer = 0; layer < memory_.layers; ++layer)
            for (int head = 0; head < heads_; ++head) {
                memset(cache(memory_.keys[layer], block, head), 0, size_t(cached_));
                memset(cache(memory_.values[layer], block, head), 0, size_t(cached_));
            }
    }

  private:
    static constexpr int kAhead = 2;  // how many pieces memory is asked for before they are needed

    char* staged() const { return (char*)staged_.get(); }
    char* cache(void* of, int block, int head) const {
        return (char*)of + (int64_t(block) * heads_ + head) * cached_;
    }

    // Keys and values of one layer and head, a part of the tokens after the other: converting one part goes on while the
    // one before is stored. Returns their checksum.
    uint64_t save_piece(const Place& place, int piece, const Place& then, int next) const {
        Checksum sum(2 * half_);
        const char *keys = cached(memory_.keys, place, piece), *next_keys = cached(memory_.keys, then, next);
        const char *values = cached(memory_.values, place, piece), *next_values = cached(memory_.values, then, next);
        char* to = stored(place, piece);
        __builtin_prefetch(stored(then, next), 1, 2);  // for its page's address, whose look-up would hold up the stores
        const int64_t bytes = page_ * part_ / kPageTokens;
        const int tokens = memory_.pages * kPageTokens;
        for (int token = 0; token < tokens; token += part_, to += bytes, next_keys += bytes) {
            packed_.keys_out(keys + token / kPageTokens * cached_page_, staged(), token % kPageTokens, part_);
            stream(to, staged(), bytes, next_keys, sum);
        }
        for (int token = 0; token < tokens; token += part_, to += bytes, next_values += bytes) {
            const char* rows = packed_.plain_values() ? values + token * packed_.dim * packed_.item_bytes : staged();
            if (rows == staged())
                packed_.values_out(values + token / kPageTokens * cached_page_, staged(), token % kPageTokens, part_);
            stream(to, rows, bytes, next_values, sum);
        }
        return sum.value();
    }
    char* cached(void* const* of, const Place& place, int piece) const { return cache(of[piece / heads_], place.block, piece % heads_); }
    char* stored(const Place& place, int piece) const { return place.slot.payload(piece % heads_) + piece / heads_ * 2 * half_; }

    bool load_head(const Place& place, int head) const {
        bool sound = true;
        const char* from = place.slot.payload(head);
        for (int layer = 0; layer < memory_.layers && sound; ++layer, from += 2 * half_) {
            Checksum sum(2 * half_);
            sum.take(from, 2 * half_);
            sound = place.slot.sound(head, layer, sum.value());
            char *keys = cache(memory_.keys[layer], place.block, head), *values = cache(memory_.values[layer], place.block, head);
            const char* page = from;
            for (int i = 0; i < memory_.pages; ++i, page += page_, keys += cached_page_, values += cached_page_) {
                const char* rows = page + half_;
                packed_.keys_in(staged(), page);
                if (!packed_.plain_values()) packed_.values_in(staged() + page_, rows), rows = staged() + page_;
                stream(keys, staged(), page_, page + 2 * half_);
                stream(values, rows, cached_page_, page + 3 * half_);
            }
        }
        return sound;
    }

    const KvMemory& memory_;
    int heads_;
    Packed packed_;
    int64_t page_;         // bytes of one head's keys of one layer and page in a slot, and of its values
    int64_t cached_page_;  // the same in the caches
    int64_t half_;    // bytes of one head's keys of one layer in a slot, and of its values
    int64_t cached_;  // the same in the caches
    int part_;        // tokens converted at a time: whole lines
    std::unique_ptr<F[]> staged_;  // zeros where nothing is put: what pads values must be finite
};

// The cells of one block, in an arena's order.
class BlockCells {
  public:
    BlockCells(const KvCells& memory, int block)
        : memory_(memory), cells_((char*)memory.cells + int64_t(block) * memory.kv_heads * memory.layers * memory.cell_bytes) {}

    KvCopied save(const Slot& slot, uint64_t generation) const {
        return slot.save(generation, [&](uint64_t* sums) {
            for (int i = 0; i < count(); ++i) sums[i] = copy(stored(slot, i), cell(i), cell(i + 1));
        });
    }
    KvCopied load(const Slot& slot, uint64_t generation) const {
        return slot.load(generation, [&] {
            bool sound = true;
            for (int i = 0; i < count() && sound; ++i) {
                uint64_t sum = copy(cell(i), stored(slot, i), stored(slot, std::min(i + 1, count() - 1)));
                sound = slot.sound(i / memory_.layers, i % memory_.layers, sum);
            }
            return sound;
        });
    }

  private:
    int count() const { return memory_.kv_heads * memory_.layers; }
    char* cell(int i) const { return cells_ + i * memory_.cell_bytes; }
    char* stored(const Slot& slot, int i) const { return slot.payload(i / memory_.layers) + i % memory_.layers * memory_.cell_bytes; }
    uint64_t copy(char* to, const char* from, const char* next) const {
        Checksum sum(memory_.cell_bytes);
        stream(to, from, memory_.cell_bytes, next, sum);
        return sum.value();
    }

    const KvCells& memory_;
    char* const cells_;
};

// The blocks in turn, until one is not copied whole.
template <class Copy> KvCopied each_block(int count, Copy copy) {
    KvCopied copied = KvCopied::kAll;
    for (int i = 0; i < count && copied == KvCopied::kAll; ++i) copied = copy(i);
    return copied;
}

}  // namespace

KvCopied save_cells(const KvCells& memory, const KvArena& arena, const KvBlocks& what) {
    return each_block(what.count, [&](int i) {
        return BlockCells(memory, i).save({arena, what.slots[i], memory.kv_heads, memory.layers}, what.generations[i]);
    });
}

KvCopied load_cells(const KvCells& memory, const KvArena& arena, const KvBlocks& what) {
    return each_block(what.count, [&](int i) {
        return BlockCells(memory, i).load({arena, what.slots[i], memory.kv_heads, memory.layers}, what.generations[i]);
    });
}

KvCopied save_blocks(const KvMemory& memory, const KvArena& arena, const KvBlocks& what) {
    Copier copier(memory);
    auto place = [&](int i) { return Place{what.blocks[i], {arena, what.slots[i], memory.kv_heads, memory.layers}}; };
    return each_block(what.count, [&](int i) {
        return copier.save(place(i), what.generations[i], place(std::min(i + 1, what.count - 1)));
    });
}

KvCopied load_blocks(const KvMemory& memory, const KvArena& arena, const KvBlocks& what) {
    Copier copier(memory);
    int at = 0;
    KvCopied copied = each_block(what.count, [&](int i) {
        at = i;
        return copier.load({what.blocks[i], {arena, what.slots[i], memory.kv_heads, memory.layers}}, what.generations[i]);
    });
    if (copied != KvCopied::kAll)
        for (int i = at; i < what.count; ++i) copier.clear(what.blocks[i]);
    return copied;
}
