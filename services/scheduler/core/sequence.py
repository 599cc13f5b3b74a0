"""One request inside the engine: its tokens, how far they are planned, its blocks, and the phase it is in."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

from shared.blocks import BlockHash, next_hash, root_hash, split_hashes
from shared.ids import DetokenizerId, EngineId, NodeId, SequenceId
from shared.messages.detokenizer import NewTokens
from shared.messages.generation import FinishReason
from shared.messages.scheduler import GenerateRequest
from shared.messages.worker import MAX_POOLED_BYTES_PER_PLAN, GrammarRef, SequenceWork
from shared.packing import pack, unpack
from shared.reliability.transitions import extend_history

FLOAT_BYTES = 4
"""Of each element of a vector."""

SequencePhase = Literal[
    "waiting",
    "quarantined",
    "compiling",
    "seeking",
    "loading",
    "leaving",
    "prefilling",
    "decoding",
    "handing",
    "returning",
    "ended",
]

NEXT_PHASES: dict[SequencePhase, frozenset[SequencePhase]] = {
    "waiting": frozenset({"quarantined", "compiling", "seeking", "loading", "leaving", "prefilling", "ended"}),
    "quarantined": frozenset({"prefilling", "ended"}),
    "compiling": frozenset({"waiting", "ended"}),
    "seeking": frozenset({"waiting", "ended"}),
    "loading": frozenset({"prefilling", "ended"}),
    "leaving": frozenset({"ended"}),
    "prefilling": frozenset({"decoding", "handing", "waiting", "ended"}),
    "decoding": frozenset({"returning", "waiting", "ended"}),
    "handing": frozenset({"decoding", "ended"}),
    "returning": frozenset({"waiting", "ended"}),
    "ended": frozenset(),
}
"""The phases that may follow each phase.

quarantined: a process died with it, and it waits beside the queue until it may be computed alone
(`planning/isolation.py`). compiling: it waits outside the queue for the workers to compile its grammar. seeking: it
waits outside the queue for the KV store's answer, or for another sequence to load or compute the same blocks. loading:
its blocks are being filled from the store. leaving: another engine is sent it, and computes its prompt. handing: its
only token here is drawn, and its blocks are being saved for the decode engine. returning: it was preempted while
sampled tokens were still on their way, and waits again once they have arrived.
"""


class QueueKey(NamedTuple):
    """The order in every queue. Keys compare as tuples; the smallest is served first and preempted last."""

    priority: int
    arrival: float
    ticket: int


@dataclass(slots=True)
class AcceptanceRate:
    """The probability that a draft is accepted if those before it were, from counts that fade with each step."""

    FADE: ClassVar = 0.9
    """The factor by which a step reduces the weight of earlier ones."""
    FADE_UNTRIED: ClassVar = 0.98
    """The factor for a step without drafts. It makes an old rate fade, so that drafts are tried again some time."""

    _accepted: float = 0.0
    _tried: float = 0.0

    def record(self, drafted: int, accepted: int) -> None:
        """Adds one step's drafts. Those behind the first rejected one count as not tried."""
        self._accepted = self._accepted * self.FADE + accepted
        self._tried = self._tried * self.FADE + min(drafted, accepted + 1)

    def decay(self) -> None:
        """Records a step that tried no drafts."""
        self._accepted *= self.FADE_UNTRIED
        self._tried *= self.FADE_UNTRIED

    def rate(self, assumed: float) -> float:
        """The probability from 0 to 1; `assumed` counts as one more trial."""
        return (self._accepted + assumed) / (self._tried + 1.0)


