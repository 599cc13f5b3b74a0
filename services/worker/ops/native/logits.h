// Passing over the logits of a row, which need not be a multiple of 16. Knows no threads.
#pragma once
#include <limits>

#include "lanes.h"

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

// As they are in `logits`, and behind the last one what cannot be drawn.
BATON_INLINE F logits_at(const float* logits, int first, int vocab) {
    if (first + kLanes <= vocab) return load(logits + first);
    float lane[kLanes];
    for (int i = 0; i < kLanes; ++i) lane[i] = first + i < vocab ? logits[first + i] : -std::numeric_limits<float>::infinity();
    return load(lane);
}

inline float greatest_of(const float* logits, int vocab) {
    F most = all(-std::numeric_limits<float>::infinity());
    for (int i = 0; i < vocab; i += kLanes) most = larger(most, logits_at(logits, i, vocab));
    return greatest(most);
}
