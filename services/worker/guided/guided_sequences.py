"""The grammars of the sequences that a rank holds: masks before a draw, the next state behind it, and forced drafts.

A grammar is followed in its own process (`host.py`), which works while the device computes: it is told what was drawn,
asked for masks before the forward pass, and read behind it. Where it fails, its sequences do, and no others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.worker.batch.batch import DraftTokens
from services.worker.guided import metrics
from services.worker.guided.library import GrammarLibrary
from services.worker.guided.processes import GrammarGone, GrammarProcess
from services.worker.guided.protocol import Accept, Fill, StartMatching, StopMatching
from services.worker.sampling.masks import TokenMask
from services.worker.speculation.proposer import DraftRequest, StatelessProposer
from shared.ids import SequenceId
from shared.messages.scheduler import GrammarFault, SequenceFailed
from shared.messages.worker import GrammarRef, NewSequence
from shared.packing import pack, unpack

Int32s = NDArray[np.int32]
Indices = NDArray[np.intp]


@dataclass(slots=True)
class _Guided:
    sequence: SequenceId
    number: int
    """As its grammar's process knows it."""
    process: GrammarProcess


class GuidedSequences:
    """Owns which sequences follow a grammar, by their index. Belongs to the rank that samples: one thread asks for
    masks and drafts, another may add and release sequences meanwhile. Without grammars it costs nothing."""

    def __init__(self, library: GrammarLibrary) -> None:
        self._library = library
        self._guided: dict[int, _Guided] = {}
        self._numbers = 0
        self._asked: list[tuple[GrammarProcess, dict[int, int]]] = []
        """Whom masks were requested of, and of each of its numbers the first row of logits."""
        self._failed: list[SequenceFailed] = []
        """Not reported yet."""

    def __len__(self) -> int:
        return len(self._guided) or len(self._failed)

    def clear(self) -> None:
        """Forgets every sequence and its grammar."""
        for seq_index in list(self._guided):
            self.release(seq_index)
        self._asked.clear()
        self._failed.clear()

    def add(self, seq_index: int, new: NewSequence, grammar: GrammarRef) -> None:
        """A new sequence that follows `grammar`; what it has put out already is replayed."""
        process = self._library.process(grammar.key)
        if process is None:
            self._failed.append(SequenceFailed(new.sequence, "its grammar is not compiled here", "lost"))
            return
        self._numbers += 1
        self._guided[seq_index] = _Guided(new.sequence, self._numbers, process)
        output = pack(unpack(new.tokens)[new.prompt_length :])
        try:
            process.send(StartMatching(self._numbers, new.stop_token_ids, grammar.after, output))
        except GrammarGone as gone:
            self._fail(process, gone)

    def release(self, seq_index: int) -> None:
        """Forgets the sequence in `seq_index`, whether or not it has a grammar."""
        guided = self._guided.pop(seq_index, None)
        if guided is not None:
            try:
                guided.process.send(StopMatching(guided.number))
            except GrammarGone as gone:
                self._fail(guided.process, gone)

    def take_failed(self) -> tuple[SequenceFailed, ...]:
        """The sequences that are followed no longer, each once. What is drawn for them means nothing."""
        failed, self._failed = tuple(self._failed), []
        return failed

    def with_grammar(self, seq_indices: Indices) -> NDArray[np.bool_]:
        """[W] whether each one's sequence has a grammar."""
        return np.array([seq_index in self._guided for seq_index in seq_indices.tolist()], dtype=np.bool_)

    def jump_forward(self, seq_indices: Indices, limits: list[int]) -> list[tuple[int, ...]]:
        """Tokens that each sequence will probably go on with, as its grammar leaves no other text: up to `limits`."""
        places: dict[int, int] = {}
        wanted: defaultdict[GrammarProcess, list[tuple[int, int]]] = defaultdict(list)
        for place, (seq_index, most) in enumerate(zip(seq_indices.tolist(), limits, strict=True)):
            if most and (guided := self._guided.get(seq_index)) is not None:
                wanted[guided.process].append((guided.number, most))
                places[guided.number] = place
        forced: list[tuple[int, ...]] = [()] * len(seq_indices)
        self._library.awaited = bool(wanted)
        for process, numbers in wanted.items():
            try:
                answers = process.jump_forward(numbers)
            except GrammarGone as gone:
                self._fail(process, gone)
                continue
            for (number, _), tokens in zip(numbers, answers, strict=True):
                forced[places[number]] = tokens
        self._library.awaited = False
        return forced

    def request_masks(self, seq_indices: Indices, drafted: Int32s, drafts: Int32s) -> None:
        """Has masks made of what may be drawn next; to be followed by `masks`. Best called before the device computes.

        seq_indices [Q]; drafts [Q, K], `drafted` [Q] of each row. The masks are of rows that lie 1 + `drafted` for each
        sequence, one behind the other.
        """
        first = (np.cumsum(drafted + 1) - (drafted + 1)).tolist()
        wanted: defaultdict[GrammarProcess, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        rows: dict[int, int] = {}
        for place, seq_index in enumerate(seq_indices.tolist()):
            if (guided := self._guided.get(seq_index)) is not None:
                wanted[guided.process].append((guided.number, tuple(drafts[place, : int(drafted[place])].tolist())))
                rows[guided.number] = first[place]
        for process, sequences in wanted.items():
            try:
                process.send(Fill(tuple(sequences)))
            except GrammarGone as gone:
                self._fail(process, gone)
            else:
                self._asked.append((process, {number: rows[number] for number, _ in sequences}))

    def masks(self) -> TokenMask | None:
        """What was requested; waits for it. Best called while the device computes."""
        asked, self._asked = self._asked, []
        rows: list[NDArray[np.intp]] = []
        bits: list[Int32s] = []
        self._library.awaited = bool(asked)
        for process, first in asked:
            try:
                filled, masks = process.filled()
            except GrammarGone as gone:
                self._fail(process, gone)
                continue
            rows += [np.arange(first[number], first[number] + count) for number, count in filled.bound]
            if len(masks):
                bits.append(masks)
            for number, error in filled.failed:
                self._fail_one(process, number, error)
            metrics.MASK_SECONDS.inc(filled.seconds)
            metrics.MASKS.inc(len(masks))
            metrics.DEAD_ENDS.inc(filled.dead_ends)
            metrics.BROKEN.inc(filled.broken)
        self._library.awaited = False
        if not rows:
            return None
        places, masked = np.concatenate(rows), np.concatenate(bits)
        order = np.argsort(places)
        return TokenMask(places[order], masked[order])

    def accept(self, seq_indices: Indices, counts: Int32s, tokens: Int32s) -> None:
        """The tokens just drawn: the first `counts` [Q] of each row of `tokens` [Q, K + 1]."""
        drawn: defaultdict[GrammarProcess, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        for place, seq_index in enumerate(seq_indices.tolist()):
            if (guided := self._guided.get(seq_index)) is not None:
                drawn[guided.process].append((guided.number, tuple(tokens[place, : counts[place]].tolist())))
        for process, sequences in drawn.items():
            try:
                process.send(Accept(tuple(sequences)))
            except GrammarGone as gone:
                self._fail(process, gone)

    def _fail(self, process: GrammarProcess, gone: GrammarGone) -> None:
        """All sequences that follow a grammar whose process is gone."""
        for seq_index, guided in list(self._guided.items()):
            if guided.process is process:
                self._end(seq_index, gone.error, gone.fault)

    def _fail_one(self, process: GrammarProcess, number: int, error: str) -> None:
        for seq_index, guided in list(self._guided.items()):
            if guided.process is process and guided.number == number:
                self._end(seq_index, error, "refused")

    def _end(self, seq_index: int, error: str, fault: GrammarFault) -> None:
        guided = self._guided.pop(seq_index, None)
        if guided is not None:
            self._failed.append(SequenceFailed(guided.sequence, error, fault))
            metrics.FAILED.labels(fault).inc()


# Jump-forward drafts: where a grammar leaves one text only, that text is drafted in the tokens that the model would
# probably choose for it. They are verified like any drafts, so the output is what it would be without them: where the
# model prefers to spell the text in other tokens, its own are taken.


MAX_JUMP_FORWARD = 16
"""Tokens in one step. Names of properties are seldom longer, with the punctuation around them."""


class JumpForwardProposer(StatelessProposer):
    """Drafts what grammars force, see :class:`services.worker.speculation.proposer.Proposer`."""

    most = MAX_JUMP_FORWARD

    def __init__(self, guided: GuidedSequences) -> None:
        self._guided = guided

    def propose(self, request: DraftRequest) -> DraftTokens:
        """Drafts of the sequences that a grammar binds, up to `request.limits` and MAX_JUMP_FORWARD of each."""
        if not len(self._guided):
            return DraftTokens.none(len(request.seq_indices))
        limits = np.minimum(request.limits, MAX_JUMP_FORWARD).tolist()
        forced = self._guided.jump_forward(request.seq_indices, limits)
        counts = np.array([len(tokens) for tokens in forced], dtype=np.int32)
        drafts = np.zeros((len(forced), int(counts.max(initial=0))), dtype=np.int32)
        for row, tokens in enumerate(forced):
            drafts[row, : len(tokens)] = tokens
        return DraftTokens(drafts, counts)
