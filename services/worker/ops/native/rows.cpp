// Embedding, RMS norms and the MLP's gate.
#include "rows.h"

#include <algorithm>
#include <cmath>

#include "activation.h"

namespace {

float get(const float* x) { return *x; }
float get(const Bf16* x) { return float_of(*x); }
void put(float* to, float x) { *to = x; }
void put(Bf16* to, float x) { *to = bf16_of(x); }

template <class From> void embed_row(const From* from, int hidden, float scale, float* to) {
    int i = 0;
    for (; i + kLanes <= hidden; i += kLanes) store(to + i, load(from + i) * all(scale));
    for (; i < hidden; ++i) to[i] = get(from + i) * scale;
}

// residual += x; returns the sum of its squares. The tail's squares come last, one by one.
template <class From> float add_row(const From* x, float* residual, int hidden) {
    F squares = zeros();
    int i = 0;
    for (; i + kLanes <= hidden; i += kLanes) {
        F v = load(x + i) + load(residual + i);
        store(residual + i, v);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; i < hidden; ++i) {
        residual[i] += get(x + i);
        total += residual[i] * residual[i];
    }
    return total;
}

template <class From> float squares_of(const From* x, int hidden) {
    F squares = zeros();
    int i = 0;
    for (; i + kLanes <= hidden; i += kLanes) {
        F v = load(x + i);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; i < hidden; ++i) total += get(x + i) * get(x + i);
    return total;
}

template <class From, class To> void scale_row(const From* x, float squares, const Norm& what, To* to) {
    float scale = 1.0f / std::sqrt(squares / float(what.hidden) + what.eps);
    int i = 0;
    for (; i + kLanes <= what.hidden; i += kLanes) store(to + i, load(x + i) * all(scale) * load(what.weight + i));
    for (; i < what.hidden; ++i) put(to + i, get(x + i) * scale * what.weight[i]);
}

template <class From, class To>
void norm_row(const From* x, float* residual, const Norm& what, To* to) {
    if (residual) {
        float squares = add_row(x, residual, what.hidden);
        scale_row(residual, squares, what, to);
    } else {
        scale_row(x, squares_of(x, what.hidden), what, to);
    }
}

template <class To> void gate_row(const float* gate_up, int width, Activation activation, To* to) {
    int i = 0;
    for (; i + kLanes <= width; i += kLanes)
        store(to + i, gated(activation, load(gate_up + i), load(gate_up + width + i)));
    if (i == width) return;
    float gates[kLanes] = {}, ups[kLanes] = {};
    std::copy(gate_up + i, gate_up + width, gates);
    std::copy(gate_up + width + i, gate_up + 2 * width, ups);
    float rest[kLanes];
    store(rest, gated(activation, load(gates), load(ups)));
    for (int k = 0; i + k < width; ++k) put(to + i + k, rest[k]);
}

// Ups below zero become zero, all are squared. What is no number stays so.
template <class To> void square_row(const float* up, int width, To* to) {
    int i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        F x = larger(zeros(), load(up + i));
        store(to + i, x * x);
    }
    for (; i < width; ++i) put(to + i, up[i] < 0.0f ? 0.0f : up[i] * up[i]);
}

template <class Item> void gate_items(const float* gates, int width, Item* x) {
    int i = 0;
    for (; i + kLanes <= width; i += kLanes) store(x + i, load(x + i) * sigmoid(load(gates + i)));
    if (i == width) return;
    float rest[kLanes] = {};
    std::copy(gates + i, gates + width, rest);
    store(rest, sigmoid(load(rest)));
    for (int k = 0; i + k < width; ++k) put(x + i + k, get(x + i + k) * rest[k]);
}

}  // namespace

bool embed(Pool& pool, const int* ids, int count, Number number, const void* table, int vocab, int hidden, float scale,
           float* to, int64_t to_stride) {
    for (int row = 0; row < count; ++row)
        if (ids[row] < 0 || ids[row] >= vocab) return false;
    each_row(pool, count, [&](int row) {
        int64_t at = int64_t(ids[row]) * hidden;
        if (number == Number::kHalf) embed_row((const Bf16*)table + at, hidden, scale, to + row * to_stride);
        else embed_row((const float*)table + at, hidden, scale, to + row * to_stride);
    });
    return true;
}

void norm(Pool& pool, const Rows& x, float* residual, int64_t residual_stride, const Norm& what, Number to_number, void* to,
          int64_t to_stride) {
    auto with = [&](auto* from, auto* out) {
        each_row(pool, x.count, [&](int row) {
            norm_row(from + row * x.stride, residual ? residual + row * residual_stride : nullptr, what, out + row * to_stride);
        });
    };
    bool half = to_number == Number::kHalf;
    if (x.number == Number::kHalf) half ? with((const Bf16*)x.data, (Bf16*)to) : with((const Bf16*)x.data, (float*)to);
    else half ? with((const float*)x.data, (Bf16*)to) : with((const float*)x.data, (float*)to);
}

void gate(Pool& pool, const Rows& gate_up, int width, Activation activation, Number to_number, void* to, int64_t to_stride) {
    auto with = [&](auto* out) {
        each_row(pool, gate_up.count, [&](int row) {
            const float* from = (const float*)gate_up.data + row * gate_up.stride;
            if (has_gates(activation)) gate_row(from, width, activation, out + row * to_stride);
            else square_row(from, width, out + row * to_stride);
        });
    };
    to_number == Number::kHalf ? with((Bf16*)to) : with((float*)to);
}

void gate_by(Pool& pool, const float* gates, int64_t gates_stride, int width, Number number, void* x, int64_t x_stride, int count) {
    each_row(pool, count, [&](int row) {
        const float* from = gates + row * gates_stride;
        if (number == Number::kHalf) gate_items(from, width, (Bf16*)x + row * x_stride);
        else gate_items(from, width, (float*)x + row * x_stride);
    });
}
