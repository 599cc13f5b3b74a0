// Logits become weights (probabilities up to a factor), those that are cut off become zero, and the tokens that are left
// race: each one's time is exponential, from a hash of the row's key and the token; the greatest weight / time wins.
//
// A time is never shorter than the uniform number v that it is made of, -log(1 - v) >= v, so weight / v bounds what a
// token can reach. Logarithms are taken of the few tokens only whose bound exceeds the best one so far, and these in
// double precision: so the winner of the same weights is the one that PyTorch's way finds, whatever the instructions are.
#include "draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "logits.h"

namespace {

constexpr uint32_t kStep = 0x9E3779B1u;
// Products in single precision are off by less than this: nothing that could win is passed over.
constexpr float kSlack = 1.0f - 1e-6f;
// How far the lower bound of the weights that are kept is moved until it is one, as a share.
constexpr float kBand = 1.0f / 16;
// So few weights are sorted.
constexpr int kFew = 64;

BATON_INLINE RegU hashed(RegU x, RegU second) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x += second;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

// In (0, 1): of 31 bits, as near to 1 as a float comes.
BATON_INLINE F uniforms(U hashes) {
    F v;
    BATON_EACH {
        RegI low = (RegI)(hashes.part[i_] & 0x7FFFFFFFu);
        v.part[i_] = (__builtin_convertvector(low, RegF) + 0.5f) * 4.656612873077393e-10f;
    }
    return smaller(v, all(0.99999994f));
}

int64_t winner_of(const float* weights, int width, uint32_t first, uint32_t second) {
    U token;
    BATON_EACH {
        for (int lane = 0; lane < kLanes / kParts; ++lane)
            token.part[i_][lane] = uint32_t(i_ * (kLanes / kParts) + lane) * kStep + first;
    }
    double best = 0.0;
    F bound = zeros();
    int64_t winner = 0;
    for (int i = 0; i < width; i += kLanes) {
        U hashes;
        BATON_EACH hashes.part[i_] = hashed(token.part[i_], second + RegU{});
        BATON_EACH token.part[i_] += uint32_t(kLanes) * kStep;
        F v = uniforms(hashes);
        if (!any_greater(load(weights + i), bound * v)) continue;
        float each[kLanes];
        store(each, v);
        for (int lane = 0; lane < kLanes; ++lane) {
            double reached = double(weights[i + lane]) / -std::log1p(-double(each[lane]));
            if (reached > best) {
                best = reached;
                winner = i + lane;
            }
        }
        bound = all(float(best) * kSlack);
    }
    return winner;
}

int64_t first_of(const float* logits, int vocab, float value) {
    for (int i = 0; i < vocab; ++i)
        if (logits[i] == value) return i;
    return 0;
}

int64_t first_nan(const float* logits, int vocab) {
    return std::find_if(logits, logits + vocab, [](float x) { return std::isnan(x); }) - logits;
}

BATON_INLINE F zero_below(F x, F least) {
    BATON_EACH x.part[i_] = x.part[i_] >= least.part[i_] ? x.part[i_] : RegF{};
    return x;
}

// e^((logit - greatest logit) / temperature), zeros for what is below min_p; their sum.
float weigh(const float* logits, int vocab, float most, float temperature, float min_p, float* weights) {
    F divisor = all(temperature), peak = all(most) / divisor, least = all(min_p), total = zeros();
    for (int i = 0; i < vocab; i += kLanes) {
        F x = logits_at(logits, i, vocab);
        if (temperature != 1.0f) x = x / divisor;
        x = zero_below(exp(x - peak), least);  // the greatest weight is 1
        store(weights + i, x);
        total = total + x;
    }
    return sum(total);
}

// How many weights are greater than something, and what these sum up to.
struct Tally {
    int64_t count;
    double mass;

