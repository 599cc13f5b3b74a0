// Each token's time is exponential, from a hash of the row's key and the token; the greatest weight / time wins.
//
// A time is never shorter than the uniform number v that it is made of, -log(1 - v) >= v, so weight / v bounds what a
// token can reach. Logarithms are taken of the few tokens only whose bound exceeds the best one so far, and these in
// double precision: so the winner is the one that PyTorch's way finds, whatever the instructions are.
#include "race.h"

#include <cmath>

#include "lanes.h"

namespace {

constexpr uint32_t kStep = 0x9E3779B1u;
// Products in single precision are off by less than this: nothing that could win is passed over.
constexpr float kSlack = 1.0f - 1e-6f;

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

BATON_INLINE bool any_greater(F a, F b) {
#if defined(BATON_AVX512)
    return _mm512_cmp_ps_mask((__m512)a.part[0], (__m512)b.part[0], _CMP_GT_OQ) != 0;
#elif defined(BATON_AVX2)
    __m256 either = _mm256_or_ps(_mm256_cmp_ps((__m256)a.part[0], (__m256)b.part[0], _CMP_GT_OQ),
                                 _mm256_cmp_ps((__m256)a.part[1], (__m256)b.part[1], _CMP_GT_OQ));
    return _mm256_movemask_ps(either) != 0;
#else
    int32_t any = 0;
    BATON_EACH {
        RegI greater = a.part[i_] > b.part[i_];
        for (int lane = 0; lane < kLanes / kParts; ++lane) any |= greater[lane];
    }
    return any != 0;
#endif
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

}  // namespace

void run_race(Pool& pool, const Race& race, int64_t* winners) {
    pool.run(race.count, [&](int row, int) {
        winners[row] =
            winner_of(race.weights + int64_t(row) * race.width, race.width, race.keys[2 * row], race.keys[2 * row + 1]);
    });
}
