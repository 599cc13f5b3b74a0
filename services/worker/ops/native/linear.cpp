// Matrix products: cuts them in blocks for the caches and the threads, and finishes the sums.
#include "linear.h"

#include <algorithm>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "codes.h"
#include "paired_segments.h"
#include "pairs.h"
#include "quad.h"
#include "row_copies.h"
#include "segments.h"
#include "sums.h"
#include "thread_memory.h"
#include "tiled.h"
#include "tiled_segments.h"

namespace {

int steps_of(Number number, int in) { return number == Number::kHalf ? (in + 1) / 2 : in; }
int quads_of(int in) { return (in + Quad::kItems - 1) / Quad::kItems; }
// Codes are multiplied as bf16, which holds their numbers exactly, where activations are bf16 and one instruction takes
// pairs of them: AVX2 would need more instructions than for floats.
#if defined(BATON_BF16)
constexpr bool kHalfCodes = true;
#else
constexpr bool kHalfCodes = false;
#endif
Number multiplied_as(const Linear& linear) {
    return linear.code == Code::kPlain || kHalfCodes ? linear.number : Number::kSingle;
}
int steps_of(const Linear& linear) {
    return in_whole_numbers(linear.code) ? quads_of(linear.in) : steps_of(multiplied_as(linear), linear.in);
}
int groups_of(int out) { return (out + kGroupOutputs - 1) / kGroupOutputs; }

// Rows of x as tiles read them: of the weights' kind, and not a multiple of 1 kB apart, which would put them all into
// the same few sets of the cache.
template <class Kind> struct Copied {
    using Item = typename Kind::Item;
    static constexpr int kStride = (kBlockSteps + 16) * Kind::kItems;
    alignas(64) Item items[kTileRows * kStride];
};

// Weights of a block that codes became.
template <class Kind> struct BlockNumbers {
    alignas(64) typename Kind::Item items[kBlockSteps * kGroupOutputs * Kind::kItems];
};

// What a tile's sums begin with: those of the steps before, or what the sum of each row's items makes them, where items are
// digits.
struct Start {
    bool resumed;
    const int32_t* row_sums;
};

// The weights of a block of steps as they are multiplied: numbers where they lie, or where codes were turned into them.
template <class Kind> struct Numbers {
    using Item = typename Kind::Item;
    static constexpr int kStep = kStepBytes / int(sizeof(Item));
    template <int R> static constexpr int kColumns = kTileColumns;
    const Item* at;

    template <int R, int C>
    BATON_INLINE void multiply(const Item* x, int64_t stride, int column, int steps, Ahead ahead, const Start& start, Sums<R, C>& sums) const {
        const Item* w = at + column * (kStep / kGroupColumns);
        if (start.resumed) multiply_panel<Kind, R, C, kStep, true>(x, stride, w, steps, ahead, start.row_sums, sums.at);
        else multiply_panel<Kind, R, C, kStep, false>(x, stride, w, steps, ahead, start.row_sums, sums.at);
    }
    Numbers from(int step) const { return {at + size_t(step) * kStep}; }
};
// Codes, turned into numbers in registers.
template <class Kind, Code code> struct Coded {
    using Item = typename Kind::Item;
    // One row leaves registers for the sums of a whole group: its codes are read in the order they lie in.
    template <int R> static constexpr int kColumns = R == 1 ? kGroupColumns : kTileColumns;
    const uint8_t* at;
    const uint8_t* zeros;

    template <int R, int C>
    BATON_INLINE void multiply(const Item* x, int64_t stride, int column, int steps, Ahead, const Start& start, Sums<R, C>& sums) const {
        if (!start.resumed) clear(sums);
        multiply_codes<Kind, code, R, C>(x, stride, at + column * code_bytes(code), zeros ? zeros + column * kLanes : nullptr, steps, sums.at);
    }
    Coded from(int step) const { return {at + size_t(step * Kind::kItems / kCodeInputs) * kGroupColumns * code_bytes(code), zeros}; }
};

// What belongs to the codes of one block of steps of a group: [scales of the block][64].
struct Scales {
    const float* scales;
    const uint8_t* zeros;
    int steps;  // that share one; 0: the sums of all are scaled
    const float* offsets = nullptr;

