// Sixteen float lanes on any CPU: one AVX-512 register, two of AVX2, four of NEON or SSE.
//
// Everything is built on GCC and Clang vector types; intrinsics are used where those have no word for it (fused
// multiply-add, bf16 dot products, rounding to bf16). Nothing here may be contracted or reassociated by the compiler
// (-ffp-contract=off, no -ffast-math): each kernel's result must be the same in every template instance.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define BATON_INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define BATON_AVX512 1
constexpr int kRegister = 64;
#elif defined(__AVX2__) && defined(__FMA__)
#define BATON_AVX2 1
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif
#if defined(BATON_AVX512) && defined(__AVX512BF16__)
#define BATON_BF16 1
#endif
#if defined(BATON_AVX512) && defined(__AVX512VNNI__)
#define BATON_VNNI 1
#endif

constexpr int kLanes = 16;
constexpr int kParts = 64 / kRegister;

typedef float RegF __attribute__((vector_size(kRegister)));
typedef int32_t RegI __attribute__((vector_size(kRegister)));
typedef uint32_t RegU __attribute__((vector_size(kRegister)));

template <class R> struct Sixteen {
    R part[kParts];
};
using F = Sixteen<RegF>;
using U = Sixteen<RegU>;

#define BATON_EACH for (int i_ = 0; i_ < kParts; ++i_)
// Before a loop over the rows or columns of a tile: unrolled before anything else, its sums are registers throughout; later, GCC
// keeps them on the stack between two loops that add to them.
#define BATON_UNROLLED _Pragma("GCC unroll 12")

