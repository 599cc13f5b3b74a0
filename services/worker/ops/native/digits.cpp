// Rounding rows to digits: the greatest of a row first, then its elements by that.
#include "digits.h"

#include <algorithm>
#include <type_traits>

namespace {

// Rows of a tile: a tile should take longer than a thread needs to join (about a microsecond).
constexpr int kRowsOfTile = 4;
// The greatest whole number of one digit, and of two: 256 * 127 + 127.
constexpr float kGreatest[] = {127.0f, 32639.0f};
// Below, a row counts as zeros: the reciprocal of its step would be infinite.
constexpr float kMinMagnitude = 1e-30f;
constexpr uint32_t kSign = 0x80000000u, kInfinity = 0x7f800000u;

using I = Sixteen<RegI>;

// The greatest magnitude as bits, which are in order as numbers are; infinities and what is no number come last.
template <class Item> uint32_t greatest_bits(const Item* x, int in) {
    I most = {};
    int i = 0;
#if defined(BATON_AVX512)
    if constexpr (std::is_same_v<Item, Bf16>) {
        __m512i halves = _mm512_setzero_si512();
        for (; i + 2 * kLanes <= in; i += 2 * kLanes)
            halves = _mm512_max_epu16(halves, _mm512_and_si512(_mm512_loadu_si512(x + i), _mm512_set1_epi16(0x7fff)));
        // The odd ones, and the even ones, as floats.
        __m512i odd = _mm512_and_si512(halves, _mm512_set1_epi32(int(0xffff0000u)));
        most.part[0] = (RegI)_mm512_max_epi32(odd, _mm512_slli_epi32(halves, 16));
    }
#endif
    for (; i < in; i += kLanes) {
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

// How many inputs become digits at once: a register of bytes.
constexpr int kDigits = 64;
constexpr int kParcels = kDigits / kLanes;

// Stores 64 digits, and adds them to sums whose total is theirs.
#if defined(BATON_AVX512)
BATON_INLINE void store_digits(int8_t* to, __m512i digits, I& sums) {
    _mm512_storeu_si512(to, digits);
#if defined(BATON_VNNI)
    sums.part[0] = (RegI)_mm512_dpbusd_epi32((__m512i)sums.part[0], _mm512_set1_epi8(1), digits);
#else
    __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), digits);
    sums.part[0] += (RegI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#endif
}
#endif

// Sixty-four whole numbers as bytes: their only digit, or the first and, where `second` is not null, the second.
BATON_INLINE void store_whole(const I whole[kParcels], int8_t* first, int8_t* second, I sums[2]) {
#if defined(BATON_AVX512)
    // Two digits fit into 16 bits. Packing goes by quarters of registers: four bytes of each of the four are left in each.
    auto words = [&](int i) { return _mm512_packs_epi32((__m512i)whole[i].part[0], (__m512i)whole[i + 1].part[0]); };
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    __m512i low = words(0), high = words(2);
    if (second) {
        const __m512i byte = _mm512_set1_epi16(0xff), half = _mm512_set1_epi16(128);
        __m512i bytes = _mm512_packus_epi16(_mm512_and_si512(low, byte), _mm512_and_si512(high, byte));
        store_digits(second, _mm512_permutexvar_epi32(order, bytes), sums[1]);
        // What is left of the number without its low digit, which has a sign: at most 32,639 + 128.
        low = _mm512_srai_epi16(_mm512_add_epi16(low, half), 8);
        high = _mm512_srai_epi16(_mm512_add_epi16(high, half), 8);
    }
    store_digits(first, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(low, high)), sums[0]);
#else
    int32_t lanes[kDigits], *totals = (int32_t*)sums;
    memcpy(lanes, whole, sizeof lanes);
    for (int i = 0; i < kDigits; ++i) {
        if (second) totals[kLanes] += second[i] = int8_t(lanes[i]);
        totals[0] += first[i] = int8_t(second ? (lanes[i] + 128) >> 8 : lanes[i]);
    }
#endif
}

#if defined(BATON_VNNI)
// Sixteen whole numbers as DigitRows::pairs has them, each four `stride` behind the four before.
BATON_INLINE void store_pairs(I whole, int16_t* to, int64_t stride) {
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(2, 3, 6, 7, 0, 1, 4, 5, 10, 11, 14, 15, 8, 9, 12, 13));
    __m256i numbers = _mm512_cvtepi32_epi16(_mm512_sub_epi32((__m512i)whole.part[0], _mm512_set1_epi32(128)));
    int64_t fours[4];
    _mm256_storeu_si256((__m256i*)fours, _mm256_shuffle_epi8(numbers, order));
    for (int i = 0; i < 4; ++i) memcpy(to + i * stride, fours + i, 8);
}

// Adds to sums whose total is theirs the products of sixteen whole numbers, two and two.
BATON_INLINE void add_pairs_of(I whole, I& sums) {
    __m512i low = _mm512_and_si512((__m512i)whole.part[0], _mm512_set1_epi32(0xffff));
    sums.part[0] = (RegI)_mm512_dpwssd_epi32((__m512i)sums.part[0], low, _mm512_srli_epi64(low, 32));
}
#endif

void add(I& sums, I digits) { BATON_EACH sums.part[i_] = sums.part[i_] + digits.part[i_]; }

int32_t total(I sums) {
#if defined(BATON_AVX512)
    return _mm512_reduce_add_epi32((__m512i)sums.part[0]);
#else
    int32_t lanes[kLanes], all = 0;
    memcpy(lanes, &sums, sizeof lanes);
    for (int32_t lane : lanes) all += lane;
    return all;
#endif
}

