// The library's C interface; services/worker/ops/native/library.py mirrors it field by field.
#include "attention.h"
#include "decoder.h"
#include "draw.h"
#include "exchange.h"
#include "kv_copy.h"
#include "latent.h"
#include "linear.h"
#include "logprobs.h"
#include "low_rank.h"
#include "mixture.h"
#include "probe.h"
#include "rows.h"
#include "states.h"
#include "threads.h"
#include "tiles.h"

extern "C" {

// Raised with any change to what follows, and checked by the loader.
int baton_version() { return 37; }
const char* baton_instructions() {
#if defined(BATON_BF16)
    return "avx512-bf16";
#elif defined(BATON_VNNI)
    return "avx512-vnni";
#elif defined(BATON_AVX512)
    return "avx512";
#elif defined(BATON_AVX2)
    return "avx2";
#elif defined(__aarch64__)
    return "neon";
#else
    return "portable";
#endif
}

int baton_allow_tiles() { return allow_tiles(); }

Pool* baton_pool(int threads) { return new Pool(threads - 1); }
void baton_pool_free(Pool* pool) { delete pool; }

int64_t baton_packed_bytes(int number, int out, int in) { return packed_bytes(Number(number), out, in); }
void baton_pack(Pool* pool, int number, const void* weight, int out, int in, void* groups) {
    pack(*pool, Number(number), weight, out, in, groups);
}
int64_t baton_coded_bytes(int code, int out, int in) { return coded_bytes(Code(code), out, in); }
void baton_pack_codes(Pool* pool, int code, const uint8_t* codes, int out, int in, void* groups) {
    pack_codes(*pool, Code(code), codes, out, in, groups);
}
void baton_multiply(Pool* pool, const Linear* linear, const void* x, int number, int count, int64_t stride, int kind, int activation,
                    void* to, int64_t to_stride) {
    multiply(*pool, {x, Number(number), stride, count}, *linear, {Out(kind), {ActivationKind(activation), 0.0f}, to, to_stride});
}
void baton_multiply_each(Pool* pool, const Linear* linears, const int64_t* starts, int linear_count, const void* x, int number,
                         int count, int64_t stride, int kind, int activation, void* to, int64_t to_stride) {
    multiply_each(*pool, {x, Number(number), stride, count}, linears, starts, linear_count,
                  {Out(kind), {ActivationKind(activation), 0.0f}, to, to_stride});
}
void baton_route(Pool* pool, const float* logits, int rows, const RouterRule* rule, float* chances, int64_t* picks) {
    route(*pool, logits, rows, *rule, chances, picks);
}
void baton_mix(Pool* pool, const void* x, int number, int count, int64_t stride, const Picks* picks, const Experts* experts, float* to,
               int64_t to_stride) {
    mix(*pool, {x, Number(number), stride, count}, *picks, *experts, to, to_stride);
}
void baton_add_low_rank(Pool* pool, const LowRankTable* table, const void* x, int number, int count, int64_t stride, const int* slots,
                        float* to, int64_t to_stride) {
    add_low_rank(*pool, {x, Number(number), stride, count}, *table, slots, to, to_stride);
}
int baton_embed(Pool* pool, const int* ids, int count, int number, const void* table, int vocab, int hidden, float* to) {
    return embed(*pool, ids, count, Number(number), table, vocab, hidden, 1.0f, to, hidden);
}
int baton_embed_codes(Pool* pool, const int* ids, int count, const Linear* table, float* to) {
    return embed_codes(*pool, ids, count, *table, to, table->in);
}
void baton_norm(Pool* pool, const void* x, int number, int count, int hidden, float* residual, const float* weight, float eps,
                int to_number, void* to) {
    norm(*pool, {x, Number(number), hidden, count}, residual, hidden, {weight, eps, hidden}, Number(to_number), to, hidden);
}
void baton_gate(Pool* pool, const float* gate_up, int count, int width, Activation activation, int to_number, void* to) {
    int outputs = has_gates(activation) ? 2 * width : width;
    gate(*pool, {gate_up, Number::kSingle, outputs, count}, width, activation, Number(to_number), to, width);
}
void baton_gate_by(Pool* pool, const float* gates, int count, int width, int number, void* x) {
    gate_by(*pool, gates, width, width, Number(number), x, width, count);
}
void baton_rope_and_store(Pool* pool, const RopeAndStore* what, const Batch* batch, const Cache* cache) {
    rope_and_store(*pool, *what, *batch, *cache);
}
void baton_copy_slots(Pool* pool, const Cache* cache, const SlotCopies* copies) { copy_slots(*pool, *cache, *copies); }
void baton_attend(Pool* pool, const Attention* what, const Batch* batch, const Cache* cache) {
    attend(*pool, *what, *batch, *cache, plan_attention(*batch, pool->threads(), what->heads, cache->kv_heads, what->window));
}
void baton_store_latents(Pool* pool, const StoreLatents* what, const Batch* batch, const LatentCache* cache) {
    store_latents(*pool, *what, *batch, *cache);
}
void baton_attend_latents(Pool* pool, const LatentAttention* what, const Batch* batch, const LatentCache* cache) {
    attend_latents(*pool, *what, *batch, *cache, plan_attention(*batch, pool->threads(), what->heads, 1, 0));
}
void baton_mix_states(
    Pool* pool, const MixStates* what, const Batch* batch, const StateMixer* mixer, const StateCache* cache
) {
    mix_states(*pool, *what, *batch, *mixer, *cache);
}
Decoder* baton_decoder(Pool* pool, const DecoderConfig* config, const DecoderLayer* layers) {
    return new Decoder(*pool, *config, layers);
}
void baton_decoder_free(Decoder* decoder) { delete decoder; }
int baton_kv_save(const KvMemory* memory, const KvArena* arena, const KvBlocks* what) {
    return int(save_blocks(*memory, *arena, *what));
}
int baton_kv_load(const KvMemory* memory, const KvArena* arena, const KvBlocks* what) {
    return int(load_blocks(*memory, *arena, *what));
}
int baton_kv_save_cells(const KvCells* memory, const KvArena* arena, const KvBlocks* what) {
    return int(save_cells(*memory, *arena, *what));
}
int baton_kv_load_cells(const KvCells* memory, const KvArena* arena, const KvBlocks* what) {
    return int(load_cells(*memory, *arena, *what));
}
int baton_exchange(Exchange* exchange, int kind, int number, void* x, int64_t bytes, void* to, int milliseconds) {
    return advance(*exchange, ExchangeKind(kind), Number(number), (char*)x, bytes, (char*)to, milliseconds);
}
uint64_t baton_notifier_state(const Exchange* exchange) {
    NotifierState state = notifier_state(*exchange);
    return uint64_t(state.changes) << 32 | state.called;
}
void baton_notify(Exchange* exchange, int calls, uint32_t call) { notify(*exchange, calls, call); }
void baton_await_notify(Exchange* exchange, uint32_t seen, int milliseconds) { await_notify(*exchange, seen, milliseconds); }
void baton_show(Exchange* exchange, uint64_t shown) { show(*exchange, shown); }
uint64_t baton_shown_by(const Exchange* exchange, int rank) { return shown_by(*exchange, rank); }
float baton_probe_reading(Pool* pool, const void* from, int64_t bytes) { return probe_reading(*pool, from, bytes); }
int64_t baton_probe_multiplying(Pool* pool, int number, int64_t steps) { return probe_multiplying(*pool, Number(number), steps); }
int64_t baton_probe_tiles(Pool* pool, int64_t steps) { return probe_tiles(*pool, steps); }
void baton_draw(Pool* pool, const float* logits, int vocab, int count, const uint32_t* keys, const float* temperature,
                const int64_t* top_k, const float* top_p, const float* min_p, int64_t* tokens) {
    draw(*pool, {logits, vocab, count, keys, temperature, top_k, top_p, min_p, nullptr, 0}, tokens);
}
void baton_find_likeliest(Pool* pool, const float* logits, int vocab, int count, int64_t* tokens, bool* undefined) {
    find_likeliest(*pool, logits, vocab, count, tokens, undefined);
}
void baton_find_logprobs(Pool* pool, const Logprobs* what, float* totals, int64_t* ranks, int64_t* ids, float* values) {
    find_logprobs(*pool, *what, totals, ranks, ids, values);
}
int baton_decoder_run(Decoder* decoder, const Forward* forward) { return decoder->run(*forward); }
int baton_decoder_decode(Decoder* decoder, Decode* step) { return decoder->decode(*step); }
void baton_decoder_finish(Decoder* decoder, Decode* step) { decoder->finish(*step); }
void baton_accept(Decode* step) { accept(*step); }
void baton_race_key(uint64_t seed, uint32_t position, uint32_t* halves) { race_key(seed, position, halves); }
int baton_decoder_draft_on(Decoder* decoder, const Forward* forward, int steps, int64_t stride, int* ids) {
    return decoder->draft_on(*forward, steps, stride, ids);
}
}
