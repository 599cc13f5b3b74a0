// The forward pass: layer after layer, each step shared by the pool's threads.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

Decoder::Decoder(Pool& pool, const DecoderConfig& config, const DecoderLayer* layers)
    : pool_(pool), config_(config), layers_(layers, layers + config.layers), size_(config.number == Number::kHalf ? 2 : 4), end_(config.layers - 1) {
    while (end_ > 0 && !layers_[size_t(end_)].qkv.groups) --end_;
}

void* Decoder::Buffer::fit(int rows, int items, int size) {
    stride = (items + kLanes - 1) / kLanes * kLanes;
    if (stride * size % 1024 == 0) stride += 64 / size;
    size_t needed = (size_t(rows) * stride * size + 63) / 64;
    if (memory.size() < needed) {
        memory.clear();
        memory.resize(needed);
    }
    return memory.data();
}

void Decoder::fit(int rows) {
    int heads = config_.heads * config_.head_dim, kv = config_.kv_heads * config_.head_dim;
    residual_.fit(rows, config_.hidden, 4);
    normed_.fit(rows, config_.hidden, size_);
    qkv_.fit(rows, heads + 2 * kv, 4);
    queries_.fit(rows, heads, size_);
    output_.fit(rows, config_.hidden, 4);
}

bool Decoder::run(const Forward& forward) {
    int rows = forward.batch.rows;
    fit(rows);
    windows_[0] = windows_[1] = -1;
    adapted_ = forward.adapters ? forward.adapters->tables : nullptr;
    slots_ = forward.adapters ? forward.adapters->slots : nullptr;
    if (!begin(forward)) return false;
    norm_residual(layers_[0].input_norm, rows, layers_[0].output_kept);
    for (int i = 0; i < config_.layers; ++i) {
        const auto& layer = layers_[i];
        bool last = i + 1 == config_.layers;
        if (forward.taps) tap(forward, i);
        Rows x = config_.given_norm ? rows_of(pairs_, rows) : layer.input_norm ? rows_of(normed_, rows) : residual(rows);
        if (layer.states) mix_states(layer, forward, i, x);
        else if (layer.latent) attend_latents(layer, forward, i, x);
        else if (layer.qkv.groups) attention(layer, forward, i, x);
        else if (layer.output.groups) keep_rows(x);
        if (!last && layers_[i + 1].beside) {
            keep_output(layer, i, rows);
            continue;
        }
        bool every = i < end_ || forward.ends_every_row(config_.layers);
        if (!every && forward.logits == 0) return true;
        if (!every && forward.logits < rows) pick(forward, only_last_attend(layer, forward, i)), rows = forward.logits;
        if (layer.output.groups)
            add_output(mixed(rows), layer.output, layer.attention_post_norm, kAdaptedOfLayer * i + kOutput, layer.output_scale, layer.beside);
        mlp(layer, i, rows, forward.inputs);
        last ? norm_residual(config_.final_norm, rows) : norm_residual(layers_[i + 1].input_norm, rows, layers_[i + 1].output_kept);
    }
    if (forward.ends_every_row(config_.layers)) {
        forward.taps ? tap(forward, config_.layers) : give_features(forward);
        pick_last(forward);
    }
    if (forward.logits) logits(forward);
    return true;
}

bool Decoder::draft_on(Forward forward, int steps, int64_t stride, int* ids) {
    int rows = forward.batch.rows;
    for (int step = 0; step < steps; ++step) {
        forward.ids = ids + int64_t(step) * rows;
        if (!run(forward)) return false;
        for (int row = 0; row < rows; ++row) {
            const float* logits = forward.to + int64_t(row) * config_.words;
            bool undefined;  // means a draft that is not accepted
            int word = int(likeliest_of(logits, config_.words, &undefined));
            ids[int64_t(step + 1) * rows + row] = config_.tokens ? config_.tokens[word] : word;
        }
        forward.batch.slots += stride;
        forward.batch.positions += stride;
        forward.batch.context_lens += stride;
        forward.given = forward.features;
    }
    return true;
}

