"""Steps of decodes on a processor, each one call of the C++ library that ends with tokens drawn and held.

What captured decodes are on a GPU: nothing is left to do between two such steps, and next to nothing to prepare one, as
the library finds by a sequence's number what differs from step to step. Tokens of whoever asks for more than the
library's draws know are drawn from the call's logits by the sampler, and then put where the others are.
"""

from __future__ import annotations

import ctypes
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.batch.batch import BrokenPlan, DecodeBatch, DraftTokens, ScheduledWork
from services.worker.batch.decode_reuse import goes_on
from services.worker.batch.rows import Indices, Int32s
from services.worker.batch.sequences import SequenceTable
from services.worker.graphs.decode_draws import DecodeDraws, RowSubset
from services.worker.models.decoder import Decoder
from services.worker.models.loaded_model import CausalLm
from services.worker.models.lora.adapted_models import NativeAdded
from services.worker.models.lora.slots import NO_ADAPTER, LoraSlots
from services.worker.models.native_decoder import NativeDecoder
from services.worker.models.weights import KvCaches
from services.worker.ops.native import library
from services.worker.sampling.logprobs import LogprobTensors, RowLogprobs
from services.worker.sampling.masks import TokenMask
from services.worker.sampling.parameters import SamplingBatch
from shared.ids import SequenceId
from shared.messages.worker import SequenceWork


class HostDecode:
    """A step of decodes. Used again once its outcome has been taken."""

    _own: NDArray[np.float32]
    _likeliest: NDArray[np.int64]
    _chances: NDArray[np.float32]
    """Of rows that report log-probabilities, see `Decode` of decoder.h; of each step anew."""

    def __init__(self, decoder: NativeDecoder, free: deque[HostDecode]) -> None:
        """`free`: where it waits for its next use."""
        self._decoder, self._free = decoder, free
        self._drawn: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._undefined: NDArray[np.bool_] = np.empty(0, dtype=np.bool_)
        self._gained: Int32s = np.empty(0, dtype=np.int32)
        self._call = library.NativeDecode()
        self._run: HostDecodeRun | None = None

    def begin(self, run: HostDecodeRun, steps: int) -> None:
        """It is the step of `run` so many steps behind the first."""
        if run is not self._run:
            self._run, self._call = run, library.NativeDecode.from_buffer_copy(run.call)
            self._make_room(self._call.rows)
        self._call.steps = steps

    def _make_room(self, rows: int) -> None:
        if len(self._drawn) < rows:
            self._drawn, self._undefined = np.empty(rows, dtype=np.int64), np.empty(rows, dtype=np.bool_)
            self._gained = np.empty(rows, dtype=np.int32)
        for name, array in (("drawn", self._drawn), ("undefined", self._undefined), ("gained", self._gained)):
            setattr(self._call, name, _address(array))

    @property
    def run(self) -> HostDecodeRun:
        """That it is a step of."""
        assert self._run is not None, "it was begun"
        return self._run

    def compute(self) -> float:
        """Draws a token for each row that is not left, which sequences hold from here on where none is; how many
        seconds the forward pass took. Raises IndexError where a token is outside of the vocabulary."""
        call, draws = self._call, self.run.draws
        if (added := self.run.added()) is not None:
            call.adapters = ctypes.addressof(added.adapters)
        if rows := len(draws.reported):
            self._own, likeliest = np.empty(rows, dtype=np.float32), (rows, call.logprobs.likeliest)
            self._likeliest, self._chances = np.empty(likeliest, dtype=np.int64), np.empty(likeliest, dtype=np.float32)
            call.own, call.likeliest = _address(self._own), _address(self._likeliest)
            call.chances = _address(self._chances)
        self._decoder.decode(self._call)
        seconds: float = self._call.forward_seconds
        return seconds

    def finish(self, mask: TokenMask | None) -> None:
        """Draws what `compute` has not, as rows have grammars; `mask`: of the step's rows."""
        self.run.draws.put(mask)
        self._decoder.finish(self._call)

    @property
    def logits(self) -> Tensor:
        """[R, words] until the next step is computed."""
        return self.run.logits[: self._call.rows]

    @property
    def logprobs(self) -> tuple[RowLogprobs, ...]:
        """Those that the library found."""
        draws = self.run.draws
        if not len(draws.reported):
            return ()
        tokens, own = torch.from_numpy(self._drawn[draws.reported]), torch.from_numpy(self._own)
        others, values = torch.from_numpy(self._likeliest), torch.from_numpy(self._chances)
        return (RowLogprobs(draws.reported, LogprobTensors(tokens, own, others, values, draws.counts)),)

    def left_logits(self, left: RowSubset) -> tuple[Tensor, SamplingBatch]:
        """[A, words] of the rows left, and how they are drawn, but for what grammars allow."""
        logits, choices = self.logits, self.run.draws.left_choices
        assert choices is not None, "rows are left"
        if len(left.rows) < len(logits):
            logits = logits.index_select(0, torch.from_numpy(left.rows))
        return logits, choices.later(self._call.steps) if self._call.steps else choices

    def accept(self, left: RowSubset, tokens: Tensor, undefined: Tensor) -> None:
        """What was drawn of the rows left [A], and whether it means nothing: sequences hold all that stands from here
        on."""
        self._drawn[left.rows], self._undefined[left.rows] = tokens.numpy(), undefined.numpy()
        self._decoder.accept(self._call)

    @property
    def drawn(self) -> Int32s:
        """[R] until it is used again."""
        return self._drawn[: self._call.rows].astype(np.int32)

    @property
    def gained(self) -> Int32s:
        """[Q] tokens that each sequence holds more."""
        return self._gained[: self._call.count].copy()

    @property
    def undefined(self) -> NDArray[np.bool_]:
        """[R] which tokens mean nothing, until it is used again."""
        return self._undefined[: self._call.rows]

    def take(self) -> tuple[tuple[SequenceId, ...], list[int], list[bool]]:
        """Of a step without drafts: whose tokens were drawn, the tokens, and which of them mean nothing, as
        `SamplerOutput.undefined`. Once, when it is computed; on any thread."""
        sampled = self.run.rows.sampled
        drawn, undefined = self._drawn[: len(sampled)].tolist(), self._undefined[: len(sampled)].tolist()
        self.release()
        return sampled, drawn, undefined

    def release(self) -> None:
        """In place of `take`, of a step whose outcome was read."""
        self._free.append(self)


