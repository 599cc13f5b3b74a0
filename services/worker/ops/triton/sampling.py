"""One token for each row of logits, by temperature, min_p, top_k, top_p and a key, with no sort and in hardly more than
one pass over the logits. What is drawn is what `sampling.sampler`, `sampling.filters` and `sampling.races` say.

A first kernel reads every logit once, many programs to a row. Of a row without cuts it leaves for each chunk of tokens
its winner and how far that came. Of a row with cuts it leaves each chunk's greatest logit and its weight: these bound
which chunks can hold tokens that survive. A second kernel, one program to a row, compares the winners; or reads those
chunks alone, finds the threshold by bisecting the bits of weights (positive floats are ordered as their bits are), and
has the tokens race that are not below it.

Bytes moved for R rows of V logits of b bytes: R · V · b, and 28 for each of the R · V / CHUNK chunks; then CHUNK · b
for each chunk looked into. Those are about top_k, or as many as a nucleus has tokens: few unless a distribution is
flat. Of a flat one, whose nucleus may be anywhere, the program looks through the whole row up to 30 times for each cut.

Sums are added up in an order that depends on the vocabulary alone, so a row's token does not depend on other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
AT_ONCE = 32
"""Chunks that a program looks through at once; the first of these stay in its registers."""
WARPS = 8
REGISTERS = 128
"""Most registers of a thread. Two programs then fit on an SM, and all rows of a large batch onto an H200 at once."""

_ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0, the weight of the likeliest token."""
_COARSE = tl.constexpr(1 << 16)
"""Bits of a weight this close are close enough where only a bound is sought."""
_LOWEST = tl.constexpr(-3.0e38)


class DrawParameters(NamedTuple):
    """How each of R rows is drawn; on the logits' device."""

    temperature: Tensor
    """float32; 0: the first of the greatest logits, whatever else is said."""
    top_k: Tensor
    """int64; the vocabulary's size or more keeps all."""
    top_p: Tensor
    """float32; 1 keeps all."""
    min_p: Tensor
    """float32; 0 keeps all."""
    keys: Tensor
    """int64, see `random_numbers.race_keys`"""


def draw(logits: Tensor, how: DrawParameters) -> Tensor:
    """logits [R, vocab], contiguous, float32, float16 or bfloat16 → int64 [R].

    The same tokens as `sampling.sampler` draws by the same keys, but where a sum of weights that decides about a cut,
    or the quotients of the two best tokens, are rounded to the other side (all are float32). A row with a NaN gives the
    first one, another one without any finite logit some token.
    """
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    peaks = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    sums, listed = torch.empty_like(peaks), torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    grid = (rows, triton.cdiv(chunks, AT_ONCE))
    chunk_kernel[grid](
        *(logits, *how, peaks, sums, listed), VOCAB=vocab, CHUNKS=chunks, AT_ONCE=AT_ONCE, CHUNK=CHUNK, num_warps=4
    )
    draw_kernel[(rows,)](
        *(logits, *how, peaks, sums, listed, tokens),
        VOCAB=vocab,
        CHUNKS=chunks,
        ALL=triton.next_power_of_2(chunks),
        AT_ONCE=AT_ONCE,
        CHUNK=CHUNK,
        num_warps=WARPS,
        maxnreg=REGISTERS,
    )
    return tokens


@triton.jit
def _power(temperature):
    """What a difference of logits is multiplied by to get one of powers of 2."""
    return 1.4426950408889634 / temperature


@triton.jit
def _read(logits, token, there):
    return tl.load(logits + token, mask=there, other=float("-inf")).to(tl.float32)