// The residual as the first layer finds it; false where an id is out of the vocabulary.
bool Decoder::begin(const Forward& forward) {
    int rows = forward.batch.rows;
    Buffer& to = config_.joined.groups ? pairs_ : residual_;
    if (config_.joined.groups) pairs_.fit(rows, 2 * config_.hidden, 4);
    auto* first = (float*)to.data();
    bool known = config_.coded_embedding.groups
                     ? embed_codes(pool_, forward.ids, rows, config_.coded_embedding, first, to.stride)
                     : embed(pool_, forward.ids, rows, config_.number, config_.embedding, config_.vocab, config_.hidden,
                             config_.embedding_scale, first, to.stride);
    if (!known) return false;
    if (const Inputs* inputs = forward.inputs)
        for (int i = 0; i < inputs->count; ++i)
            memcpy((float*)to.data() + inputs->rows[i] * to.stride, inputs->level(i, 0, config_.hidden), size_t(config_.hidden) * 4);
    if (config_.given_norm) return join(forward), true;
    if (!config_.joined.groups) return true;
    for (int i = 0; i < rows; ++i)
        memcpy((float*)pairs_.data() + i * pairs_.stride + config_.hidden, forward.given + int64_t(i) * config_.hidden,
               size_t(config_.hidden) * 4);
    Rows pairs{pairs_.data(), Number::kSingle, pairs_.stride, rows};
    multiply(pool_, pairs, config_.joined, {Out::kFloat, config_.activation, residual_.data(), residual_.stride});
    return true;
}

// Embeddings, which lie where the residual will, and the rows given: normed side by side, and the residual behind them.
void Decoder::join(const Forward& forward) {
    int rows = forward.batch.rows, hidden = config_.hidden;
    pairs_.fit(rows, 2 * hidden, size_);
    norm(pool_, residual(rows), nullptr, 0, {config_.embedding_norm, config_.eps, hidden}, config_.number, pairs_.data(), pairs_.stride);
    for (int i = 0; i < rows; ++i)
        memcpy((float*)residual_.data() + i * residual_.stride, forward.given + int64_t(i) * hidden, size_t(hidden) * 4);
    Norm what{config_.given_norm, config_.eps, hidden};
    norm(pool_, residual(rows), nullptr, 0, what, config_.number, (char*)pairs_.data() + int64_t(hidden) * size_, pairs_.stride);
    if (config_.norms_residual)
        norm(pool_, residual(rows), nullptr, 0, what, Number::kSingle, residual_.data(), residual_.stride);
}

// From the normed rows to the mixed values; keys and values are in the cache then.
void Decoder::attention(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x) {
    int rows = x.count, first = kAdaptedOfLayer * index, width = config_.heads * config_.head_dim;
    if (only_last_attend(layer, forward, index)) return attend_last(layer, forward, index, x);
    auto* qkv = (float*)qkv_.fit(rows, width + 2 * config_.kv_heads * config_.head_dim, 4);
    multiply_adapted(x, layer.qkv, first + kQkv, qkv, qkv_.stride, layer.input_scales);
    Cache cache = cache_of(forward, index);
    rope_and_store(pool_,
                   {qkv, qkv_.stride, config_.heads, layer.cos_sin, layer.q_norm, layer.k_norm, config_.eps,
                    queries_.data(), queries_.stride, config_.growth},
                   forward.of_layer(index), cache);
    if (index == end_ && forward.logits == 0 && !forward.ends_every_row(config_.layers)) return;
    mixed_.fit(rows, width, size_), mixed_number_ = config_.number;
    attend(pool_,
           {queries_.data(), queries_.stride, config_.heads, config_.attention_scale, layer.window, config_.attention_softcap,
            mixed_.data(), mixed_.stride, layer.sinks, layer.slopes},
           forward.of_layer(index), cache, plan(forward.batch, layer.window));
    if (layer.gate.groups) gate_mixed(layer, index, x, width);
}

