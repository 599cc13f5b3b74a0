// Rows rounded to whole numbers, each by a scale of its own, as digits of eight bits that Quad multiplies. Knows no weights.
#pragma once
#include <vector>

#include "linear.h"

// Inputs whose sum of products with int8 fits into 32 bits: 32,639 * 128 * 512.
constexpr int kPairedInputs = 512;

// How rows are rounded.
struct Rounding {
    int digits;
    int segment;  // inputs whose sums are wanted, a multiple of 16 that divides `in`; 0: none
    // The first row of each tile of pairs.h, and behind the last: two digits are kept as one number of 16 bits. Null: they are
    // kept as digits.
    const std::vector<int>* tiles;
    int lifted;  // how much more weights stand for than what pairs.h multiplies
};

// A row becomes one digit of its greatest element's 127th part (W8A8), or two, of its 32,639th: 256 * first + second, both
// in [-128, 127]. That step is at most sqrt(n) / 32,639 of the mean square's root of a row of n, so for all models that are
// served rounding to two digits loses less than rounding to bf16 has lost before.
class DigitRows {
  public:
    // Rounds to the nearest, ties to even; a row's digits depend on nothing but the row, and on no instructions. What was
    // rounded before is gone. A row that has an infinity, or what is no number, gets a scale that is none, either.
    void round(Pool& pool, const Rows& x, int in, const Rounding& how);
    bool paired() const { return how_.tiles; }

    // A row's digits lie one behind the other, `stride` apart, filled up with zeros to a whole number of 64.
    const int8_t* items(int64_t row) const { return (const int8_t*)items_.data() + row * how_.digits * stride_; }
    int64_t stride() const { return stride_; }
    // Of a tile that begins with this row [steps][rows of the tile][4]: numbers less 128, of each four inputs the second, fourth,
    // first and third.
    const int16_t* pairs(int64_t row) const { return (const int16_t*)items_.data() + row * stride_; }
    // Of the same tile [segments][rows of the tile]: the sum of the products of its pairs less `lifted` times its numbers' sum,
    // for each kPairedInputs of a row or for each segment.
    const int32_t* pair_sums(int64_t row) const { return pair_sums_.data() + row * pair_segments_; }
    const float* scales(int64_t row) const { return scales_.data() + row; }
    // The sum of each digit's items.
    const int32_t* sums(int64_t row) const { return sums_.data() + row * how_.digits; }
    // The sum of each segment's whole numbers: below 2^24, so that floats hold it. Of a tile of pairs as `pair_sums`.
    const int32_t* segment_sums(int64_t row) const { return segment_sums_.data() + row * segments_; }

  private:
    template <class Item> void round_row(const Item* x, int in, int row);
    template <class Item> void keep_pairs(const Item* x, int in, int row, float inverse);

    Rounding how_{1, 0, nullptr, 0};
    int64_t pair_segments_ = 0;  // of a row
    int64_t segments_ = 0;  // of a row
    int64_t stride_ = 0;
    std::vector<F> items_;
    std::vector<float> scales_;
    std::vector<int32_t> sums_;
    std::vector<int32_t> segment_sums_;
    std::vector<int32_t> pair_sums_;
};