@triton.jit
def _times(token, key):
    """The exponentially distributed times of tokens (int32), see `sampling.races`."""
    x = token.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) + (key >> 32).to(tl.uint32)
    x = x * 0x846CA68B
    low = ((x ^ (x >> 16)) & 0x7FFFFFFF).to(tl.int32)
    v = tl.minimum((low.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994)
    # Near 1, 1 - v has too few digits of v: the logarithm's series has them.
    small = v * (1.0 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
    return tl.where(v < 0.015625, small, -tl.log(1.0 - v))


@triton.jit
def _first_greatest(values, token, VOCAB: tl.constexpr):
    """(the greatest of `values` [T, C], the first token that has it) of each row; VOCAB where all are NaN."""
    best = tl.max(values, axis=1)
    return best, tl.min(tl.where(values == best[:, None], token, VOCAB), axis=1)


@triton.jit
def _is_cut(k, p, floor, VOCAB: tl.constexpr):
    return (k < VOCAB) | (p < 1.0) | (floor > 0.0)


@triton.jit
def chunk_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    peaks,
    sums,
    listed,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The greatest logit of each chunk, NaN where one is among them, and in `sums` its weight relative to that; of
    random rows without cuts the logarithm of the best token's quotient relative to that, and the token in `listed`."""
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    chunk = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    values = _read(logits + row * VOCAB, token, token < VOCAB)
    peak = tl.max(values, axis=1)
    powers = (values - tl.maximum(peak, _LOWEST)[:, None]) * _power(tl.where(heat > 0, heat, 1.0))
    spoilt = tl.max((values != values).to(tl.int32), axis=1) > 0
    tl.store(peaks + row * CHUNKS + chunk, tl.where(spoilt, float("nan"), peak), mask=chunk < CHUNKS)
    if _is_cut(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row), VOCAB) | (heat <= 0.0):
        tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.exp2(powers), axis=1), mask=chunk < CHUNKS)
    else:
        reached, winner = _first_greatest(powers - tl.log2(_times(token, tl.load(keys + row))), token, VOCAB)
        tl.store(sums + row * CHUNKS + chunk, reached, mask=chunk < CHUNKS)
        tl.store(listed + row * CHUNKS + chunk, winner, mask=chunk < CHUNKS)


@triton.jit
def _floor(peaks, sums, BY_COUNT: tl.constexpr, wanted, CHUNK: tl.constexpr):
    """A weight, as bits, at and above which there are surely `wanted` tokens or else tokens that weigh so much.

    A chunk whose peak is at or above a threshold has one such token at least, and what lies below the threshold weighs
    less than CHUNK - 1 times as much.
    """
    low = tl.full((), 0, tl.int32)
    high = low + (_ONE + 1)
    while high - low > _COARSE:
        middle = low + (high - low) // 2
        threshold = middle.to(tl.float32, bitcast=True)
        least = tl.maximum(peaks, sums - (CHUNK - 1) * threshold)
        if BY_COUNT:
            least = tl.zeros_like(peaks) + 1.0
        surely = tl.sum(tl.where(peaks >= threshold, least, 0.0), axis=0)
        low = tl.where(surely >= wanted, middle, low)
        high = tl.where(surely >= wanted, high, middle)
    return low


@triton.jit
def _weights(row, tile, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr):
    """Of the tokens of some of a row's listed chunks: [AT_ONCE, CHUNK], 0 below its floor."""
    logits, VOCAB, power, top, floor, listed, count = row
    place = tile * AT_ONCE + tl.arange(0, AT_ONCE)
    chunk = tl.load(listed + place, mask=place < count, other=0)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    there = (place < count)[:, None] & (token < VOCAB)
    weights = tl.exp2((_read(logits, token, there) - top) * power)
    return tl.where(weights >= floor, weights, 0.0)


@triton.jit
def _measured(row, first, bits, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr):
    """(how many, how much they weigh): tokens of the listed chunks whose weights have at least these `bits`. `first`:
    the first tile of weights."""
    threshold = bits.to(tl.float32, bitcast=True)
    numbers = (first >= threshold).to(tl.int32)
    masses = tl.where(first >= threshold, first, 0.0)
    for tile in range(1, tl.cdiv(row[6], AT_ONCE)):
        weights = _weights(row, tile, AT_ONCE, CHUNK)
        numbers += (weights >= threshold).to(tl.int32)
        masses += tl.where(weights >= threshold, weights, 0.0)
    return tl.sum(tl.sum(numbers, axis=1), axis=0), tl.sum(tl.sum(masses, axis=1), axis=0)