// Where a matrix is in the place of attention.
void Decoder::keep_rows(const Rows& x) {
    mixed_.fit(x.count, config_.hidden, size_), mixed_number_ = config_.number;
    each_row(pool_, x.count, [&](int row) {
        memcpy((char*)mixed_.data() + row * mixed_.stride * size_, (const char*)x.data + row * x.stride * size_, size_t(config_.hidden) * size_);
    });
}

// How much is taken of the mixed values, in the weights' type, by a product of the rows that they were made of.
void Decoder::gate_mixed(const DecoderLayer& layer, int index, const Rows& x, int width) {
    auto* gates = (float*)gates_.fit(x.count, width, 4);
    multiply_adapted(x, layer.gate, kAdaptedOfLayer * index + kGate, gates, gates_.stride);
    gate_by(pool_, gates, gates_.stride, width, config_.number, mixed_.data(), mixed_.stride, x.count);
}

// The same over latents: queries are multiplied with what makes keys of these, and what attention gives with what makes values.
void Decoder::attend_latents(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x) {
    const DecoderLatent& latent = *layer.latent;
    int rows = x.count, heads = config_.heads, dim = latent.query_dim(), cached = latent.cached_dim(), rank = latent.rank;
    make_latents(layer, x);
    float* queries = latent_queries_.data();
    LatentCache cache{config_.number, forward.keys[index], forward.values[index], rank, latent.rope_dim, 0, config_.page_bits};
    const Batch& batch = forward.of_layer(index);
    store_latents(pool_, {latents_.data(), queries, heads, dim, layer.cos_sin, latent.kv_norm, latent.eps, config_.growth}, batch, cache);
    if (index + 1 == config_.layers && forward.logits == 0 && !forward.ends_every_row(config_.layers)) return;
    absorbed_.resize(size_t(rows) * heads * cached);
    attended_.resize(size_t(rows) * heads * rank);
    multiply_heads(latent.keys_up, rows, queries, dim, absorbed_.data(), int64_t(heads) * cached, cached);
    each_row(pool_, rows, [&](int row) {
        for (int64_t head = int64_t(row) * heads; head < int64_t(row + 1) * heads; ++head)
            memcpy(absorbed_.data() + head * cached + rank, queries + head * dim + latent.nope_dim, size_t(latent.rope_dim) * 4);
    });
    ::attend_latents(pool_, {absorbed_.data(), heads, config_.attention_scale, attended_.data()}, batch, cache, plan(forward.batch, 0));
    auto* mixed = (float*)mixed_.fit(rows, heads * latent.value_dim, 4);
    mixed_number_ = Number::kSingle;
    multiply_heads(latent.values_up, rows, attended_.data(), rank, mixed, mixed_.stride, latent.value_dim);
    if (layer.gate.groups) gate_heads(layer, index, x, latent.value_dim);
}

// How much is taken of each head's mixed values, which are floats, by a product of the rows that they were made of.
void Decoder::gate_heads(const DecoderLayer& layer, int index, const Rows& x, int width) {
    auto* gates = (float*)gates_.fit(x.count, config_.heads, 4);
    multiply_adapted(x, layer.gate, kAdaptedOfLayer * index + kGate, gates, gates_.stride);
    each_row(pool_, x.count, [&](int row) {
        float* values = (float*)mixed_.data() + row * mixed_.stride;
        for (int head = 0; head < config_.heads; ++head) {
            float part = sigmoid(gates[row * gates_.stride + head]);
            for (int i = 0; i < width; ++i) values[head * width + i] *= part;
        }
    });
}

