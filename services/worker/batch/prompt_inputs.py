"""Which rows of a step begin as a client gave them: prompts of embeddings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.worker.batch.rows import Int32s, RowRuns
from services.worker.ops.interface import InputRows
from shared.messages.generation import EmbeddingDtype, PromptEmbeds

_DTYPES: dict[EmbeddingDtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def embedded_prompt(embeds: PromptEmbeds) -> Tensor:
    """[tokens, hidden] in the client's dtype."""
    return torch.frombuffer(bytearray(embeds.rows), dtype=_DTYPES[embeds.dtype]).view(-1, embeds.size)


def input_rows(prompts: dict[int, Tensor], units: RowRuns, last_rows: Int32s) -> InputRows | None:
    """Those of a step; None where it computes no part of such a prompt. `prompts` [tokens, hidden]: by sequence index,
    those of which the step computes the last token are removed; last_rows [U]."""
    rows: list[Int32s] = []
    values: list[Tensor] = []
    for place, seq_index in enumerate(units.seq_indices.tolist()):
        prompt = prompts.get(seq_index)
        if prompt is None:
            continue
        start, count = int(units.starts[place]), int(units.counts[place])
        if start + count >= len(prompt):
            del prompts[seq_index]
        if (own := prompt[start : start + count]).numel():
            first = int(last_rows[place]) - count + 1
            rows.append(np.arange(first, first + len(own), dtype=np.int32))
            values.append(own)
    if not rows:
        return None
    joined = torch.cat(values) if len({each.dtype for each in values}) == 1 else torch.cat([v.float() for v in values])
    return InputRows(torch.from_numpy(np.concatenate(rows)), joined)
