// What the logits of a row are changed by before its token is drawn: services/worker/sampling/logits_processors.py says what each
// means, and draws the same from what it makes of them.
#pragma once
#include <cstdint>

struct Changes {
    const int32_t* allowed;  // bits of what may be drawn, token t bit t % 32 of word t / 32; null: all
    const int32_t* mask;     // the same of a grammar
    const int64_t* bias_tokens;
    const float* bias_values;
    const int64_t* stops;  // what may not be drawn yet, unless nothing else is left
    const int32_t* held;   // the sequence's tokens, prompt and output; null: none is penalised
    int biases;
    int stop_count;
    int prompt_length;
    int held_length;  // in the run's first step
    float presence;
    float frequency;
    float repetition;

    bool any() const { return allowed || mask || biases || stop_count || held; }
};

// logits [vocab]; `steps`: by how many tokens more are held.
void change_logits(const Changes& by, int steps, float* logits, int vocab);
