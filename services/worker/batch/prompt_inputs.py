"""Which rows of a step begin as a client gave them: prompts of embeddings."""

from __future__ import annotations

from mmap import mmap

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from services.worker.batch.batch import BrokenPlan
from services.worker.batch.mapped_rows import MappedRows
from services.worker.batch.rows import Int32s, RowRuns, Rows
from services.worker.ops.interface import InputRows
from shared.messages.generation import EmbeddingDtype, MediaRows, PromptEmbeds

_DTYPES: dict[EmbeddingDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class EmbeddedPrompt:
    """The rows of one prompt, as parts [rows, hidden] in the client's dtype, and the tokens that have them, ascending
    [rows]. Rows that an encoder keeps are not copied: they stay mapped as long as this does."""

    def __init__(self, embeds: PromptEmbeds) -> None:
        """Raises BrokenPlan where rows that the plan names were not looked for."""
        own = _tensor(bytearray(embeds.rows), embeds) if embeds.rows else None
        runs = embeds.runs or ((0, embeds.count),)
        self._parts: list[Tensor] = []
        at = 0
        for (_, count), kept in zip(runs, embeds.media or (None,) * len(runs), strict=True):
            if kept is not None:
                self._parts.append(_mapped(kept, embeds))
            elif own is not None:
                self._parts.append(own[at : at + count])
                at += count
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        """[parts + 1] the first row of each, and how many there are."""
        self.mutual = [
            (first, first + n) for (first, n), mutual in zip(embeds.runs, embeds.mutual, strict=False) if mutual
        ]
        """(first, end) of runs whose tokens see each other."""
        tokens: Int32s = np.concatenate([np.arange(first, first + n, dtype=np.int32) for first, n in runs])
        written = [np.arange(first, first + len(ids), dtype=np.int32) for first, ids in embeds.texts]
        self.tokens = tokens[~np.isin(tokens, np.concatenate(written))] if written else tokens

    def between(self, first: int, end: int) -> tuple[Int32s, list[Tensor]]:
        """The tokens from `first` up to `end` that have rows, and these, in parts."""
        low, high = (int(each) for each in np.searchsorted(self.tokens, (first, end)))
        found = [
            part[max(0, low - start) : max(0, high - start)]
            for part, start in zip(self._parts, self._starts.tolist(), strict=False)
        ]
        return self.tokens[low:high], [part for part in found if len(part)]


def _tensor(rows: bytearray | mmap, embeds: PromptEmbeds) -> Tensor:
    return torch.frombuffer(rows, dtype=_DTYPES[embeds.dtype]).view(-1, embeds.size)


def _mapped(kept: MediaRows, embeds: PromptEmbeds) -> Tensor:
    if not isinstance(kept, MappedRows):
        raise BrokenPlan(f"rows {kept.name.hex()} are not here")
    return _tensor(kept.rows, embeds)


def last_seen(prompts: dict[int, EmbeddedPrompt], rows: Rows) -> Int32s | None:
    """[n] the last place that each row sees; None where that is its own for all. `prompts`: by sequence index. Raises
    BrokenPlan where a step ends within a run whose tokens see each other."""
    lasts: Int32s | None = None
    for seq_index, prompt in prompts.items():
        if not prompt.mutual:
            continue
        own = np.flatnonzero(rows.seq_indices == seq_index)
        if not len(own):
            continue
        places = rows.positions[own]
        for first, end in prompt.mutual:
            inside = own[(places >= first) & (places < end)]
            if not len(inside):
                continue
            if places[-1] + 1 < end:
                raise BrokenPlan(f"a step ends at {places[-1] + 1}, within an image from {first} to {end}")
            lasts = rows.positions.copy() if lasts is None else lasts
            lasts[inside] = end - 1
    return lasts


def input_rows(prompts: dict[int, EmbeddedPrompt], units: RowRuns, last_rows: Int32s) -> InputRows | None:
    """Those of a step; None where it computes no token that has one. `prompts`: by sequence index; those of which the
    step computes the last row are removed. last_rows [U]."""
    rows: list[Int32s] = []
    values: list[Tensor] = []
    for place, seq_index in enumerate(units.seq_indices.tolist()):
        prompt = prompts.get(seq_index)
        if prompt is None:
            continue
        start, count = int(units.starts[place]), int(units.counts[place])
        if start + count > prompt.tokens[-1]:
            del prompts[seq_index]
        tokens, own = prompt.between(start, start + count)
        if len(tokens):
            rows.append(tokens + np.int32(int(last_rows[place]) - count + 1 - start))
            values += own
    if not rows:
        return None
    if len({each.dtype for each in values}) > 1:
        values = [each.float() for each in values]
    width = max(each.shape[1] for each in values)  # a client's own rows have nothing for further layers
    joined = torch.cat([pad(each, (0, width - each.shape[1])) if each.shape[1] < width else each for each in values])
    return InputRows(torch.from_numpy(np.concatenate(rows)), joined)
