// Steps of decodes: what is around the forward pass, so that nothing of it is left to whoever launches one.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "decoder.h"

bool Decoder::decode(Decode& step) {
    using Clock = std::chrono::steady_clock;
    auto began = Clock::now();
    Forward forward{};
    forward.batch = rows_of(step);
    forward.ids = decoded_.data();
    forward.logits_rows = forward.batch.query_starts;  // every row
    forward.logits = step.rows;
    forward.keys = step.keys, forward.values = step.values, forward.to = step.to;
    if (!run(forward)) return false;
    step.forward_seconds = std::chrono::duration<double>(Clock::now() - began).count();
    draw_rows(step);
    for (int row = 0; row < step.rows; ++row)
        step.tokens[step.sequences[row] * step.width + forward.batch.positions[row] + 1] = int(step.drawn[row]);
    return true;
}

// The rows of a step; the tokens that are computed come first in `decoded_`.
Batch Decoder::rows_of(const Decode& step) {
    int rows = step.rows, block = kPageTokens << config_.page_bits;
    int last = *std::max_element(step.positions, step.positions + rows) + step.steps, blocks = last / block + 1;
    decoded_.resize(size_t(rows) * size_t(5 + blocks) + 1);
    int *ids = decoded_.data(), *positions = ids + rows, *contexts = positions + rows, *slots = contexts + rows;
    int *starts = slots + rows, *tables = starts + rows + 1;
    for (int row = 0; row < rows; ++row) {
        int position = step.positions[row] + step.steps;
        const int* table = step.tables + step.sequences[row] * step.table_width;
        ids[row] = step.tokens[step.sequences[row] * step.width + position];
        positions[row] = position, contexts[row] = position + 1, starts[row] = row;
        slots[row] = table[position / block] * block + position % block;
        std::copy_n(table, blocks, tables + int64_t(row) * blocks);
    }
    starts[rows] = rows;
    Batch batch{};
    batch.rows = batch.sequences = rows;
    batch.query_starts = starts, batch.context_lens = contexts, batch.positions = positions, batch.slots = slots;
    batch.block_tables = tables, batch.table_width = blocks;
    return batch;
}

void Decoder::draw_rows(Decode& step) {
    int rows = step.rows, words = config_.words;
    if (!step.seeds) return find_likeliest(pool_, step.to, words, rows, step.drawn, step.undefined);
    keys_.resize(2 * size_t(rows));
    for (int row = 0; row < rows; ++row)
        race_key(step.seeds[row], uint32_t(step.outputs[row] + step.steps), &keys_[2 * size_t(row)]);
    step.draws.logits = step.to, step.draws.vocab = words, step.draws.count = rows, step.draws.keys = keys_.data();
    draw(pool_, step.draws, step.drawn);
    for (int row = 0; row < rows; ++row) step.undefined[row] = std::isnan(step.to[int64_t(row) * words + step.drawn[row]]);
}