    bool reaches(const Tally& wanted) const { return count >= wanted.count || mass >= wanted.mass; }
};

Tally above(const float* weights, int width, float least) {
    const F bound = all(least);
    F total = zeros(), count = zeros();  // a lane's count is exact up to 2^24
    for (int i = 0; i < width; i += kLanes) {
        F x = load(weights + i);
        BATON_EACH {
            total.part[i_] += x.part[i_] > bound.part[i_] ? x.part[i_] : RegF{};
            count.part[i_] += x.part[i_] > bound.part[i_] ? RegF{} + 1.0f : RegF{};
        }
    }
    return {int64_t(sum(count)), double(sum(total))};
}

// Where the greatest weights end that are kept, and what these sum up to.
struct Cut {
    float least;
    double mass;
};

// Of `weights` in (low, 1], of which those above `high` are `passed`: the least of the fewest greatest that reach `wanted`.
Cut walk(const float* weights, int width, float low, float high, Tally passed, const Tally& wanted) {
    float band[kFew];
    int size = 0;
    for (int i = 0; i < width; i += kLanes) {
        if (!any_greater(load(weights + i), all(low))) continue;
        for (int lane = i; lane < i + kLanes; ++lane)
            if (weights[lane] > low && weights[lane] <= high) band[size++] = weights[lane];
    }
    std::sort(band, band + size, std::greater<float>());
    for (int i = 0; i < size; ++i) {
        passed = {passed.count + 1, passed.mass + band[i]};
        if (passed.reaches(wanted)) return {band[i], passed.mass};
    }
    return {band[size - 1], passed.mass};  // there are some; their sum in another order may just miss it
}

// The least of the fewest greatest weights that reach `wanted`, whose mass is above zero; zero where all together do not.
// Bounds are drawn nearer from both sides, passing over all weights each time, until few lie between them: positive floats are
// ordered as their bits are.
Cut cut_off(const float* weights, int width, const Tally& wanted) {
    float low = 1.0f, high = 1.0f;
    Tally passed{0, 0.0}, reached{0, 0.0};
    do {
        high = low, passed = reached;
        if (low == 0.0f) return {0.0f, reached.mass};
        low = low < 1e-36f ? 0.0f : low * kBand;
        reached = above(weights, width, low);
    } while (!reached.reaches(wanted));
    while (reached.count - passed.count > kFew) {
        uint32_t from, to;
        memcpy(&from, &low, 4);
        memcpy(&to, &high, 4);
        if (to - from <= 1) {  // they are all the same
            int64_t equal = std::min(wanted.count, reached.count) - passed.count;
            return {high, passed.mass + double(equal) * high};
        }
        uint32_t middle = from + (to - from) / 2;
        float bound;
        memcpy(&bound, &middle, 4);
        Tally tally = above(weights, width, bound);
        if (tally.reaches(wanted))
            low = bound, reached = tally;
        else
            high = bound, passed = tally;
    }
    return walk(weights, width, low, high, passed, wanted);
}

// What is kept of the weights, whose sum is `mass`: the top_k greatest, and of these the fewest that have a share of top_p.
float least_kept(const float* weights, int width, int64_t top_k, float top_p, double mass) {
    constexpr double kUnlimited = std::numeric_limits<double>::infinity();
    Cut cut{0.0f, mass};
    if (top_k < width) cut = cut_off(weights, width, {top_k, kUnlimited});
    if (top_p < 1.0f) cut = cut_off(weights, width, {top_k, double(top_p) * cut.mass});
    return cut.least;
}

// The row's logits as it is drawn from them.
const float* changed_row(const Draws& draws, int row) {
    const float* logits = draws.logits + int64_t(row) * draws.vocab;
    if (!draws.changes || !draws.changes[row].any()) return logits;
    static thread_local std::vector<float> changed;  // as others want to know what they were
    changed.assign(logits, logits + draws.vocab);
    change_logits(draws.changes[row], draws.steps, changed.data(), draws.vocab);
    return changed.data();
}

int64_t draw_row(const Draws& draws, int row, std::vector<float>& scratch) {
    const float* logits = changed_row(draws, row);
    const int width = (draws.vocab + kLanes - 1) / kLanes * kLanes;
    bool undefined;
    const int64_t likeliest = likeliest_of(logits, draws.vocab, &undefined);
    if (undefined) return first_nan(logits, draws.vocab);  // who looks at its logit sees that it means nothing
    if (draws.temperature[row] == 0.0f) return likeliest;
    const float most = logits[likeliest];
    if (int(scratch.size()) < width) scratch.resize(width);
    float* weights = scratch.data();
    float mass = weigh(logits, draws.vocab, most, draws.temperature[row], draws.min_p[row], weights);
    if (!(mass > 0.0f)) return 0;  // no logit is a finite number
    if (draws.top_k[row] < draws.vocab || draws.top_p[row] < 1.0f) {
        F least = all(least_kept(weights, width, draws.top_k[row], draws.top_p[row], mass));
        for (int i = 0; i < width; i += kLanes) store(weights + i, zero_below(load(weights + i), least));
    }
    return winner_of(weights, width, draws.keys[2 * row], draws.keys[2 * row + 1]);
}

// Logits of which the greatest is found at once: those of one part of a row are looked through a second time.
constexpr int kPart = 1024;

// The magnitudes' bits, which are in order as they are and those of NaN behind infinity's.
BATON_INLINE RegI magnitude(RegF x) { return (RegI)((RegU)x & 0x7fffffffu); }

}  // namespace

