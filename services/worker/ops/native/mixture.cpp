// Rows sorted by expert, and one job of the threads for each of two matrices: a job for each expert would have the threads meet
// twice for each of them, where one row takes microseconds.
#include "mixture.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "rows.h"

namespace {

// Rows whose experts' inputs and outputs are in memory at a time.
constexpr int kMaxRows = 512;

void score_row(const float* logits, const RouterRule& rule, float* scores) {
    if (rule.sigmoid) {
        for (int i = 0; i < rule.experts; ++i) scores[i] = sigmoid(logits[i]);
        return;
    }
    float most = *std::max_element(logits, logits + rule.experts), total = 0.0f;
    for (int i = 0; i < rule.experts; ++i) total += scores[i] = std::exp(logits[i] - most);
    for (int i = 0; i < rule.experts; ++i) scores[i] /= total;
}

constexpr float kNever = -std::numeric_limits<float>::infinity();

float greatest_of(const float* numbers, int count) {
    F most = all(kNever);
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) most = larger(load(numbers + i), most);
    float found = greatest(most);
    for (; i < count; ++i) found = numbers[i] > found ? numbers[i] : found;
    return found;
}

// The places of the greatest `chosen` of some numbers, the greatest first; of equal ones the first. What is chosen is overwritten.
template <class Place> void take_greatest(float* numbers, int count, int chosen, Place* places) {
    for (int pick = 0; pick < chosen; ++pick) {
        float most = greatest_of(numbers, count);
        auto best = int(std::find(numbers, numbers + count, most) - numbers);
        // None of those left is a number, or of a group to be chosen from.
        if (most == kNever)
            for (best = 0; std::find(places, places + pick, best) != places + pick;) ++best;
        places[pick] = best;
        numbers[best] = kNever;
    }
}

// Nothing is chosen of the other groups. One is as good as its best expert; where there is a bias, as its best two together.
void leave_out_groups(const RouterRule& rule, float* choosing) {
    static thread_local std::vector<float> worth;
    static thread_local std::vector<int> best;
    worth.resize(size_t(rule.groups));
    best.resize(size_t(rule.chosen_groups));
    int size = rule.experts / rule.groups;
    for (int group = 0; group < rule.groups; ++group) {
        float first = kNever, second = kNever;
        for (const float* score = choosing + group * size; score < choosing + (group + 1) * size; ++score) {
            second = std::max(second, std::min(first, *score));
            first = std::max(first, *score);
        }
        worth[size_t(group)] = rule.bias ? first + second : first;
    }
    take_greatest(worth.data(), rule.groups, rule.chosen_groups, best.data());
    for (int group = 0; group < rule.groups; ++group)
        if (std::find(best.begin(), best.end(), group) == best.end()) std::fill_n(choosing + group * size, size, kNever);
}

void route_row(const float* logits, const RouterRule& rule, float* chances, int64_t* picks) {
    static thread_local std::vector<float> scores, choosing;
    scores.resize(size_t(rule.experts));
    choosing.resize(size_t(rule.experts));
    score_row(logits, rule, scores.data());
    for (int i = 0; i < rule.experts; ++i) choosing[i] = rule.bias ? scores[i] + rule.bias[i] : scores[i];
    if (rule.groups > 1) leave_out_groups(rule, choosing.data());
    take_greatest(choosing.data(), rule.experts, rule.chosen, picks);
    float total = 0.0f;
    for (int pick = 0; pick < rule.chosen; ++pick) total += chances[pick] = scores[size_t(picks[pick])];
    for (int pick = 0; pick < rule.chosen; ++pick) {
        if (rule.renormalised) chances[pick] /= total;
        chances[pick] *= rule.scale;
    }
}

// Memory that grows and is kept, for rows that are not a multiple of 1 kB apart: tiles read them where they lie.
struct RowMemory {
    std::vector<F> memory;
    int64_t stride = 0;

    char* fit(int64_t rows, int64_t items, int size) {
        stride = (items + kLanes - 1) / kLanes * kLanes;
        if (stride * size % 1024 == 0) stride += 64 / size;
        size_t needed = size_t(rows * stride * size + 63) / 64;
        if (memory.size() < needed) memory.resize(needed);
        return (char*)memory.data();
    }
};

// Where each pick of some rows lies among those of all, sorted by expert; -1: nowhere.
struct Order {
    std::vector<int64_t> starts;  // of each expert, and behind the last
    std::vector<int> places;
    int count = 0;

