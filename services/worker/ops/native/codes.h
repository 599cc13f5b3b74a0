// Weights as codes of a byte or half of one: how they lie, and how they become floats. Knows no scales and no threads.
#pragma once
#include "fp8.h"
#include "linear.h"
#include "tile.h"

// Inputs of a step of codes.
constexpr int kCodeInputs = 2;

// Bytes of a step of 16 outputs.
constexpr int code_bytes(Code code) { return code == Code::kInt4 ? kLanes : kCodeInputs * kLanes; }

// Both inputs of a step of 16 outputs, as floats that bf16 holds exactly.
struct Pair {
    F first, second;
};

template <Code code> BATON_INLINE Pair decode(const uint8_t* codes, Bytes zero) {
    if constexpr (code == Code::kInt4) {
        Bytes both = load_bytes(codes);
        Bytes low = (both & 15) - zero;
        Bytes high = (Bytes)(((unsigned char __attribute__((vector_size(16))))both) >> 4) - zero;
        return {floats_of(integers_of(low)), floats_of(integers_of(high))};
    } else if constexpr (code == Code::kInt8) {
        return {floats_of(load_integers(codes)), floats_of(load_integers(codes + kLanes))};
    } else {
        return {floats_of_fp8(codes), floats_of_fp8(codes + kLanes)};
    }
}

// The same as bf16, as Half multiplies them: the first input's in the low halves. Exact, as bf16 holds every code's number.
template <Code code> BATON_INLINE U decode_halves(const uint8_t* codes, Bytes zero) {
    Pair weights = decode<code>(codes, zero);
    U low = bits_of(weights.first), high = bits_of(weights.second);
    BATON_EACH low.part[i_] = (low.part[i_] >> 16) | (high.part[i_] & 0xffff0000u);
    return low;
}

#if defined(BATON_BF16)
// All at once, the same numbers: a bias of the exponent is added, or, to those that have none (subnormal ones), what makes them normal.
alignas(64) constexpr uint16_t kInTurn[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
constexpr uint16_t kFp8Bias = 120 << 7;
alignas(64) constexpr uint16_t kFp8Subnormal[32] = {  // the bf16 of n / 512, less n << 4
    0, 0x3b00 - 0x10, 0x3b80 - 0x20, 0x3bc0 - 0x30, 0x3c00 - 0x40, 0x3c20 - 0x50, 0x3c40 - 0x60, 0x3c60 - 0x70};
template <> BATON_INLINE U decode_halves<Code::kFp8>(const uint8_t* codes, Bytes) {
    __m512i x = _mm512_permutexvar_epi16(_mm512_load_si512(kInTurn), _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)codes)));
    __mmask32 subnormal = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
    __m512i bias = _mm512_mask_permutexvar_epi16(_mm512_set1_epi16(kFp8Bias), subnormal, x, _mm512_load_si512(kFp8Subnormal));
    __m512i bits = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(int16_t(0x87f0)));
    U r;
    r.part[0] = (RegU)_mm512_add_epi16(bits, bias);
    return r;
}
#endif

BATON_INLINE Bytes zeros_at(const uint8_t* zeros, int column) { return zeros ? load_bytes(zeros + column * kLanes) : Bytes{} + 8; }

// A step of codes as Kind multiplies it: a pair of inputs.
template <class Kind, Code code> struct Decoded;
template <Code code> struct Decoded<Single, code> {
    Pair weights;
    BATON_INLINE Decoded(const uint8_t* codes, Bytes zero) : weights(decode<code>(codes, zero)) {}
    BATON_INLINE F multiply(F sum, const float* x) const {
        sum = fma(weights.first, all(x[0]), sum);
        return fma(weights.second, all(x[1]), sum);
    }
    // As numbers of two steps, or of one.
    BATON_INLINE void store_at(float* to, int column) const {
        store(to + column * kLanes, weights.first);
        store(to + kGroupOutputs + column * kLanes, weights.second);
    }
};
template <Code code> struct Decoded<Half, code> {
    U weights;
    BATON_INLINE Decoded(const uint8_t* codes, Bytes zero) : weights(decode_halves<code>(codes, zero)) {}
    BATON_INLINE F multiply(F sum, const Bf16* x) const { return Half::multiply(sum, weights, Half::broadcast(x)); }
    BATON_INLINE void store_at(Bf16* to, int column) const { store_bits(to + column * kLanes * Half::kItems, weights); }
};

// As multiply_panel, which computes the same sums of what decode_steps writes. `steps` are Kind's; where that is an odd number
// of single inputs, x has another one.
template <class Kind, Code code, int Rows, int Columns>
__attribute__((noinline)) void multiply_codes(const typename Kind::Item* x, int64_t stride, const uint8_t* codes, const uint8_t* zeros,
                                              int steps, F sums[Rows][Columns]) {
    F sum[Rows][Columns];
    Bytes zero[Columns];
    for (int c = 0; c < Columns; ++c) {
        zero[c] = zeros_at(zeros, c);
        for (int r = 0; r < Rows; ++r) sum[r][c] = sums[r][c];
    }
    for (int step = 0; step < steps; step += kCodeInputs / Kind::kItems, codes += kGroupColumns * code_bytes(code), x += kCodeInputs) {
        for (int c = 0; c < Columns; ++c) {
            Decoded<Kind, code> weights(codes + c * code_bytes(code), zero[c]);
            for (int r = 0; r < Rows; ++r) sum[r][c] = weights.multiply(sum[r][c], x + r * stride);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int c = 0; c < Columns; ++c) sums[r][c] = sum[r][c];
}

// The codes of `steps` of a group as numbers [steps][64][Kind::kItems]; where `steps` is an odd number of single inputs, one
// more is written.
template <class Kind, Code code> void decode_steps(const uint8_t* codes, const uint8_t* zeros, int steps, typename Kind::Item* to) {
    for (int step = 0; step < steps; step += kCodeInputs / Kind::kItems, to += kCodeInputs * kGroupOutputs)
        for (int c = 0; c < kGroupColumns; ++c, codes += code_bytes(code))
            Decoded<Kind, code>(codes, zeros_at(zeros, c)).store_at(to, c);
}

// Puts the code of an input and an output into a group whose codes are 0.
inline void put_code(Code code, uint8_t* group, int input, int output, uint8_t value) {
    int64_t step = int64_t(input / kCodeInputs) * kGroupColumns + output / kLanes;
    int lane = output % kLanes, second = input % kCodeInputs;
    if (code == Code::kInt4) group[step * kLanes + lane] |= uint8_t(second ? value << 4 : value);
    else group[(step * kCodeInputs + second) * kLanes + lane] = value;
}
