"""Logits and parameters → tokens and log-probabilities, for a whole batch at once.

Order, as in vLLM: log-probabilities from the raw logits; what is allowed; logit_bias; bans (min_tokens, bad_words);
penalties; what is forced; temperature; min_p; top_k, then top_p; one draw, which depends on nothing but that row's
logits, seed and output position (`races`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.gpu import runs_triton
from services.worker.ops.transfer import to_device, to_device_together, to_host
from services.worker.sampling.filters import CHUNK, min_p_threshold, top_threshold, zero_below
from services.worker.sampling.history import HistoryLookup
from services.worker.sampling.logits_processors import LOGITS_FEATURES, process_logits
from services.worker.sampling.logprobs import FindLogprobs, RowLogprobs, found_by, token_logprobs, top_logprobs
from services.worker.sampling.parameters import Feature, SamplingBatch
from services.worker.sampling.races import Draw, race_by_torch, race_times

_CACHED = 1 << 18
"""Logits worked on at once by a CPU: 1 MiB, as larger buffers are fetched from memory, page by page, at every step."""

_RACING = 64
"""Tokens that draft candidates are chosen among."""

_CHANGES = LOGITS_FEATURES | Feature.RANDOM


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What was drawn for each row; on the device of the logits, or on its way to the host."""

    tokens: Tensor
    """[R] int64 the sampled token of each row."""
    logprobs: tuple[RowLogprobs, ...] = ()
    undefined: Tensor | None = None
    """[R] where not 0 the row's token was drawn from NaN, see `undefined_rows`; None where nobody has looked."""

    def on_host(self) -> SamplerOutput:
        """This output on the host; see `transfer.to_host`. Tokens and what is undefined are one copy."""
        undefined = self.tokens.new_empty(0) if self.undefined is None else self.undefined.to(self.tokens.dtype)
        tokens, flags = to_host(torch.cat((self.tokens, undefined))).tensor_split((len(self.tokens),))
        logprobs = tuple(RowLogprobs(rows, part.on_host()) for rows, part in self.logprobs)
        return SamplerOutput(tokens, logprobs, None if self.undefined is None else flags)


FindLikeliest = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Finds by one kernel of logits [R, vocab] the first of each row's greatest ones, int64 [R], and whether a NaN is among
them, bool [R]: the row's token means nothing then."""


@runtime_checkable
class SupportsFindLikeliest(Protocol):
    """Operations that find the likeliest tokens by a kernel of their own."""

    @property
    def find_likeliest(self) -> FindLikeliest:
        """See `FindLikeliest`."""


def find_likeliest_of(ops: object) -> FindLikeliest | None:
    """The kernel by which `ops` find the likeliest tokens; None if they have none."""
    return ops.find_likeliest if isinstance(ops, SupportsFindLikeliest) else None


def sample(
    logits: Tensor,
    choices: SamplingBatch,
    history: HistoryLookup,
    kernel: Draw | None = None,
    find: FindLogprobs | None = None,
    find_likeliest: FindLikeliest | None = None,
) -> SamplerOutput:
    """Draws one token for each row of `logits` [R, vocab]. `kernel`: what draws on the logits' device; None: a Triton
    kernel on a GPU, PyTorch's operations elsewhere. `find` and `find_likeliest`: what finds log-probabilities there,
    and the tokens of greedy rows; None: PyTorch's operations."""
    if not choices.features & (_CHANGES | Feature.LOGPROBS):
        if find_likeliest is None:
            return SamplerOutput(_argmax(logits))
        likeliest, undefined = find_likeliest(logits)
        return SamplerOutput(likeliest, undefined=undefined)
    kernel = _kernel_for(logits, kernel)
    if kernel is not None and not choices.features & (LOGITS_FEATURES | Feature.LOGPROBS):
        return SamplerOutput(_draw(logits, choices, kernel))
    if find is not None and kernel is not None and not choices.features & LOGITS_FEATURES:
        drawn = _draw(logits, choices, kernel)
        return SamplerOutput(drawn, tuple(_row_logprobs(logits.float(), drawn, choices, find)))
    tokens: list[Tensor] = []
    logprobs: list[RowLogprobs] = []
    for first, last in _row_blocks(logits):
        block = _sample_rows(logits[first:last], choices.part(first, last), history, kernel, find)
        tokens.append(block.tokens)
        logprobs += [RowLogprobs(rows + first, part) for rows, part in block.logprobs]
    return SamplerOutput(tokens[0] if len(tokens) == 1 else torch.cat(tokens), tuple(logprobs))


