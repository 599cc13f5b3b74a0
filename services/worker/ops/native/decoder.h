// A whole forward pass, as services.worker.models.decoder has it, without leaving C++.
#pragma once
#include <algorithm>
#include <vector>

#include "attention.h"
#include "draw.h"
#include "latent.h"
#include "linear.h"
#include "logprobs.h"
#include "low_rank.h"
#include "mixture.h"
#include "rows.h"
#include "states.h"
#include "threads.h"

// Experts in the place of a layer's MLP.
struct DecoderMixture {
    Linear router;
    RouterRule rule;
    Experts experts;
    // [1, hidden]: the sigmoid of its product is how much is taken of what the shared expert makes; `groups` is null: all of it.
    Linear shared_gate;
    Activation shared_activation;
    int64_t* counts;  // [experts] or null: how often each was picked, added to
};

// What a selective space (Mamba-1) has between its convolution and its states: R numbers of each row make its time steps.
struct DecoderSelective {
    Linear made;            // [R + 2 * N, C]: these numbers, B and C
    Linear steps;           // [C, R]
    const float* norms[3];  // of the three parts; null: they are not normed
    float eps;
};

// What a delta net by element (Kimi Delta Attention) has before its states, of R numbers of each row for either.
struct DecoderGates {
    Linear rates;    // [H * N, R]
    Linear outputs;  // [H * P, R]: gates
};

// A mixer with states in the place of a layer's attention.
struct DecoderStates {
    StateMixer mixer;
    // The last outputs of what rows are projected to, where they are kept in another way than the others; `groups` is null: they
    // are the layer's `qkv`'s.
    Linear steps;
    const DecoderSelective* selective;  // of a selective space, whose `qkv` gives what its convolution sees, then gates; else null
    // Of a delta net by element, whose `qkv` gives what its convolution sees, what rates and gates are made of, and, unless
    // `steps` does, how much is written; else null. No adapters change it.
    const DecoderGates* gates;
    const float* norm;                  // [heads * head_dim] behind the mixer, before the layer's gate; null: it has its own, if any
    float eps;                          // of it
};

// Latent attention in the place of a layer's usual one; services.worker.models.latent.attention says what is multiplied.
struct DecoderLatent {
    int rank;       // of what is cached beside `rope_dim` rotated elements
    int nope_dim;   // of a head's query, before those that are rotated
    int rope_dim;
    int value_dim;  // of a head
    // [q_rank], and what makes queries of the latent that it norms; null: `qkv` makes queries.
    const float* q_norm;
    Linear q_up;
    const float* kv_norm;     // [rank]
    const Linear* keys_up;    // [heads] of [rank, nope_dim]
    const Linear* values_up;  // [heads] of [value_dim, rank]
    float eps;                // of these norms

    int query_dim() const { return nope_dim + rope_dim; }
    int cached_dim() const { return rank + rope_dim; }
};

struct DecoderLayer {
    const float* input_norm;  // null where nothing is normed: of the only layer of a decoder that foresees
    const float* q_norm;  // null where heads are not normed
    const float* k_norm;
    const float* attention_post_norm;  // null where outputs are not normed
    const float* mlp_norm;  // null where there is no MLP
    const float* mlp_post_norm;
    const float* cos_sin;
    // Of a mixer with states all that it is given, but for its `steps`; `groups` is null where nothing attends: normed rows are what
    // `output` is multiplied with, or, where that is null, too, there is an MLP alone.
    Linear qkv;
    Linear gate;  // the sigmoid of its product is how much is taken of what attention, or a normed mixer, gives; `groups` is
                  // null: all of it
    Linear output;
    Linear gate_up;
    Linear down;
    int window;  // 0: none
    const float* sinks;  // [heads] or null, see Attention
    const float* slopes;  // its `alibi_slopes`
    // Null: `gate_up` and `down` are the layer's MLP. Else they are the expert that every row goes through besides; `groups` is
    // null where there is none.
    const DecoderMixture* mixture;
    const DecoderStates* states;  // null: the layer attends
    const DecoderLatent* latent;  // null: not to latents
    // What is multiplied with products (Falcon-H1): each output of `qkv` and of `gate_up`, null: nothing; all of `output`'s and
    // of `down`'s.
    const float* input_scales;
    const float* up_scales;
    float output_scale;
    float down_scale;
    int beside;  // 1: it reads what the layer before reads, whose output joins the residual with this one's
    // What the residual is multiplied by before what `output` gives, and what the MLP gives, joins it.
    float output_kept;
    float mlp_kept;
};

