"""Builds the next step: who computes how many tokens in which blocks. Knows lengths, never token values.

One token budget a step. Decoding sequences first (one token each, and drafts where they pay), so that nobody's stream
stalls behind a long prompt; then the rest of chunked prefills; then newcomers. Memory that runs out under a decoding
sequence is taken from whoever stands last in line (preemption by recompute).
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from msgspec.structs import replace

from services.scheduler.core.grammars import Grammars
from services.scheduler.core.kv_memory import KvMemory
from services.scheduler.core.limits import Limits
from services.scheduler.core.line import Line
from services.scheduler.core.loads import Loads
from services.scheduler.core.micro_batches import MicroBatches
from services.scheduler.core.saves import BESIDE_DECODES, MOST_BLOCKS, Saves
from services.scheduler.core.sequence import Sequence
from services.scheduler.core.shared_prompts import SharedPrompts
from services.scheduler.core.speculation import Speculation
from services.scheduler.core.steps import Expected
from services.scheduler.core.tally import Tally
from services.scheduler.core.transfers import Transfers
from shared.blocks import BLOCK_SIZE, blocks_for
from shared.ids import SequenceId
from shared.messages.generation import Grammar, SamplingParams
from shared.messages.worker import MOST_SCORED, MOST_TOLD, NewSequence, Transfer, Work
from shared.tokens import TOKEN_BYTES, pack


class Started(NamedTuple):
    """A sequence that enters the engine, and how many of its tokens were cached."""

    sequence: Sequence
    cached: int


class Planned(NamedTuple):
    """One step's contents."""

    released: tuple[SequenceId, ...]
    new: tuple[NewSequence, ...]
    work: tuple[Work, ...]
    transfers: tuple[Transfer, ...]
    started: tuple[Started, ...]
    compile: tuple[Grammar, ...]
    handing: tuple[Sequence, ...]
    """Those whose only token it draws: the next ones come from another engine."""
    expected: Expected


