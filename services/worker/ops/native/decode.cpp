// Steps of decodes: what is around the forward pass, so that nothing of it is left to whoever launches one.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "decoder.h"

namespace {

// What stands in the place of blocks behind a window: shared.kv_groups.
constexpr int kNullBlock = 0;

}  // namespace

bool Decoder::decode(Decode& step) {
    using Clock = std::chrono::steady_clock;
    auto began = Clock::now();
    lay_out(step);
    Forward forward{};
    forward.batch = decodes_[0];
    forward.ids = decoded_.data();
    forward.logits_rows = forward.batch.query_starts;  // every row
    forward.logits = step.rows;
    forward.keys = step.keys, forward.values = step.values, forward.to = step.to;
    forward.group_of = step.group_of, forward.batches = decodes_.data();
    forward.adapters = step.adapters;
    forward.state_slots = step.sequences;
    if (!run(forward)) return false;
    step.forward_seconds = std::chrono::duration<double>(Clock::now() - began).count();
    if (!step.halts) finish(step);
    return true;
}

void Decoder::finish(Decode& step) {
    draw_rows(step);
    if (step.logprobs.count) find_logprobs_of(step);
    if (!step.left) accept(step);
}

// The rows of a step for each group of layers; the tokens that are computed come first in `decoded_`.
void Decoder::lay_out(const Decode& step) {
    int rows = step.rows, block = kPageTokens << config_.page_bits;
    int last = *std::max_element(step.positions, step.positions + rows) + step.steps, blocks = last / block + 1;
    decoded_.resize(size_t(rows) * size_t(4 + step.groups * (1 + blocks)) + 1);
    int *ids = decoded_.data(), *positions = ids + rows, *contexts = positions + rows, *starts = contexts + rows;
    int* next = starts + rows + 1;
    for (int row = 0; row < rows; ++row) {
        int position = step.positions[row] + step.steps;
        ids[row] = step.tokens[step.sequences[row] * step.width + position];
        positions[row] = position, contexts[row] = position + 1, starts[row] = row;
    }
    starts[rows] = rows;
    Batch batch{};
    batch.rows = batch.sequences = rows;
    batch.query_starts = starts, batch.context_lens = contexts, batch.positions = positions, batch.table_width = blocks;
    decodes_.assign(step.groups, batch);
    for (int group = 0; group < step.groups; ++group, next += int64_t(rows) * (1 + blocks)) {
        int *slots = next, *tables = next + rows, window = step.tables[group].window;
        for (int row = 0; row < rows; ++row, tables += blocks) {
            const int* table = step.tables[group].blocks + step.sequences[row] * step.table_width;
            int position = positions[row], seen = window ? std::max(0, position - window + 1) / block : 0;
            slots[row] = table[position / block] * block + position % block;
            std::fill_n(tables, seen, kNullBlock);
            std::copy(table + seen, table + blocks, tables + seen);
        }
        decodes_[group].slots = slots, decodes_[group].block_tables = next + rows;
    }
}

void Decoder::draw_rows(Decode& step) {
    int rows = step.rows, words = config_.words;
    if (!step.seeds) return find_likeliest(pool_, step.to, words, rows, step.drawn, step.undefined);
    keys_.resize(2 * size_t(rows));
    for (int row = 0; row < rows; ++row)
        race_key(step.seeds[row], uint32_t(step.outputs[row] + step.steps), &keys_[2 * size_t(row)]);
    step.draws.logits = step.to, step.draws.vocab = words, step.draws.count = rows, step.draws.keys = keys_.data();
    step.draws.steps = step.steps;
    draw(pool_, step.draws, step.drawn);
    for (int row = 0; row < rows; ++row) step.undefined[row] = std::isnan(step.to[int64_t(row) * words + step.drawn[row]]);
}

// Of the logits as they are, whatever they were changed by.
void Decoder::find_logprobs_of(Decode& step) {
    Logprobs& what = step.logprobs;
    drawn_.resize(what.count), ranks_.resize(what.count), totals_.resize(what.count);
    for (int i = 0; i < what.count; ++i) drawn_[i] = step.drawn[what.rows[i]];
    what.logits = step.to, what.vocab = config_.words, what.tokens = drawn_.data();
    find_logprobs(pool_, what, totals_.data(), ranks_.data(), step.likeliest, step.chances);
    for (int i = 0; i < what.count; ++i) step.own[i] = step.to[what.rows[i] * config_.words + drawn_[i]] - totals_[i];
}

void accept(Decode& step) {
    for (int sequence = 0, row = 0; sequence < step.count; ++sequence) {
        int drafts = step.drafted ? step.drafted[sequence] : 0, same = 0;
        int* tokens = step.tokens + step.sequences[row] * step.width + step.positions[row] + step.steps + 1;
        while (same < drafts && tokens[same] == step.drawn[row + same]) ++same;
        tokens[same] = int(step.drawn[row + same]);
        step.gained[sequence] = same + 1;
        row += drafts + 1;
    }
}
