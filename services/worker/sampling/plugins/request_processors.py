"""The processors of a rank, and which of its sequences ask for which."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.ops.transfer import to_device
from services.worker.sampling.history import HistoryLookup
from services.worker.sampling.logits_processors import mask_forbidden
from services.worker.sampling.parameters import Feature, ProcessedRows, SamplingBatch
from services.worker.sampling.plugins.interface import LogitsProcessor, ProcessorConfig, ProcessorParams
from services.worker.sampling.plugins.processor_batch import ProcessorBatch, RequestRow
from shared.ids import SequenceId
from shared.messages.scheduler import SequenceFailed
from shared.messages.worker import NewSequence
from shared.packing import NOT_DECODED
from shared.plugins.entry_points import PluginError, described, find_plugin, load_class

_decoder = msgspec.json.Decoder(dict[str, Any])

GROUP = "baton.logits_processors"

ProcessorClasses = Mapping[str, type[LogitsProcessor]]
"""By the names of their entry points, in the order in which they are applied."""
NO_PROCESSORS: ProcessorClasses = MappingProxyType({})


def load_processors(names: Sequence[str]) -> ProcessorClasses:
    """Raises PluginError where one cannot be had, or its arguments are another one's, too."""
    found: dict[str, type[LogitsProcessor]] = {}
    readers: dict[str, str] = {}
    for name in names:
        processor, where = load_class(GROUP, name, LogitsProcessor)  # type: ignore[type-abstract]
        args = getattr(processor, "extra_args", ())
        if not isinstance(args, tuple) or not args or not all(isinstance(each, str) and each for each in args):
            raise PluginError(f"{where}: extra_args: the names that it reads of vllm_xargs are expected, as a tuple")
        if other := next((readers[each] for each in args if each in readers), None):
            raise PluginError(f"{where}: extra_args: {', '.join(args)}: {other} reads one of these, too")
        readers |= dict.fromkeys(args, name)
        found[name] = processor
    return found


def argument_names(processors: ProcessorClasses) -> tuple[str, ...]:
    """What requests may have in `vllm_xargs`."""
    return tuple(name for processor in processors.values() for name in processor.extra_args)


class _RowParams(NamedTuple):
    sequence: SequenceId
    params: ProcessorParams