    const uint8_t* zeros_of(int segment) const { return zeros ? zeros + segment * kGroupOutputs : nullptr; }
};

template <int R, int C> BATON_INLINE void scale(const float* scales, Sums<R, C>& sums) {
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) sums.at[r][c] = sums.at[r][c] * load(scales + c * kLanes);
}

template <int R, int C> BATON_INLINE void add_scaled(const float* scales, const Sums<R, C>& part, Sums<R, C>& sums) {
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) sums.at[r][c] = fma(part.at[r][c], load(scales + c * kLanes), sums.at[r][c]);
}

// sums[r][c] += the sum of row r's inputs of a segment times the segment's offsets.
template <int R, int C> BATON_INLINE void add_offsets(const Product& p, int64_t row, int segment, const float* offsets, Sums<R, C>& sums) {
    int segments = p.linear.in / p.linear.scaled;
    for (int r = 0; r < R; ++r) {
        F sum = all(p.group_sums[(row + r) * segments + segment]);
        for (int c = 0; c < C; ++c) sums.at[r][c] = fma(sum, load(offsets + c * kLanes), sums.at[r][c]);
    }
}

template <class Kind> Coded<Kind, Code::kInt4> with_zeros(Coded<Kind, Code::kInt4> weights, const uint8_t* zeros) { return {weights.at, zeros}; }
template <class Weights> Weights with_zeros(Weights weights, const uint8_t*) { return weights; }

// One tile over one block of steps; sums wait in `kept` [rows][kGroupColumns] for the next one.
template <class Kind, int R, class Weights>
void run_tile(const Product& p, const Block& block, const Weights& weights, const Scales& scaling, const typename Kind::Item* x,
              int64_t stride, int row, int first, int count, Ahead ahead, F* kept) {
    constexpr int C = Weights::template kColumns<R>;
    bool last = first + count == p.steps;
    for (int column = 0; column < kGroupColumns; column += C) {
        Sums<R, C> sums;
        F* part = kept + row * p.digits() * kGroupColumns + column;
        if (first) resume(part, sums);
        Start start{first > 0, p.rounded ? p.rounded->sums(p.first + block.row + row) : nullptr};
        int output = block.group * kGroupOutputs + column * kLanes;
        if (last) expect<Kind, R, C>(p, block, row, output);
        Ahead fetched = column ? Ahead{nullptr, 0} : ahead;
        if (!scaling.steps) {
            weights.template multiply<R, C>(x, stride, column, count, fetched, start, sums);
            if (scaling.scales && last) scale(scaling.scales + column * kLanes, sums);
        } else {
            if (!first) clear(sums);
            for (int step = 0; step < count; step += scaling.steps) {
                int segment = step / scaling.steps;
                Sums<R, C> scaled;
                auto own = with_zeros(weights.from(step), scaling.zeros_of(segment));
                own.template multiply<R, C>(x + step * Kind::kItems, stride, column, scaling.steps, fetched, {false, nullptr}, scaled);
                int at = segment * kGroupOutputs + column * kLanes;
                add_scaled(scaling.scales + at, scaled, sums);
                if (scaling.offsets)
                    add_offsets(p, p.first + block.row + row, first / scaling.steps + segment, scaling.offsets + at, sums);
                fetched = {nullptr, 0};
            }
        }
        if (!last) {
            keep(part, sums);
        } else if constexpr (kRounds<Kind>) {
            int64_t first_row = p.first + block.row + row;
            if (p.digits() == 1) finish<Kind>(p, block, row, column, numbers_of<1, false>(p, first_row, p.linear.scales + output, sums));
            else if constexpr (R % 2 == 0) finish<Kind>(p, block, row, column, numbers_of<2, false>(p, first_row, p.linear.scales + output, sums));
        } else {
            finish<Kind>(p, block, row, column, sums);
        }
    }
}