class Planner:
    """Owns the three lines, who stands beside them, and the sequences in the engine by number."""

    def __init__(
        self,
        limits: Limits,
        memory: KvMemory,
        transfers: Transfers,
        loads: Loads,
        saves: Saves,
        grammars: Grammars,
        speculation: Speculation,
        tally: Tally,
    ) -> None:
        self.memory = memory
        self.waiting = Line()
        self.prefilling = Line()
        self.decoding = Line()
        self.compiling: dict[SequenceId, Sequence] = {}
        self.seeking: dict[SequenceId, Sequence] = {}
        self.loading: dict[SequenceId, Sequence] = {}
        self.handing: dict[SequenceId, Sequence] = {}
        self.by_id: dict[SequenceId, Sequence] = {}
        self.preemptions = 0
        self._guided = 0
        """Sequences with a grammar."""
        self._limits = limits
        self._transfers = transfers
        self._loads = loads
        self._saves = saves
        self._grammars = grammars
        self._speculation = speculation
        self._tally = tally
        self._prompts = SharedPrompts()
        self._micro_batches = MicroBatches(limits.stages)
        self._released: list[SequenceId] = []
        # of the step that is being planned
        self._work: list[Work] = []
        self._budget = 0
        self._samples = 0
        self._drafts = 0
        """Drafts that it may still hold."""
        self._extras: dict[SequenceId, int] = {}
        self._scores = self._told = 0
        """Prompt tokens that it may still score, and log-probabilities that it may still tell of them."""
        self._started: list[Started] = []
        self._new_bytes = 0
        self._handing: list[Sequence] = []
        self._filled: list[Sequence] = []
        """Sequences that may have filled a block."""

    @property
    def running(self) -> int:
        """Those that have blocks, or are about to be given up to another engine."""
        return len(self.prefilling) + len(self.decoding) + len(self.loading) + len(self.handing)

    @property
    def lined_up(self) -> int:
        """Those that wait for their turn, or beside the line for what they need before it."""
        return len(self.waiting) + len(self.seeking) + len(self.compiling)

    @property
    def waits_elsewhere(self) -> bool:
        """Whether somebody goes on without any step's result: when the store has answered, when the ranks have copied
        or compiled something."""
        sought = len(self.seeking) > self._prompts.waiting
        return bool(sought or self.handing or len(self._transfers) or self._grammars.answers_awaited)

    def plan(self, now: float) -> Planned | None:
        """The next step, or None where there is nothing to compute or copy before results come."""
        self._work, self._filled, self._started, self._handing, self._extras = [], [], [], [], {}
        self._budget, self._samples, self._new_bytes = self._limits.max_batch_tokens, 0, 0
        self._scores, self._told = MOST_SCORED, MOST_TOLD
        preemptions = self.preemptions
        self._plan_decodes()
        decodes = self._samples
        self._plan_prefills()
        # Who was preempted just now stands first in line; it would only come back to be preempted again.
        if preemptions == self.preemptions:
            self._admit(now)
        for sequence in self._filled:
            self.memory.index_full_blocks(sequence)
            self._resume(self._prompts.progressed(sequence))
        if self._saves.pending:
            self._saves.plan(BESIDE_DECODES if decodes else MOST_BLOCKS, now)
        compile_ = self._grammars.take(self._limits.max_new_bytes - self._new_bytes, now)
        if not self._work and not self._transfers.planned and not compile_:
            return None
        self._micro_batches.issued(self._work, self.by_id)
        released, self._released = self._released, []
        tokens = self._limits.max_batch_tokens - self._budget
        return Planned(
            released=tuple(released),
            new=tuple(_new_sequence(*start) for start in self._started),
            work=tuple(self._work),
            transfers=self._transfers.take_planned(),
            started=tuple(self._started),
            compile=compile_,
            handing=tuple(self._handing),
            expected=Expected(self._samples, tokens, self._extras, prefills=len(self._work) > decodes),
        )

    # ---- decode

    def _plan_decodes(self) -> None:
        work, members = self._work, self._micro_batches.of_next_plan(self.decoding.members())
        self._drafts = drafts = self._speculation.begin(len(members), self._budget, guided=self._guided > 0)
        for sequence in members:
            if sequence.length >= sequence.limit or sequence.phase != "decoding":
                continue  # all its tokens are on their way; or it was preempted for one before it
            if drafts and (extra := self._extra(sequence)):
                work.append(self._speculate(sequence, extra))
                continue
            if sequence.planned < sequence.capacity:
                work.append(sequence.decode_work)
            elif self._make_room(sequence):
                work.append(Work(sequence.id, 1, pack(self.memory.grow(sequence, sequence.length)), True))
                self._filled.append(sequence)  # the block before is full
            else:
                continue
            sequence.planned += 1
            sequence.length += 1
        self._budget -= len(work) + drafts - self._drafts
        self._samples = len(work)

    def _extra(self, sequence: Sequence) -> int:
        """How many drafts its next step may hold. They take no block that somebody running needs for certain, and
        nothing beyond the limit: until results say less, all that is in flight counts as accepted."""
        wanted = min(self._speculation.wanted(sequence), sequence.limit - sequence.length - 1, self._drafts)
        missing = blocks_for(sequence.length + wanted) - len(sequence.blocks)
        if missing > 0 and self.memory.pool.free - missing < self.running:
            wanted = sequence.capacity - sequence.length
        return max(0, wanted)

    def _speculate(self, sequence: Sequence, extra: int) -> Work:
        blocks = self.memory.grow(sequence, sequence.length + extra)
        if blocks:
            self._filled.append(sequence)
        sequence.planned += 1 + extra
        sequence.length += 1 + extra
        self._drafts -= extra
        self._extras[sequence.id] = extra
        return Work(sequence.id, 1, pack(blocks), True, extra)

    def yielded_less(self, sequence: Sequence, tokens: int) -> None:
        """A step has yielded so many tokens less than it might have. The blocks that were meant for them stay in the
        sequence's table, where the workers have them too, and are filled by its next steps."""
        sequence.length -= tokens
        if sequence.phase == "decoding":
            sequence.planned -= tokens

    def _make_room(self, sequence: Sequence) -> bool:
        """Frees a block from the end of the line; False where that end was `sequence` itself.

        Everybody behind `sequence` is still without work in this step, because decodes are planned in the order of
        the line and prefills after them: so nothing that is planned is taken back.
        """
        while self.memory.pool.free == 0:
            victim = self._last_in_line()
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _last_in_line(self) -> Sequence:
        ends = [line.last for line in (self.decoding, self.prefilling) if line.last is not None]
        return max(ends, key=lambda sequence: sequence.rank)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes everything from `sequence`. It waits again, once the token on its way (if any) is known."""
        self.preemptions += 1
        self._release(sequence)
        if sequence.awaits_token:
            sequence.move("returning")
        else:
            self.wait(sequence)

    # ---- prefill

    def _plan_prefills(self) -> None:
        """The rest of chunked prompts. One that finds no block free waits for decodes to end: what prefills under way
        still need fits by itself, since nobody was admitted without counting it (`_fits`)."""
        for sequence in self.prefilling.members():
            self._prefill(sequence)

    def _prefill(self, sequence: Sequence) -> None:
        """Plans as many of the sequence's tokens as budget and free blocks allow."""
        room = sequence.capacity - sequence.planned + self.memory.pool.free * BLOCK_SIZE
        count = min(sequence.length - sequence.planned, self._budget, room)
        if sequence.scored:
            told = 1 + (sequence.generation.sampling.prompt_logprobs or 0)
            count = min(count, self._scores, self._told // told)
            self._scores -= max(0, count)
            self._told -= max(0, count) * told
        if count <= 0 or not (sequence.introduced or self._introduce(sequence)):
            return
        new_blocks = self.memory.grow(sequence, sequence.planned + count)
        sequence.planned += count
        self._budget -= count
        last = sequence.planned == sequence.length
        self._work.append(Work(sequence.id, count, pack(new_blocks), last))
        self._filled.append(sequence)
        if last:
            self._begin_decode(sequence)

    def _introduce(self, sequence: Sequence) -> bool:
        """Has the workers told of it; False where the plan has no room for its tokens."""
        if not self._has_room_to_introduce(sequence):
            return False
        self._new_bytes += _new_size(sequence)
        sequence.introduced = True
        self._started.append(Started(sequence, sequence.planned))
        return True

    def _has_room_to_introduce(self, sequence: Sequence) -> bool:
        return not self._started or self._new_bytes + _new_size(sequence) <= self._limits.max_new_bytes

    def _begin_decode(self, sequence: Sequence) -> None:
        self._samples += 1
        sequence.length += 1
        self.prefilling.remove(sequence)
        if sequence.decode_on is not None and sequence.length < sequence.limit:
            sequence.move("handing")
            self.handing[sequence.id] = sequence
            self._handing.append(sequence)
        else:
            self._decode(sequence)

    def _decode(self, sequence: Sequence) -> None:
        sequence.move("decoding")
        self.decoding.add(sequence)

    def keep(self, sequence: Sequence) -> None:
        """It is decoded here after all, and for good: what was saved of it bears the name of this one hand-over."""
        sequence.decode_on = None
        del self.handing[sequence.id]
        self._decode(sequence)

    # ---- newcomers

    def _admit(self, now: float) -> None:
        """Newcomers, in line, while there is budget, a place, and memory for the whole of each."""
        while self.running < self._limits.max_running:
            sequence = self.waiting.first
            if sequence is None or not self._take_turn(sequence, now):
                return

    def _take_turn(self, sequence: Sequence, now: float) -> bool:
        """What the first in line does now; False where it goes on waiting, and all behind it."""
        concerned = self._loads.concerns(sequence)
        if self._budget <= 0 and not concerned:
            return False
        cached = self.memory.cached_blocks(sequence)
        turn = self._loads.turn(sequence, len(cached), now) if concerned else "compute"
        match turn:
            case "compute" if self._prompts.wait(sequence, len(cached)):
                self._tally.prompts_shared += 1
                self._step_aside(sequence)
            case "compute":
                return self._fits(sequence, cached) and self._enter(sequence, cached)
            case "load":
                return self._fits(sequence, cached) and self._load(sequence, cached, now)
            case "await":
                self._loads.await_other(sequence, len(cached))
                self._step_aside(sequence)
            case "look again":
                if self._loads.look_up(sequence):
                    self._step_aside(sequence)
                else:
                    self._loads.forget(sequence)
            case _:
                assert_never(turn)
        return True

    def _fits(self, sequence: Sequence, cached: list[int]) -> bool:
        """Whether all known tokens fit, beside what prefills under way still need and a block for everybody running.

        Admitting by the first chunk alone would fill memory with prompts of which none can be finished; and without
        the block for each, a newcomer would be preempted within the next 16 steps.
        """
        pool = self.memory.pool
        coming = (*self.prefilling, *self.loading.values())
        promised = sum(blocks_for(s.length) - len(s.blocks) for s in coming) + self.running
        needed = blocks_for(sequence.length) - len(cached) + pool.idle_among(cached)
        return needed + promised <= pool.free

    def _enter(self, sequence: Sequence, cached: list[int]) -> bool:
        """False where the plan has no room for it."""
        if self._budget <= 0 or not self._has_room_to_introduce(sequence):
            return False
        self._loads.forget(sequence)
        self.waiting.remove(sequence)
        self.memory.adopt(sequence, cached)
        sequence.move("prefilling")
        self.prefilling.add(sequence)
        self._prompts.begin(sequence)
        self._prefill(sequence)
        return True

    def _load(self, sequence: Sequence, cached: list[int], now: float) -> bool:
        self.waiting.remove(sequence)
        sequence.move("loading")
        self.loading[sequence.id] = sequence
        self._loads.begin(sequence, cached, now)
        return True

    def _step_aside(self, sequence: Sequence) -> None:
        """Out of the line, until it is told to `resume`."""
        self.waiting.remove(sequence)
        sequence.move("seeking")
        self.seeking[sequence.id] = sequence

    def _seek(self, sequence: Sequence) -> None:
        """Has the store asked what it has of a sequence that waits, where it may have something."""
        if self._loads.look_up(sequence):
            self._step_aside(sequence)

    def resume(self, sequence: Sequence) -> None:
        """To its place in the line: what it was seeking is known."""
        del self.seeking[sequence.id]
        sequence.move("waiting")
        self.waiting.add(sequence)

    def _resume(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self.resume(sequence)

    def loaded(self, sequence: Sequence, tokens: int | None) -> None:
        """Its first `tokens` lie computed in its blocks; None: only those that did before."""
        del self.loading[sequence.id]
        if tokens is None:
            self.memory.shrink(sequence)
        else:
            self.memory.fill(sequence, tokens)
        sequence.move("prefilling")
        self.prefilling.add(sequence)
        self._prompts.begin(sequence)

    # ---- coming and leaving

    def accept(self, sequence: Sequence) -> None:
        """A new sequence, into the waiting line; or beside it while its grammar is compiled, or the store is asked what
        it has of it."""
        self.by_id[sequence.id] = sequence
        self._guided += sequence.generation.grammar is not None
        if self._grammars.ready(sequence.generation.grammar):
            self.waiting.add(sequence)
            self._seek(sequence)
        else:
            sequence.move("compiling")
            self.compiling[sequence.id] = sequence
            self._grammars.wait(sequence)

    def compiled(self, sequence: Sequence) -> None:
        """Its grammar is ready."""
        del self.compiling[sequence.id]
        self.wait(sequence)

    def wait(self, sequence: Sequence) -> None:
        """Into the waiting line, with all its tokens known. The store may have what it lacks."""
        sequence.move("waiting")
        self.waiting.add(sequence)
        self._seek(sequence)

    def end(self, sequence: Sequence) -> None:
        """Takes `sequence` out, whatever its phase; its blocks are free for the next plan."""
        if sequence.phase == "waiting":
            self.waiting.remove(sequence)
        elif sequence.phase == "compiling":
            del self.compiling[sequence.id]
            self._grammars.leave(sequence)
        self.seeking.pop(sequence.id, None)
        self._loads.forget(sequence)
        self._release(sequence)
        del self.by_id[sequence.id]
        self._guided -= sequence.generation.grammar is not None
        sequence.move("ended")

    def _release(self, sequence: Sequence) -> None:
        """Takes a sequence that has blocks from its place and gives them back; the workers hear with the next plan."""
        match sequence.phase:
            case "prefilling":
                self.prefilling.remove(sequence)
                self._resume(self._prompts.left(sequence))
            case "decoding":
                self.decoding.remove(sequence)
            case "handing":
                del self.handing[sequence.id]
            case "loading":
                del self.loading[sequence.id]
                self._loads.leave(sequence)
            case _:
                return
        self.memory.release(sequence)
        sequence.planned = 0
        if sequence.introduced:
            sequence.introduced = False
            self._released.append(sequence.id)


def _new_size(sequence: Sequence) -> int:
    """About the bytes that telling the workers of it takes, where they are many."""
    return len(sequence.tokens) * TOKEN_BYTES + sequence.list_bytes


def _sampling(sequence: Sequence) -> SamplingParams:
    """The client's, without what it has been told already."""
    sampling = sequence.generation.sampling
    told = sampling.prompt_logprobs is not None and not sequence.scored
    return replace(sampling, prompt_logprobs=None) if told else sampling


def _new_sequence(sequence: Sequence, cached: int) -> NewSequence:
    generation = sequence.generation
    return NewSequence(
        sequence=sequence.id,
        tokens=pack(sequence.tokens),
        prompt_length=sequence.prompt_length,
        computed=cached,
        blocks=pack(sequence.blocks[: blocks_for(cached)]),
        sampling=_sampling(sequence),
        min_tokens=generation.stopping.min_tokens,
        stop_token_ids=tuple(sorted(sequence.stops)),
        grammar=generation.grammar,
    )
