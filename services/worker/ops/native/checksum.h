// XXH3-64 (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md) of what is given piece by piece. Knows no blocks.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

// What the specification calls the default secret.
extern const unsigned char kChecksumSecret[192];

// Eight running sums: of the products of the words' halves, and of the neighbours' words.
#if defined(BATON_AVX512)
struct StripeSums {
    __m512i sums;
    explicit StripeSums(const uint64_t* from) : sums(_mm512_load_si512(from)) {}
    void to(uint64_t* sums_to) const { _mm512_store_si512(sums_to, sums); }
    BATON_INLINE void add(const char* stripe, const unsigned char* secret) {
        __m512i data = _mm512_loadu_si512(stripe), key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
        sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, swapped));
    }
    BATON_INLINE void scramble(const unsigned char* secret, uint32_t prime) {
        __m512i mixed = _mm512_ternarylogic_epi64(sums, _mm512_srli_epi64(sums, 47), _mm512_loadu_si512(secret), 0x96);
        sums = _mm512_mullo_epi64(mixed, _mm512_set1_epi64(prime));
    }
};
#elif defined(__AVX2__)
struct StripeSums {
    __m256i sums[2];
    explicit StripeSums(const uint64_t* from) {
        for (int i = 0; i < 2; ++i) sums[i] = _mm256_load_si256((const __m256i*)from + i);
    }
    void to(uint64_t* sums_to) const {
        for (int i = 0; i < 2; ++i) _mm256_store_si256((__m256i*)sums_to + i, sums[i]);
    }
    BATON_INLINE void add(const char* stripe, const unsigned char* secret) {
        for (int i = 0; i < 2; ++i) {
            __m256i data = _mm256_loadu_si256((const __m256i*)stripe + i);
            __m256i key = _mm256_xor_si256(data, _mm256_loadu_si256((const __m256i*)secret + i));
            __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
            sums[i] = _mm256_add_epi64(sums[i], _mm256_add_epi64(product, swapped));
        }
    }
    BATON_INLINE void scramble(const unsigned char* secret, uint32_t prime) {
        __m256i by = _mm256_set1_epi64x(prime);
        for (int i = 0; i < 2; ++i) {
            __m256i mixed = _mm256_xor_si256(_mm256_xor_si256(sums[i], _mm256_srli_epi64(sums[i], 47)), _mm256_loadu_si256((const __m256i*)secret + i));
            __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(mixed, 32), by), 32);
            sums[i] = _mm256_add_epi64(_mm256_mul_epu32(mixed, by), high);
        }
    }
};
#else
struct StripeSums {
    uint64_t sums[8];
    explicit StripeSums(const uint64_t* from) { memcpy(sums, from, sizeof sums); }
    void to(uint64_t* sums_to) const { memcpy(sums_to, sums, sizeof sums); }
    static BATON_INLINE uint64_t word(const void* from) {
        uint64_t value;
        memcpy(&value, from, 8);
        return value;
    }
    BATON_INLINE void add(const char* stripe, const unsigned char* secret) {
        for (int i = 0; i < 8; ++i) {
            uint64_t data = word(stripe + 8 * i), key = data ^ word(secret + 8 * i);
            sums[i ^ 1] += data;
            sums[i] += (key & 0xFFFFFFFFu) * (key >> 32);
        }
    }
    BATON_INLINE void scramble(const unsigned char* secret, uint32_t prime) {
        for (int i = 0; i < 8; ++i) sums[i] = (sums[i] ^ (sums[i] >> 47) ^ word(secret + 8 * i)) * prime;
    }
};
#endif

// The hash with seed 0 of `bytes` bytes, which must be a multiple of kStripe and more than kShortest: shorter inputs are
// hashed otherwise.
class Checksum {
  public:
    static constexpr int kStripe = 64;
    static constexpr int kShortest = 240;

    explicit Checksum(int64_t bytes);
    // The next `bytes` bytes, a multiple of kStripe; `each` is called with the place of every stripe, as it was read: what
    // else is to be done with the bytes costs least then, as one waits for memory and the other does not.
    template <class Each> BATON_INLINE void take(const void* data, int64_t bytes, Each each);
    void take(const void* data, int64_t bytes) {
        take(data, bytes, [](const char*) {});
    }
    // After everything was taken. 1 where it would be 0, which means "not written" to the KV store.
    uint64_t value() const;

  private:
    static constexpr int kBlockStripes = 16;  // the secret moves on 8 bytes with each stripe
    static constexpr int kScrambleAt = 128;
    static constexpr int kLastAt = 121;
    static constexpr uint32_t kScramblePrime = 0x9E3779B1u;

    alignas(64) uint64_t sums_[8];
    int64_t bytes_;
    int64_t left_;      // stripes before the last one
    int of_block_ = 0;  // stripes taken since the sums were last scrambled
};

template <class Each> BATON_INLINE void Checksum::take(const void* data, int64_t bytes, Each each) {
    const char* stripe = (const char*)data;
    const char* end = stripe + bytes;
    StripeSums sums(sums_);
    while (stripe < end && left_ > 0) {
        int stripes = int(std::min({int64_t(end - stripe) / kStripe, left_, int64_t(kBlockStripes - of_block_)}));
        const unsigned char* secret = kChecksumSecret + 8 * of_block_;
        for (int i = 0; i < stripes; ++i, stripe += kStripe) sums.add(stripe, secret + 8 * i), each(stripe);
        left_ -= stripes, of_block_ += stripes;
        if (of_block_ == kBlockStripes) sums.scramble(kChecksumSecret + kScrambleAt, kScramblePrime), of_block_ = 0;
    }
    if (stripe < end) sums.add(stripe, kChecksumSecret + kLastAt), each(stripe);
    sums.to(sums_);
}