template <class Kind, class Weights>
using TileCall = void (*)(const Product&, const Block&, const Weights&, const Scales&, const typename Kind::Item*, int64_t, int, int, int,
                          Ahead, F*);

template <class Kind, class Weights, int R = 1> TileCall<Kind, Weights> tile_of(int rows) {
    if constexpr (R > kTileRows) return nullptr;
    else return rows == R ? &run_tile<Kind, R, Weights> : tile_of<Kind, Weights, R + 1>(rows);
}

// The tiles of a block of rows over one block of steps.
struct Steps {
    int first;
    int count;
    int tiles;
    Ahead ahead;  // of all tiles
};

template <class Kind, class Weights>
void run_tiles(const Product& p, const Block& block, const Steps& steps, const Weights& weights, const Scales& scaling, F* kept) {
    using Item = typename Kind::Item;
    int first = steps.first, count = steps.count, tiles = steps.tiles, lines = steps.ahead.lines;
    for (int tile = 0; tile < tiles; ++tile) {
        int from = block.rows * tile / tiles, to = block.rows * (tile + 1) / tiles;
        Ahead ahead{steps.ahead.from + tile * lines * 64 * (count / kChunk), lines};
        if constexpr (kRounds<Kind>) {
            auto call = tile_of<Kind, Weights>((to - from) * p.digits());
            const Item* x = p.rounded->items(p.first + block.row + from) + first * Kind::kItems;
            call(p, block, weights, scaling, x, p.rounded->stride(), from, first, count, ahead, kept);
        } else {
            auto call = tile_of<Kind, Weights>(to - from);
            if (readable<Kind>(p)) {
                auto* x = (const Item*)p.x.data + (block.row + from) * p.x.stride + first * Kind::kItems;
                call(p, block, weights, scaling, x, p.x.stride, from, first, count, ahead, kept);
                continue;
            }
            auto& copied = thread_memory<Copied<Kind>>();
            int begin = first * Kind::kItems, padded = count * Kind::kItems;
            int items = std::min(padded, p.linear.in - begin);
            if (p.linear.code != Code::kPlain) padded = (padded + kCodeInputs - 1) / kCodeInputs * kCodeInputs;
            for (int r = from; r < to; ++r)
                copy_row(copied.items + (r - from) * copied.kStride, p.x, block.row + r, begin, items, padded);
            call(p, block, weights, scaling, copied.items, copied.kStride, from, first, count, ahead, kept);
        }
    }
}

template <class Kind> void run_block(const Product& p, const Block& block) {
    using Item = typename Kind::Item;
    int tiles = tiles_of_rows(block.rows, p.digits());
    F kept[kBlockRows * kGroupColumns];
    const char* group = (const char*)p.linear.groups + size_t(block.group) * p.steps * kStepBytes;
    for (int first = 0; first < p.steps; first += kBlockSteps) {
        int count = std::min(kBlockSteps, p.steps - first);
        // A lone tile reads its weights from memory itself: nothing is gained by asking twice.
        int lines = tiles > 1 ? kChunk * kGroupColumns / tiles + 1 : 0;
        Numbers<Kind> weights{(const Item*)(group + size_t(first) * kStepBytes)};
        Steps steps{first, count, tiles, {group + size_t(first + count) * kStepBytes, lines}};
        run_tiles<Kind>(p, block, steps, weights, {nullptr, nullptr, 0}, kept);
    }
}

// So many tiles read codes themselves: one, as nothing else is read; with AVX2's small tiles two of int8, of which each
// makes floats in two instructions, faster than they are read back from the second-level cache.
template <Code code> constexpr int kReadingTiles = code == Code::kInt8 && kTileRows <= 3 ? 2 : 1;