// Of the normed rows: their queries, and the latents and rotated keys that are to be cached.
void Decoder::make_latents(const DecoderLayer& layer, const Rows& x) {
    const DecoderLatent& latent = *layer.latent;
    int rows = x.count, cached = latent.cached_dim(), width = layer.qkv.out - cached, queries = config_.heads * latent.query_dim();
    auto* made = (float*)qkv_.fit(rows, layer.qkv.out, 4);
    multiply(pool_, x, layer.qkv, {Out::kFloat, config_.activation, made, qkv_.stride});
    latents_.resize(size_t(rows) * cached);
    latent_queries_.resize(size_t(rows) * queries);
    each_row(pool_, rows, [&](int row) {
        const float* from = made + row * qkv_.stride;
        if (!latent.q_norm) memcpy(latent_queries_.data() + int64_t(row) * queries, from, size_t(queries) * 4);
        memcpy(latents_.data() + int64_t(row) * cached, from + width, size_t(cached) * 4);
    });
    if (!latent.q_norm) return;
    mixed_.fit(rows, width, size_);
    norm(pool_, {made, Number::kSingle, qkv_.stride, rows}, nullptr, 0, {latent.q_norm, latent.eps, width}, config_.number, mixed_.data(),
         mixed_.stride);
    multiply(pool_, rows_of(mixed_, rows), latent.q_up, {Out::kFloat, config_.activation, latent_queries_.data(), queries});
}

// Each head's row times its own matrix. Head after head lies `width` items behind the one before in `from`, as the products do
// in `to`.
void Decoder::multiply_heads(const Linear* linears, int rows, const float* from, int from_width, float* to, int64_t to_stride, int to_width) {
    int heads = config_.heads, in = linears->in, out = linears->out;
    by_head_.resize(size_t(heads) * rows * in);
    products_.resize(size_t(heads) * rows * out);
    head_starts_.resize(size_t(heads) + 1);
    for (int head = 0; head <= heads; ++head) head_starts_[size_t(head)] = int64_t(head) * rows;
    each_row(pool_, rows, [&](int row) {
        for (int64_t head = 0; head < heads; ++head)
            memcpy(by_head_.data() + (head * rows + row) * in, from + (int64_t(row) * heads + head) * from_width, size_t(in) * 4);
    });
    Rows x{by_head_.data(), Number::kSingle, in, heads * rows};
    multiply_each(pool_, x, linears, head_starts_.data(), heads, {Out::kFloat, config_.activation, products_.data(), out});
    each_row(pool_, rows, [&](int row) {
        for (int64_t head = 0; head < heads; ++head)
            memcpy(to + row * to_stride + head * to_width, products_.data() + (head * rows + row) * out, size_t(out) * 4);
    });
}

// From the normed rows to what a mixer makes of them; their sequences' states are in the cache then.
void Decoder::mix_states(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x) {
    const DecoderStates& states = *layer.states;
    const StateMixer& mixer = states.mixer;
    const Linear& steps = states.steps;
    const DecoderGates* gates = states.gates;
    int first = kAdaptedOfLayer * index, width = layer.qkv.out + (steps.groups ? steps.out : 0), before = gates ? mixer.inner() : 0;
    if (gates) width = before + std::max(width, mixer.channels() + mixer.shared() + mixer.heads);
    auto* projected = (float*)qkv_.fit(x.count, width, 4);
    multiply_adapted(x, layer.qkv, first + kQkv, projected + before, qkv_.stride, layer.input_scales);
    if (states.selective) return select_states(layer, forward, index, projected);
    if (steps.groups) multiply_adapted(x, steps, first + kSteps, projected + before + layer.qkv.out, qkv_.stride);
    if (gates) make_gates(layer, projected, x.count);
    Buffer& to = states.norm ? selected_ : mixed_;
    auto* out = (float*)to.fit(x.count, mixer.inner(), 4);
    mixed_number_ = Number::kSingle;
    StateCache cache{(float*)forward.keys[index], (float*)forward.values[index]};
    ::mix_states(pool_, {projected, qkv_.stride, forward.state_slots, out, to.stride}, forward.batch, mixer, cache);
    if (states.norm) norm_mixed(layer, x.count);
    if (layer.gate.groups) gate_mixed(layer, index, x, mixer.inner());
}

