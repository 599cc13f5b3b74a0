// Rows of a table of codes that is packed for products: an output of a group, all of its inputs.
#include "codes.h"
#include "quad.h"
#include "rows.h"

namespace {

// The code of an input and an output of a group: the reverse of what `pack_codes` writes.
template <Code code> BATON_INLINE uint8_t code_at(const uint8_t* group, int input, int output) {
    int column = output / kLanes, lane = output % kLanes;
    if constexpr (code == Code::kQuad) {
        return group[(input / Quad::kItems * kGroupOutputs + output) * Quad::kItems + input % Quad::kItems];
    } else if constexpr (code == Code::kNibble) {
        uint8_t both = group[(input / Quad::kItems * (kGroupColumns / 2) + column / 2) * 64 + lane * Quad::kItems + input % Quad::kItems];
        return column % 2 ? both >> 4 : both & 15;
    } else {
        const uint8_t* step = group + (input / kCodeInputs * kGroupColumns + column) * code_bytes(code);
        if constexpr (code == Code::kInt8) return step[input % kCodeInputs * kLanes + lane];
        return input % kCodeInputs ? step[lane] >> 4 : step[lane] & 15;
    }
}

template <Code code> void embed_row(const Linear& table, int id, float* to) {
    int group = id / kGroupOutputs, output = id % kGroupOutputs;
    int size = table.scaled ? table.scaled : table.in, segments = table.in / size;
    const uint8_t* codes = (const uint8_t*)table.groups + group * (coded_bytes(code, kGroupOutputs, table.in));
    for (int segment = 0; segment < segments; ++segment) {
        int64_t at = (int64_t(group) * segments + segment) * kGroupOutputs + output;
        int zero = code == Code::kQuad ? 128 : table.zeros ? table.zeros[at] : 8;
        float scale = table.scales[at], offset = table.offsets ? table.offsets[at] : 0.0f;
        for (int i = segment * size; i < (segment + 1) * size; ++i) {
            uint8_t stored = code_at<code>(codes, i, output);
            to[i] = float(code == Code::kInt8 ? int8_t(stored) : stored - zero) * scale + offset;
        }
    }
}

void embed_row(const Linear& table, int id, float* to) {
    switch (table.code) {
        case Code::kInt8: return embed_row<Code::kInt8>(table, id, to);
        case Code::kInt4: return embed_row<Code::kInt4>(table, id, to);
        case Code::kQuad: return embed_row<Code::kQuad>(table, id, to);
        case Code::kNibble: return embed_row<Code::kNibble>(table, id, to);
        case Code::kPlain:
        case Code::kFp8: return;  // are not asked for
    }
}

}  // namespace

bool embed_codes(Pool& pool, const int* ids, int count, const Linear& table, float* to, int64_t to_stride) {
    for (int row = 0; row < count; ++row)
        if (ids[row] < 0 || ids[row] >= table.out) return false;
    pool.run(count, [&](int row, int) { embed_row(table, ids[row], to + row * to_stride); });
    return true;
}