// The same for codes: for more tiles than that they are turned into numbers once.
template <class Kind, Code code> void run_coded_block(const Product& p, const Block& block) {
    using Item = typename Kind::Item;
    int tiles = tiles_of_rows(block.rows, 1), scaled = p.linear.scaled / Kind::kItems;
    F kept[kBlockRows * kGroupColumns];
    size_t pairs = size_t(p.linear.in + kCodeInputs - 1) / kCodeInputs, pair_bytes = kGroupColumns * code_bytes(code);
    auto* group = (const uint8_t*)p.linear.groups + block.group * pairs * pair_bytes;
    size_t segments = scaled ? size_t(p.steps / scaled) : 1;
    for (int first = 0; first < p.steps; first += kBlockSteps) {
        int count = std::min(kBlockSteps, p.steps - first);
        const uint8_t* codes = group + size_t(first * Kind::kItems / kCodeInputs) * pair_bytes;
        size_t at = (block.group * segments + (scaled ? first / scaled : 0)) * kGroupOutputs;
        Scales scaling{p.linear.scales + at, at_or_null(p.linear.zeros, at), scaled, at_or_null(p.linear.offsets, at)};
        // What is turned into numbers next comes from memory beside the products of what was.
        constexpr int kLines = kChunk * Kind::kItems * kGroupColumns * code_bytes(code) / kCodeInputs / 64;
        Steps steps{first, count, tiles, {(const char*)codes + size_t(count * Kind::kItems / kCodeInputs) * pair_bytes, kLines / tiles + 1}};
        if (tiles <= kReadingTiles<code>) {
            run_tiles<Kind>(p, block, steps, Coded<Kind, code>{codes, scaling.zeros}, scaling, kept);
            continue;
        }
        Item* numbers = thread_memory<BlockNumbers<Kind>>().items;
        for (int step = 0, part = scaled ? scaled : count; step < count; step += part)
            decode_steps<Kind, code>(codes + size_t(step * Kind::kItems / kCodeInputs) * pair_bytes, scaling.zeros_of(scaled ? step / scaled : 0), part,
                               numbers + step * kGroupOutputs * Kind::kItems);
        run_tiles<Kind>(p, block, steps, Numbers<Kind>{numbers}, scaling, kept);
    }
}

bool is_gated(const Product& p) { return p.target.kind == Out::kGated; }
// 64 rows of two digits are one block, as 64 of bf16 are, so that weights of a byte come from memory once: 0.4 to 1% less time
// than as two, where half bytes took 12% more (Zen 4). More rows of numbers in a block were not faster (ADR 158).
constexpr int kNumberRows = 96;
int row_blocks_of(const Product& p) {
    int most = p.linear.code == Code::kQuad && p.digits() == 2 && !p.linear.tiled ? kBlockRows / 2 : kNumberRows / p.digits();
    return (p.x.count + most - 1) / most;
}
int column_blocks_of(const Product& p) { return groups_of(p.linear.out) / (is_gated(p) ? 2 : 1); }
// So many blocks of rows take turns with a group. Tiles are faster than weights come from memory: these are read once for as
// many rows as half of the second-level cache holds.
constexpr int64_t kTurnBytes = 1 << 20;
int turns_of(const Product& p) {
    if (!p.linear.tiled) return 1;
    int64_t rows = (p.x.count + row_blocks_of(p) - 1) / row_blocks_of(p), bytes = rows * p.linear.in * int64_t(sizeof(Bf16));
    return int(std::clamp<int64_t>(kTurnBytes / bytes, 1, row_blocks_of(p)));
}
int tiles_of(const Product& p) { return row_blocks_of(p) * column_blocks_of(p); }

