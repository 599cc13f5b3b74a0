"""Logits and parameters → tokens and log-probabilities, for a whole batch at once.

Order, as in vLLM: log-probabilities from the raw logits; what is allowed; logit_bias; bans (min_tokens, bad_words);
penalties; what is forced; temperature; min_p; top_k, then top_p; one draw. A draw turns one random number over in the
cumulative distribution, in the order of token ids, so it depends on nothing but that row's logits, seed and output
position. (Gumbel-max would need a random number for each token of the vocabulary: 30 times the work of the rest.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.worker.crossing import fetched, sent, sent_together
from services.worker.sampling.chances import chances, numbers
from services.worker.sampling.filters import CHUNK, kept, min_p_threshold, top_threshold
from services.worker.sampling.held import History
from services.worker.sampling.kernel_draws import drawn_by_kernel, draws_by_kernel
from services.worker.sampling.logprobs import Told, most_likely, of_tokens
from services.worker.sampling.parameters import Choices, Feature
from services.worker.sampling.processing import CHANGES, processed

_CHUNK = 8 * CHUNK
"""Tokens added up before the cumulative sum: it runs over few numbers, in double precision, at little cost."""

_CACHED = 1 << 18
"""Logits worked on at once by a CPU: 1 MiB, as larger buffers are fetched from memory, page by page, at every step."""

_CHANGES = CHANGES | Feature.RANDOM


@dataclass(frozen=True, slots=True)
class Drawn:
    """What the rows drew, where their logits are; or on its way from there."""

    tokens: Tensor
    """[R] int64"""
    told: tuple[Told, ...] = ()

    def on_host(self) -> Drawn:
        """The same, see `crossing.fetched`."""
        return Drawn(fetched(self.tokens), tuple(Told(rows, part.on_host()) for rows, part in self.told))


def sample(logits: Tensor, choices: Choices, history: History) -> Drawn:
    """Draws one token for each row of `logits` [R, vocab]."""
    if not choices.features & (_CHANGES | Feature.LOGPROBS):
        return Drawn(_likeliest(logits))
    if draws_by_kernel(logits.device) and not choices.features & (CHANGES | Feature.LOGPROBS):
        return Drawn(_drawn(logits, choices))
    tokens: list[Tensor] = []
    told: list[Told] = []
    for first, last in _row_blocks(logits):
        drawn = _sample_rows(logits[first:last], choices.part(first, last), history)
        tokens.append(drawn.tokens)
        told += [Told(rows + first, part) for rows, part in drawn.told]
    return Drawn(tokens[0] if len(tokens) == 1 else torch.cat(tokens), tuple(told))


def draw_plainly(logits: Tensor, choices: Choices) -> Tensor:
    """[R] int64 tokens, drawn as `sample` draws them, by the same random numbers, without what changes logits first."""
    return _drawn(logits if draws_by_kernel(logits.device) else logits.float().clone(), choices)


def _row_blocks(logits: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows to work on at once: on a CPU, as many as its caches hold; elsewhere all."""
    rows, vocab = logits.shape
    step = max(1, _CACHED // vocab) if logits.device.type == "cpu" else rows
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _sample_rows(logits: Tensor, choices: Choices, history: History) -> Drawn:
    wants_logprobs = bool(choices.features & Feature.LOGPROBS)
    raw = logits.float()
    if choices.features & _CHANGES:
        untouched = raw is logits or wants_logprobs
        tokens = _drawn(processed(raw.clone() if untouched else raw, choices, history), choices)
    else:
        tokens = _likeliest(raw)
    return Drawn(tokens, tuple(_told(raw, tokens, choices)) if wants_logprobs else ())


def _drawn(logits: Tensor, choices: Choices) -> Tensor:
    """[R] tokens: the likeliest of greedy rows, a random one of the others. Overwrites `logits`, but by kernels."""
    if not choices.features & Feature.RANDOM:
        return _likeliest(logits)
    if draws_by_kernel(logits.device):
        return drawn_by_kernel(logits, choices)
    random = choices.rows_with(Feature.RANDOM)
    if len(random) == len(logits):
        return _random(logits, choices, random, None)
    tokens = _likeliest(logits)
    rows = sent(random, logits.device)
    return tokens.index_copy_(0, rows, _random(logits.index_select(0, rows), choices, random, rows))


def _random(logits: Tensor, choices: Choices, rows: NDArray[np.intp], there: Tensor | None) -> Tensor:
    """A random token of each of the `rows`, whose logits these are, and will be overwritten; `there`: the same numbers
    on the device, None: all rows."""
    table, slots = choices.table, choices.slots[rows]
    sent_numbers, top_k, temperature, min_p, top_p = sent_together(
        [
            numbers(choices, rows),
            *(values[slots] for values in (table.top_k, table.temperature, table.min_p, table.top_p)),
        ],
        logits.device,
    )
    weights = _weights(logits.div_(temperature.unsqueeze(1)))
    if choices.features & Feature.MIN_P:
        weights = kept(weights, min_p_threshold(weights, min_p.unsqueeze(1)))
    if choices.features & Feature.TOP:
        weights = kept(weights, top_threshold(weights, top_k.unsqueeze(1), top_p.unsqueeze(1)))
    return inverse_cdf(weights, chances(sent_numbers, choices, there))


def _weights(logits: Tensor) -> Tensor:
    """Probabilities up to a factor, with zeros up to a multiple of _CHUNK; overwrites `logits`."""
    weights = logits.sub_(logits.amax(dim=1, keepdim=True)).exp_()
    missing = -logits.shape[1] % _CHUNK
    return F.pad(weights, (0, missing)) if missing else weights


def inverse_cdf(weights: Tensor, chances: Tensor) -> Tensor:
    """The token at which each row's share of the cumulated weight passes its chance.

    weights float32 [R, multiple of _CHUNK], chances float64 [R] in [0, 1) → int64 [R]; never a token of weight 0.
    """
    chunks = weights.view(len(weights), -1, _CHUNK)
    by_chunk = chunks.sum(dim=2).double().cumsum(dim=1)
    total = by_chunk[:, -1:]
    # A product rounded up to the total would point behind the last token.
    target = torch.minimum(chances.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    chunk = (by_chunk <= target).sum(dim=1, keepdim=True)
    before = torch.where(chunk > 0, by_chunk.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inside = chunks.gather(1, chunk.unsqueeze(2).expand(-1, -1, _CHUNK)).squeeze(1)
    offset = (inside.double().cumsum(dim=1) <= target - before).sum(dim=1, keepdim=True)
    # Rounding can leave the target behind the chunk's last likely token: that one is meant then.
    last_likely = (_CHUNK - 1) - (inside.flip(1) > 0).to(torch.int8).argmax(dim=1, keepdim=True)
    return (chunk * _CHUNK + torch.minimum(offset, last_likely)).squeeze(1)


def _likeliest(logits: Tensor) -> Tensor:
    """[R] the first of each row's greatest logits."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=1)
    # NumPy's is vectorised: 0.3 ms for 64 rows of 32,000 in bfloat16, 7.3 ms with torch's.
    return torch.from_numpy(logits.float().numpy().argmax(axis=1))


def _told(raw: Tensor, tokens: Tensor, choices: Choices) -> Iterator[Told]:
    """Most ask for the likeliest tokens beside their own, some for tokens that they name."""
    naming = choices.rows_with(Feature.LOGPROB_IDS)
    others = choices.rows_with(Feature.LOGPROBS)
    if len(naming):
        others = np.setdiff1d(others, naming, assume_unique=True)
    for rows, named in ((others, False), (naming, True)):
        if not len(rows):
            continue
        numbers = sent(rows, raw.device)
        part, chosen = raw.index_select(0, numbers), tokens.index_select(0, numbers)
        slots, table = choices.slots[rows], choices.table
        if named:
            ids = sent(table.logprob_ids.rows(slots), raw.device)
            yield Told(rows, of_tokens(part, chosen, ids, table.logprob_ids.lengths(slots)))
        else:
            yield Told(rows, most_likely(part, chosen, table.logprobs[slots]))
