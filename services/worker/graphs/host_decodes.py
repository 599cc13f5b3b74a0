"""Steps of decodes on a processor, each one call of the C++ library that ends with tokens drawn and held.

What captured decodes are on a GPU: nothing is left to do between two such steps, and next to nothing to prepare one, as
the library finds by a sequence's number what differs from step to step.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import Batch, BrokenPlan
from services.worker.batch.decode_reuse import goes_on
from services.worker.batch.rows import Indices
from services.worker.batch.sequences import SequenceTable
from services.worker.models.decoder import Decoder
from services.worker.models.loaded_model import CausalLm
from services.worker.models.native_decoder import NativeDecoder
from services.worker.models.weights import KvCaches
from services.worker.ops.native import library
from services.worker.sampling.parameters import Feature, SamplingBatch
from shared.ids import SequenceId
from shared.messages.worker import SequenceWork

_DRAWN = Feature.RANDOM | Feature.TOP | Feature.MIN_P
"""What the library's draws know."""


class HostDecode:
    """A step of decodes. Used again once its outcome has been taken."""

    def __init__(self, decoder: NativeDecoder, free: deque[HostDecode], logits: Tensor) -> None:
        """`free`: where it waits for its next use. `logits` [most rows, words] are those of all steps."""
        self._decoder, self._free, self._logits = decoder, free, logits
        self._drawn: NDArray[np.int64] = np.empty(len(logits), dtype=np.int64)
        self._undefined: NDArray[np.bool_] = np.empty(len(logits), dtype=np.bool_)
        self._outcome = {"drawn": self._drawn.ctypes.data, "undefined": self._undefined.ctypes.data}
        self._call = library.NativeDecode()
        self._run: HostDecodeRun | None = None

    def begin(self, run: HostDecodeRun, steps: int) -> None:
        """It is the step of `run` so many steps behind the first."""
        if run is not self._run:
            self._run, self._call = run, library.NativeDecode.from_buffer_copy(run.call)
            for name, address in self._outcome.items():
                setattr(self._call, name, address)
        self._call.steps = steps

    def compute(self) -> float:
        """Draws a token for each sequence, which holds it from here on; how many seconds the forward pass took. Raises
        IndexError where a token is outside of the vocabulary."""
        self._decoder.decode(self._call)
        seconds: float = self._call.forward_seconds
        return seconds

    @property
    def logits(self) -> Tensor:
        """[Q, words] until the next step is computed."""
        return self._logits[: self._call.rows]

    def take(self) -> tuple[tuple[SequenceId, ...], list[int], list[bool]]:
        """Whose tokens were drawn, the tokens, and which of them mean nothing, as `SamplerOutput.undefined`. Once, when
        it is computed; on any thread."""
        assert self._run is not None, "it was begun"
        sampled = self._run.sampled
        drawn, undefined = self._drawn[: len(sampled)].tolist(), self._undefined[: len(sampled)].tolist()
        self._free.append(self)
        return sampled, drawn, undefined