struct DecoderConfig {
    Number number;
    int layers;
    int hidden;
    int heads;
    int kv_heads;
    int head_dim;
    int page_bits;  // of the caches
    Code cache_code;
    int vocab;
    Activation activation;
    float eps;
    float attention_scale;
    float attention_softcap;  // 0: none
    float logits_softcap;     // 0: none
    float embedding_scale;
    float residual_scale;  // what outputs are multiplied by before they join the residual
    int residual_normed;   // 1: they join the normed rows that were read, and not these before their norm
    float logits_divisor;
    const void* embedding;  // [vocab, hidden]; null where it is codes
    Linear coded_embedding;  // the same as packed codes, not scaled by `embedding_scale`, which is 1 then; `groups` is null elsewhere
    const float* final_norm;  // null where nothing is normed
    Linear head;
    // [hidden, 2 * hidden]: a row begins as this of its embedding and of the feature given with it. A decoder that foresees
    // the features of another (EAGLE) has one; `groups` is null in others.
    Linear joined;
    // A decoder that goes on from rows that it is given (EAGLE-3) has these two, and no `joined`: its layer reads
    // [2 * hidden], the normed embedding and the normed row, and the row is its residual. What it gives on is not normed.
    const float* embedding_norm;
    const float* given_norm;
    int norms_residual;  // 1: the residual is the normed row
    QueryGrowth growth;  // scales of the weights' kind, or floats where attention is latent
    int words;           // of the head; `vocab` are the embedding's
    const int* tokens;   // [words]: the token that each word is; null: they are the same
};

// A layer's matrices that adapters may change, in this order; kSteps of a selective space, too.
enum Adapted : int { kQkv, kSteps, kMade, kGate, kOutput, kGateUp, kDown, kSharedGate, kAdaptedOfLayer };

// Whose adapters a pass's rows have, and what these add: to each layer's matrices, and to the logits behind the last layer's;
// null tables: nothing.
struct Adapters {
    const LowRankTable* const* tables;  // [kAdaptedOfLayer * layers + 1]
    const int* slots;                   // of each row
    const int* logits_slots;            // of each row whose logits are wanted
};

// Rows that begin as these do, and not as their tokens' embeddings.
struct Inputs {
    int count;
    const int* rows;
    const float* values;  // [count, (1 + levels) * hidden]: behind what a row begins as, what joins it behind the first layers
    int levels;

    const float* level(int row, int number, int hidden) const { return values + (int64_t(row) * (1 + levels) + number) * hidden; }
};

struct Forward {
    const int* ids;
    Batch batch;
    const int* logits_rows;
    int logits;
    void* const* keys;  // of each layer; of one with states its windows
    void* const* values;  // or its states
    float* to;  // [logits, words]
    float* features;  // [rows, hidden]: the last hidden state of every row, normed; null where nobody wants them
    const int* taps;  // null; or in place of that [rows, tap_count * hidden]: what goes into the layers of these numbers, and
    int tap_count;    // comes out of the last one where that is the number of layers
    const float* given;  // [rows, hidden]: what `joined` joins; may be `features`
    const int* group_of;  // of each layer the group that it is in; null: there is one group
    const Batch* batches;  // of each group: block tables and slots differ, nothing else does
    const Adapters* adapters;  // null: no row has one
    const Inputs* inputs;  // null: every row begins as its token's embedding
    const int64_t* state_slots;  // of each sequence, where layers have states

    const Batch& of_layer(int index) const { return group_of ? batches[group_of[index]] : batch; }
    bool taps_at(int layer) const { return std::find(taps, taps + tap_count, layer) != taps + tap_count; }
    // Whether the last layer computes every row, and not just those whose logits are wanted.
    bool ends_every_row(int layers) const { return features && (!taps || taps_at(layers)); }
};

