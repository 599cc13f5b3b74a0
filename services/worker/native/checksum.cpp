#include "checksum.h"

#include <algorithm>
#include <cstring>

#include "lanes.h"

namespace {

// The specification's default secret and primes.
constexpr unsigned char kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
constexpr uint64_t kPrime32[3] = {0x9E3779B1u, 0x85EBCA77u, 0xC2B2AE3Du};
constexpr uint64_t kPrime64[5] = {0x9E3779B185EBCA87u, 0xC2B2AE3D27D4EB4Fu, 0x165667B19E3779F9u, 0x85EBCA77C2B2AE63u,
                                  0x27D4EB2F165667C5u};
constexpr uint64_t kAvalanche = 0x165667919E3779F9u;

constexpr int kBlockStripes = 16;  // the secret moves on 8 bytes with each stripe
constexpr int kScrambleAt = 128;
constexpr int kLastAt = 121;
constexpr int kMergeAt = 11;

uint64_t word(const void* from) {
    uint64_t value;
    memcpy(&value, from, 8);
    return value;
}

uint64_t folded_product(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return uint64_t(product) ^ uint64_t(product >> 64);
}

#if defined(__AVX512F__)
// Sums of one stripe in one register: products of the words' halves, and the neighbours' words.
struct Sums {
    __m512i sums;
    explicit Sums(const uint64_t* from) : sums(_mm512_load_si512(from)) {}
    void to(uint64_t* sums_to) const { _mm512_store_si512(sums_to, sums); }
    BATON_INLINE void add(const char* stripe, const unsigned char* secret) {
        __m512i data = _mm512_loadu_si512(stripe), key = _mm512_xor_si512(data, _mm512_loadu_si512(secret));
        __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        __m512i swapped = _mm512_shuffle_epi32(data, (_MM_PERM_ENUM)_MM_SHUFFLE(1, 0, 3, 2));
        sums = _mm512_add_epi64(product, _mm512_add_epi64(sums, swapped));
    }
};
#elif defined(__AVX2__)
struct Sums {
    __m256i sums[2];
    explicit Sums(const uint64_t* from) {
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
            sums[i] = _mm256_add_epi64(product, _mm256_add_epi64(sums[i], swapped));
        }
    }
};
#else
struct Sums {
    uint64_t sums[8];
    explicit Sums(const uint64_t* from) { memcpy(sums, from, sizeof sums); }
    void to(uint64_t* sums_to) const { memcpy(sums_to, sums, sizeof sums); }
    BATON_INLINE void add(const char* stripe, const unsigned char* secret) {
        for (int i = 0; i < 8; ++i) {
            uint64_t data = word(stripe + 8 * i), key = data ^ word(secret + 8 * i);
            sums[i ^ 1] += data;
            sums[i] += (key & 0xFFFFFFFFu) * (key >> 32);
        }
    }
};
#endif

}  // namespace

Checksum::Checksum(int64_t bytes)
    : sums_{kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]},
      bytes_(bytes),
      left_(bytes / kStripe - 1) {}

void Checksum::take(const void* data, int64_t bytes) {
    const char* stripe = (const char*)data;
    const char* end = stripe + bytes;
    while (stripe < end && left_ > 0) {
        int stripes = int(std::min({int64_t(end - stripe) / kStripe, left_, int64_t(kBlockStripes - of_block_)}));
        Sums sums(sums_);
        for (int i = 0; i < stripes; ++i) sums.add(stripe + i * kStripe, kSecret + 8 * (of_block_ + i));
        sums.to(sums_);
        stripe += stripes * kStripe, left_ -= stripes, of_block_ += stripes;
        if (of_block_ == kBlockStripes) scramble();
    }
    if (stripe < end) accumulate(stripe, kLastAt);
}

void Checksum::accumulate(const char* stripe, int at) {
    Sums sums(sums_);
    sums.add(stripe, kSecret + at);
    sums.to(sums_);
}

void Checksum::scramble() {
    for (int i = 0; i < 8; ++i) sums_[i] = (sums_[i] ^ (sums_[i] >> 47) ^ word(kSecret + kScrambleAt + 8 * i)) * kPrime32[0];
    of_block_ = 0;
}

uint64_t Checksum::value() const {
    uint64_t hash = uint64_t(bytes_) * kPrime64[0];
    for (int i = 0; i < 8; i += 2) {
        const unsigned char* secret = kSecret + kMergeAt + 8 * i;
        hash += folded_product(sums_[i] ^ word(secret), sums_[i + 1] ^ word(secret + 8));
    }
    hash = (hash ^ (hash >> 37)) * kAvalanche;
    hash ^= hash >> 32;
    return hash ? hash : 1;
}