// What a mixer without a norm of its own gave, into the weights' type.
void Decoder::norm_mixed(const DecoderLayer& layer, int rows) {
    const DecoderStates& states = *layer.states;
    int width = states.mixer.inner();
    mixed_.fit(rows, width, size_), mixed_number_ = config_.number;
    Rows from{selected_.data(), Number::kSingle, selected_.stride, rows};
    norm(pool_, from, nullptr, 0, {states.norm, states.eps, width}, config_.number, mixed_.data(), mixed_.stride);
}

// Of what a delta net by element is given, the gates before what its convolution sees, and the time steps behind that.
void Decoder::make_gates(const DecoderLayer& layer, float* projected, int rows) {
    const StateMixer& mixer = layer.states->mixer;
    const DecoderGates& gates = *layer.states->gates;
    int rank = gates.rates.in, given = 2 * rank + mixer.heads;
    int64_t stride = qkv_.stride;
    auto* made = (float*)made_.fit(rows, given, 4);
    float* behind = projected + mixer.inner() + mixer.channels();
    each_row(pool_, rows, [&](int row) { memcpy(made + row * made_.stride, behind + row * stride, size_t(given) * 4); });
    multiply(pool_, {made, Number::kSingle, made_.stride, rows}, gates.rates, {Out::kFloat, config_.activation, behind, stride});
    multiply(pool_, {made + rank, Number::kSingle, made_.stride, rows}, gates.outputs, {Out::kFloat, config_.activation, projected, stride});
    each_row(pool_, rows, [&](int row) {
        memcpy(behind + row * stride + mixer.shared(), made + row * made_.stride + 2 * rank, size_t(mixer.heads) * 4);
    });
}

// The same of a selective space, with the products that lie between its convolution and its states.
void Decoder::select_states(const DecoderLayer& layer, const Forward& forward, int index, const float* projected) {
    const StateMixer& mixer = layer.states->mixer;
    int rows = forward.batch.rows, channels = mixer.heads;
    auto* given = (float*)selected_.fit(rows, 3 * channels + 2 * mixer.state_dim, 4);
    StateMixer convolution = mixer;
    convolution.rule = StateRule::kConvolution, convolution.state_dim = 0;
    StateCache cache{(float*)forward.keys[index], (float*)forward.values[index]};
    MixStates what{projected, qkv_.stride, forward.state_slots, given + channels, selected_.stride};
    ::mix_states(pool_, what, forward.batch, convolution, cache);
    fill_rows(layer, index, projected, rows);
    auto* out = (float*)mixed_.fit(rows, channels, 4);
    mixed_number_ = Number::kSingle;
    ::mix_states(pool_, {given, selected_.stride, forward.state_slots, out, mixed_.stride}, forward.batch, mixer, cache);
}