// The block tables of a group of layers, and how far these see.
struct DecodeTable {
    const int* blocks;  // [sequences, table_width] of each
    int window;         // blocks behind it may be somebody else's by now; 0: there is none
};

// A step in which sequences decode: a token each, and the drafts behind it, from the tokens that they hold to those that are
// drawn. What sequences hold is by their numbers; what differs from step to step is `steps`.
struct Decode {
    int count;                 // of sequences
    int rows;                  // of all: one for the last token, and one for each draft, which lies behind it
    int steps;                 // behind the one that `positions` and `outputs` are of
    const int64_t* sequences;  // [rows] whose each row is
    const int* positions;      // [rows] of the tokens that are computed
    const int* outputs;        // [rows] tokens that were drawn before
    const int* drafted;        // [count] drafts of each; null: nobody has any
    int* tokens;               // [sequences, width]: what is drawn is put behind those that are computed
    int64_t width;
    const DecodeTable* tables;  // of each group of layers
    int groups;
    int64_t table_width;
    const int* group_of;       // as of Forward
    const Adapters* adapters;  // as of Forward
    void* const* keys;         // of each layer
    void* const* values;
    float* to;              // [rows, words]
    int halts;              // 1: nothing is drawn yet, as masks of `draws` are to come; `finish` is to be called then
    int left;               // rows whose tokens are drawn behind the call, and put into `drawn`; `accept` is to be called then
    const uint64_t* seeds;  // [rows] what the keys of `draws` are made of; null: the likeliest tokens are wanted
    Draws draws;            // of which logits, keys and steps are the library's
    Logprobs logprobs;      // of `logprobs.count` rows, whose logits and tokens are the library's
    // What comes of it.
    int64_t* drawn;          // [rows]
    bool* undefined;         // [rows] whether `drawn` means nothing, as the model computed NaN
    int* gained;             // [count] tokens that each holds more: its drafts that were drawn, too, and one behind them
    float* own;              // [logprobs.count] the log-probability of what was drawn
    int64_t* likeliest;      // [logprobs.count, logprobs.likeliest] tokens of each row, and their log-probabilities
    float* chances;
    double forward_seconds;  // until there were logits
};

// The drafts that were drawn, too, stand, and what was drawn behind them: sequences hold both from here on.
void accept(Decode& step);

// Used from one thread. Keeps its workspace, which grows to the largest batch seen.
class Decoder {
  public:
    Decoder(Pool& pool, const DecoderConfig& config, const DecoderLayer* layers);

    // False where an id is out of the vocabulary; nothing is computed then.
    bool run(const Forward& forward);
    // The same, and what is drawn and accepted.
    bool decode(Decode& step);
    // What is left of a step that halts.
    void finish(Decode& step);
    // As many steps of one row for each sequence, each step's ids the likeliest tokens behind the step before. `forward` is
    // the first step, whose logits are wanted of every row; the next one's slots, positions and context lengths lie `stride`
    // items further. Ids [steps + 1, rows] are `ids`, of which the first row is given. Where features are given, they are
    // the step before's. False where an id is out of the vocabulary.
    bool draft_on(Forward forward, int steps, int64_t stride, int* ids);

  private:
    struct Buffer {
        std::vector<F> memory;
        int64_t stride = 0;
        // Rows of `items` items of `size` bytes, not a multiple of 1 kB apart: tiles read them where they lie.
        void* fit(int rows, int items, int size);
        void* data() { return memory.data(); }
    };