// Philox4x32-10: the position is the counter, the seed the key.
void race_key(uint64_t seed, uint32_t position, uint32_t* halves) {
    constexpr uint64_t kFactors[] = {0xD2511F53u, 0xCD9E8D57u};
    uint32_t even[] = {position, 0}, odd[] = {0, 0}, key[] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round, key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u) {
        uint64_t first = kFactors[0] * even[0], second = kFactors[1] * even[1];
        even[0] = uint32_t(second >> 32) ^ odd[0] ^ key[0], odd[0] = uint32_t(second);
        even[1] = uint32_t(first >> 32) ^ odd[1] ^ key[1], odd[1] = uint32_t(first);
    }
    halves[0] = even[0], halves[1] = odd[0];
}

int64_t likeliest_of(const float* logits, int vocab, bool* undefined) {
    float best = -std::numeric_limits<float>::infinity();
    int found = 0;
    Sixteen<RegI> largest = {};
    for (int first = 0; first < vocab; first += kPart) {
        F most = all(-std::numeric_limits<float>::infinity());
        for (int i = first; i < std::min(vocab, first + kPart); i += kLanes) {
            F x = logits_at(logits, i, vocab);
            most = larger(x, most);
            BATON_EACH {
                RegI size = magnitude(x.part[i_]);
                largest.part[i_] = size > largest.part[i_] ? size : largest.part[i_];
            }
        }
        float greatest_here = greatest(most);
        if (greatest_here > best) best = greatest_here, found = first;
    }
    int32_t lanes[kLanes];
    memcpy(lanes, &largest, sizeof lanes);
    *undefined = *std::max_element(lanes, lanes + kLanes) > 0x7f800000;
    return found + first_of(logits + found, std::min(vocab - found, kPart), best);
}

void find_likeliest(Pool& pool, const float* logits, int vocab, int count, int64_t* tokens, bool* undefined) {
    pool.run(count, [&](int row, int) { tokens[row] = likeliest_of(logits + int64_t(row) * vocab, vocab, undefined + row); });
}

void draw(Pool& pool, const Draws& draws, int64_t* tokens) {
    pool.run(draws.count, [&](int row, int) {
        // Kept, as memory that is returned has to be fetched again page by page.
        static thread_local std::vector<float> scratch;
        tokens[row] = draw_row(draws, row, scratch);
    });
}