BATON_INLINE F zeros() {
    F r;
    BATON_EACH r.part[i_] = RegF{};
    return r;
}
BATON_INLINE F all(float x) {
    F r;
    BATON_EACH r.part[i_] = x - RegF{};
    return r;
}
BATON_INLINE U all_bits(uint32_t x) {
    U r;
    BATON_EACH r.part[i_] = x + RegU{};
    return r;
}
// Whole registers from and to wherever they lie. Not by memcpy: GCC moves 64 bytes as four times 16, by way of the stack.
typedef float LooseF __attribute__((vector_size(kRegister), aligned(1), may_alias));
typedef uint32_t LooseU __attribute__((vector_size(kRegister), aligned(1), may_alias));
BATON_INLINE F load(const float* from) {
    F r;
    BATON_EACH r.part[i_] = *(const LooseF*)((const char*)from + i_ * kRegister);
    return r;
}
BATON_INLINE U load_bits(const void* from) {
    U r;
    BATON_EACH r.part[i_] = *(const LooseU*)((const char*)from + i_ * kRegister);
    return r;
}
BATON_INLINE void store(float* to, F x) {
    BATON_EACH *(LooseF*)((char*)to + i_ * kRegister) = x.part[i_];
}
BATON_INLINE void store_bits(void* to, U x) {
    BATON_EACH *(LooseU*)((char*)to + i_ * kRegister) = x.part[i_];
}
BATON_INLINE F operator+(F a, F b) {
    BATON_EACH a.part[i_] = a.part[i_] + b.part[i_];
    return a;
}
BATON_INLINE F operator-(F a, F b) {
    BATON_EACH a.part[i_] = a.part[i_] - b.part[i_];
    return a;
}
BATON_INLINE F operator*(F a, F b) {
    BATON_EACH a.part[i_] = a.part[i_] * b.part[i_];
    return a;
}
BATON_INLINE F operator/(F a, F b) {
    BATON_EACH a.part[i_] = a.part[i_] / b.part[i_];
    return a;
}
BATON_INLINE F larger(F a, F b) {
    BATON_EACH a.part[i_] = a.part[i_] > b.part[i_] ? a.part[i_] : b.part[i_];
    return a;
}
BATON_INLINE F smaller(F a, F b) {
    BATON_EACH a.part[i_] = a.part[i_] < b.part[i_] ? a.part[i_] : b.part[i_];
    return a;
}
BATON_INLINE RegF fused(RegF a, RegF b, RegF c) {
#if defined(BATON_AVX512)
    return (RegF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(BATON_AVX2)
    return (RegF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (RegF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
// a * b + c
BATON_INLINE F fma(F a, F b, F c) {
    BATON_EACH c.part[i_] = fused(a.part[i_], b.part[i_], c.part[i_]);
    return c;
}
BATON_INLINE F floats_of(U bits) {
    F r;
    BATON_EACH r.part[i_] = (RegF)bits.part[i_];
    return r;
}
BATON_INLINE U bits_of(F x) {
    U r;
    BATON_EACH r.part[i_] = (RegU)x.part[i_];
    return r;
}

// All lanes as one, always by the same tree: each half is folded into the other, down to one lane. In registers where they are
// wide: by way of memory it takes about sixty cycles, as long as a pass over a row of 160 scores.
template <class Fold> BATON_INLINE float folded(F x, const Fold& fold) {
#if defined(BATON_AVX512)
    __m512 wide = (__m512)x.part[0];
    __m256 eight = fold(_mm512_castps512_ps256(wide), _mm512_extractf32x8_ps(wide, 1));
    __m128 four = fold(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = fold(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(fold(two, _mm_movehdup_ps(two)));
#else
    float lane[kLanes];
    store(lane, x);
    for (int width = kLanes / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = fold(lane[i], lane[i + width]);
    return lane[0];
#endif
}
BATON_INLINE float sum(F x) {
    return folded(x, [](auto a, auto b) { return a + b; });
}
BATON_INLINE float greatest(F x) {
    return folded(x, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x to 2 ulp (Cephes' polynomial), 0 below -87.3 and e^88 above 88: no infinities, so that 0 * e^x stays 0.
BATON_INLINE RegF exp_part(RegF x) {
#if defined(BATON_AVX512)
    RegF clipped = (RegF)_mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.3f), (__m512)x));
#else
    RegF clipped = x < -87.3f ? RegF{} - 87.3f : x;
    clipped = clipped > 88.0f ? RegF{} + 88.0f : clipped;
#endif
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, which is in the sum's low bits.
    const RegF shift = RegF{} + 12582912.0f;
    RegF rounded = fused(clipped, RegF{} + 1.44269504088896341f, shift);
    RegF n = rounded - shift;
    RegF r = fused(n, RegF{} - 0.693359375f, clipped);
    r = fused(n, RegF{} + 2.12194440e-4f, r);
    RegF p = RegF{} + 1.9875691500e-4f;
    p = fused(p, r, RegF{} + 1.3981999507e-3f);
    p = fused(p, r, RegF{} + 8.3334519073e-3f);
    p = fused(p, r, RegF{} + 4.1665795894e-2f);
    p = fused(p, r, RegF{} + 1.6666665459e-1f);
    p = fused(p, r, RegF{} + 5.0000001201e-1f);
    p = fused(p, r * r, r + 1.0f);
#if defined(BATON_AVX512)  // p * 2^n; NaN stays NaN by itself
    return (RegF)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
    RegI power = (RegI)rounded - (RegI)shift;
    RegF scaled = (RegF)((RegI)p + (power << 23));
    scaled = x < -87.3f ? RegF{} : scaled;
    return x == x ? scaled : x;
#endif
}
BATON_INLINE F exp(F x) {
    BATON_EACH x.part[i_] = exp_part(x.part[i_]);
    return x;
}
// tanh(x) = 1 - 2 / (e^2x + 1); absolute error below 2e-7.
BATON_INLINE F tanh(F x) {
    F e = exp(x + x);
    return all(1.0f) - all(2.0f) / (e + all(1.0f));
}

// x where first + lane is in [low, high), `other` elsewhere.
BATON_INLINE F within(F x, int first, int low, int high, float other) {
    constexpr int kWide = kLanes / kParts;
    BATON_EACH {
        RegI at;
        for (int lane = 0; lane < kWide; ++lane) at[lane] = first + i_ * kWide + lane;
        RegI inside = (at >= low) & (at < high);
        x.part[i_] = inside ? x.part[i_] : RegF{} + other;
    }
    return x;
}

// bf16: the upper half of a float.
using Bf16 = uint16_t;
BATON_INLINE float float_of(Bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float r;
    memcpy(&r, &bits, 4);
    return r;
}
// To the nearest, ties to even; NaN stays NaN.
BATON_INLINE Bf16 bf16_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16((bits >> 16) | 0x40);
    return Bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
BATON_INLINE F load(const Bf16* from) {
#if defined(BATON_AVX512)
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    F r;
    r.part[0] = (RegF)_mm512_slli_epi32(wide, 16);
    return r;
#else
    U wide;
    BATON_EACH {
        for (int lane = 0; lane < kLanes / kParts; ++lane)
            wide.part[i_][lane] = uint32_t(from[i_ * (kLanes / kParts) + lane]) << 16;
    }
    return floats_of(wide);
#endif
}
BATON_INLINE void store(Bf16* to, F x) {
#if defined(BATON_BF16)
    __m256bh narrow = _mm512_cvtneps_pbh((__m512)x.part[0]);
    memcpy(to, &narrow, 32);
#else
    U bits = bits_of(x);
    BATON_EACH {
        RegU even = (bits.part[i_] >> 16) & 1u;
        RegU rounded = (bits.part[i_] + 0x7fffu + even) >> 16;
        RegU quiet = (bits.part[i_] >> 16) | 0x40u;
        bits.part[i_] = (bits.part[i_] & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
    }
    uint32_t lane[kLanes];
    memcpy(lane, &bits, 64);
    for (int i = 0; i < kLanes; ++i) to[i] = Bf16(lane[i]);
#endif
}
// Sixteen numbers, of which the first `count` are there; the others are zeros. And as many as are there, back.
template <class Item> BATON_INLINE F load_some(const Item* from, int count) {
    if (count >= kLanes) return load(from);
    Item wide[kLanes] = {};
    memcpy(wide, from, size_t(count) * sizeof(Item));
    return load(wide);
}
template <class Item> BATON_INLINE void store_some(Item* to, F x, int count) {
    if (count >= kLanes) return store(to, x);
    Item wide[kLanes];
    store(wide, x);
    memcpy(to, wide, size_t(count) * sizeof(Item));
}

// Sixteen bytes, and as what they can be read.
typedef int8_t Bytes __attribute__((vector_size(16)));
BATON_INLINE Bytes load_bytes(const void* from) {
    Bytes r;
    memcpy(&r, from, 16);
    return r;
}
BATON_INLINE Sixteen<RegI> integers_of(Bytes bytes) {
    Sixteen<RegI> r;
#if defined(BATON_AVX512)
    r.part[0] = (RegI)_mm512_cvtepi8_epi32((__m128i)bytes);
#elif defined(BATON_AVX2)
    r.part[0] = (RegI)_mm256_cvtepi8_epi32((__m128i)bytes);
    r.part[1] = (RegI)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)bytes, (__m128i)bytes));
#else
    BATON_EACH {
        for (int lane = 0; lane < kLanes / kParts; ++lane) r.part[i_][lane] = bytes[i_ * (kLanes / kParts) + lane];
    }
#endif
    return r;
}
// From memory, which costs no shuffle.
BATON_INLINE Sixteen<RegI> load_integers(const void* from) {
#if defined(BATON_AVX2)
    Sixteen<RegI> r;
    BATON_EACH r.part[i_] = (RegI)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)from + 8 * i_)));
    return r;
#else
    return integers_of(load_bytes(from));
#endif
}
BATON_INLINE F floats_of(Sixteen<RegI> x) {
    F r;
    BATON_EACH r.part[i_] = __builtin_convertvector(x.part[i_], RegF);
    return r;
}

// Sums as they wait, and back.
BATON_INLINE F kept(F sum) { return sum; }
BATON_INLINE F kept(U sum) { return floats_of(sum); }
BATON_INLINE void resume(F& sum, F kept) { sum = kept; }
BATON_INLINE void resume(U& sum, F kept) { sum = bits_of(kept); }

// Has weights read before whatever is read in this way after them: compilers put loads into another order, in which memory's
// own prefetcher loses the thread. One row of int8 with two digits takes 3 to 5% longer without (Zen 4).
template <class Weights> BATON_INLINE void read_in_order(Weights&) {}
#if defined(BATON_AVX512)
BATON_INLINE void read_in_order(U& weights) { asm volatile("" : "+v"(weights.part[0])); }
BATON_INLINE void read_in_order(F& weights) { asm volatile("" : "+v"(weights.part[0])); }
#endif

// How a kind of number is stored and multiplied. A step is one load of 16 lanes of weights: four bytes of each lane (VNNI's
// layout), two bf16 numbers (AVX512-BF16's), or one float.
struct Half {
    using Item = Bf16;
    using Sum = F;
    static constexpr int kItems = 2;
    static BATON_INLINE F first_sum(const int32_t*, int) { return zeros(); }
    static BATON_INLINE U broadcast(const Bf16* x) {
        uint32_t pair;
        memcpy(&pair, x, 4);
        return all_bits(pair);
    }
    static BATON_INLINE U weights(const Bf16* w) { return load_bits(w); }
    // The two products are added in the instruction's own order; without it, low one first.
    static BATON_INLINE F multiply(F sum, U w, U x) {
#if defined(BATON_BF16)
        F r;
        r.part[0] = (RegF)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)(__m512i)w.part[0], (__m512bh)(__m512i)x.part[0]);
        return r;
#else
        BATON_EACH {
            sum.part[i_] = fused((RegF)(w.part[i_] << 16), (RegF)(x.part[i_] << 16), sum.part[i_]);
            sum.part[i_] = fused((RegF)(w.part[i_] & 0xffff0000u), (RegF)(x.part[i_] & 0xffff0000u), sum.part[i_]);
        }
        return sum;
#endif
    }
};
struct Single {
    using Item = float;
    using Sum = F;
    static constexpr int kItems = 1;
    static BATON_INLINE F first_sum(const int32_t*, int) { return zeros(); }
    static BATON_INLINE F broadcast(const float* x) { return all(*x); }
    static BATON_INLINE F weights(const float* w) { return load(w); }
    static BATON_INLINE F multiply(F sum, F w, F x) { return fma(w, x, sum); }
};
