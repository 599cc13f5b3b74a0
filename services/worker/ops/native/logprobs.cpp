// Two passes over a row, which stays in cache: its greatest logit; then what their exponentials sum up to, how many are as great as
// the token's, and the likeliest, of which a logit has to exceed the last one found so far: few do.
#include "logprobs.h"

#include <algorithm>
#include <cmath>

#include "logits.h"

namespace {

// Logits that are summed up in single precision, before their sum is added to the others in double: sums of some 100,000 would
// be off by more than the logits are.
constexpr int kSummed = 1024;

// The likeliest so far, best first.
struct Likeliest {
    float logits[kMaxTopLogprobs];
    int64_t ids[kMaxTopLogprobs];
    int size = 0;

    void put(float logit, int64_t id, int most) {
        int at = size < most ? size++ : most - 1;
        for (; at > 0 && logit > logits[at - 1]; --at) logits[at] = logits[at - 1], ids[at] = ids[at - 1];
        logits[at] = logit, ids[at] = id;
    }
};

void find_row(const Logprobs& what, int row, float* totals, int64_t* ranks, int64_t* ids, float* values) {
    const float* logits = what.logits + what.rows[row] * what.vocab;
    const float most = greatest_of(logits, what.vocab);
    const F peak = all(most), least = all(logits[what.tokens[row]]);
    Likeliest best;
    for (int i = 0; i < what.likeliest; ++i) best.put(logits[i], i, what.likeliest);
    double total = 0.0;
    F count = zeros();  // a lane's count is exact up to 2^24
    for (int first = 0; first < what.vocab; first += kSummed) {
        F sums = zeros();
        for (int i = first; i < std::min(what.vocab, first + kSummed); i += kLanes) {
            F x = logits_at(logits, i, what.vocab);
            sums = sums + exp(x - peak);
            BATON_EACH count.part[i_] += x.part[i_] >= least.part[i_] ? RegF{} + 1.0f : RegF{};
            if (!best.size || !any_greater(x, all(best.logits[best.size - 1]))) continue;
            for (int id = std::max(i, what.likeliest); id < std::min(i + kLanes, what.vocab); ++id)
                if (logits[id] > best.logits[best.size - 1]) best.put(logits[id], id, what.likeliest);
        }
        total += double(sum(sums));
    }
    const float all_of_them = totals[row] = float(double(most) + std::log(total));
    // What lies behind the last logit is as great as a token's only where that is minus infinity.
    ranks[row] = std::min(int64_t(sum(count)), int64_t(what.vocab));
    for (int i = 0; i < what.likeliest; ++i) {
        ids[int64_t(row) * what.likeliest + i] = best.ids[i];
        values[int64_t(row) * what.likeliest + i] = best.logits[i] - all_of_them;
    }
}

}  // namespace

void find_logprobs(Pool& pool, const Logprobs& what, float* totals, int64_t* ranks, int64_t* ids, float* values) {
    pool.run(what.count, [&](int row, int) { find_row(what, row, totals, ranks, ids, values); });
}