class TokenState:
    """Owns the tokens of one sequence, and how many of them are planned. Only its methods write its fields.

    `planned` ≤ `length`: of `length` tokens (known ones, and those that are being sampled) the first `planned` have
    been given to the workers to compute. The last token of all is never computed, because nothing follows it. Both are
    upper bounds while steps are in flight that may yield several tokens; each result corrects them.
    """

    __slots__ = (
        "_embeds",
        "_hashed",
        "_lora",
        "_salt",
        "block_size",
        "hashes",
        "known",
        "length",
        "limit",
        "min_length",
        "planned",
        "prompt_length",
        "stops",
    )

    def __init__(self, generate: GenerateRequest, limit: int, stops: frozenset[int], block_size: int) -> None:
        generation = generate.generation
        self.block_size = block_size
        """Tokens of a block of the engine's KV memory."""
        self.prompt_length = generation.prompt_length
        least = generation.stopping.min_tokens if generation.grammar is None else 0
        self.min_length = generation.prompt_length + least
        """Tokens, prompt and output, below which no stop token ends the sequence. With a grammar one is drawn
        so early only where nothing else may follow."""
        self.limit = limit
        """Tokens, prompt and output, at which the sequence ends with `length`."""
        self.stops = stops
        self.known = array("I", unpack(generation.tokens))
        self.hashes: list[BlockHash] = list(split_hashes(generation.block_hashes))
        """One hash for each full block of known tokens; none at all for a sequence that is not to be cached."""
        self.length = len(self.known)
        self.planned = 0
        self._salt = generation.cache_salt
        self._lora = generation.lora
        self._embeds = generation.prompt_embeds
        self._hashed = generation.prefix_caching

    def append(self, token: int) -> FinishReason | None:
        """Adds the value of the next token. Returns the finish reason if the sequence ends with it, else None."""
        known = self.known
        known.append(token)
        count = len(known)
        if self._hashed and count % self.block_size == 0:
            parent = self.hashes[-1] if self.hashes else root_hash(self._salt, self._lora)
            embeds = b"" if self._embeds is None else self._embeds.of_tokens(count - self.block_size, count)
            self.hashes.append(next_hash(parent, pack(known[-self.block_size :]), embeds))
        if token in self.stops and count > self.min_length:
            return "stop"
        return "length" if count >= self.limit else None

    def plan_decode(self, count: int) -> None:
        """Records a plan that computes one token and yields up to `count`: all but the first are drafts."""
        self.planned += count
        self.length += count

    def plan_prefill(self, count: int) -> bool:
        """Records a plan that computes `count` more tokens of the prompt. Returns whether it is whole with them: then
        the step draws a token."""
        self.planned += count
        whole = self.planned == self.length
        self.length += whole
        return whole

    def retract(self, count: int, *, planned: bool) -> None:
        """Corrects the upper bounds: a step yielded `count` tokens fewer; `planned`: they had been planned, too."""
        self.length -= count
        if planned:
            self.planned -= count

    def set_planned(self, count: int) -> None:
        """Sets that exactly the first `count` tokens are computed in the sequence's blocks."""
        self.planned = count

    @property
    def produced(self) -> int:
        """Output tokens known, those of earlier attempts included."""
        return len(self.known) - self.prompt_length

    @property
    def in_flight(self) -> bool:
        """Whether a token is being sampled whose value is not known yet."""
        return self.length > len(self.known)


@dataclass(slots=True)
class BlockTable:
    """The blocks of KV memory that one sequence holds. Only `BlockAllocator` writes its fields."""

    numbers: list[int] = field(default_factory=list)
    """Where layers have tables of their own, all tables' ids for each block of tokens (`HybridBlockAllocator`)."""
    capacity: int = 0
    """Tokens that the blocks have room for."""
    indexed: int = 0
    """Number of leading blocks that were offered to the prefix index."""
    given_back: list[int] = field(default_factory=list)
    """For each table of its own the number of leading blocks that lie behind the window; empty where there is one
    table for all layers."""
    encoded: list[int] = field(default_factory=list)
    """Those of rows beside its prompt (`EncodedBlockAllocator`)."""
    encoded_name: bytes | None = None
    """What these rows are, once that was looked at."""


class TransferState:
    """Where a sequence's blocks may come from, and which engine continues it. Only its methods write its fields."""

    __slots__ = (
        "decode_node",
        "decode_on",
        "kv_source",
        "loaded_tokens",
        "partial",
        "passed_by",
        "preempted",
        "prefill_on",
        "remote_from",
        "unsought",
    )

    def __init__(self, generate: GenerateRequest) -> None:
        handed = generate.handed
        self.decode_on: EngineId | None = generate.decode_on
        """The engine that the sequence is handed over to after its first token; None: it stays."""
        self.decode_node: NodeId | None = generate.decode_node
        """The node of that engine, where it is another one than this engine's."""
        self.kv_source: NodeId | None = generate.kv_source if handed is None else handed.node
        """The node whose KV store probably holds its blocks; None if none is known."""
        self.partial = BlockHash(handed.partial) if handed is not None and handed.partial else None
        """Hash of its last, partial block in the store, if it was handed over; else None."""
        self.loaded_tokens = 0
        """How many of its tokens lie in blocks that were loaded from a KV store."""
        self.preempted = False
        """Whether it lost its blocks to others, and has not begun again."""
        self.unsought = False
        """Whether it has to be looked up in the store, when its turn comes, for what it has lost."""

        self.prefill_on: EngineId | None = generate.prefill_on
        """The engine that may compute its prompt, if that pays when its turn has come; None: none may."""
        self.remote_from = generate.remote_from
        """Tokens to compute from which on it pays."""
        self.passed_by: EngineId | None = generate.passed_by
        """The decode engine that has passed it on before its prompt was computed; None without one."""

    def preempt(self) -> None:
        """It loses its blocks to others. What these leave of them shows only when its turn comes again."""
        self.preempted = self.unsought = True
        self.loaded_tokens = 0

    def record_loaded(self, tokens: int) -> None:
        """Blocks of so many tokens were loaded."""
        self.loaded_tokens = tokens

    def seek(self) -> None:
        """The store is asked for what it has lost, or need not be."""
        self.unsought = False

    def resume(self) -> bool:
        """It has blocks again; returns whether it had lost some."""
        preempted, self.preempted = self.preempted, False
        return preempted

    def stay(self) -> None:
        """The sequence is decoded here instead of being handed over."""
        self.decode_on = None

    def forget_partial(self) -> None:
        """The partial block in the store is no longer needed: it was loaded, or is computed instead."""
        self.partial = None


