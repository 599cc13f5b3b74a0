// What the last layer that attends computes: every row's keys and values, all else of rows whose logits are wanted.
#include <algorithm>
#include <cstring>
#include <utility>

#include "decoder.h"

namespace {

// What makes the outputs [first, first + out) alone; `first` is a multiple of kGroupOutputs.
Linear part_of(const Linear& linear, int first, int out) {
    auto from = [](auto* items, int64_t at) { return items ? items + at : nullptr; };
    bool plain = linear.code == Code::kPlain;
    int64_t scaled = int64_t(linear.scaled ? linear.in / linear.scaled : 1) * first;
    Linear part = linear;
    part.out = out;
    part.groups = (const char*)linear.groups + (plain ? packed_bytes(linear.number, first, linear.in) : coded_bytes(linear.code, first, linear.in));
    part.bias = from(linear.bias, first), part.scales = from(linear.scales, scaled);
    part.zeros = from(linear.zeros, scaled), part.offsets = from(linear.offsets, scaled);
    return part;
}

}  // namespace

// Whether queries are made of the rows whose logits are wanted alone. Not where that is rare or more than a product: with adapters,
// gates, scales, positions of images, or rows in another order than the batch's.
bool Decoder::only_last_attend(const DecoderLayer& layer, const Forward& forward, int index) const {
    bool plain = !layer.states && !layer.latent && layer.qkv.groups && !layer.gate.groups && !layer.input_scales && !adapted_;
    if (!plain || index != end_ || forward.ends_every_row(config_.layers) || forward.logits >= forward.batch.rows) return false;
    if (index + 1 < config_.layers && layers_[size_t(index) + 1].beside) return false;
    const int *first = forward.logits_rows, *end = first + forward.logits;
    return !forward.batch.rotations && std::is_sorted(first, end);
}

void Decoder::attend_last(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x) {
    int queries = config_.heads * config_.head_dim, others = 2 * config_.kv_heads * config_.head_dim;
    bool apart = queries % kGroupOutputs == 0;  // else one product makes both, of every row
    Linear makes = apart ? part_of(layer.qkv, queries, others) : layer.qkv;
    auto* made = (float*)qkv_.fit(x.count, makes.out, 4);
    multiply(pool_, x, makes, {Out::kFloat, config_.activation, made, qkv_.stride});
    Cache cache = cache_of(forward, index);
    float* keys = made + (apart ? 0 : queries);
    rope_and_store(pool_, {keys, qkv_.stride, 0, layer.cos_sin, nullptr, layer.k_norm, config_.eps, nullptr, 0}, forward.of_layer(index), cache);
    if (forward.logits == 0) return;
    Rows last = last_of(forward, apart ? x : Rows{made, Number::kSingle, qkv_.stride, x.count});
    if (apart) {
        made = (float*)qkv_.fit(last.count, queries, 4);
        multiply(pool_, last, part_of(layer.qkv, 0, queries), {Out::kFloat, config_.activation, made, qkv_.stride});
        last = {made, Number::kSingle, qkv_.stride, last.count};
    }
    Batch batch = last_batch(forward, index);
    Cache none{config_.number, nullptr, nullptr, 0, config_.head_dim, config_.page_bits, Code::kPlain};  // these were stored above
    rope_and_store(pool_,
                   {(const float*)last.data, last.stride, config_.heads, layer.cos_sin, layer.q_norm, nullptr, config_.eps, queries_.data(),
                    queries_.stride, config_.growth},
                   batch, none);
    mixed_.fit(last.count, queries, size_), mixed_number_ = config_.number;
    attend(pool_,
           {queries_.data(), queries_.stride, config_.heads, config_.attention_scale, layer.window, config_.attention_softcap,
            mixed_.data(), mixed_.stride, layer.sinks, layer.slopes},
           batch, cache, plan_attention(batch, pool_.threads(), config_.heads, config_.kv_heads, layer.window));
}

// A copy of the rows whose logits are wanted.
Rows Decoder::last_of(const Forward& forward, const Rows& x) {
    int size = x.number == Number::kHalf ? 2 : 4;
    auto* to = (char*)gated_.fit(forward.logits, int(x.stride), size);
    for (int i = 0; i < forward.logits; ++i)
        memcpy(to + i * gated_.stride * size, (const char*)x.data + forward.logits_rows[i] * x.stride * size, size_t(x.stride) * size);
    return {to, x.number, gated_.stride, forward.logits};
}

// The layer's batch without the other rows, whose contexts are in the cache.
Batch Decoder::last_batch(const Forward& forward, int index) {
    const Batch& all = forward.of_layer(index);
    int rows = forward.logits, sequences = all.sequences;
    last_rows_.resize(size_t(3 * rows + sequences + 1));
    int *starts = last_rows_.data(), *positions = starts + sequences + 1, *slots = positions + rows, *lasts = slots + rows;
    for (int sequence = 0; sequence <= sequences; ++sequence)
        starts[sequence] = int(std::lower_bound(forward.logits_rows, forward.logits_rows + rows, all.query_starts[sequence]) - forward.logits_rows);
    for (int i = 0; i < rows; ++i) {
        int row = forward.logits_rows[i];
        positions[i] = all.positions[row], slots[i] = all.slots[row], lasts[i] = all.last_seen(row);
    }
    Batch batch = all;
    batch.rows = rows, batch.query_starts = starts, batch.positions = positions, batch.slots = slots;
    batch.lasts = all.lasts ? lasts : nullptr, batch.copies = {};
    return batch;
}

// Keeps the rows whose logits are wanted: the last layer computes no others. `mixed`: these are all that was mixed.
void Decoder::pick(const Forward& forward, bool mixed) {
    auto copy = [&](Buffer& from, Buffer& to, int size) {
        if (to.memory.size() < from.memory.size()) to.memory.resize(from.memory.size());
        to.stride = from.stride;
        size_t bytes = size_t(from.stride) * size;
        for (int i = 0; i < forward.logits; ++i)
            memcpy((char*)to.data() + i * bytes, (const char*)from.data() + forward.logits_rows[i] * bytes, bytes);
        std::swap(from, to);
    };
    if (!mixed) copy(mixed_, queries_, mixed_number_ == Number::kHalf ? 2 : 4);
    copy(residual_, output_, 4);
    if (layers_[size_t(end_)].beside) copy(beside_, output_, 4);
    if (adapted_) slots_ = forward.adapters->logits_slots;
}

// The head reads on only where logits are wanted.
void Decoder::pick_last(const Forward& forward) {
    Buffer& from = config_.final_norm ? normed_ : residual_;
    int size = config_.final_norm ? size_ : 4;
    output_.fit(forward.logits, config_.hidden, size);
    size_t bytes = size_t(from.stride) * size;
    for (int i = 0; i < forward.logits; ++i)
        memcpy((char*)output_.data() + i * bytes, (const char*)from.data() + forward.logits_rows[i] * bytes, bytes);
    std::swap(from, output_);
}
