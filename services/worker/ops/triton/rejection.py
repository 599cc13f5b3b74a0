"""Rejection sampling of drafts for a whole batch on the device: Leviathan, Kalman, Matias, arXiv:2211.17192, algorithm
1; Chen et al., arXiv:2302.01318. What comes out has the target's distribution, whatever the drafts.

No worker draws so: it accepts drafts by the same keys as drawing without drafts takes, so a seed's output does not
depend on them (`triton.verification`, docs/speculative.md). This is the other way, of independent random
numbers, which `baton bench kernels` measures.

Bytes moved for Q sequences of K drafts and V tokens: 8 · Q · V (one row of p and q each, 4 · Q · V where all drafts
stand), 16 · Q · V / CHUNK for the sums of chunks, and 8 · Q · K for the drafts' own probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
AT_ONCE = 32
WARPS = 8


class RejectionInputs(NamedTuple):
    """Q sequences, each with K drafts at the most; on one device."""

    target: Tensor
    """p, float32 [Q, K + 1, V]: the model's probabilities at each draft's place, and behind the last."""
    drafting: Tensor | None
    """q, float32 [Q, K, V]: what each draft was drawn from; None where drafts are certain."""
    drafts: Tensor
    """int32 [Q, K] draft tokens of each sequence."""
    counts: Tensor
    """int32 [Q] drafts of each sequence."""
    chances: Tensor
    """float64 [Q, K + 1] in [0, 1), independent: one for each draft, and the last for what replaces or follows it."""


def verify(attempt: RejectionInputs) -> tuple[Tensor, Tensor]:
    """(tokens int32 [Q, K + 1], how many drafts are accepted int32 [Q]): those drafts, and one token more; what lies
    behind it is left undefined.

    The draft x is accepted with probability min(1, p(x) / q(x)); the first that is not is replaced by a draw from
    max(0, p - q), normed; behind drafts that are all accepted a token is drawn from p. Sums are float32 over chunks,
    float64 over those.
    """
    sequences, places, vocab = attempt.target.shape
    chunks = triton.cdiv(vocab, CHUNK)
    device = attempt.target.device
    sums = torch.empty((2, sequences, chunks), dtype=torch.float32, device=device)
    tokens = torch.empty((sequences, places), dtype=torch.int32, device=device)
    stand = torch.empty(sequences, dtype=torch.int32, device=device)
    sizes = {"PLACES": places, "PADDED": triton.next_power_of_2(places), "VOCAB": vocab, "CHUNKS": chunks}
    grid = (sequences, triton.cdiv(chunks, AT_ONCE))
    residual_kernel[grid](*attempt, sums[0], sums[1], **sizes, AT_ONCE=AT_ONCE, CHUNK=CHUNK, num_warps=4)
    replace_kernel[(sequences,)](
        *(*attempt, sums[0], sums[1], tokens, stand),
        **sizes,
        ALL=triton.next_power_of_2(chunks),
        CHUNK=CHUNK,
        num_warps=WARPS,
    )
    return tokens, stand


@triton.jit
def _standing(
    target, drafting, drafts, counts, chances, sequence, PLACES: tl.constexpr, PADDED: tl.constexpr, VOCAB: tl.constexpr
):
    """How many drafts of a sequence are accepted."""
    place = tl.arange(0, PADDED)
    count = tl.load(counts + sequence)
    there = place < count
    draft = tl.load(drafts + sequence * (PLACES - 1) + place, mask=there, other=0)
    p = tl.load(target + (sequence * PLACES + place) * VOCAB + draft, mask=there, other=0.0).to(tl.float64)
    q = tl.full((PADDED,), 1.0, tl.float64)
    if drafting is not None:
        own = (sequence * (PLACES - 1) + place) * VOCAB + draft
        q = tl.load(drafting + own, mask=there, other=0.0).to(tl.float64)
    chance = tl.load(chances + sequence * PLACES + place, mask=there, other=0.0)
    return tl.min(tl.where(there & (chance * q < p), PADDED, tl.minimum(place, count)), axis=0)


@triton.jit
def _left(target, drafting, drafts, sequence, place, replaced, token, PLACES: tl.constexpr, VOCAB: tl.constexpr):
    """(p, what is left of it without q where a draft is `replaced`) of the tokens at a place."""
    inside = token < VOCAB
    p = tl.load(target + (sequence * PLACES + place) * VOCAB + token, mask=inside, other=0.0)
    at = sequence * (PLACES - 1) + place
    if drafting is not None:
        q = tl.load(drafting + at * VOCAB + token, mask=inside & (token >= tl.where(replaced, 0, VOCAB)), other=0.0)
    else:
        q = tl.where(token == tl.load(drafts + at, mask=replaced, other=-1), 1.0, 0.0)
    return p, tl.maximum(p - q, 0.0)


@triton.jit
def residual_kernel(
    target,
    drafting,
    drafts,
    counts,
    chances,
    left_sums,
    sums,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sums of some chunks of the row that a sequence's last token is drawn from."""
    sequence = tl.program_id(0).to(tl.int64)
    place = _standing(target, drafting, drafts, counts, chances, sequence, PLACES, PADDED, VOCAB)
    replaced = place < tl.load(counts + sequence)
    chunk = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    p, left = _left(target, drafting, drafts, sequence, place, replaced, token, PLACES, VOCAB)
    tl.store(left_sums + sequence * CHUNKS + chunk, tl.sum(left, axis=1), mask=chunk < CHUNKS)
    tl.store(sums + sequence * CHUNKS + chunk, tl.sum(p, axis=1), mask=chunk < CHUNKS)