    void fit(int rows);
    void lay_out(const Decode& step);
    void draw_rows(Decode& step);
    void find_logprobs_of(Decode& step);
    bool begin(const Forward& forward);
    void attention(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x);
    void attend_latents(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x);
    void make_latents(const DecoderLayer& layer, const Rows& x);
    void multiply_heads(const Linear* linears, int rows, const float* from, int from_width, float* to, int64_t to_stride, int to_width);
    void keep_rows(const Rows& x);
    void mix_states(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x);
    void select_states(const DecoderLayer& layer, const Forward& forward, int index, const float* projected);
    void norm_mixed(const DecoderLayer& layer, int rows);
    void gate_mixed(const DecoderLayer& layer, int index, const Rows& x, int width);
    void gate_heads(const DecoderLayer& layer, int index, const Rows& x, int width);
    void fill_rows(const DecoderLayer& layer, int index, const float* projected, int rows);
    void make_gates(const DecoderLayer& layer, float* projected, int rows);
    void multiply_adapted(const Rows& x, const Linear& linear, int adapted, float* to, int64_t stride, const float* scales = nullptr);
    bool only_last_attend(const DecoderLayer& layer, const Forward& forward, int index) const;
    void attend_last(const DecoderLayer& layer, const Forward& forward, int index, const Rows& x);
    Rows last_of(const Forward& forward, const Rows& x);
    Batch last_batch(const Forward& forward, int index);
    void pick(const Forward& forward, bool mixed);
    void join(const Forward& forward);
    void tap(const Forward& forward, int layer);
    void give_features(const Forward& forward);
    void pick_last(const Forward& forward);
    void mlp(const DecoderLayer& layer, int index, int rows, const Inputs* inputs);
    void gate_rows(const DecoderLayer& layer, int index, int rows);
    void mix_rows(const DecoderLayer& layer, int index, int rows);
    void add_shared(const DecoderLayer& layer, int index, int rows);
    void add_level(const Inputs& inputs, int layer);
    void add_output(const Rows& x, const Linear& linear, const float* post_norm, int adapted, float scale, bool beside = false);
    void add_rows(int rows, const float* post_norm, float scale = 1);
    void norm_output(int rows, const float* post_norm);
    void keep_output(const DecoderLayer& layer, int index, int rows);
    bool adapts(int adapted) const { return adapted_ && adapted_[adapted]; }
    void adapt(int adapted, const Rows& x, float* to, int64_t stride);
    void norm_residual(const float* weight, int rows, float kept = 1);
    void keep_residual(int rows, float kept);
    void logits(const Forward& forward);
    const AttentionPlan& plan(const Batch& batch, int window);
    Cache cache_of(const Forward& forward, int index) const {
        return {config_.number, forward.keys[index], forward.values[index], config_.kv_heads, config_.head_dim, config_.page_bits, config_.cache_code};
    }
    Rows rows_of(Buffer& buffer, int count) { return {buffer.data(), config_.number, buffer.stride, count}; }
    Rows mixed(int count) { return {mixed_.data(), mixed_number_, mixed_.stride, count}; }
    Rows residual(int count) { return {residual_.data(), Number::kSingle, residual_.stride, count}; }

    Pool& pool_;
    DecoderConfig config_;
    std::vector<DecoderLayer> layers_;
    int size_;  // bytes of an item
    int end_;   // the last layer that has a cache: behind it, only rows whose logits are wanted are computed
    Buffer pairs_, residual_, normed_, qkv_, queries_, gates_, mixed_, gate_up_, gated_, output_, shared_, beside_, selected_, made_;
    Number mixed_number_ = Number::kSingle;  // of what `mixed_` holds: floats behind a mixer with states
    std::vector<float> router_logits_, chances_, shared_gates_;
    std::vector<int64_t> picks_, head_starts_;
    std::vector<int> last_rows_;  // of the last layer that attends, what its batch points to
    std::vector<int> decoded_;  // of a step of decodes, what its batches point to
    std::vector<Batch> decodes_;  // of each group of layers
    std::vector<uint32_t> keys_;
    std::vector<int64_t> drawn_, ranks_;  // of rows whose log-probabilities are wanted
    std::vector<float> totals_;
    std::vector<float> latents_, latent_queries_, by_head_, products_, absorbed_, attended_;
    AttentionPlan plans_[2];
    const LowRankTable* const* adapted_ = nullptr;  // of the batch in hand
    const int* slots_ = nullptr;                    // of the rows in hand
    int windows_[2] = {-1, -1};  // of the plans made for the batch in hand
};
