// The tile instructions that Baton's kernels use, for processors without AMX: each raises SIGILL, whose handler decodes it and
// does what Intel's manual (SDM, volume 2) says of it. So tests run the machine code that is meant for Xeons as it is.
#include <immintrin.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kMaxRowBytes = 64;

struct Tile {
    int rows, row_bytes;
    alignas(64) uint8_t bytes[kMaxRows][kMaxRowBytes];

    void clear() { memset(bytes, 0, sizeof bytes); }
};

thread_local bool shaped = false;
thread_local Tile tiles[kTiles];

// A VEX-encoded instruction of the map 0F38 (SDM, volume 2, chapter 2.3).
struct Instruction {
    int prefix;  // pp: 0 none, 1 66, 2 F3, 3 F2
    int opcode;
    bool memory;
    int reg, rm, vvvv;
    char* base;      // of memory
    int64_t stride;  // the index register's
    int length;
};

int64_t register_at(const gregset_t& registers, int number) {
    constexpr int kNames[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return registers[kNames[number]];
}

bool decode(const gregset_t& registers, Instruction& made) {
    auto* at = (const uint8_t*)registers[REG_RIP];
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || at[2] & 0x84) return false;
    int x_bit = at[1] & 0x40 ? 0 : 8, b_bit = at[1] & 0x20 ? 0 : 8;
    made.prefix = at[2] & 3;
    made.vvvv = ~(at[2] >> 3) & 15;
    made.opcode = at[3];
    int mod = at[4] >> 6;
    made.reg = at[4] >> 3 & 7;
    made.rm = at[4] & 7;
    made.memory = mod != 3;
    made.length = 5;
    if (!made.memory) return true;
    int base = made.rm | b_bit;
    int64_t address = 0;
    made.stride = 0;
    if (made.rm == 4) {
        int sib = at[made.length++], index = (sib >> 3 & 7) | x_bit;
        if (index != 4) made.stride = register_at(registers, index) << (sib >> 6);
        base = (sib & 7) | b_bit;
        if ((sib & 7) == 5 && mod == 0) return false;  // without a base: none of ours
    } else if (made.rm == 5 && mod == 0) {
        return false;  // relative to the instruction: none of ours
    }
    address = register_at(registers, base);
    int32_t far = 0;
    if (mod == 1) address += int8_t(at[made.length]), made.length += 1;
    if (mod == 2) memcpy(&far, at + made.length, 4), address += far, made.length += 4;
    made.base = (char*)address;
    return true;
}

bool shape(const uint8_t* config) {
    if (config[0] != 1 || config[1] != 0) return false;
    for (int i = 2; i < 16; ++i)
        if (config[i]) return false;
    for (int i = 0; i < kTiles; ++i) {
        uint16_t row_bytes;
        memcpy(&row_bytes, config + 16 + 2 * i, 2);
        int rows = config[48 + i];
        if (row_bytes > kMaxRowBytes || row_bytes % 4 || rows > kMaxRows || !rows != !row_bytes) return false;
        tiles[i].rows = rows, tiles[i].row_bytes = row_bytes;
        tiles[i].clear();
    }
    return shaped = true;
}

// As the manual has it: tiles are three, and their shapes are those of a product.
bool multipliable(const Tile& sum, const Tile& x, const Tile& w) {
    return &sum != &x && &x != &w && &sum != &w && sum.rows == x.rows && sum.row_bytes == w.row_bytes && x.row_bytes == 4 * w.rows;
}

