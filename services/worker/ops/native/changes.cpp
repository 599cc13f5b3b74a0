// Each of a row's changes, in the order of the sampler's.
#include "changes.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "logits.h"

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int kBits = 32;

void forbid(const int32_t* bits, float* logits, int vocab) {
    for (int first = 0; first < vocab; first += kBits) {
        uint32_t barred = ~uint32_t(bits[first / kBits]);
        int end = std::min(first + kBits, vocab);
        if (barred == ~uint32_t{}) {
            std::fill(logits + first, logits + end, kNever);
            continue;
        }
        for (int token = first; barred && token < end; ++token, barred >>= 1)
            if (barred & 1) logits[token] = kNever;
    }
}

// Bans give way where they would leave nothing.
void ban(const Changes& by, float* logits, int vocab) {
    static thread_local std::vector<float> before;
    before.resize(by.stop_count);
    for (int i = 0; i < by.stop_count; ++i) before[i] = logits[by.stops[i]];
    for (int i = 0; i < by.stop_count; ++i) logits[by.stops[i]] = kNever;
    if (greatest_of(logits, vocab) == kNever)
        for (int i = 0; i < by.stop_count; ++i) logits[by.stops[i]] = before[i];
}

void penalise(const Changes& by, int length, float* logits, int vocab) {
    constexpr int kNot = -1;
    static thread_local std::vector<int> outputs;  // how often the output holds each token; kNot: neither it nor the prompt does
    if (int(outputs.size()) < vocab) outputs.resize(vocab, kNot);
    for (int i = 0; i < length; ++i) {
        if (uint32_t(by.held[i]) >= uint32_t(vocab)) continue;  // it has no logit
        int& count = outputs[by.held[i]];
        count = std::max(count, 0) + (i >= by.prompt_length);
    }
    for (int i = 0; i < length; ++i) {
        if (uint32_t(by.held[i]) >= uint32_t(vocab) || outputs[by.held[i]] == kNot) continue;
        int& count = outputs[by.held[i]];
        float& logit = logits[by.held[i]];
        float value = logit > 0 ? logit / by.repetition : logit * by.repetition;
        logit = value - (by.frequency * float(count) + by.presence * float(count > 0));
        count = kNot;
    }
}

}  // namespace

void change_logits(const Changes& by, int steps, float* logits, int vocab) {
    if (by.allowed) forbid(by.allowed, logits, vocab);
    if (by.mask) forbid(by.mask, logits, vocab);
    for (int i = 0; i < by.biases; ++i) logits[by.bias_tokens[i]] += by.bias_values[i];
    if (by.stop_count) ban(by, logits, vocab);
    if (by.held) penalise(by, by.held_length + steps, logits, vocab);
}
