"""One processor and the batch that it knows of: requests at fixed indices, as in vLLM, though Baton's rows are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.sampling.plugins.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    ProcessorParams,
)

RowKey = tuple[int, int, int]
"""(sequence index, its generation, rows of the sequence before this one): the same from step to step for the same
sequence's first row. Those behind drafts are others in each step, as the drafts are."""


class RequestRow(NamedTuple):
    """One row of logits to be changed."""

    key: RowKey
    params: ProcessorParams
    tokens: NDArray[np.int32]
    """Prompt and output before the token to draw, drafts included. Read while the step lasts."""
    prompt_length: int


class ProcessorOutcome(NamedTuple):
    """What came of one `apply`."""

    logits: Tensor
    """[P, vocab] those of rows that failed mean nothing."""
    failed: dict[int, str]
    """Which rows failed, and why."""


class ProcessorBatch:
    """Owns a processor, and which request it has at which index."""

    def __init__(self, name: str, make: Callable[[], LogitsProcessor]) -> None:
        """Raises what making it raises."""
        self.name, self._make = name, make
        made = make()
        self.argmax_invariant = bool(made.is_argmax_invariant())
        """Whether greedy requests may be left out."""
        self._processor: LogitsProcessor | None = made
        """None: it is to be made anew."""
        self._keys: list[RowKey] = []
        self._outputs: list[list[int]] = []

    def apply(self, rows: Sequence[RequestRow], logits: Tensor) -> ProcessorOutcome:
        """Changes `logits` float32 [P, vocab], one row for each of `rows`. If the processor raises, or answers with
        what it must not, each row is tried alone, so that only those fail for which it does that again."""
        try:
            return ProcessorOutcome(*self._checked(rows, logits.clone()))
        except Exception:  # whatever a foreign package raises
            self.clear()
        results, failed = logits.clone(), dict[int, str]()
        for place, row in enumerate(rows):
            try:
                alone = ProcessorBatch(self.name, self._make)
                one, wrong = alone._checked([row], logits[place : place + 1].clone())
            except Exception as error:  # whatever a foreign package raises
                failed[place] = f"the logits processor {self.name} failed: {error!r}"
            else:
                results[place] = one[0]
                if wrong:
                    failed[place] = wrong[0]
        return ProcessorOutcome(results, failed)

    def clear(self) -> None:
        """Forgets all requests, and the processor."""
        self._processor = None
        self._keys, self._outputs = [], []

    def _checked(self, rows: Sequence[RequestRow], logits: Tensor) -> tuple[Tensor, dict[int, str]]:
        processor = self._processor = self._processor or self._make()
        processor.update_state(self._update(rows))
        order = {key: place for place, key in enumerate(self._keys)}
        places = torch.tensor([order[row.key] for row in rows], device=logits.device)
        arranged = torch.empty_like(logits)
        arranged[places] = logits
        result = processor.apply(arranged)
        if not isinstance(result, Tensor) or result.shape != logits.shape:
            shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ValueError(f"apply must return logits of shape {tuple(logits.shape)}, not {shape}")
        taken = result.to(device=logits.device, dtype=torch.float32).index_select(0, places)
        broken = (~(taken < torch.inf).all(dim=1)).nonzero().flatten().tolist()  # NaN is not below, either
        why = f"the logits processor {self.name} failed: it returned NaN or infinity"
        return taken, dict.fromkeys(broken, why)

    def _update(self, rows: Sequence[RequestRow]) -> BatchUpdate | None:
        """Makes the batch that of `rows`; None where it was that already, but for longer outputs."""
        wanted = {row.key for row in rows}
        held = {key: index for index, key in enumerate(self._keys)}
        free = [index for index, key in enumerate(self._keys) if key not in wanted]
        added: list[AddedRequest] = []
        for row in rows:
            index = held.get(row.key)
            if index is not None:
                output = self._outputs[index]
                output.extend(row.tokens[row.prompt_length + len(output) :].tolist())
                continue
            output = row.tokens[row.prompt_length :].tolist()
            if free:
                index = free.pop(0)
                self._keys[index], self._outputs[index] = row.key, output
            else:
                index = len(self._keys)
                self._keys.append(row.key)
                self._outputs.append(output)
            added.append((index, row.params, row.tokens[: row.prompt_length].tolist(), output))
        removed = list(free)
        moved = self._condense(free)
        return BatchUpdate(len(self._keys), removed, added, moved) if removed or added else None

    def _condense(self, free: list[int]) -> list[MovedRequest]:
        """Moves the last requests to the indices that are free, in rising order, until none is."""
        moved: list[MovedRequest] = []
        while free:
            last = len(self._keys) - 1
            if free[-1] == last:
                free.pop()
            else:
                index = free.pop(0)
                self._keys[index], self._outputs[index] = self._keys[last], self._outputs[last]
                moved.append((last, index, MoveDirectionality.UNIDIRECTIONAL))
            self._keys.pop()
            self._outputs.pop()
        return moved