@triton.jit
def _threshold(row, first, low, wanted, BY_COUNT: tl.constexpr, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr):
    """The greatest weight, as bits from `low` up, at and above which there are `wanted` tokens, or else tokens that
    weigh so much; `low` where there is none. Ends early where one token is left between the bounds."""
    high, at_low, at_high = low * 0 + (_ONE + 1), low * 0 + (1 << 30), low * 0
    while (high - low > 1) & (at_low - at_high > 1):
        middle = low + (high - low) // 2
        number, mass = _measured(row, first, middle, AT_ONCE, CHUNK)
        if BY_COUNT:
            enough = number >= wanted
        else:
            enough = mass >= wanted
        low, at_low = tl.where(enough, middle, low), tl.where(enough, number, at_low)
        high, at_high = tl.where(enough, high, middle), tl.where(enough, at_high, number)
    return low


@triton.jit
def _cut(row, first, low, top_k, top_p, total, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr):
    """The least weight kept. `low`: bits of a lower bound of it. `total`: of all weights."""
    if top_k < row[1]:
        low = _threshold(row, first, low, top_k, True, AT_ONCE, CHUNK)
    if top_p < 1.0:
        if (top_k < row[1]) | (row[4] > 0):
            number, mass = _measured(row, first, low, AT_ONCE, CHUNK)
            # Of tokens that tie with the last one, only as many as top_k says count for top_p.
            beyond = tl.maximum(number - top_k, 0).to(tl.float32)
            total = mass - beyond * low.to(tl.float32, bitcast=True)
        low = _threshold(row, first, low, top_p * total, False, AT_ONCE, CHUNK)
    return low.to(tl.float32, bitcast=True)


@triton.jit
def _winner(row, first, threshold, key, AT_ONCE: tl.constexpr, CHUNK: tl.constexpr):
    """The first of the tokens with the greatest quotient, among those that weigh `threshold` or more."""
    best, winner = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    for tile in range(tl.cdiv(row[6], AT_ONCE)):
        weights = first
        if tile > 0:
            weights = _weights(row, tile, AT_ONCE, CHUNK)
        place = tile * AT_ONCE + tl.arange(0, AT_ONCE)
        chunk = tl.load(row[5] + place, mask=place < row[6], other=0)
        token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        quotients = tl.where(weights >= threshold, weights, 0.0) / _times(token, key)
        reached, tokens = _first_greatest(quotients, token, row[1])
        greatest = tl.max(reached, axis=0)
        earliest = tl.min(tl.where(reached == greatest, tokens, row[1]), axis=0)
        winner = tl.where(greatest > best, earliest, winner)
        best = tl.where(greatest > best, greatest, best)
    return winner