// Inputs from `i` on as whole numbers; zeros behind the last.
template <class Item> BATON_INLINE void round_some(const Item* x, int i, int in, float inverse, I whole[kParcels]) {
    if (i + kDigits <= in) {
        for (int k = 0; k < kParcels; ++k) whole[k] = rounded(load(x + i + k * kLanes), inverse);
    } else {
        for (int k = 0; i + k * kLanes < in; ++k) whole[k] = rounded(load_some(x + i + k * kLanes, in - i - k * kLanes), inverse);
    }
}

}  // namespace

#if defined(BATON_VNNI)
template <class Item> void DigitRows::keep_pairs(const Item* x, int in, int row, float inverse) {
    auto next = std::upper_bound(how_.tiles->begin(), how_.tiles->end(), row);
    int first = next[-1], rows = *next - first, segment = how_.segment ? how_.segment : kPairedInputs;
    auto* to = (int16_t*)items_.data() + first * stride_ + (row - first) * 4;
    int32_t* products = pair_sums_.data() + first * pair_segments_ + row - first;
    int32_t* sums = segment_sums_.data() + first * segments_ + row - first;
    I product = {}, sum = {};
    for (int i = 0; i < stride_; i += kDigits) {
        I whole[kParcels] = {};
        round_some(x, i, in, inverse, whole);
        for (int k = 0; k < kParcels; ++k) {
            int end = i + (k + 1) * kLanes;
            store_pairs(whole[k], to + int64_t(end - kLanes) * rows, 4 * rows);
            if (end - kLanes >= in) continue;
            add_pairs_of(whole[k], product);
            add(sum, whole[k]);
            if (end % segment && end < in) continue;
            int32_t whole_sum = how_.segment ? total(sum) : 0;
            if (how_.segment) *sums = whole_sum, sums += rows;
            *products = int32_t(uint32_t(total(product)) - uint32_t(how_.lifted) * uint32_t(whole_sum)), products += rows;
            product = sum = {};
        }
    }
}
#endif

template <class Item> void DigitRows::round_row(const Item* x, int in, int row) {
    uint32_t bits = greatest_bits(x, in);
    float most, inverse = 0.0f, top = kGreatest[how_.digits - 1];
    memcpy(&most, &bits, 4);
    auto* to = (int8_t*)items_.data() + row * how_.digits * stride_;
    bool number = bits < kInfinity;
    scales_[row] = number ? 0.0f : __builtin_nanf("");
    if (number && most > kMinMagnitude) scales_[row] = most / top, inverse = top / most;
#if defined(BATON_VNNI)
    if (how_.tiles) return keep_pairs(x, in, row, inverse);
#endif
    if (inverse == 0.0f) {
        memset(to, 0, size_t(how_.digits * stride_));
        std::fill_n(sums_.data() + row * how_.digits, how_.digits, 0);
        std::fill_n(segment_sums_.data() + row * segments_, segments_, 0);
        return;
    }
    I segment = {}, sums[2] = {};
    for (int i = 0; i < stride_; i += kDigits, to += kDigits) {
        I whole[kParcels] = {};
        round_some(x, i, in, inverse, whole);
        for (int k = 0; how_.segment && k < kParcels && i + k * kLanes < in; ++k) {
            add(segment, whole[k]);
            int end = i + (k + 1) * kLanes;
            if (end % how_.segment == 0) segment_sums_[row * segments_ + end / how_.segment - 1] = total(segment), segment = {};
        }
        store_whole(whole, to, how_.digits == 2 ? to + stride_ : nullptr, sums);
    }
    for (int digit = 0; digit < how_.digits; ++digit) sums_[row * how_.digits + digit] = total(sums[digit]);
}

void DigitRows::round(Pool& pool, const Rows& x, int in, const Rounding& how) {
    how_ = how;
    int digits = how.digits, segment = how.segment, paired_inputs = segment ? segment : kPairedInputs;
    pair_segments_ = how.tiles ? (in + paired_inputs - 1) / paired_inputs : 0;
    segments_ = segment ? in / segment : 0;
    stride_ = (in + 63) / 64 * 64;
    // Not a multiple of 1 kB apart: tiles would find their rows in the same few sets of the cache.
    if (stride_ % 1024 == 0) stride_ += 64;
    size_t needed = size_t(x.count) * digits * stride_ / 64;
    if (items_.size() < needed) items_.resize(needed);
    if (scales_.size() < size_t(x.count)) scales_.resize(x.count);
    if (sums_.size() < size_t(x.count) * digits) sums_.resize(size_t(x.count) * digits);
    if (segment_sums_.size() < size_t(x.count) * segments_) segment_sums_.resize(size_t(x.count) * segments_);
    if (pair_sums_.size() < size_t(x.count) * pair_segments_) pair_sums_.resize(size_t(x.count) * pair_segments_);
    // Threads do not write to one tile of pairs, whose rows' numbers lie among each other.
    int tiles = how.tiles ? int(how.tiles->size()) - 1 : (x.count + kRowsOfTile - 1) / kRowsOfTile;
    pool.run(tiles, [&](int tile, int) {
        int row = how.tiles ? (*how.tiles)[tile] : tile * kRowsOfTile;
        for (int end = how.tiles ? (*how.tiles)[tile + 1] : std::min(x.count, row + kRowsOfTile); row < end; ++row) {
            if (x.number == Number::kHalf) round_row((const Bf16*)x.data + row * x.stride, in, row);
            else round_row((const float*)x.data + row * x.stride, in, row);
        }
    });
}
