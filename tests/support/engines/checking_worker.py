"""A worker for tests of the scheduler: its KV memory remembers what was written, so a wrong block table shows.

The "keys and values" of a position are a digest of all tokens up to it; computing a token checks that every position
before it lies in the sequence's blocks as it should. The next token is a function of that digest, so that the right
output of any prompt is known without a scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.blocks import hash_chain
from shared.ids import (
    Attempt,
    DetokenizerId,
    EngineId,
    GatewayId,
    GrammarKey,
    Incarnation,
    LoraId,
    ModelName,
    RequestId,
    SequenceId,
)
from shared.kv_groups import NULL_BLOCK, KvCacheGroup, StateRecords
from shared.messages.generation import (
    Generation,
    Grammar,
    PoolingOptions,
    PromptEmbeds,
    SamplingOptions,
    StopConditions,
)
from shared.messages.model_card import LoraCard, ModelCard, PoolingCard
from shared.messages.scheduler import (
    GenerateRequest,
    GrammarCompiled,
    SampledTokens,
    SequencePooled,
    StepFinished,
    StepTiming,
    TransferProgress,
)
from shared.messages.worker import SequenceWork, StepPlan, Transfer
from shared.packing import pack, unpack
from tests.support.engines.checking_store import HonestStore

VOCABULARY = 24
EOS = 3
TIMING = StepTiming(wait=0.0, prepare=0.0, forward=0.0, sample=0.0)
GATEWAY = GatewayId("gateway-1")
LORAS = tuple(LoraId(bytes([number]) * 16) for number in range(4))
"""Adapters that the worker serves."""
DETOKENIZER = DetokenizerId("detokenizer-1")


def card(max_model_len: int = 256) -> ModelCard:
    return ModelCard(
        name=ModelName("m"),
        max_model_len=max_model_len,
        vocab_size=VOCABULARY,
        eos_token_ids=(EOS,),
        dtype="float32",
        created=0,
        pooling=PoolingCard(pooling="last", normalize=True, size=2**16),
        loras=tuple(
            LoraCard(name=ModelName(f"adapter-{number}"), id=each, rank=8) for number, each in enumerate(LORAS)
        ),
    )


def generate(
    request: str,
    prompt: list[int],
    *,
    attempt: int = 1,
    resume: tuple[int, ...] = (),
    detokenizer: DetokenizerId = DETOKENIZER,
    arrival: float = 0.0,
    priority: int = 0,
    cache_salt: str | None = None,
    prefix_caching: bool = True,
    decode_on: EngineId | None = None,
    grammar: Grammar | None = None,
    pooling: PoolingOptions | None = None,
    suspect_until: int | None = None,
    block_size: int = BLOCK_SIZE,
    lora: LoraId | None = None,
    embeds: PromptEmbeds | None = None,
    **stopping: object,
) -> GenerateRequest:
    """A request as the coordinator sends it; `stopping` are fields of StopConditions."""
    tokens = pack([*prompt, *resume])
    generation = Generation(
        request=RequestId(request),
        attempt=Attempt(attempt),
        gateway=GATEWAY,
        model=ModelName("m"),
        tokens=tokens,
        prompt_length=len(prompt),
        block_hashes=b"".join(hash_chain(tokens, cache_salt, block_size, lora, embeds)) if prefix_caching else b"",
        sampling=SamplingOptions(seed=0),
        stopping=StopConditions(**stopping),  # type: ignore[arg-type]
        priority=priority,
        arrival=arrival,
        cache_salt=cache_salt,
        grammar=grammar,
        pooling=pooling,
        prefix_caching=prefix_caching,
        suspect_until=suspect_until,
        lora=lora,
        prompt_embeds=embeds,
    )
    return GenerateRequest(generation, detokenizer, decode_on)


def digests(tokens: list[int]) -> list[int]:
    """Of each beginning of `tokens`, from the first token on."""
    return list(accumulate(tokens, lambda result, token: hash((result, token)), initial=0))[1:]


def digest(tokens: list[int]) -> int:
    return digests(tokens)[-1] if tokens else 0


def next_token(tokens: list[int]) -> int:
    return digest(tokens) % VOCABULARY


def continuation(tokens: list[int], count: int) -> list[int]:
    """The next tokens behind `tokens`."""
    state, drawn = digest(tokens), list[int]()
    for _ in range(count):
        drawn.append(state % VOCABULARY)
        state = hash((state, drawn[-1]))
    return drawn


def right_output(request: GenerateRequest, context: int) -> tuple[list[int], str]:
    """All output tokens of a request and how it finishes, computed one by one."""
    generation, stopping = request.generation, request.generation.stopping
    tokens = unpack(generation.tokens)[: generation.prompt_length]
    stops = {*stopping.stop_token_ids, *(() if stopping.ignore_eos else (EOS,))}
    least = stopping.min_tokens if generation.grammar is None else 0
    room = context - len(tokens) if stopping.max_tokens is None else stopping.max_tokens
    output: list[int] = []
    state = digest(tokens)
    while len(output) < room:
        output.append(state % VOCABULARY)
        state = hash((state, output[-1]))
        if output[-1] in stops and len(output) > least:
            return output, "stop"
    return output, "length"


@dataclass
class _Held:
    tokens: list[int]
    blocks: list[int]
    computed: int
    pooling: PoolingOptions | None = None


class HonestWorker:
    """Executes plans one by one. `step` gives the result that a real worker would publish. `accepts` says how many of
    so many drafts are accepted; where it is None, a plan with drafts is none of ours.

    What is to be loaded lies there as rubbish until the last rank has copied it, and what is to be saved is read only
    then: who uses the blocks too early, or gives them away, is found out.

    With places for `checkpoints` of states a sequence begins behind computed tokens only by a checkpoint of these. Each
    has as many pages behind the blocks as `records` says, which are saved and loaded as blocks are.

    With `groups` of layers each has a table of its own, and other keys and values than the rest. What lies behind its
    window it does not read.
    """

    def __init__(
        self,
        num_blocks: int,
        store: HonestStore | None = None,
        ranks: int = 1,
        accepts: Callable[[int], int] | None = None,
        groups: tuple[KvCacheGroup, ...] = (),
        checkpoints: int | None = None,
        records: StateRecords | None = None,
    ) -> None:
        self._has_states = checkpoints is not None
        self._pages = 1 if records is None else records.pages
        self._reads_blocks = records is None or not records.alone
        self._blocks = num_blocks
        self._accepts = accepts
        self._groups = groups or (KvCacheGroup(layers=1),)
        self._has_null_block = bool(groups)
        self.computed_tokens = 0
        self.compiling: list[Grammar] = []
        """Those that were requested, and are not answered."""
        self._compiled: set[GrammarKey] = set()
        self._store = store
        self._done = [0] * ranks
        self._failed: set[int] = set()
        self.copies: deque[Transfer] = deque()
        """That some rank has not done yet."""
        rooms = num_blocks + (checkpoints or 0) * self._pages
        self._memory: list[list[int | None]] = [[None] * BLOCK_SIZE for _ in range(rooms)]
        self._held: dict[SequenceId, _Held] = {}
        self._expected: tuple[int, int] | None = None

    def step(self, plan: StepPlan) -> StepFinished:
        self._check_order(plan)
        self._begin_copying(plan)
        for released in plan.released:
            del self._held[released]
        for new in plan.new:
            assert new.sequence not in self._held, "a sequence is sent twice"
            assert new.computed < len(unpack(new.tokens)), "nothing is left to compute"
            assert len(unpack(new.blocks)) == -(-new.computed // BLOCK_SIZE) * len(self._groups)
            assert new.grammar is None or new.grammar.key in self._compiled, "its grammar was never compiled"
            assert new.pooling is None or not new.pooling.computes_all or not new.computed, "hidden states are missing"
            self._held[new.sequence] = _Held(unpack(new.tokens), unpack(new.blocks), new.computed, new.pooling)
        self._restore(plan)
        self._compiled -= set(plan.forget)
        self.compiling += [grammar for grammar in plan.compile if grammar not in self.compiling]
        accepted = [self._accepts(work.speculate) if self._accepts else 0 for work in plan.work]
        each = list(zip(plan.work, accepted, strict=True))
        writes = [self._compute(self._held[work.sequence], work, count) for work, count in each]
        assert len(set().union(*writes)) == sum(map(len, writes)), "two sequences write to one place"
        self._keep(plan)
        sampled = tuple(self._sample(work, count) for work, count in each if work.sample)
        pooling = [work.sequence for work in plan.work if work.sample and self._held[work.sequence].pooling is not None]
        pooled = tuple(SequencePooled(sequence, self._vector(self._held[sequence])) for sequence in pooling)
        drafted = sum(work.speculate for work in plan.work)
        positions = tuple(sum(count > place for count in accepted) for place in range(max(accepted, default=0)))
        return StepFinished(
            epoch=plan.epoch,
            step=plan.step,
            sampled=sampled,
            timing=TIMING,
            drafted=drafted,
            accepted=positions,
            pooled=pooled,
        )

    def compile(self, error: str | None = None) -> GrammarCompiled:
        """The oldest requested grammar is ready, or never will be."""
        assert self._expected is not None
        grammar = self.compiling.pop(0)
        if error is None:
            self._compiled.add(grammar.key)
        return GrammarCompiled(epoch=Incarnation(self._expected[0]), grammar=grammar.key, error=error)

    def _restore(self, plan: StepPlan) -> None:
        """Every new sequence of which some is computed has the states behind it."""
        places = {copy.sequence: copy.checkpoint for copy in plan.restored}
        begun = {new.sequence: self._held[new.sequence] for new in plan.new if new.computed}
        assert places.keys() == (begun.keys() if self._has_states else set())
        for sequence, place in places.items():
            held = begun[sequence]
            assert self._checkpoint(place) == self._states(held), "the states are of other tokens"

    def _keep(self, plan: StepPlan) -> None:
        working = {work.sequence for work in plan.work}
        for copy in plan.checkpoints:
            assert copy.sequence in working
            pages = self._checkpoint(copy.checkpoint)
            for page, states in zip(pages, self._states(self._held[copy.sequence]), strict=True):
                page[:] = states

    def _checkpoint(self, place: int) -> list[list[int | None]]:
        first = self._blocks + place * self._pages
        pages = self._memory[first : first + self._pages]
        assert len(pages) == self._pages, "there is no such checkpoint"
        return pages

    def _states(self, held: _Held) -> list[list[int | None]]:
        """What the pages of a checkpoint of its states hold."""
        states = digest(held.tokens[: held.computed])
        return [[states + number] * BLOCK_SIZE for number in range(self._pages)]

    def _check_order(self, plan: StepPlan) -> None:
        if self._expected is None or self._expected[0] != plan.epoch:
            assert plan.step == 0
            self._held.clear()
            self.compiling.clear()
            self._compiled.clear()
            self._done, self._failed = [0] * len(self._done), set()
            self.copies.clear()
        else:
            assert plan.step == self._expected[1]
        self._expected = (plan.epoch, plan.step + 1)

    def _begin_copying(self, plan: StepPlan) -> None:
        for transfer in plan.transfers:
            assert transfer.number == max([min(self._done) - 1, *(t.number for t in self.copies)]) + 1
            self.copies.append(transfer)
            if transfer.kind == "load":
                for block in unpack(transfer.blocks):
                    self._memory[block] = [None] * BLOCK_SIZE

    def copy(self, rank: int, *, fails: bool = False) -> TransferProgress | None:
        """One rank does its next transfer; None where it has done all."""
        number = self._done[rank]
        transfer = next((t for t in self.copies if t.number == number), None)
        if transfer is None:
            return None
        self._done[rank] += 1
        if fails:
            self._failed.add(number)
        if min(self._done) > number:
            self.copies.popleft()
            if number not in self._failed and not self._copied(transfer):
                self._failed.add(number)
        return self.report(rank)

    def report(self, rank: int) -> TransferProgress | None:
        """How far a rank's copying is; None before its first plan."""
        if self._expected is None:
            return None
        failed = tuple(sorted(n for n in self._failed if n < self._done[rank]))
        return TransferProgress(rank=rank, epoch=Incarnation(self._expected[0]), done=self._done[rank], failed=failed)

    def _copied(self, transfer: Transfer) -> bool:
        assert self._store is not None
        for block, slot in zip(unpack(transfer.blocks), self._store.slots_of(transfer), strict=True):
            if slot is None:
                return False
            if transfer.kind == "save":
                slot.contents = self._memory[block].copy()
            else:
                self._memory[block] = slot.contents.copy()
        return True

    def load(self, blocks: list[int], first: int, tokens: list[int]) -> None:
        """A KV connector fills `blocks`, of which the first is block `first` of a sequence that has these tokens."""
        right = digests(tokens)
        for place, block in enumerate(blocks, first):
            self._memory[block] = list(right[place * BLOCK_SIZE : (place + 1) * BLOCK_SIZE])

    def _compute(self, held: _Held, work: SequenceWork, accepted: int) -> set[tuple[int, int]]:
        """Writes what is accepted as it should be, and rubbish where drafts are rejected."""
        held.blocks += unpack(work.blocks)
        assert work.count > 0
        end = held.computed + work.count
        assert end <= len(held.tokens), "a token is computed before it is known"
        fit = -(-(end + work.speculate) // BLOCK_SIZE) * len(self._groups)
        assert len(held.blocks) >= fit if self._accepts else len(held.blocks) == fit, "blocks do not fit the work"
        assert not work.speculate or (self._accepts and work.sample and work.count == 1), "drafts beside a prompt"
        assert work.sample == (end == len(held.tokens)), "a sample is drawn exactly when all tokens are computed"
        right = digests(held.tokens + continuation(held.tokens, accepted))
        places = set()
        for number, group in enumerate(self._groups):
            table = held.blocks[number :: len(self._groups)]
            first = 0 if group.window is None else max(0, held.computed - group.window + 1)
            for position in range(first, held.computed) if self._reads_blocks else ():
                block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert self._memory[block][offset] == right[position] + number, f"position {position} was overwritten"
            for position in range(held.computed, end + work.speculate):
                block, offset = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                assert block != NULL_BLOCK or not self._has_null_block, "the null block is written to"
                self._memory[block][offset] = right[position] + number if position < end + accepted else None
                places.add((block, offset))
        held.computed = end + accepted
        self.computed_tokens += work.count
        return places

    @staticmethod
    def _vector(held: _Held) -> bytes:
        assert held.pooling is not None
        return digest(held.tokens).to_bytes(8, "little", signed=True).ljust(4 * held.pooling.dimensions, b"\0")

    def _sample(self, work: SequenceWork, accepted: int) -> SampledTokens:
        held = self._held[work.sequence]
        if held.pooling is not None:
            return SampledTokens(work.sequence, ())
        drawn = continuation(held.tokens, accepted + 1)
        held.tokens += drawn
        return SampledTokens(work.sequence, tuple(drawn), drafted=work.speculate)