@triton.jit
def _draw_cut(
    logits,
    peak,
    mass,
    top,
    power,
    cuts,
    key,
    listed,
    index,
    VOCAB: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The token of a row of which `cuts` (top k, top p, min p) leave some: only chunks that may have one of these are
    read again, which are written to `listed`."""
    k, p, floor = cuts
    peak = tl.exp2((peak - top) * power)
    mass *= peak
    peak = tl.where(peak >= floor, peak, 0.0)
    total = tl.sum(mass, axis=0)
    low = k * 0
    if k < VOCAB:
        low = _floor(peak, mass, True, k.to(tl.float32), CHUNK)
    elif (p < 1.0) & (floor <= 0.0):
        low = _floor(peak, mass, False, p * total, CHUNK)
    wanted = (peak > 0) & (peak >= low.to(tl.float32, bitcast=True))
    count = tl.sum(wanted.to(tl.int32), axis=0)
    place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.debug_barrier()
    tl.store(listed + place, index, mask=wanted)
    tl.debug_barrier()
    row = (logits, VOCAB, power, top, floor, listed, count)
    first = _weights(row, 0, AT_ONCE, CHUNK)
    threshold = tl.maximum(floor, _cut(row, first, low, k, p, total, AT_ONCE, CHUNK))
    return _winner(row, first, threshold, key, AT_ONCE, CHUNK)


@triton.jit
def draw_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    keys,
    peaks,
    sums,
    listed,
    tokens,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALL: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A row a program. Writes to `sums` and `listed` of rows with cuts what it finds out about their chunks."""
    number = tl.program_id(0).to(tl.int64)
    logits += number * VOCAB
    sums += number * CHUNKS
    listed += number * CHUNKS
    heat = tl.load(temperature + number)
    index, element = tl.arange(0, ALL), tl.arange(0, CHUNK)
    peak = tl.load(peaks + number * CHUNKS + index, mask=index < CHUNKS, other=float("-inf"))
    spoilt = (peak != peak).to(tl.int32)
    if tl.max(spoilt, axis=0) > 0:
        token = tl.argmax(spoilt, axis=0) * CHUNK + element
        values = _read(logits, token, token < VOCAB)
        tl.store(tokens + number, tl.min(tl.where(values != values, token, VOCAB - 1), axis=0).to(tl.int64))
    elif heat > 0:
        top = tl.maximum(tl.max(peak, axis=0), _LOWEST)
        floor, p = tl.load(min_p + number), tl.load(top_p + number)
        k = tl.minimum(tl.load(top_k + number), VOCAB).to(tl.int32)
        power = _power(heat)
        mass = tl.load(sums + index, mask=index < CHUNKS, other=0.0)
        if _is_cut(k, p, floor, VOCAB):
            cuts = (k, p, floor)
            key = tl.load(keys + number)
            winner = _draw_cut(logits, peak, mass, top, power, cuts, key, listed, index, VOCAB, AT_ONCE, CHUNK)
        else:
            reached = tl.where(index < CHUNKS, mass + (peak - top) * power, float("-inf"))
            # Without a finite logit what is found may lie in the padding.
            winner = tl.load(listed + tl.minimum(tl.argmax(reached, axis=0), CHUNKS - 1))
        tl.store(tokens + number, tl.minimum(winner, VOCAB - 1).to(tl.int64))
    else:
        token = tl.minimum(tl.argmax(peak, axis=0), CHUNKS - 1) * CHUNK + element
        best = tl.argmax(_read(logits, token, token < VOCAB), axis=0)
        tl.store(tokens + number, tl.minimum(tl.min(token, axis=0) + best, VOCAB - 1).to(tl.int64))


# Masks upon logits: which tokens may be drawn, a bit for each. Bytes moved for P rows of V logits of b bytes: P · V / 8
# of bits, and b for each forbidden logit, which is written but never read; at the most P · V · b.


WORDS = 64
"""Words of mask bits that one program applies."""


def apply_bitmask(logits: Tensor, bits: Tensor, rows: Tensor) -> None:
    """logits [R, vocab], contiguous: row rows[i] becomes -inf wherever bits[i] has a 0.

    bits: int32 [P, ceil(vocab / 32)] in xgrammar's layout, token t is bit t % 32 of word t // 32; rows: int64 [P], each
    once.
    """
    words = bits.shape[1]
    grid = (len(rows), triton.cdiv(words, WORDS))
    bitmask_kernel[grid](logits, bits, rows, VOCAB=logits.shape[1], BITS=words, WORDS=WORDS, num_warps=4)


@triton.jit
def bitmask_kernel(logits, bits, rows, VOCAB: tl.constexpr, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Some words of one row a program."""
    mask = tl.program_id(0).to(tl.int64)
    # One token a thread, its neighbours' beside it: each is stored or not, so that no thread can store several at once.
    token = tl.max_contiguous(tl.program_id(1) * (WORDS * 32) + tl.arange(0, WORDS * 32), 1)
    allowed = tl.load(bits + mask * BITS + token // 32, mask=token < BITS * 32, other=0)
    forbidden = ((allowed >> (token % 32)) & 1) == 0
    row = logits + tl.load(rows + mask) * VOCAB
    nothing = tl.full((WORDS * 32,), float("-inf"), logits.dtype.element_ty)
    tl.store(row + token, nothing, mask=forbidden & (token < VOCAB))