def undefined_rows(logits: Tensor, tokens: Tensor) -> Tensor:
    """[R] whether the logit of a row's drawn token is NaN: then the token means nothing. One number is read of each
    row: whatever draws gives a NaN where there is one."""
    return logits.gather(1, tokens.unsqueeze(1)).squeeze(1).isnan()


def sample_draft(logits: Tensor, choices: SamplingBatch, history: HistoryLookup, kernel: Draw | None = None) -> Tensor:
    """[R] int64 tokens, drawn from a drafter's logits [R, vocab] as `sample` draws from the model's, by the same
    keys."""
    kernel = _kernel_for(logits, kernel)
    if choices.features & LOGITS_FEATURES:
        return _draw(process_logits(logits.float().clone(), choices, history), choices, kernel)
    return _draw(logits if kernel is not None else logits.float().clone(), choices, kernel)


def _kernel_for(logits: Tensor, kernel: Draw | None) -> Draw | None:
    return draw_by_triton if runs_triton(logits.device) else kernel


def _row_blocks(logits: Tensor) -> list[tuple[int, int]]:
    """Ranges of rows to work on at once: on a CPU, as many as its caches hold; elsewhere all."""
    rows, vocab = logits.shape
    step = max(1, _CACHED // vocab) if logits.device.type == "cpu" else rows
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _sample_rows(
    logits: Tensor, choices: SamplingBatch, history: HistoryLookup, kernel: Draw | None, find: FindLogprobs | None
) -> SamplerOutput:
    wants_logprobs = bool(choices.features & Feature.LOGPROBS)
    raw = logits.float()
    if choices.features & _CHANGES:
        overwritten = kernel is None or bool(choices.features & LOGITS_FEATURES)
        copied = overwritten and (raw is logits or wants_logprobs)
        tokens = _draw(process_logits(raw.clone() if copied else raw, choices, history), choices, kernel)
    else:
        tokens = _argmax(raw)
    return SamplerOutput(tokens, tuple(_row_logprobs(raw, tokens, choices, find)) if wants_logprobs else ())


def _draw(logits: Tensor, choices: SamplingBatch, kernel: Draw | None) -> Tensor:
    """[R] tokens: the likeliest of greedy rows, a random one of the others. Overwrites `logits`, but by kernels."""
    if not choices.features & Feature.RANDOM:
        return _argmax(logits)
    if kernel is not None:
        return _draw_by(kernel, logits, choices)
    random = choices.rows_with(Feature.RANDOM)
    if len(random) == len(logits):
        return _draw_random(logits, choices, random, None)
    tokens = _argmax(logits)
    rows = to_device(random, logits.device)
    return tokens.index_copy_(0, rows, _draw_random(logits.index_select(0, rows), choices, random, rows))


def _draw_by(kernel: Draw, logits: Tensor, choices: SamplingBatch) -> Tensor:
    table, seq_indices = choices.table, choices.seq_indices
    greedy = choices.by_row & int(Feature.RANDOM) == 0
    keys, *parameters = to_device_together(
        [
            choices.candidate_keys(),
            np.where(greedy, np.float32(0.0), table.temperature[seq_indices]),
            table.top_k[seq_indices],
            table.top_p[seq_indices],
            table.min_p[seq_indices],
        ],
        logits.device,
    )
    return kernel(logits, choices.select_keys(keys), *parameters)


def draw_by_triton(
    logits: Tensor, keys: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """See `races.Draw`."""
    from services.worker.ops.triton.sampling import DrawParameters, draw

    return draw(logits.contiguous(), DrawParameters(temperature, top_k, top_p, min_p, keys))


class DraftCandidates(NamedTuple):
    """The tokens that are likeliest to be drawn, of R rows."""

    tokens: Tensor
    """[R, k] int64, the one that a drafter would draft first."""
    shares: Tensor
    """[R, k] float32: how sure the drafter is of each, 1 together with all others; 0: it is none."""


def draft_candidates(logits: Tensor, choices: SamplingBatch, count: int) -> DraftCandidates:
    """The `count` best tokens of a drafter's logits [R, vocab], which nothing but temperature and cuts changes. Of
    greedy rows the likeliest, and a share is a probability. Of others those that win the race, each without those
    before it, among the `_RACING` likeliest; shares are those of weight / time, which decides it."""
    shares, tokens = torch.softmax(logits.float(), dim=1).topk(count, dim=1)
    racing = choices.rows_with(Feature.RANDOM)
    if len(racing):
        rows = to_device(racing, logits.device)
        weights, keys = _random_weights(logits.index_select(0, rows).float(), choices, racing)
        likeliest = weights.topk(min(_RACING, logits.shape[1]), dim=1)
        speeds = likeliest.values / race_times(choices.select_keys(keys), likeliest.indices)
        best = speeds.topk(count, dim=1)
        shares[rows] = (best.values / speeds.sum(dim=1, keepdim=True)).float()
        tokens[rows] = likeliest.indices.gather(1, best.indices).clamp_(max=logits.shape[1] - 1)  # of padding
    return DraftCandidates(tokens, shares)


def _draw_random(logits: Tensor, choices: SamplingBatch, rows: NDArray[np.intp], there: Tensor | None) -> Tensor:
    """A random token of each of the `rows`, whose logits these are, and will be overwritten; `there`: the same numbers
    on the device, None: all rows."""
    weights, keys = _random_weights(logits, choices, rows)
    return race_by_torch(weights, choices.select_keys(keys, there))


def _random_weights(logits: Tensor, choices: SamplingBatch, rows: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
    """(what the tokens of these rows race with, see `race_by_torch`; the keys of all positions that may be meant).
    Overwrites the rows' `logits`."""
    table, seq_indices = choices.table, choices.seq_indices[rows]
    keys, top_k, temperature, min_p, top_p = to_device_together(
        [
            choices.candidate_keys(rows),
            *(values[seq_indices] for values in (table.top_k, table.temperature, table.min_p, table.top_p)),
        ],
        logits.device,
    )
    weights = _weights(logits.div_(temperature.unsqueeze(1)))
    if choices.features & Feature.MIN_P:
        weights = zero_below(weights, min_p_threshold(weights, min_p.unsqueeze(1)))
    if choices.features & Feature.TOP:
        weights = zero_below(weights, top_threshold(weights, top_k.unsqueeze(1), top_p.unsqueeze(1)))
    return weights, keys


def _weights(logits: Tensor) -> Tensor:
    """Probabilities up to a factor, with zeros up to a multiple of CHUNK; overwrites `logits`. Of a row in which a NaN
    is nothing but its NaNs can win."""
    greatest = logits.amax(dim=1, keepdim=True)
    weights = logits.sub_(greatest.masked_fill_(greatest.isnan(), torch.inf)).exp_()
    missing = -logits.shape[1] % CHUNK
    return F.pad(weights, (0, missing)) if missing else weights


def _argmax(logits: Tensor) -> Tensor:
    """[R] the first of each row's greatest logits."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=1)
    # NumPy's is vectorised: 0.3 ms for 64 rows of 32,000 in bfloat16, 7.3 ms with torch's.
    return torch.from_numpy(logits.float().numpy().argmax(axis=1))


def _row_logprobs(
    raw: Tensor, tokens: Tensor, choices: SamplingBatch, find: FindLogprobs | None
) -> Iterator[RowLogprobs]:
    """Most ask for the likeliest tokens beside their own, some for tokens that they name."""
    naming = choices.rows_with(Feature.LOGPROB_IDS)
    others = choices.rows_with(Feature.LOGPROBS)
    if len(naming):
        others = np.setdiff1d(others, naming, assume_unique=True)
    for rows, named in ((others, False), (naming, True)):
        if not len(rows):
            continue
        indices = to_device(rows, raw.device)
        chosen, seq_indices, table = tokens.index_select(0, indices), choices.seq_indices[rows], choices.table
        if not named and (found := found_by(find, raw, indices, chosen, table.logprobs[seq_indices])) is not None:
            yield RowLogprobs(rows, found._replace(ranks=None))
            continue
        part = raw.index_select(0, indices)
        if named:
            ids = to_device(table.logprob_ids.rows(seq_indices), raw.device)
            yield RowLogprobs(rows, token_logprobs(part, chosen, ids, table.logprob_ids.lengths(seq_indices)))
        else:
            yield RowLogprobs(rows, top_logprobs(part, chosen, table.logprobs[seq_indices]))
