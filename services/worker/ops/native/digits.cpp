// Rounding rows to digits: the greatest of a row first, then its elements by that.
#include "digits.h"

#include <algorithm>

namespace {

// Rows of a tile: a tile should take longer than a thread needs to join (about a microsecond).
constexpr int kRowsOfTile = 4;
// The greatest whole number of one digit, and of two: 256 * 127 + 127.
constexpr float kGreatest[] = {127.0f, 32639.0f};
// Below, a row counts as zeros: the reciprocal of its step would be infinite.
constexpr float kLeast = 1e-30f;
constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u;

using I = Sixteen<RegI>;

// The greatest magnitude as bits, which are in order as numbers are; infinities and what is no number come last.
template <class Item> uint32_t greatest_bits(const Item* x, int in) {
    I most = {};
    for (int i = 0; i < in; i += kLanes) {
        U bits = bits_of(load_some(x + i, in - i));
        BATON_EACH {
            RegI size = (RegI)(bits.part[i_] & ~kSign);
            most.part[i_] = size > most.part[i_] ? size : most.part[i_];
        }
    }
    int32_t lanes[kLanes];
    memcpy(lanes, &most, sizeof lanes);
    return uint32_t(*std::max_element(lanes, lanes + kLanes));
}

// Adding 1.5 * 2^23 rounds to the nearest integer, which is in the sum's low bits.
I rounded(F x, float inverse) {
    const RegF shift = RegF{} + 12582912.0f;
    I r;
    BATON_EACH r.part[i_] = (RegI)(x.part[i_] * inverse + shift) - (RegI)shift;
    return r;
}

BATON_INLINE void store_digits(int8_t* to, I digits) {
#if defined(BATON_AVX512)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)digits.part[0]));
#else
    int32_t lanes[kLanes];
    memcpy(lanes, &digits, sizeof lanes);
    for (int i = 0; i < kLanes; ++i) to[i] = int8_t(lanes[i]);
#endif
}

void add(I& sums, I digits) { BATON_EACH sums.part[i_] = sums.part[i_] + digits.part[i_]; }

int32_t total(I sums) {
    int32_t lanes[kLanes], all = 0;
    memcpy(lanes, &sums, sizeof lanes);
    for (int32_t lane : lanes) all += lane;
    return all;
}

}  // namespace

template <class Item> void DigitRows::round_row(const Item* x, int in, int row) {
    uint32_t bits = greatest_bits(x, in);
    float most, inverse = 0.0f, top = kGreatest[digits_ - 1];
    memcpy(&most, &bits, 4);
    auto* to = (int8_t*)items_.data() + row * digits_ * stride_;
    int32_t* sums = sums_.data() + row * digits_;
    bool number = bits < kInfinity;
    scales_[row] = number ? 0.0f : __builtin_nanf("");
    if (number && most > kLeast) scales_[row] = most / top, inverse = top / most;
    I first = {}, second = {}, segment = {};
    for (int i = 0; i < stride_; i += kLanes, to += kLanes) {
        I whole = inverse != 0.0f && i < in ? rounded(load_some(x + i, in - i), inverse) : I{};
        if (segment_ && i < in) {
            add(segment, whole);
            if ((i + kLanes) % segment_ == 0) segment_sums_[row * segments_ + i / segment_] = total(segment), segment = {};
        }
        if (digits_ == 2) {
            I low = whole;
            // The low digit with its sign; what is left is a multiple of 256.
            BATON_EACH {
                low.part[i_] = (whole.part[i_] << 24) >> 24;
                whole.part[i_] = (whole.part[i_] - low.part[i_]) >> 8;
            }
            store_digits(to + stride_, low);
            add(second, low);
        }
        store_digits(to, whole);
        add(first, whole);
    }
    sums[0] = total(first);
    if (digits_ == 2) sums[1] = total(second);
}

void DigitRows::round(Pool& pool, const Rows& x, int in, int digits, int segment) {
    digits_ = digits;
    segment_ = segment;
    segments_ = segment ? in / segment : 0;
    stride_ = (in + 63) / 64 * 64;
    // Not a multiple of 1 kB apart: tiles would find their rows in the same few sets of the cache.
    if (stride_ % 1024 == 0) stride_ += 64;
    size_t needed = size_t(x.count) * digits * stride_ / 64;
    if (items_.size() < needed) items_.resize(needed);
    if (scales_.size() < size_t(x.count)) scales_.resize(x.count);
    if (sums_.size() < size_t(x.count) * digits) sums_.resize(size_t(x.count) * digits);
    if (segment_sums_.size() < size_t(x.count) * segments_) segment_sums_.resize(size_t(x.count) * segments_);
    pool.run((x.count + kRowsOfTile - 1) / kRowsOfTile, [&](int tile, int) {
        int end = std::min(x.count, (tile + 1) * kRowsOfTile);
        for (int row = tile * kRowsOfTile; row < end; ++row) {
            if (x.number == Number::kHalf) round_row((const Bf16*)x.data + row * x.stride, in, row);
            else round_row((const float*)x.data + row * x.stride, in, row);
        }
    });
}