    void sort(const int64_t* experts, int picks, int expert_count) {
        starts.assign(size_t(expert_count) + 1, 0);
        for (int i = 0; i < picks; ++i)
            if (experts[i] >= 0) ++starts[size_t(experts[i]) + 1];
        for (int e = 0; e < expert_count; ++e) starts[e + 1] += starts[e];
        count = int(starts[expert_count]);
        std::vector<int64_t> next(starts.begin(), starts.end() - 1);
        places.resize(size_t(picks));
        for (int i = 0; i < picks; ++i) places[i] = experts[i] < 0 ? -1 : int(next[size_t(experts[i])]++);
    }
};

// The sum of a row's outputs, which lie by expert.
void sum_row(const float* outputs, int64_t stride, const float* chances, const int* places, int chosen, int width, float* to) {
    std::fill(to, to + width, 0.0f);
    for (int last = -1;;) {
        int next = -1;
        for (int i = 0; i < chosen; ++i)
            if (places[i] > last && (next < 0 || places[i] < places[next])) next = i;
        if (next < 0) return;
        last = places[next];
        const float* from = outputs + last * stride;
        for (int i = 0; i < width; ++i) to[i] += from[i] * chances[next];
    }
}

int bytes_of(Number number) { return number == Number::kHalf ? 2 : 4; }

void mix_some(Pool& pool, const Rows& x, const Picks& picks, const Experts& experts, float* to, int64_t to_stride) {
    static thread_local Order order;
    static thread_local RowMemory inputs, gated, both, outputs;
    const Linear &gate_up = *experts.gate_up, &down = *experts.down;
    int chosen = picks.chosen, width = has_gates(experts.activation) ? gate_up.out / 2 : gate_up.out, size = bytes_of(x.number), gated_size = bytes_of(gate_up.number);
    order.sort(picks.experts, x.count * chosen, experts.count);
    char* sorted = inputs.fit(order.count, gate_up.in, size);
    const int* places = order.places.data();  // the helpers have orders of their own
    int64_t stride = inputs.stride * size;
    each_row(pool, x.count, [&](int row) {
        const char* from = (const char*)x.data + row * x.stride * size;
        for (int i = row * chosen; i < (row + 1) * chosen; ++i)
            if (places[i] >= 0) memcpy(sorted + places[i] * stride, from, size_t(gate_up.in) * size);
    });
    Rows rows{sorted, x.number, inputs.stride, order.count};
    const int64_t* starts = order.starts.data();
    void* middle = gated.fit(order.count, width, gated_size);
    if (can_gate(gate_up, experts.activation)) {
        multiply_each(pool, rows, experts.gate_up, starts, experts.count, {Out::kGated, experts.activation, middle, gated.stride});
    } else {
        void* floats = both.fit(order.count, gate_up.out, 4);
        multiply_each(pool, rows, experts.gate_up, starts, experts.count, {Out::kFloat, experts.activation, floats, both.stride});
        gate(pool, {floats, Number::kSingle, both.stride, order.count}, width, experts.activation, gate_up.number, middle, gated.stride);
    }
    Rows activated{middle, gate_up.number, gated.stride, order.count};
    auto* made = (float*)outputs.fit(order.count, down.out, 4);
    multiply_each(pool, activated, experts.down, starts, experts.count, {Out::kFloat, experts.activation, made, outputs.stride});
    int64_t made_stride = outputs.stride;
    each_row(pool, x.count, [&](int row) {
        sum_row(made, made_stride, picks.chances + row * chosen, places + row * chosen, chosen, down.out, to + row * to_stride);
    });
}

}  // namespace

void route(Pool& pool, const float* logits, int rows, const RouterRule& rule, float* chances, int64_t* picks) {
    each_row(pool, rows, [&](int row) {
        route_row(logits + int64_t(row) * rule.experts, rule, chances + int64_t(row) * rule.chosen, picks + int64_t(row) * rule.chosen);
    });
}

void mix(Pool& pool, const Rows& x, const Picks& picks, const Experts& experts, float* to, int64_t to_stride) {
    for (int first = 0; first < x.count; first += kMaxRows) {
        int64_t at = first;
        Rows some{(const char*)x.data + at * x.stride * bytes_of(x.number), x.number, x.stride, std::min(kMaxRows, x.count - first)};
        Picks own{picks.chances + at * picks.chosen, picks.experts + at * picks.chosen, picks.chosen};
        mix_some(pool, some, own, experts, to + at * to_stride, to_stride);
    }
}