// One of a product's `tiles_of`.
template <class Run> void multiply_tile(const Product& p, int tile, Run run) {
    // Group after group for the same rows: those stay in cache, and the weights come in the order they lie in.
    int row_blocks = row_blocks_of(p), groups = column_blocks_of(p), most = turns_of(p), first = tile / (most * groups) * most;
    int turns = std::min(most, row_blocks - first), left = tile - first * groups, group = left / turns, turn = left % turns;
    int part = first + turn;
    int row = int(int64_t(p.x.count) * part / row_blocks), end = int(int64_t(p.x.count) * (part + 1) / row_blocks);
    if (!is_gated(p)) return run(p, {row, end - row, group, nullptr, nullptr, turn, turns});
    F gates[kBlockRows * kGroupColumns];
    run(p, {row, end - row, group, nullptr, gates, turn, turns});
    run(p, {row, end - row, groups + group, gates, nullptr, turn, turns});
}

using BlockRun = void (*)(const Product&, const Block&);

#if defined(BATON_TILES)
// Whether bytes are multiplied in tiles: both ways give the same bits, and few rows are one register tile, which reads weights
// in the order they lie in.
bool tiles_bytes(const Product& p) { return p.linear.tiled && p.x.count * p.digits() > kTileRows; }
#endif

// What multiplies plain numbers, or bytes with one scale for all of an output's inputs.
template <class Kind> BlockRun block_run_of(const Product& p) {
#if defined(BATON_VNNI)
    if constexpr (kRounds<Kind>)
        if (p.rounded->paired()) return run_paired_block;
#endif
#if defined(BATON_TILES)
    if constexpr (!std::is_same_v<Kind, Single>)
        if (kRounds<Kind> ? tiles_bytes(p) : p.linear.tiled) return run_tiled_block<Kind>;
#endif
    return run_block<Kind>;
}

// What multiplies bytes and half bytes where groups of inputs share a scale.
template <Code code> BlockRun segment_run_of(const Product& p) {
#if defined(BATON_VNNI)
    if constexpr (code == Code::kNibble)
        if (p.rounded->paired()) return run_paired_segments<code>;
#endif
#if defined(BATON_TILES)
    if (tiles_bytes(p)) return run_tiled_segments<code>;
#endif
    return run_segmented_block<code>;
}

// Only what `multiplied_as` may ask for: each other kind would be as much to compile as those that run.
template <class Kind> void multiply_tile_as(const Product& p, int tile) {
    if (p.linear.code == Code::kQuad) return multiply_tile(p, tile, p.linear.scaled ? segment_run_of<Code::kQuad>(p) : block_run_of<Quad>(p));
    if (p.linear.code == Code::kNibble) return multiply_tile(p, tile, segment_run_of<Code::kNibble>(p));
    if constexpr (kHalfCodes || std::is_same_v<Kind, Single>) {
        if (p.linear.code == Code::kInt8) return multiply_tile(p, tile, run_coded_block<Kind, Code::kInt8>);
        if (p.linear.code == Code::kInt4) return multiply_tile(p, tile, run_coded_block<Kind, Code::kInt4>);
        if (p.linear.code == Code::kFp8) return multiply_tile(p, tile, run_coded_block<Kind, Code::kFp8>);
    }
    multiply_tile(p, tile, block_run_of<Kind>(p));
}

void multiply_tile_of(const Product& p, int tile) {
    if (multiplied_as(p.linear) == Number::kHalf) multiply_tile_as<Half>(p, tile);
    else multiply_tile_as<Single>(p, tile);
}

const void* row_at(const void* data, int64_t row, int64_t stride, Number number) {
    return (const char*)data + row * stride * (number == Number::kHalf ? 2 : 4);
}

template <class Item> void pack_group(const Item* weight, int out, int in, int group, Item* to, Item flipped = 0) {
    constexpr int kItems = 4 / int(sizeof(Item));
    int padded = (in + kItems - 1) / kItems * kItems;
    for (int lane = 0; lane < kGroupOutputs; ++lane) {
        int64_t output = int64_t(group) * kGroupOutputs + lane;
        for (int i = 0; i < padded; ++i) {
            Item item = output < out && i < in ? weight[output * in + i] : Item(0);
            to[(i / kItems * kGroupOutputs + lane) * kItems + i % kItems] = item ^ flipped;
        }
    }
}

