// Rows rounded to whole numbers, each by a scale of its own, as digits of eight bits that Quad multiplies. Knows no weights.
#pragma once
#include <vector>

#include "linear.h"

// A row becomes one digit of its greatest element's 127th part (W8A8), or two, of its 32,639th: 256 * first + second, both
// in [-128, 127]. That step is at most sqrt(n) / 32,639 of the mean square's root of a row of n, so for all models that are
// served rounding to two digits loses less than rounding to bf16 has lost before.
class DigitRows {
  public:
    // Rounds to the nearest, ties to even; a row's digits depend on nothing but the row, and on no instructions. What was
    // rounded before is gone. A row that has an infinity, or what is no number, gets a scale that is none, either. `segment`:
    // inputs whose sums are wanted, a multiple of 16 that divides `in`; 0: none.
    void round(Pool& pool, const Rows& x, int in, int digits, int segment);

    // A row's digits lie one behind the other, `stride` apart, filled up with zeros to a whole number of 64.
    const int8_t* items(int64_t row) const { return (const int8_t*)items_.data() + row * digits_ * stride_; }
    int64_t stride() const { return stride_; }
    const float* scales(int64_t row) const { return scales_.data() + row; }
    // The sum of each digit's items.
    const int32_t* sums(int64_t row) const { return sums_.data() + row * digits_; }
    // The sum of each segment's whole numbers: below 2^24, so that floats hold it.
    const int32_t* segment_sums(int64_t row) const { return segment_sums_.data() + row * segments_; }

  private:
    template <class Item> void round_row(const Item* x, int in, int row);

    int digits_ = 1;
    int segment_ = 0;
    int64_t segments_ = 0;  // of a row
    int64_t stride_ = 0;
    std::vector<F> items_;
    std::vector<float> scales_;
    std::vector<int32_t> sums_;
    std::vector<int32_t> segment_sums_;
};
