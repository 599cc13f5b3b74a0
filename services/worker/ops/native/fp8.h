// float8_e4m3fn, a sign, four bits of exponent and three of fraction: as floats, and back.
#pragma once
#include "lanes.h"

// Its bits are a float's, but for the bias of the exponent; subnormal ones come out right, too. `codes` may have anything
// above their eight bits that a sign extended to the left has.
BATON_INLINE F floats_of_fp8(Sixteen<RegI> codes) {
    F r;
    BATON_EACH r.part[i_] = (RegF)((codes.part[i_] << 20) & int32_t(0x87f00000)) * 0x1p120f;
    return r;
}
BATON_INLINE F floats_of_fp8(const uint8_t* codes) { return floats_of_fp8(load_integers(codes)); }

// To the nearest, ties to even; 448 for what is larger, and for NaN.
BATON_INLINE uint8_t fp8_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    uint8_t sign = uint8_t(bits >> 24 & 0x80);
    float size = x < 0 ? -x : x;
    size = (size < 448.0f ? size : 448.0f) * 0x1p-120f;
    memcpy(&bits, &size, 4);
    return uint8_t(sign | ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20));
}