class HostDecodeRun:
    """Sequences that decode a token each, step after step, from a batch of `DecodeReuse` on."""

    def __init__(
        self, work: tuple[SequenceWork, ...], batch: Batch, sequences: SequenceTable, template: library.NativeDecode
    ) -> None:
        """`batch`, of `work`, is computed in another way: its successor is the run's first step."""
        assert batch.choices is not None, "somebody draws"
        self.sampled, self.seq_indices = batch.sampled, batch.sampled_indices
        self._work, self._sequences = work, sequences
        self._again: tuple[SequenceWork, ...] | None = None
        """The work of nearly all steps: without new blocks."""
        self._ends = batch.rows.context_lens
        self._room = sequences.blocks.room(self.seq_indices)
        self._steps = 0
        self._count_left()
        self.call = library.NativeDecode.from_buffer_copy(template)
        self._kept = (template, self._point(batch, batch.choices))

    def next(self, work: tuple[SequenceWork, ...]) -> int | None:
        """How many steps behind `batch` that of `work` is, which counts as computed from here on. None, and nothing
        done, where it does not go on with all sequences and no others, or a context is full. Raises BrokenPlan."""
        if work != self._again:
            if not goes_on(self._work, work):
                return None
            if not any(item.blocks for item in work):
                self._again = work
            elif self._full:
                return None
            else:
                self._append(work)
        if self._left <= 0:
            if self._full:
                return None
            raise BrokenPlan(f"{work[int((self._ends + self._steps >= self._room).argmax())]}: its blocks are full")
        self._left -= 1
        self._steps += 1
        self._sequences.count_computed(self.seq_indices)
        self._sequences.advance(self.seq_indices)
        return self._steps

    def _append(self, work: tuple[SequenceWork, ...]) -> None:
        blocks = self._sequences.blocks
        blocks.append_new(self.seq_indices, work)
        self._room = blocks.room(self.seq_indices)
        self._count_left()

    @property
    def _full(self) -> bool:
        """Whether somebody's context is."""
        width: int = self._sequences.tokens.shape[1]
        return int(self._ends.max()) + self._steps + 1 >= width

    def _count_left(self) -> None:
        """Steps until somebody's blocks, or context, are full."""
        longest = self._sequences.tokens.shape[1] - 1
        self._left = int((np.minimum(self._room, longest) - self._ends).min()) - self._steps

    def _point(self, batch: Batch, choices: SamplingBatch) -> object:
        """Fills in the call; what it points to."""
        call, sequences, rows = self.call, self._sequences, batch.rows
        call.rows = len(self.sampled)
        call.sequences, call.positions = _address(rows.seq_indices), _address(rows.positions)
        call.tokens, call.width = _address(sequences.tokens), sequences.tokens.shape[1]
        call.tables, call.table_width = _address(sequences.block_tables), sequences.block_tables.shape[1]
        if not choices.features & Feature.RANDOM:
            return batch
        table, seq_indices = choices.table, choices.seq_indices
        greedy = choices.by_row & int(Feature.RANDOM) == 0
        seeds, temperature = table.seed[seq_indices], np.where(greedy, np.float32(0.0), table.temperature[seq_indices])
        top_k, top_p, min_p = (each[seq_indices] for each in (table.top_k, table.top_p, table.min_p))
        call.seeds, call.outputs = _address(seeds), _address(choices.position)
        call.draws.temperature, call.draws.top_k = _address(temperature), _address(top_k)
        call.draws.top_p, call.draws.min_p = _address(top_p), _address(min_p)
        return batch, seeds, temperature, top_k, top_p, min_p


class HostDecodes:
    """Prepares the steps of one rank whose pass is the library's as a whole. Used from the thread that prepares."""

    def __init__(self, decoder: NativeDecoder, caches: KvCaches, sequences: SequenceTable, max_num_seqs: int) -> None:
        self._decoder, self._sequences = decoder, sequences
        self._logits = decoder.room_for_logits(max_num_seqs)
        self._template = decoder.decode_call(caches, self._logits)
        self._run: HostDecodeRun | None = None
        self._free: deque[HostDecode] = deque()
        """No more than plans are computed ahead."""

    @classmethod
    def of(cls, model: CausalLm, caches: KvCaches, sequences: SequenceTable, max_num_seqs: int) -> HostDecodes | None:
        """None where the library has no pass for all steps of `model`."""
        native = model.native if isinstance(model, Decoder) else None
        if native is None or model.fastest_pass != native.forward:
            return None
        return cls(native, caches, sequences, max_num_seqs)

    def forget(self) -> None:
        """The next step has to be made anew."""
        self._run = None

    def remember(self, work: tuple[SequenceWork, ...], batch: Batch) -> bool:
        """`batch`, of `work`, is one that `DecodeReuse` goes on with, and nothing changes its logits, or observes what
        is drawn. Whether `next` goes on with it."""
        self._run = HostDecodeRun(work, batch, self._sequences, self._template) if self._knows(batch) else None
        return self._run is not None

    def next(self, work: tuple[SequenceWork, ...]) -> HostDecode | None:
        """The step of `work`, which counts as computed and its tokens as known from here on; None, and nothing done,
        where that does not go on with all sequences of the last one and no others. Raises BrokenPlan."""
        steps = None if self._run is None else self._run.next(work)
        if self._run is None or steps is None:
            return None
        step = self._free.popleft() if self._free else HostDecode(self._decoder, self._free, self._logits)
        step.begin(self._run, steps)
        return step

    def _knows(self, batch: Batch) -> bool:
        """Whether steps like it are no more than the library's call: computed in another way, they draw the same."""
        rows, choices = batch.rows, batch.choices
        if choices is None or choices.features & ~_DRAWN or self._sequences.blocks.windows or rows.others:
            return False
        if batch.shifts is not None or batch.encoded is not None:
            return False
        return bool((self._sequences.loras[rows.seq_indices] < 0).all())


def _address(array: Indices | NDArray[np.generic]) -> int:
    address: int = array.ctypes.data
    return address
