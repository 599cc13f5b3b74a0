// Products of bytes, as VNNI's instructions or as pairs of 16 bits. Apart from lanes.h: only what includes this differs where
// there are such instructions, so build.py compiles the rest once for both.
#pragma once
#include "lanes.h"

// The sums of products of 16-bit numbers, two and two.
BATON_INLINE RegU add_pairs(RegU a, RegU b) {
#if defined(BATON_AVX512)
    return (RegU)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(BATON_AVX2)
    return (RegU)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
    return (RegU)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    RegI low = ((RegI)(a << 16) >> 16) * ((RegI)(b << 16) >> 16);
    return (RegU)(low + ((RegI)a >> 16) * ((RegI)b >> 16));
#endif
}
// Bytes: weights are 128 more than what they stand for, inputs have a sign. Sums are whole numbers of 32 bits, which wait as
// the bits of floats; they are exact, so that no order and no instructions change them.
struct Quad {
    using Item = int8_t;
    using Sum = U;
    static constexpr int kItems = 4;
    // Less what weights are stored above their value: 128 times the sum of the row's items.
    static BATON_INLINE U first_sum(const int32_t* row_sums, int row) { return all_bits(0u - (uint32_t(row_sums[row]) << 7)); }
#if defined(BATON_VNNI)
    static BATON_INLINE U broadcast(const int8_t* x) {
        uint32_t quad;
        memcpy(&quad, x, 4);
        return all_bits(quad);
    }
    static BATON_INLINE U weights_of(U bytes) { return bytes; }
    static BATON_INLINE U weights(const int8_t* w) { return load_bits(w); }
    static BATON_INLINE U multiply(U sum, U w, U x) {
        U r;
        r.part[0] = (RegU)_mm512_dpbusd_epi32((__m512i)sum.part[0], (__m512i)w.part[0], (__m512i)x.part[0]);
        return r;
    }
#else
    // The first and third byte, and the second and fourth, in 16 bits each: products of bytes, added in pairs, need 17.
    struct Wide {
        U even, odd;
    };
    static BATON_INLINE Wide broadcast(const int8_t* x) {
        auto pair = [](int8_t low, int8_t high) { return all_bits(uint16_t(low) | uint32_t(uint16_t(high)) << 16); };
        return {pair(x[0], x[2]), pair(x[1], x[3])};
    }
    static BATON_INLINE Wide weights(const int8_t* w) { return weights_of(load_bits(w)); }
    static BATON_INLINE Wide weights_of(U bytes) {
        Wide r{bytes, {}};
        BATON_EACH {
            r.odd.part[i_] = (r.even.part[i_] >> 8) & 0x00ff00ffu;
            r.even.part[i_] = r.even.part[i_] & 0x00ff00ffu;
        }
        return r;
    }
    static BATON_INLINE U multiply(U sum, Wide w, Wide x) {
        BATON_EACH sum.part[i_] = sum.part[i_] + add_pairs(w.even.part[i_], x.even.part[i_]) + add_pairs(w.odd.part[i_], x.odd.part[i_]);
        return sum;
    }
#endif
};
