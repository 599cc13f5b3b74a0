// Rows of x where tiles can read them, or as they can: of the weights' kind, and not all in the same few sets of a cache.
#pragma once
#include <type_traits>

#include "codes.h"
#include "sums.h"

namespace {

template <class To, class From> void convert(To* to, const From* from, int count) {
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
    for (; i < count; ++i) {
        if constexpr (sizeof(To) == 2) to[i] = bf16_of(from[i]);
        else to[i] = float_of(from[i]);
    }
}

template <class Item> void copy_row(Item* to, const Rows& x, int row, int first, int count, int padded) {
    using Other = std::conditional_t<sizeof(Item) == 2, float, Bf16>;
    int64_t at = row * x.stride + first;
    if ((x.number == Number::kHalf) == (sizeof(Item) == 2)) memcpy(to, (const Item*)x.data + at, size_t(count) * sizeof(Item));
    else convert(to, (const Other*)x.data + at, count);
    for (int i = count; i < padded; ++i) to[i] = 0;
}

// Whether tiles may read x where it lies.
template <class Kind> bool readable(const Product& p) {
    constexpr int item = sizeof(typename Kind::Item);
    bool aliased = p.x.count > 4 && p.x.stride * item % 1024 == 0;
    int items = p.linear.code == Code::kPlain ? Kind::kItems : kCodeInputs;
    return (p.x.number == Number::kHalf) == (item == 2) && !aliased && p.linear.in % items == 0;
}

}  // namespace