@triton.jit
def cumulated_past(masses, place, target):
    """(place, the mass before it): where the cumulated `masses` (float64, in order) pass `target`; the last that weighs
    anything where rounding leaves the target behind it."""
    cumulated = tl.cumsum(masses, axis=0)
    last = tl.max(tl.where(masses > 0, place, 0), axis=0)
    found = tl.minimum(tl.sum((cumulated <= target).to(tl.int32), axis=0), last)
    return found, tl.max(tl.where(place < found, cumulated, 0.0), axis=0)


@triton.jit
def replace_kernel(
    target,
    drafting,
    drafts,
    counts,
    chances,
    left_sums,
    sums,
    tokens,
    stand,
    PLACES: tl.constexpr,
    PADDED: tl.constexpr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One sequence a program: its accepted drafts, and the token behind them."""
    sequence = tl.program_id(0).to(tl.int64)
    place = _standing(target, drafting, drafts, counts, chances, sequence, PLACES, PADDED, VOCAB)
    replaced = place < tl.load(counts + sequence)
    index, element, earlier = tl.arange(0, ALL), tl.arange(0, CHUNK), tl.arange(0, PADDED)
    stands = earlier < place
    draft = tl.load(drafts + sequence * (PLACES - 1) + earlier, mask=stands, other=0)
    tl.store(tokens + sequence * PLACES + earlier, draft, mask=stands)
    tl.store(stand + sequence, place)
    mass = tl.load(left_sums + sequence * CHUNKS + index, mask=index < CHUNKS, other=0.0)
    # Where rounding leaves nothing of p without q, the two are as good as equal.
    nothing = tl.sum(mass, axis=0) <= 0.0
    if nothing:
        mass = tl.load(sums + sequence * CHUNKS + index, mask=index < CHUNKS, other=0.0)
    mass = mass.to(tl.float64)
    target_mass = tl.load(chances + sequence * PLACES + PLACES - 1) * tl.sum(mass, axis=0)
    chunk, before = cumulated_past(mass, index, target_mass)
    token = chunk * CHUNK + element
    p, left = _left(target, drafting, drafts, sequence, place, replaced, token, PLACES, VOCAB)
    inside = tl.where(nothing, p, left).to(tl.float64)
    found, before = cumulated_past(inside, element, target_mass - before)
    tl.store(tokens + sequence * PLACES + place, tl.minimum(chunk * CHUNK + found, VOCAB - 1))
