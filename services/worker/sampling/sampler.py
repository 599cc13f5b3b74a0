"""Logits and parameters → tokens and log-probabilities, for a whole batch at once.

Order, as in vLLM: log-probabilities from the raw logits; logit_bias and min_tokens; penalties; temperature; min_p;
top_k, then top_p; one draw. A draw turns one random number over in the cumulative distribution, in the order of token
ids, so it depends on nothing but that row's logits, seed and output position. (Gumbel-max would need a random number
for each token of the vocabulary: 30 times the work of the rest.)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.filters import min_p_threshold, top_threshold
from services.worker.sampling.parameters import Choices, Feature
from services.worker.sampling.penalties import Penalties, penalised
from services.worker.sampling.philox import uniforms
from shared.messages.generation import TokenLogprobs

History = Callable[[NDArray[np.intp]], tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]]
"""Slots → (tokens [P, longest], lengths [P], prompt lengths [P])."""

_CHUNK = 256
"""Tokens added up before the cumulative sum: it runs over few numbers, in double precision, at little cost."""

_CHANGES = Feature.BIAS | Feature.MIN_TOKENS | Feature.PENALTIES | Feature.RANDOM


class Drawn(Struct, frozen=True):
    tokens: list[int]
    logprobs: dict[int, TokenLogprobs]
    """By row, for the rows that asked."""


def sample(logits: Tensor, choices: Choices, history: History) -> Drawn:
    """Draws one token for each row of `logits` [R, vocab]."""
    if not choices.features & (_CHANGES | Feature.LOGPROBS):
        return Drawn(logits.argmax(dim=1).tolist(), {})
    raw = logits.float()
    tokens = _drawn(_processed(raw, choices, history), choices) if choices.features & _CHANGES else raw.argmax(dim=1)
    drawn: list[int] = tokens.tolist()
    return Drawn(drawn, _logprobs(raw, drawn, choices) if choices.features & Feature.LOGPROBS else {})


def _processed(raw: Tensor, choices: Choices, history: History) -> Tensor:
    """Everything that can change which token is the likeliest; a new tensor where anything is changed."""
    logits = raw
    if choices.features & (Feature.BIAS | Feature.MIN_TOKENS):
        rows, tokens, values = (torch.from_numpy(part).to(raw.device) for part in choices.bias)
        logits = raw.index_put((rows, tokens), values, accumulate=True)
    if choices.features & Feature.PENALTIES:
        numbers = choices.rows_with(Feature.PENALTIES)
        rows = torch.from_numpy(numbers).to(raw.device)
        changed = penalised(logits.index_select(0, rows), _penalties(choices, numbers, history, raw.device))
        logits = logits.index_copy(0, rows, changed)
    return logits


def _penalties(choices: Choices, rows: NDArray[np.intp], history: History, device: torch.device) -> Penalties:
    tokens, lengths, prompts = history(choices.slots[rows])

    def column(values: NDArray[np.int32] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(device).unsqueeze(1)

    return Penalties(
        tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
        lengths=column(lengths),
        prompt_lengths=column(prompts),
        presence=column(choices.presence[rows]),
        frequency=column(choices.frequency[rows]),
        repetition=column(choices.repetition[rows]),
    )


def _drawn(logits: Tensor, choices: Choices) -> Tensor:
    """[R] tokens: the likeliest of greedy rows, a random one of the others."""
    if not choices.features & Feature.RANDOM:
        return logits.argmax(dim=1)
    numbers = choices.rows_with(Feature.RANDOM)
    rows = torch.from_numpy(numbers).to(logits.device)
    if len(numbers) == len(logits):
        return _random(logits, choices, numbers)
    tokens = logits.argmax(dim=1)
    return tokens.index_copy_(0, rows, _random(logits.index_select(0, rows), choices, numbers))


def _random(logits: Tensor, choices: Choices, rows: NDArray[np.intp]) -> Tensor:
    def column(values: NDArray[np.float32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values[rows]).to(logits.device).unsqueeze(1)

    logits = logits / column(choices.temperature)
    if choices.features & Feature.MIN_P:
        logits = _without(logits, min_p_threshold(logits, column(choices.min_p)))
    if choices.features & Feature.TOP:
        logits = _without(logits, top_threshold(logits, column(choices.top_k), column(choices.top_p)))
    chances = torch.from_numpy(uniforms(choices.seed[rows], choices.position[rows])).to(logits.device)
    return inverse_cdf(torch.softmax(logits, dim=1), chances)


def _without(logits: Tensor, threshold: Tensor) -> Tensor:
    return logits.masked_fill(logits < threshold, float("-inf"))


def inverse_cdf(probabilities: Tensor, chances: Tensor) -> Tensor:
    """The token at which each row's cumulative probability passes its chance.

    probabilities float32 [R, vocab], chances float64 [R] in [0, 1) → int64 [R]; never a token of probability 0.
    """
    rows, vocab = probabilities.shape
    chunks = F.pad(probabilities, (0, -vocab % _CHUNK)).view(rows, -1, _CHUNK)
    by_chunk = chunks.sum(dim=2).double().cumsum(dim=1)
    target = chances.unsqueeze(1) * by_chunk[:, -1:]
    chunk = (by_chunk <= target).sum(dim=1, keepdim=True).clamp_(max=by_chunk.shape[1] - 1)
    before = torch.where(chunk > 0, by_chunk.gather(1, (chunk - 1).clamp_(min=0)), 0.0)
    inside = chunks.gather(1, chunk.unsqueeze(2).expand(-1, -1, _CHUNK)).squeeze(1)
    cumulated = inside.double().cumsum(dim=1)
    offset = (cumulated <= target - before).sum(dim=1, keepdim=True)
    # Rounding can leave the target behind the chunk's last likely token: that one is meant then.
    last_likely = (_CHUNK - 1) - (inside.flip(1) > 0).to(torch.int8).argmax(dim=1, keepdim=True)
    return (chunk * _CHUNK + torch.minimum(offset, last_likely)).squeeze(1)


def _logprobs(raw: Tensor, tokens: list[int], choices: Choices) -> dict[int, TokenLogprobs]:
    numbers = choices.rows_with(Feature.LOGPROBS)
    rows = torch.from_numpy(numbers).to(raw.device)
    logprobs = torch.log_softmax(raw.index_select(0, rows), dim=1)
    chosen = torch.tensor([tokens[row] for row in numbers], device=raw.device).unsqueeze(1)
    of_chosen = logprobs.gather(1, chosen).squeeze(1).tolist()
    top = torch.topk(logprobs, min(int(choices.logprobs[numbers].max()), raw.shape[1]), dim=1)
    values, ids = top.values.tolist(), top.indices.tolist()
    return {
        int(row): TokenLogprobs(
            tokens[row], of_chosen[i], tuple(zip(ids[i], values[i], strict=True))[: choices.logprobs[row]]
        )
        for i, row in enumerate(numbers)
    }
