// Mixtures of experts: which experts a router chooses for rows, and what these make of them.
#pragma once
#include <cmath>

#include "linear.h"

// How a router chooses: services.worker.ops.interface.Routing.
struct RouterRule {
    int experts;
    int chosen;  // of each row
    int sigmoid;  // what makes scores of logits, which are the chances; 0: a softmax
    int renormalised;
    const float* bias;  // [experts] or null: added to the scores that choose
    float scale;
    int groups;  // of neighbours, of whose best so many `chosen_groups` experts are chosen
    int chosen_groups;
};

// logits [rows, experts] → chances and picks [rows, chosen], the best first; of equal ones that of the lower number.
void route(Pool& pool, const float* logits, int rows, const RouterRule& rule, float* chances, int64_t* picks);

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

struct Experts {
    const Linear* gate_up;  // [count]: gates, then ups
    const Linear* down;     // [count]
    int count;
    Activation activation;
};

// The experts of each row and what their outputs are multiplied by, [rows, chosen]; -1: another rank's.
struct Picks {
    const float* chances;
    const int64_t* experts;
    int chosen;
};

// to [rows, out of `down`]: the sum of the outputs of a row's picks, each times its chance, by their numbers; zeros of a row
// that has none.
void mix(Pool& pool, const Rows& x, const Picks& picks, const Experts& experts, float* to, int64_t to_stride);