class RequestProcessors:
    """Owns the rank's processors, and the parameters of sequences that ask for them. Belongs to the rank that samples:
    one thread applies them, another may add and release sequences meanwhile. Where no sequence asks it costs nothing.
    """

    def __init__(self, classes: ProcessorClasses, config: ProcessorConfig) -> None:
        """Raises PluginError where one cannot be made."""
        self._classes = classes
        self._batches: dict[str, ProcessorBatch] = {}
        for name, made in classes.items():
            try:
                self._batches[name] = ProcessorBatch(name, partial(made, config))
            except Exception as error:  # whatever a foreign package raises
                raise PluginError(f"{described(find_plugin(GROUP, name))}: {error!r}") from None
        self._asking: dict[int, _RowParams] = {}
        self._failed: deque[SequenceFailed] = deque()
        """Not reported yet."""

    def __len__(self) -> int:
        return len(self._asking) or len(self._failed)

    def clear(self) -> None:
        """Forgets every sequence."""
        if self._asking:
            for batch in self._batches.values():
                batch.clear()
        self._asking.clear()
        self._failed.clear()

    def add(self, seq_index: int, new: NewSequence) -> None:
        """A new sequence that has `extra_args`; it fails where they are not what the processors take."""
        try:
            params = ProcessorParams(_decoder.decode(new.sampling.extra_args), new.sampling)
        except NOT_DECODED as error:
            self._failed.append(SequenceFailed(new.sequence, f"vllm_xargs: {error}", "invalid_args"))
            return
        known = argument_names(self._classes)
        if strange := [name for name in params.extra_args if name not in known]:
            allowed = ", ".join(known) or "none, as this engine has no logits processors"
            why = f"vllm_xargs: {strange[0]!r} is not allowed; there are: {allowed}"
            self._failed.append(SequenceFailed(new.sequence, why, "invalid_args"))
            return
        for name, processor in self._classes.items():
            if not params.extra_args.keys() & set(processor.extra_args):
                continue
            try:
                processor.validate_params(params)
            except ValueError as error:
                self._failed.append(SequenceFailed(new.sequence, f"vllm_xargs: {error}", "invalid_args"))
                return
            except Exception as error:  # whatever a foreign package raises
                why = f"the logits processor {name} failed: {error!r}"
                self._failed.append(SequenceFailed(new.sequence, why, "processor"))
                return
        self._asking[seq_index] = _RowParams(new.sequence, params)

    def release(self, seq_index: int) -> None:
        """Forgets the sequence at `seq_index`, whether or not it asks for a processor."""
        self._asking.pop(seq_index, None)

    def asked_by(self, seq_indices: NDArray[np.intp]) -> NDArray[np.bool_]:
        """[W] whether each one's sequence asks for one."""
        return np.array([seq_index in self._asking for seq_index in seq_indices.tolist()], dtype=np.bool_)

    def take_failed(self) -> tuple[SequenceFailed, ...]:
        """The sequences that no processor is applied to any more, each once. What is drawn for them means nothing."""
        return tuple(self._failed.popleft() for _ in range(len(self._failed)))

    def process(
        self, logits: Tensor, choices: SamplingBatch, history: HistoryLookup, generations: NDArray[np.int64]
    ) -> SamplingBatch:
        """`choices`, with logits for the rows whose sequences ask, where they differ from `logits` [R, vocab]. What is
        forbidden stays so; where a processor leaves nothing of what is allowed, the row stays as it was."""
        asking = {i: found for i in set(choices.seq_indices.tolist()) if (found := self._asking.get(i)) is not None}
        if not asking:
            return choices
        rows = np.flatnonzero(np.isin(choices.seq_indices, list(asking)))
        own = choices.of_rows(rows)
        values = mask_forbidden(logits.index_select(0, to_device(rows, logits.device)).float(), own)
        before = values.clone()
        requests = self._request_rows(own, asking, history, generations)
        for name, batch in self._batches.items():
            values = self._applied(name, batch, own, requests, values)
        values = mask_forbidden(values, own)
        nothing_left = values.amax(dim=1, keepdim=True) == -torch.inf
        return choices.with_processed(ProcessedRows(rows, torch.where(nothing_left, before, values)))

    def _applied(
        self, name: str, batch: ProcessorBatch, own: SamplingBatch, requests: list[RequestRow], values: Tensor
    ) -> Tensor:
        """`values` as this processor leaves them. Raises nothing: sequences fail."""
        args = set(self._classes[name].extra_args)
        places = [place for place, row in enumerate(requests) if row.params.extra_args.keys() & args]
        if places and batch.argmax_invariant:
            places = [place for place in places if own.by_row[place] & int(Feature.RANDOM)]
        if not places:
            return values
        numbers = to_device(np.array(places), values.device)
        changed, failed = batch.apply([requests[place] for place in places], values.index_select(0, numbers))
        for number, why in failed.items():
            changed[number] = values[places[number]]
            gone = self._asking.pop(requests[places[number]].key[0], None)
            if gone is not None:  # else another row of the same sequence has failed, too
                self._failed.append(SequenceFailed(gone.sequence, why, "processor"))
        return values.index_copy_(0, numbers, changed)

    @staticmethod
    def _request_rows(
        own: SamplingBatch, asking: dict[int, _RowParams], history: HistoryLookup, generations: NDArray[np.int64]
    ) -> list[RequestRow]:
        tokens, lengths, prompts = history(own.seq_indices, own.position)
        assert isinstance(tokens, np.ndarray), "ranks with processors know all tokens on the host"
        found: list[RequestRow] = []
        ahead, before = 0, -1
        for row, seq_index in enumerate(own.seq_indices.tolist()):
            ahead = ahead + 1 if seq_index == before else 0
            before = seq_index
            key = (seq_index, int(generations[seq_index]), ahead)
            held = tokens[row, : lengths[row]]
            found.append(RequestRow(key, asking[seq_index].params, held, int(prompts[row])))
        return found