// Puts the code of an input and an output into a group of kNibble whose codes are 0.
void put_nibble(uint8_t* group, int input, int output, uint8_t value) {
    int step = input / Quad::kItems, column = output / kLanes;
    int at = (step * kGroupColumns / 2 + column / 2) * 64 + output % kLanes * Quad::kItems + input % Quad::kItems;
    group[at] |= uint8_t(column % 2 ? value << 4 : value);
}

}  // namespace

int64_t packed_bytes(Number number, int out, int in) { return int64_t(groups_of(out)) * steps_of(number, in) * kStepBytes; }

void pack(Pool& pool, Number number, const void* weight, int out, int in, void* groups) {
    int64_t each = packed_bytes(number, kGroupOutputs, in);
    pool.run(groups_of(out), [&](int group, int) {
        void* to = (char*)groups + group * each;
        if (number == Number::kHalf) pack_group((const Bf16*)weight, out, in, group, (Bf16*)to);
        else pack_group((const uint32_t*)weight, out, in, group, (uint32_t*)to);
    });
}

int64_t coded_bytes(Code code, int out, int in) {
    if (in_whole_numbers(code)) return int64_t(groups_of(out)) * quads_of(in) * segment_step_bytes(code);
    return int64_t(groups_of(out)) * ((in + kCodeInputs - 1) / kCodeInputs) * kGroupColumns * code_bytes(code);
}

void pack_codes(Pool& pool, Code code, const uint8_t* codes, int out, int in, void* groups) {
    int64_t each = coded_bytes(code, kGroupOutputs, in);
    pool.run(groups_of(out), [&](int group, int) {
        auto* to = (uint8_t*)groups + group * each;
        // Of two's complement, the highest bit turned over adds 128.
        if (code == Code::kQuad) return pack_group(codes, out, in, group, to, uint8_t(0x80));
        memset(to, 0, size_t(each));
        int outputs = std::min(kGroupOutputs, out - group * kGroupOutputs);
        for (int lane = 0; lane < outputs; ++lane) {
            const uint8_t* row = codes + (int64_t(group) * kGroupOutputs + lane) * in;
            for (int i = 0; i < in; ++i) code == Code::kNibble ? put_nibble(to, i, lane, row[i]) : put_code(code, to, i, lane, row[i]);
        }
    });
}

namespace {

// Of so many rows on two digits are multiplied as one number: both give the same bits. Weights are multiplied in pairs once for
// a block of rows, which fewer do not pay for. Bytes whose groups share scales took 2 to 18% longer so (Zen 4, loaded).
constexpr int kPairsFrom = 24;
#if defined(BATON_VNNI)
// AMD's processors add beside multiplications; Intel's servers do so in place of one, where pairs would take half as long again.
bool adds_beside_products() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && ebx == signature_AMD_ebx;
}
bool in_pairs(const Product& p) {
    static const bool pays = adds_beside_products();
    bool known = p.linear.code == Code::kNibble || !p.linear.scaled;
    return pays && known && p.x.count >= kPairsFrom && p.linear.digits == 2 && !p.linear.tiled;
}
#else
bool in_pairs(const Product&) { return false; }
#endif

// Of the thread that asks, until its next product; null where rows are not rounded.
DigitRows* digit_rows(const Linear& linear) {
    static thread_local DigitRows rows;
    return in_whole_numbers(linear.code) ? &rows : nullptr;
}

// Puts the first row of each tile of pairs behind the others.
void add_paired_tiles(const Product& p, std::vector<int>& to) {
    for (int part = 0, blocks = row_blocks_of(p), row = 0; part < blocks; ++part) {
        int end = int(int64_t(p.x.count) * (part + 1) / blocks), tiles = tiles_of_rows(end - row, 1, kPairedRows);
        for (int tile = 0; tile < tiles; ++tile) to.push_back(int(p.first) + row + (end - row) * tile / tiles);
        row = end;
    }
}