@dataclass(slots=True)
class StreamState:
    """The state of the sequence's stream at the detokenizer. Only `TokenStreams` writes its fields."""

    opened: bool
    """Whether `OpenStream` was sent."""
    interval: int = 1
    """Steps whose tokens are sent together."""
    begun: bool = False
    """Whether tokens of it were sent from here: the first ones are sent at once."""
    held: NewTokens | None = None
    """Its tokens that are not sent yet."""
    cached_tokens: int = 0
    """Prompt tokens that a cache held, as reported to the client."""


class Sequence:
    """One request inside the engine. Its state lies in parts with one writer each; only `move` writes the phase."""

    __slots__ = (
        "acceptance",
        "blocks",
        "decode_work",
        "detokenizer",
        "drawn_in",
        "generation",
        "grammar",
        "history",
        "id",
        "last_token_at",
        "phase",
        "prompt_waits",
        "queue_key",
        "stream",
        "tokens",
        "transfer",
    )

    def __init__(
        self, generate: GenerateRequest, queue_key: QueueKey, limit: int, stops: frozenset[int], block_size: int
    ) -> None:
        generation = generate.generation
        self.generation = generation
        grammar = generation.grammar
        self.grammar = None if grammar is None else GrammarRef(grammar.key, grammar.after)
        """As the workers know it; its text is in `generation`."""
        self.detokenizer: DetokenizerId = generate.detokenizer
        self.queue_key = queue_key
        self.id = SequenceId(queue_key.ticket)
        """The same after a preemption: the workers receive the release before they receive the sequence again."""
        self.decode_work = SequenceWork(self.id, 1, b"", True)
        """The work of a decode step that needs no new block. It is always the same, so it is made once."""
        self.phase: SequencePhase = "waiting"
        self.history: list[SequencePhase] = ["waiting"]
        self.tokens = TokenState(generate, limit, stops, block_size)
        self.blocks = BlockTable()
        self.transfer = TransferState(generate)
        # Stop strings are found by the detokenizer: what is drawn until then is drawn for nothing.
        interval = 1 if generation.stopping.stop else generation.stream_interval
        self.stream = StreamState(opened=generate.handed is not None, interval=interval)
        self.acceptance = AcceptanceRate()
        """The acceptance rate of its own drafts; written by `SpeculationBudget`."""
        self.prompt_waits = 0
        """How often it waited for other sequences that compute the same blocks; written by `SharedPrompts`."""
        self.drawn_in = 0
        """Number of the plan that draws its latest token, if the engine has several stages; written by
        `MicroBatches`."""
        self.last_token_at = 0.0
        """When its latest token was sampled, or it came; written by `EngineRequests`, then by `StepResults`."""

    def move(self, phase: SequencePhase) -> None:
        """Enters `phase`. Raises IllegalTransition if it may not follow the present one."""
        self.history = extend_history(NEXT_PHASES, self.history, phase, self.generation.request)
        self.phase = phase

    @property
    def sent(self) -> int:
        """Output tokens that its detokenizer was sent, those of earlier attempts included."""
        held = self.stream.held
        return self.tokens.produced - (0 if held is None else len(held.tokens))

    @property
    def suspected(self) -> bool:
        """Whether it is to be computed alone: a process died with it, at a position that it has not passed yet."""
        until = self.generation.suspect_until
        return until is not None and self.tokens.produced < until

    @property
    def reusable(self) -> int:
        """Leading tokens that need not be computed if their blocks are cached: all but the last, from which the next
        one is drawn. It is 0 if the prompt's log-probabilities are requested, or the hidden states of all its tokens,
        as only computing yields them."""
        pooling = self.generation.pooling
        computes_all = self.scored or (pooling is not None and pooling.computes_all)
        return 0 if computes_all else len(self.tokens.known) - 1

    @property
    def reusable_blocks(self) -> int:
        """Leading full blocks among the `reusable` tokens."""
        return self.reusable // self.tokens.block_size

    @property
    def pooled(self) -> bool:
        """Whether its prompt becomes a vector, and nothing is generated."""
        return self.generation.pooling is not None

    @property
    def whole(self) -> bool:
        """Whether its prompt has to be computed in one step."""
        pooling = self.generation.pooling
        return pooling is not None and pooling.whole

    @property
    def vector_bytes(self) -> int:
        """Size of the vector, or vectors, that its prompt becomes; at most what one plan may report."""
        pooling = self.generation.pooling
        if pooling is None:
            return 0
        vectors = pooling.vectors(self.tokens.known)
        return min(vectors * pooling.dimensions * FLOAT_BYTES, MAX_POOLED_BYTES_PER_PLAN)

    @property
    def scored(self) -> bool:
        """Whether its prompt is computed for its log-probabilities. They are sent before the first token."""
        return self.generation.sampling.prompt_logprobs is not None and not self.tokens.produced
