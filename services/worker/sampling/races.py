"""How a token is drawn: as a race of all tokens, whose times are functions of the key of its position.

Each token t has an exponentially distributed time of its own, E(t), made from the key and t; the token with the
greatest weight / E(t) wins, which has the distribution of the weights exactly (the Gumbel-max trick: the logarithm of
that is log weight + Gumbel noise; Maddison, Tarlow, Minka, "A* sampling", arXiv:1411.0030).

So two distributions that are raced by one key have the same winner as often as anything can promise that looks at one
of them at a time: at least (1 - D) / (1 + D) of the time, where D is their distance in total variation; rejection
sampling, which looks at both, has 1 - D (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding", arXiv:2408.07978). This is what drafts are accepted by, while what is drawn does not depend on
them at all.

E(t) is -log(1 - v), where v is a number in (0, 1) of 31 bits of a hash of key and token: two rounds of multiplication
and shifts (C. Wellons' "lowbias32"), with half of the key before each. Every way of drawing uses the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Draws by one kernel, which leaves logits as they are: of logits [R, vocab], and for each row key (int64, see
`random_numbers.race_keys`), temperature (float32; 0: the first of the greatest logits, whatever else is said), top_k
(int64; the vocabulary's size or more keeps all), top_p (float32; 1 keeps all) and min_p (float32; 0 keeps all) → the
tokens, int64 [R].

The same tokens as `sampler` draws by PyTorch's operations, but where rounding decides: the two best quotients of weight
and time are a few millionths apart, or a sum of weights is as near to the share that top_p asks for. A row in whose
logits a NaN is gives the first one, so that whoever looks at its logit sees that it means nothing; another one without
any finite logit gives some token."""

_STEP = 0x9E3779B1
_FACTORS = (0x7FEB352D, 0x846CA68B)


@runtime_checkable
class SupportsDraw(Protocol):
    """Operations that draw by a kernel of their own."""

    @property
    def draw(self) -> Draw:
        """See `Draw`."""


def draw_of(ops: object) -> Draw | None:
    """The kernel that `ops` draw by; None: they have none."""
    return ops.draw if isinstance(ops, SupportsDraw) else None


def race_by_torch(weights: Tensor, keys: Tensor) -> Tensor:
    """weights [R, W], zeros of which cannot win, and keys int64 [R] (see `random_numbers.race_keys`) → the winners,
    int64 [R]; the first NaN of a row with one, some token for a row with no weight at all.

    On any device, without waiting for it. Times are of double precision: then no winner depends on how a logarithm is
    computed, and kernels may take fewer of them."""
    tokens = torch.arange(weights.shape[1], dtype=torch.int32, device=keys.device)
    return (weights / race_times(keys, tokens)).argmax(dim=1)


def race_times(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys int64 [R], tokens [W] or [R, W] → float64 [R, W], the time of each token."""
    return torch.log1p(_uniforms(keys, tokens).double().neg_()).neg_()


def _uniforms(keys: Tensor, tokens: Tensor) -> Tensor:
    halves = keys.view(torch.int32).view(-1, 2)
    x = tokens.int() * _signed(_STEP) + halves[:, :1]
    _shifted(x, 16).mul_(_signed(_FACTORS[0]))
    _shifted(x, 15).add_(halves[:, 1:]).mul_(_signed(_FACTORS[1]))
    _shifted(x, 16).bitwise_and_(0x7FFFFFFF)
    return x.float().add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) of unsigned numbers, in place."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