// Of what a selective space is given, all but what its convolution made: gates before it, B, C and time steps behind it.
void Decoder::fill_rows(const DecoderLayer& layer, int index, const float* projected, int rows) {
    const StateMixer& mixer = layer.states->mixer;
    const DecoderSelective* selective = layer.states->selective;
    int first = kAdaptedOfLayer * index, channels = mixer.heads, dim = mixer.state_dim, rank = selective->steps.in;
    auto* given = (float*)selected_.data();
    auto* made = (float*)made_.fit(rows, rank + 2 * dim, 4);
    int64_t stride = selected_.stride;
    multiply_adapted({given + channels, Number::kSingle, stride, rows}, selective->made, first + kMade, made, made_.stride);
    Rows steps{made, Number::kSingle, made_.stride, rows};
    if (selective->norms[0]) {
        // In the weights' type, as what is normed is multiplied; B and C are floats of these numbers.
        void* normed = mixed_.fit(rows, rank + 2 * dim, size_);
        int sizes[] = {rank, dim, dim};
        for (int part = 0, at = 0; part < 3; at += sizes[part++])
            norm(pool_, {made + at, Number::kSingle, made_.stride, rows}, nullptr, 0, {selective->norms[part], selective->eps, sizes[part]},
                 config_.number, (char*)normed + int64_t(at) * size_, mixed_.stride);
        steps = {normed, config_.number, mixed_.stride, rows};
    }
    each_row(pool_, rows, [&](int row) {
        float* to = given + row * stride;
        memcpy(to, projected + row * qkv_.stride + channels, size_t(channels) * 4);
        const char* from = (const char*)steps.data + row * steps.stride * (steps.number == Number::kHalf ? 2 : 4);
        for (int i = 0; i < 2 * dim; ++i)
            to[2 * channels + i] = steps.number == Number::kHalf ? float_of(((const Bf16*)from)[rank + i]) : ((const float*)from)[rank + i];
    });
    multiply_adapted(steps, selective->steps, first + kSteps, given + 2 * channels + 2 * dim, stride);
}

// to = (x * linear, and what adapters add) * scales.
void Decoder::multiply_adapted(const Rows& x, const Linear& linear, int adapted, float* to, int64_t stride, const float* scales) {
    multiply(pool_, x, linear, {Out::kFloat, config_.activation, to, stride});
    adapt(adapted, x, to, stride);
    if (!scales) return;
    each_row(pool_, x.count, [&](int row) {
        for (int i = 0; i < linear.out; ++i) to[row * stride + i] *= scales[i];
    });
}

// What every row ends with: its residual where nothing is normed, or where it is what the next row begins with.
void Decoder::give_features(const Forward& forward) {
    bool plain = !config_.final_norm || config_.given_norm;
    pool_.run(forward.batch.rows, [&](int row, int) {
        float* to = forward.features + int64_t(row) * config_.hidden;
        if (plain) {
            memcpy(to, (float*)residual_.data() + row * residual_.stride, size_t(config_.hidden) * 4);
            return;
        }
        const char* from = (const char*)normed_.data() + row * normed_.stride * size_;
        for (int i = 0; i < config_.hidden; ++i)
            to[i] = size_ == 2 ? float_of(((const Bf16*)from)[i]) : ((const float*)from)[i];
    });
}

// Adds what the rows' adapters make of x. `adapted`: which of their tables.
void Decoder::adapt(int adapted, const Rows& x, float* to, int64_t stride) {
    if (adapts(adapted)) add_low_rank(pool_, x, *adapted_[adapted], slots_, to, stride);
}

void Decoder::mlp(const DecoderLayer& layer, int index, int rows, const Inputs* inputs) {
    if (!layer.mlp_norm) return;
    norm_residual(layer.mlp_norm, rows, layer.mlp_kept);
    layer.mixture ? mix_rows(layer, index, rows) : gate_rows(layer, index, rows);
    if (inputs && index < inputs->levels) add_level(*inputs, index);
    if (layer.mixture) add_rows(rows, layer.mlp_post_norm, layer.down_scale);
    else add_output(rows_of(gated_, rows), layer.down, layer.mlp_post_norm, kAdaptedOfLayer * index + kDown, layer.down_scale);
}

// From the normed rows to what `down` is multiplied with.
void Decoder::gate_rows(const DecoderLayer& layer, int index, int rows) {
    Rows x = rows_of(normed_, rows);
    int width = layer.down.in, adapted = kAdaptedOfLayer * index + kGateUp;
    Activation activation = layer.mixture ? layer.mixture->shared_activation : config_.activation;
    gated_.fit(rows, width, size_);
    // What adapters add comes before the gates are activated, as do scales.
    if (can_gate(layer.gate_up, activation) && !adapts(adapted) && !layer.up_scales)
        return multiply(pool_, x, layer.gate_up, {Out::kGated, activation, gated_.data(), gated_.stride});
    auto* gate_up = (float*)gate_up_.fit(rows, layer.gate_up.out, 4);
    multiply_adapted(x, layer.gate_up, adapted, gate_up, gate_up_.stride, layer.up_scales);
    gate(pool_, {gate_up, Number::kSingle, gate_up_.stride, rows}, width, activation, config_.number,
         gated_.data(), gated_.stride);
}