// Rounds the rows of some products, if they are to be: linears are alike, and their rows follow each other.
void round_rows(Pool& pool, const Rows& x, DigitRows* rows, const Product* products, size_t count) {
    static thread_local std::vector<int> tiles;
    if (!rows || !count) return;
    const Linear& linear = products->linear;
    bool paired = std::all_of(products, products + count, in_pairs);
    tiles.clear();
    for (size_t i = 0; paired && i < count; ++i) add_paired_tiles(products[i], tiles);
    // Rows that nobody multiplies are no part of a tile that somebody does.
    const Product& last = products[count - 1];
    if (paired && tiles[0]) tiles.insert(tiles.begin(), 0);
    tiles.push_back(int(last.first) + last.x.count);
    if (tiles.back() < x.count) tiles.push_back(x.count);
    // Half bytes are multiplied less 128, and stand for themselves less 8, if there are no zeros.
    int lifted = linear.code == Code::kQuad ? 0 : linear.zeros ? 128 : 120;
    rows->round(pool, x, linear.in, {linear.digits, linear.scaled, paired ? &tiles : nullptr, lifted});
}

// The sum of `count` inputs of a row as Kind multiplies them.
template <class Kind> float sum_of(const Rows& x, int row, int first, int count) {
    typename Kind::Item items[kMaxScaled];
    copy_row(items, x, row, first, count, count);
    F sum = zeros();
    for (int i = 0; i < count; i += kLanes) sum = sum + load(items + i);
    float lanes[kLanes], whole = 0.0f;
    store(lanes, sum);
    for (float lane : lanes) whole += lane;
    return whole;
}

// As `digit_rows`: what Product::group_sums are.
const float* group_sums_of(Pool& pool, const Rows& x, const Linear& linear) {
    static thread_local std::vector<float> sums;
    if (!linear.offsets || in_whole_numbers(linear.code)) return nullptr;
    int segments = linear.in / linear.scaled;
    sums.resize(std::max(sums.size(), size_t(x.count) * segments));
    float* to = sums.data();  // the helpers have vectors of their own
    auto sum = multiplied_as(linear) == Number::kHalf ? sum_of<Half> : sum_of<Single>;
    pool.run(x.count, [&](int row, int) {
        for (int i = 0; i < segments; ++i) to[int64_t(row) * segments + i] = sum(x, row, i * linear.scaled, linear.scaled);
    });
    return to;
}

}  // namespace

void multiply(Pool& pool, const Rows& x, const Linear& linear, const Target& target) {
    DigitRows* rounded = digit_rows(linear);
    Product product{x, linear, target, steps_of(linear), rounded, 0, group_sums_of(pool, x, linear)};
    round_rows(pool, x, rounded, &product, 1);
    pool.run(tiles_of(product), [&](int tile, int) { multiply_tile_of(product, tile); });
}

void multiply_each(Pool& pool, const Rows& x, const Linear* linears, const int64_t* starts, int count, const Target& target) {
    std::vector<Product> products;
    std::vector<int> first{0};  // tile of each product, and behind the last
    Number written = target.kind == Out::kGated ? linears->number : Number::kSingle;
    DigitRows* rounded = digit_rows(*linears);
    const float* group_sums = group_sums_of(pool, x, *linears);
    for (int i = 0; i < count; ++i) {
        int rows = int(starts[i + 1] - starts[i]);
        if (!rows) continue;
        Rows own{row_at(x.data, starts[i], x.stride, x.number), x.number, x.stride, rows};
        Target to = target;
        to.data = (void*)row_at(target.data, starts[i], target.stride, written);
        products.push_back({own, linears[i], to, steps_of(linears[i]), rounded, starts[i], group_sums});
        first.push_back(first.back() + tiles_of(products.back()));
    }
    round_rows(pool, x, rounded, products.data(), products.size());
    pool.run(first.back(), [&](int tile, int) {
        auto product = std::upper_bound(first.begin(), first.end(), tile) - first.begin() - 1;
        multiply_tile_of(products[product], tile - first[product]);
    });
}