class HostDecodeRun:
    """Sequences that decode, step after step; with drafts, one step."""

    def __init__(
        self,
        work: tuple[SequenceWork, ...],
        rows: DecodeBatch,
        draws: DecodeDraws,
        sequences: SequenceTable,
        template: library.NativeDecode,
        logits: Tensor,
        loras: LoraSlots | None,
    ) -> None:
        """`work` and `rows` are of its first step. `logits` [rows or more, words]: where all steps' are. `loras`: None
        where no row has an adapter."""
        self.rows, self.draws, self.logits = rows, draws, logits
        self._work, self._sequences, self._loras = work, sequences, loras
        self._added: NativeAdded | None = None
        self._again: tuple[SequenceWork, ...] | None = None
        """The work of nearly all steps: without new blocks."""
        self._seq_indices = rows.sampled_indices
        self._steps = 0
        self.call = library.NativeDecode.from_buffer_copy(template)
        self._template = template
        self._point()
        if self.goes_on:
            self._ends = rows.positions + 1
            self._room = sequences.blocks.room(self._seq_indices)
            self._count_left()

    @property
    def goes_on(self) -> bool:
        """Whether there may be a second step: not behind drafts, nor where what is asked for depends on the step."""
        choices = self.rows.choices
        return self.call.rows == self.call.count and choices.table.position_independent(choices)

    def next(self, work: tuple[SequenceWork, ...]) -> int | None:
        """How many steps behind the first that of `work` is, which counts as computed from here on. None, and nothing
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
        self._sequences.count_computed(self._seq_indices)
        self._sequences.advance(self._seq_indices)
        return self._steps

    def added(self) -> NativeAdded | None:
        """What adapters add to the rows of each step; on the thread that computes. None: no row has one."""
        if self._loras is not None and self._added is None:
            self._added = self._loras.added(self._sequences.loras[self.rows.seq_indices])
        return self._added

    def _append(self, work: tuple[SequenceWork, ...]) -> None:
        blocks = self._sequences.blocks
        blocks.append_new(self._seq_indices, work)
        self._room = blocks.room(self._seq_indices)
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

    def _point(self) -> None:
        """Fills in the call."""
        call, rows = self.call, self.rows
        call.count, call.rows = len(rows.sampled), len(rows.positions)
        call.sequences, call.positions = _address(rows.seq_indices), _address(rows.positions)
        if call.rows > call.count:
            call.drafted = _address(rows.drafted)
        call.to = self.logits.data_ptr()
        self.draws.fill_in(call, self.logits.shape[1])


class HostDecodes:
    """Makes the steps of one rank whose pass is the library's as a whole. Used from the thread that prepares, and for
    steps with drafts from the one that computes."""

    def __init__(
        self,
        decoder: NativeDecoder,
        caches: KvCaches,
        sequences: SequenceTable,
        max_num_seqs: int,
        loras: LoraSlots | None,
        *,
        has_states: bool,
    ) -> None:
        """`loras`: the adapters that are served."""
        self._decoder, self._sequences, self._loras, self._has_states = decoder, sequences, loras, has_states
        decoder.room_for_logits(max_num_seqs)  # which no step without drafts has to make then
        self._template = decoder.decode_call(caches)
        self._template.tokens, self._template.width = _address(sequences.tokens), sequences.tokens.shape[1]
        tables = sequences.blocks.tables
        made = (library.DecodeTable * len(tables))(*(library.DecodeTable(_address(i), w or 0) for i, w in tables))
        self._template.tables, self._template.groups, self._tables = ctypes.addressof(made), len(tables), made
        self._template.table_width = sequences.block_tables.shape[1]
        self._run: HostDecodeRun | None = None
        self._free: deque[HostDecode] = deque()
        """No more than plans are computed ahead."""

    @classmethod
    def of(
        cls,
        model: CausalLm,
        caches: KvCaches,
        sequences: SequenceTable,
        max_num_seqs: int,
        loras: LoraSlots | None,
    ) -> HostDecodes | None:
        """None where the library has no pass for decodes of `model`."""
        native = model.native if isinstance(model, Decoder) else None
        if native is None:
            return None
        return cls(native, caches, sequences, max_num_seqs, loras, has_states=model.state_bytes > 0)

    def forget(self) -> None:
        """The next step has to be made anew."""
        self._run = None

    def knows(self, seq_indices: Indices) -> bool:
        """Whether the library computes decodes of these sequences: not of those with images that have positions of
        their own, an encoder's rows, or an adapter of embeddings or latents."""
        sequences = self._sequences
        if sequences.encoded is not None or sequences.shifts.any_of(seq_indices):
            return False
        return self._loras is None or self._loras.in_one_call(sequences.loras[seq_indices])

    def first(
        self,
        scheduled: ScheduledWork,
        drafts: DraftTokens | None,
        guided: NDArray[np.bool_] | None,
        processed: NDArray[np.bool_] | None,
    ) -> HostDecode | None:
        """The step of `scheduled`, which counts as computed from here on, and its tokens as known where nobody has
        drafts; None, and nothing done, where the library does not know it. `guided` and `processed` [W]: who has a
        grammar, and who asks for a logits processor. Raises BrokenPlan."""
        if not self._decoding(scheduled) or not self._verifies(drafts):
            return None
        rows = self._sequences.decodes(scheduled, drafts)
        draws, count = DecodeDraws(rows, self._sequences, guided, processed), len(rows.positions)
        logits = self._decoder.room_for_logits(count)
        adapted = self._loras is not None and (self._sequences.loras[rows.sampled_indices] != NO_ADAPTER).any()
        loras = self._loras if adapted else None
        run = HostDecodeRun(scheduled.work, rows, draws, self._sequences, self._template, logits, loras)
        if count == len(rows.sampled):
            self._sequences.advance(rows.sampled_indices)
        self._run = run if run.goes_on else None
        return self._step(run, 0)

    def next(self, work: tuple[SequenceWork, ...]) -> HostDecode | None:
        """The step of `work`, which counts as computed and its tokens as known from here on; None, and nothing done,
        where that does not go on with all sequences of the last one and no others. Raises BrokenPlan."""
        steps = None if self._run is None else self._run.next(work)
        return None if self._run is None or steps is None else self._step(self._run, steps)

    def _step(self, run: HostDecodeRun, steps: int) -> HostDecode:
        step = self._free.popleft() if self._free else HostDecode(self._decoder, self._free)
        step.begin(run, steps)
        return step

    def _verifies(self, drafts: DraftTokens | None) -> bool:
        """Not trees, nor drafts of sequences with states, which have to be put back."""
        return drafts is None or (drafts.parents is None and not (self._has_states and drafts.counts.any()))

    def _decoding(self, scheduled: ScheduledWork) -> bool:
        """Whether each sequence computes the last token that it holds, behind its prompt, and draws."""
        seq_indices, sequences = scheduled.seq_indices, self._sequences
        if not (scheduled.samples.all() and (scheduled.counts == 1).all()) or not self.knows(seq_indices):
            return False
        return bool((sequences.lengths[seq_indices] > sequences.prompt_lengths[seq_indices]).all())


def _address(array: NDArray[np.generic]) -> int:
    address: int = array.ctypes.data
    return address
