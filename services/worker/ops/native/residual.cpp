// The residual of the forward pass: what is added to it, what of it is read next, and what is kept of it.
#include <algorithm>
#include <cstring>

#include "decoder.h"

// Keeps the residual in front of a layer where it is asked for; behind the last one for their number.
void Decoder::tap(const Forward& forward, int layer) {
    for (int tap = 0; tap < forward.tap_count; ++tap) {
        if (forward.taps[tap] != layer) continue;
        for (int i = 0; i < forward.batch.rows; ++i)
            memcpy(forward.features + (int64_t(i) * forward.tap_count + tap) * config_.hidden,
                   (float*)residual_.data() + i * residual_.stride, size_t(config_.hidden) * 4);
    }
}

// What joins the residual behind a layer, whose MLP has normed its input already. Not behind the last one, whose rows may
// be picked.
void Decoder::add_level(const Inputs& inputs, int layer) {
    for (int i = 0; i < inputs.count; ++i) {
        const float* from = inputs.level(i, layer + 1, config_.hidden);
        float* to = (float*)residual_.data() + inputs.rows[i] * residual_.stride;
        for (int c = 0; c < config_.hidden; ++c) to[c] += from[c];
    }
}

// What is read next, and as much of the residual as that joins.
void Decoder::norm_residual(const float* weight, int rows, float kept) {
    if (weight) {
        Rows x{residual_.data(), Number::kSingle, residual_.stride, rows};
        norm(pool_, x, nullptr, 0, {weight, config_.eps, config_.hidden}, config_.number, normed_.data(), normed_.stride);
    }
    if (config_.residual_normed || kept != 1) keep_residual(rows, kept);
}

// A normed residual is of the weights' type.
void Decoder::keep_residual(int rows, float kept) {
    bool half = config_.residual_normed && size_ == 2;
    each_row(pool_, rows, [&](int row) {
        float* to = (float*)residual_.data() + row * residual_.stride;
        const auto* normed = (const char*)normed_.data() + row * normed_.stride * size_;
        for (int i = 0; i < config_.hidden; ++i) {
            float from = half ? float_of(((const Bf16*)normed)[i]) : config_.residual_normed ? ((const float*)normed)[i] : to[i];
            to[i] = half ? float_of(bf16_of(from * kept)) : from * kept;
        }
    });
}

// residual += x * linear, normed and scaled first where the model says so, with what the layer beside gave.
void Decoder::add_output(const Rows& x, const Linear& linear, const float* post_norm, int adapted, float scale, bool beside) {
    // With what adapters add, sums come before the residual, as by single operations.
    if (!post_norm && !adapts(adapted) && config_.residual_scale == 1 && scale == 1 && !beside)
        return multiply(pool_, x, linear, {Out::kAdded, config_.activation, residual_.data(), residual_.stride});
    auto* output = (float*)output_.data();
    multiply_adapted(x, linear, adapted, output, output_.stride);
    norm_output(x.count, post_norm);
    if (scale != 1 || beside)
        each_row(pool_, x.count, [&](int row) {
            float* to = output + row * output_.stride;
            for (int i = 0; i < config_.hidden; ++i) to[i] *= scale;
            if (!beside) return;
            const float* other = (float*)beside_.data() + row * beside_.stride;
            for (int i = 0; i < config_.hidden; ++i) to[i] += other[i];
        });
    add_rows(x.count, nullptr);
}

// What the layer beside the next one gives, in `beside_`.
void Decoder::keep_output(const DecoderLayer& layer, int index, int rows) {
    auto* kept = (float*)beside_.fit(rows, config_.hidden, 4);
    multiply_adapted(mixed(rows), layer.output, kAdaptedOfLayer * index + kOutput, kept, beside_.stride);
    each_row(pool_, rows, [&](int row) {
        for (int i = 0; i < config_.hidden; ++i) kept[row * beside_.stride + i] *= layer.output_scale;
    });
}

void Decoder::norm_output(int rows, const float* post_norm) {
    if (!post_norm) return;
    Rows out{output_.data(), Number::kSingle, output_.stride, rows};
    norm(pool_, out, nullptr, 0, {post_norm, config_.eps, config_.hidden}, Number::kSingle, output_.data(), output_.stride);
}

// residual += output, normed and scaled first where the model says so.
void Decoder::add_rows(int rows, const float* post_norm, float scale) {
    norm_output(rows, post_norm);
    float* residual = (float*)residual_.data();
    const float* from = (const float*)output_.data();
    scale *= config_.residual_scale;
    pool_.run(rows, [&](int row, int) {
        for (int i = 0; i < config_.hidden; ++i) residual[row * residual_.stride + i] += from[row * output_.stride + i] * scale;
    });
}
