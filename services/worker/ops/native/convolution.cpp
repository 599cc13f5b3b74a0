// Gated short convolutions (LFM2): a tile goes over all rows of a sequence, sixteen channels after the other.
#include <algorithm>

#include "states.h"

namespace {

constexpr int kChannelsOfTile = 8 * kLanes;  // of a decode: a few hundred nanoseconds
constexpr int kMaxKernel = 64;  // as services.worker.ops.native.native_states has it

struct Convolution {
    const MixStates& what;
    const Batch& batch;
    const StateMixer& mixer;
    const StateCache& cache;

    // A row: gates of what goes in, gates of what comes out, inputs.
    void go_on(int sequence, int first, int count) const {
        int begin = batch.query_starts[sequence], end = batch.query_starts[sequence + 1], kept = mixer.kernel - 1;
        int64_t channels = mixer.heads;
        float* window = cache.windows + what.slots[sequence] * kept * channels + first;
        bool begins = batch.context_lens[sequence] == end - begin;
        F weights[kMaxKernel], seen[kMaxKernel], bias = load_some(mixer.conv_bias + first, count);
        for (int k = 0; k <= kept; ++k) weights[k] = load_some(mixer.conv_weight + k * channels + first, count);
        for (int k = 0; k < kept; ++k) seen[k] = begins ? zeros() : load_some(window + k * channels, count);
        for (int at = begin; at < end; ++at) {
            const float* row = what.projected + at * what.projected_stride + first;
            seen[kept] = load_some(row, count) * load_some(row + 2 * channels, count);
            F total = bias;
            for (int k = 0; k <= kept; ++k) total = fma(seen[k], weights[k], total);
            store_some(what.out + at * what.out_stride + first, total * load_some(row + channels, count), count);
            for (int k = 0; k < kept; ++k) seen[k] = seen[k + 1];
        }
        for (int k = 0; k < kept; ++k) store_some(window + k * channels, seen[k], count);
    }
};

}  // namespace

void convolve_gated(Pool& pool, const MixStates& what, const Batch& batch, const StateMixer& mixer, const StateCache& cache) {
    Convolution convolution{what, batch, mixer, cache};
    each_sequence(pool, batch, mixer.heads, kChannelsOfTile, [&](int sequence, int first, int count) {
        for (int at = 0; at < count; at += kLanes) convolution.go_on(sequence, first + at, std::min(count - at, kLanes));
    });
}