float float_of(uint16_t half) {
    uint32_t bits = uint32_t(half) << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

// TDPBF16PS: both of a pair's products are added up apart, by fused multiplications rounded to the nearest; numbers below the
// least normal one count as zeros (DAZ and FTZ, which the handler has set).
void add_halves(Tile& sum, const Tile& x, const Tile& w) {
    for (int m = 0; m < sum.rows; ++m) {
        alignas(64) float even[16] = {}, odd[16] = {}, sums[16];
        auto* pairs = (const uint16_t*)x.bytes[m];
        for (int k = 0; k < w.rows; ++k) {
            auto* weights = (const uint16_t*)w.bytes[k];
            for (int n = 0; n < 16; ++n) {
                even[n] = __builtin_fmaf(float_of(pairs[2 * k]), float_of(weights[2 * n]), even[n]);
                odd[n] = __builtin_fmaf(float_of(pairs[2 * k + 1]), float_of(weights[2 * n + 1]), odd[n]);
            }
        }
        memcpy(sums, sum.bytes[m], sizeof sums);
        for (int n = 0; n < 16; ++n) sums[n] = sums[n] + (even[n] + odd[n]);
        memcpy(sum.bytes[m], sums, size_t(sum.row_bytes));
    }
}

// TDPBSUD: signed bytes of x times unsigned ones of w, in 32 bits.
void add_bytes(Tile& sum, const Tile& x, const Tile& w) {
    for (int m = 0; m < sum.rows; ++m) {
        uint32_t sums[16];
        memcpy(sums, sum.bytes[m], sizeof sums);
        for (int k = 0; k < w.rows; ++k)
            for (int n = 0; n < 16; ++n)
                for (int i = 0; i < 4; ++i) sums[n] += uint32_t(int8_t(x.bytes[m][4 * k + i]) * int(w.bytes[k][4 * n + i]));
        memcpy(sum.bytes[m], sums, size_t(sum.row_bytes));
    }
}

bool multiply(const Instruction& what) {
    if (what.memory || what.vvvv >= kTiles) return false;
    Tile &sum = tiles[what.reg], &x = tiles[what.rm], &w = tiles[what.vvvv];
    if (!multipliable(sum, x, w)) return false;
    if (what.opcode == 0x5c) add_halves(sum, x, w);
    else add_bytes(sum, x, w);
    return true;
}

bool load(const Instruction& what) {
    Tile& tile = tiles[what.reg];
    tile.clear();
    for (int row = 0; row < tile.rows; ++row) memcpy(tile.bytes[row], what.base + row * what.stride, size_t(tile.row_bytes));
    return tile.rows;
}

bool store(const Instruction& what) {
    const Tile& tile = tiles[what.reg];
    for (int row = 0; row < tile.rows; ++row) memcpy(what.base + row * what.stride, tile.bytes[row], size_t(tile.row_bytes));
    return tile.rows;
}

// False for what is none of these instructions, or what a processor would refuse.
bool execute(const Instruction& what) {
    enum { kNone = 0, kF3 = 2, kF2 = 3 };
    if (what.opcode == 0x49 && what.prefix == kNone && what.memory) return shape((const uint8_t*)what.base);
    if (what.opcode == 0x49 && what.prefix == kNone) {
        shaped = false;
        return true;
    }
    if (!shaped) return false;
    if (what.opcode == 0x49 && what.prefix == kF2 && !what.memory) {
        tiles[what.reg].clear();
        return tiles[what.reg].rows;
    }
    if (what.opcode == 0x4b && what.prefix == kF2 && what.memory) return load(what);
    if (what.opcode == 0x4b && what.prefix == kF3 && what.memory) return store(what);
    if ((what.opcode == 0x5c || what.opcode == 0x5e) && what.prefix == kF3) return multiply(what);
    return false;
}

struct sigaction before;
std::atomic<int64_t> products{0};

void on_illegal_instruction(int number, siginfo_t*, void* context) {
    auto& registers = ((ucontext_t*)context)->uc_mcontext.gregs;
    _mm_setcsr(0x9fc0);  // DAZ, FTZ, to the nearest, no exceptions; the system puts back what was
    Instruction what;
    if (!decode(registers, what) || !execute(what)) {
        sigaction(number, &before, nullptr);  // the instruction is met again, without this handler
        return;
    }
    if (what.opcode >= 0x5c) ++products;
    registers[REG_RIP] += what.length;
}

}  // namespace

extern "C" {

int install() {
    struct sigaction own = {};
    own.sa_sigaction = on_illegal_instruction;
    own.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGILL, &own, &before);
}
int uninstall() { return sigaction(SIGILL, &before, nullptr); }
int64_t products_done() { return products; }
}