// output = what the experts make of the normed rows.
void Decoder::mix_rows(const DecoderLayer& layer, int index, int rows) {
    const DecoderMixture& mixture = *layer.mixture;
    const RouterRule& rule = mixture.rule;
    Rows x = rows_of(normed_, rows);
    router_logits_.resize(size_t(rows) * rule.experts);
    chances_.resize(size_t(rows) * rule.chosen);
    picks_.resize(size_t(rows) * rule.chosen);
    multiply(pool_, x, mixture.router, {Out::kFloat, config_.activation, router_logits_.data(), rule.experts});
    route(pool_, router_logits_.data(), rows, rule, chances_.data(), picks_.data());
    if (mixture.counts)
        for (int64_t expert : picks_) ++mixture.counts[expert];
    mix(pool_, x, {chances_.data(), picks_.data(), rule.chosen}, mixture.experts, (float*)output_.data(), output_.stride);
    if (layer.gate_up.groups) add_shared(layer, index, rows);
}

// output += what the expert of every row makes of the normed ones, as much of it as its gate says.
void Decoder::add_shared(const DecoderLayer& layer, int index, int rows) {
    gate_rows(layer, index, rows);
    Rows x = rows_of(normed_, rows), gated = rows_of(gated_, rows);
    auto* shared = (float*)shared_.fit(rows, config_.hidden, 4);
    multiply_adapted(gated, layer.down, kAdaptedOfLayer * index + kDown, shared, shared_.stride);
    const Linear& gate = layer.mixture->shared_gate;
    shared_gates_.resize(size_t(rows));
    if (gate.groups) multiply_adapted(x, gate, kAdaptedOfLayer * index + kSharedGate, shared_gates_.data(), 1);
    each_row(pool_, rows, [&](int row) {
        float part = gate.groups ? sigmoid(shared_gates_[size_t(row)]) : 1.0f;
        float* to = (float*)output_.data() + row * output_.stride;
        for (int i = 0; i < config_.hidden; ++i) to[i] += shared[row * shared_.stride + i] * part;
    });
}

void Decoder::logits(const Forward& forward) {
    Rows x = config_.final_norm ? rows_of(normed_, forward.logits) : residual(forward.logits);
    if (adapted_) slots_ = forward.adapters->logits_slots;
    multiply_adapted(x, config_.head, kAdaptedOfLayer * config_.layers, forward.to, config_.words);
    float cap = config_.logits_softcap, divisor = config_.logits_divisor;
    if (divisor != 1)
        pool_.run(forward.logits, [&](int row, int) {
            float* to = forward.to + int64_t(row) * config_.words;
            for (int i = 0; i < config_.words; ++i) to[i] /= divisor;
        });
    if (cap == 0) return;
    pool_.run(forward.logits, [&](int row, int) {
        float* to = forward.to + int64_t(row) * config_.words;
        int i = 0;
        for (; i + kLanes <= config_.words; i += kLanes) store(to + i, all(cap) * tanh(load(to + i) / all(cap)));
        for (; i < config_.words; ++i) to[i] = cap * std::tanh(to[i] / cap);
    });
}

// Layers share plans: a model has one window or two (Gemma's layers alternate).
const AttentionPlan& Decoder::plan(const Batch& batch, int window) {
    int at = windows_[0] == window || windows_[0] == -1 ? 0 : 1;
    if (windows_[at] != window) {
        plans_[at] = plan_attention(batch, pool_.threads(), config_.heads, config_.kv_heads, window);
        windows_[at] = window;
    }
    return plans_[at];
}
