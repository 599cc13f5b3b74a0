// Products with packed weights, and what may be done to them on the way out.
#pragma once
#include "lanes.h"
#include "threads.h"

enum class Number : int { kSingle = 0, kHalf = 1 };
enum class ActivationKind : int { kSilu = 0, kGeluTanh = 1, kSwigluOai = 2, kRelu2 = 3, kSiluLimited = 4, kSwigluStep = 5 };
struct Activation {
    ActivationKind kind;
    float limit;  // of the kinds that have one (activation.h)
};
// Relu2 squares ups that are not negative, and has no gates.
inline bool has_gates(Activation activation) { return activation.kind != ActivationKind::kRelu2; }

// weights [out, in] as groups of 64 outputs. A group holds, for each step (two bf16 inputs or one float), 256 bytes: the
// step's weights of its outputs in turn. Missing outputs and inputs are zeros. So a product reads a group from its start
// to its end, and the next group after it, as fast as memory gives them.
constexpr int kGroupColumns = 4;
constexpr int kGroupOutputs = kGroupColumns * kLanes;
constexpr int kStepBytes = 64 * kGroupColumns;

// How weights are kept: as numbers, or as codes of a byte or half of one that stand for numbers. Codes lie as numbers do,
// two inputs to a step: 16 bytes of the first input and 16 of the second for each 16 outputs, or, of four bits, 16 bytes
// with the first input's codes in the low halves. kQuad: int8 to be multiplied in whole numbers, as Quad has them: four
// inputs to a step, 64 bytes for each 16 outputs. kNibble: int4 for the same, 64 bytes for each 32 outputs: the first 16 in
// the low halves.
enum class Code : int { kPlain = 0, kInt8 = 1, kInt4 = 2, kFp8 = 3, kQuad = 4, kNibble = 5 };

// Whether rows are rounded to digits before they are multiplied.
constexpr bool in_whole_numbers(Code code) { return code == Code::kQuad || code == Code::kNibble; }

constexpr int kMaxScaled = 512;

struct Linear {
    Number number;  // what activations are, and weights where they are no codes
    int out;
    int in;
    const void* groups;
    const float* bias;  // [out], or null
    Code code;
    // Inputs that share a scale: 16, 32, 64, 128, 256 or 512 (kMaxScaled), a divisor of `in`; 0: all of an output's (not of
    // kNibble).
    int scaled;
    const float* scales;  // [groups][in / scaled][64], null for kPlain
    const uint8_t* zeros;  // the same shape: the code of four bits that is 0; null: 8 everywhere
    // In whole numbers: to how many digits of eight bits rows are rounded, with a scale for each row: 2, or 1 where all of an
    // output's inputs share a scale.
    int digits;
    // Of the shape of `scales`, where `scaled` is not 0: what is added to each scaled number; null: nothing. A group's product
    // is scale * (the sum of number * x) + offset * (the sum of x).
    const float* offsets;
    // Whether bf16, and what is multiplied in whole numbers, is multiplied in tiles (tiles.h), which the process must have been
    // allowed to use. Another order of bf16's sums than without, the same whatever the number of rows.
    int tiled;
};

int64_t packed_bytes(Number number, int out, int in);
// `groups` must be aligned to 64 bytes.
void pack(Pool& pool, Number number, const void* weight, int out, int in, void* groups);

int64_t coded_bytes(Code code, int out, int in);
// The same for codes, one byte for each [out, in].
void pack_codes(Pool& pool, Code code, const uint8_t* codes, int out, int in, void* groups);

struct Rows {
    const void* data;
    Number number;
    int64_t stride;  // items from row to row
    int count;
};

// How a product's sums leave the registers.
enum class Out : int {
    kFloat = 0,  // to = sums + bias, floats
    kAdded = 1,  // to += sums + bias, floats: the residual
    kGated = 2,  // to = act(gate) * up (see `gated`), in the kind of the weights: gates are the outputs' first half, `up` the second
};

// Whether kGated can be asked of it: a group must be all gates or all up.
inline bool can_gate(const Linear& linear, Activation activation) { return has_gates(activation) && linear.out % (2 * kGroupOutputs) == 0; }

struct Target {
    Out kind;
    Activation activation;
    void* data;
    int64_t stride;  // items from row to row
};

// Each element's sum runs over the inputs in ascending order, whatever the number of rows and of threads.
void multiply(Pool& pool, const Rows& x, const Linear& linear, const Target& target);
// Rows [starts[i], starts[i + 1]) of x times linears[i], to the same rows of `target`, for each i below `count`: experts
// and their rows, in one job. All linears are of one shape and number.
void multiply_each(Pool& pool, const Rows& x, const Linear* linears, const int64_t* starts, int count, const Target& target);
