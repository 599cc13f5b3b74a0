"""One request inside the engine: its tokens, how far they are planned, and the phase it is in."""

from __future__ import annotations

from array import array
from typing import Literal, NamedTuple

from shared.blocks import BLOCK_SIZE, BlockHash, next_hash, root_hash, split_hashes
from shared.ids import DetokenizerId, EngineId, NodeId, SequenceId
from shared.messages.generation import FinishReason, SamplingParams
from shared.messages.scheduler import Generate
from shared.messages.worker import Work
from shared.tokens import pack, unpack

Phase = Literal["waiting", "compiling", "seeking", "loading", "prefilling", "decoding", "handing", "returning", "ended"]

FOLLOWS: dict[Phase, frozenset[Phase]] = {
    "waiting": frozenset({"compiling", "seeking", "loading", "prefilling", "ended"}),
    "compiling": frozenset({"waiting", "ended"}),
    "seeking": frozenset({"waiting", "ended"}),
    "loading": frozenset({"prefilling", "ended"}),
    "prefilling": frozenset({"decoding", "handing", "waiting", "ended"}),
    "decoding": frozenset({"returning", "waiting", "ended"}),
    "handing": frozenset({"decoding", "ended"}),
    "returning": frozenset({"waiting", "ended"}),
    "ended": frozenset(),
}
"""compiling: out of the line until the workers have compiled its grammar. seeking: the same until the KV store has
answered, or others have loaded or computed the same blocks. loading: its blocks are being filled from the store.
handing: drew its one token here; its blocks are being saved for the engine that goes on. returning: preempted while
sampled tokens were still on their way; waits again once those have come."""


class IllegalStep(Exception):
    """A phase that may not follow the present one; the text holds the history."""


class Rank(NamedTuple):
    """The place in any line: compared as a tuple, smaller goes first and is preempted last."""

    priority: int
    arrival: float
    ticket: int


class Acceptance:
    """How likely a draft is accepted whose predecessors were, from counts that fade with each step."""

    __slots__ = ("_accepted", "_tried")

    FADE = 0.9
    """What a step leaves of the weight of those before it."""
    FADE_UNTRIED = 0.98
    """The same for a step without drafts: what is not tried is forgotten, and so is tried again some time."""

    def __init__(self) -> None:
        self._accepted = self._tried = 0.0

    def note(self, drafted: int, accepted: int) -> None:
        """The first that is rejected ends the trial of those behind it."""
        self._accepted = self._accepted * self.FADE + accepted
        self._tried = self._tried * self.FADE + min(drafted, accepted + 1)

    def fade(self) -> None:
        self._accepted *= self.FADE_UNTRIED
        self._tried *= self.FADE_UNTRIED

    def rate(self, assumed: float) -> float:
        """`assumed` counts as one trial more."""
        return (self._accepted + assumed) / (self._tried + 1.0)


class Sequence:
    """Owned by the engine; a field is written by the one part of the core that its comment names.

    `planned` ≤ `length`: of `length` tokens (known ones, and those that are being sampled) the first `planned` have
    been given to the workers to compute. The last token of all is never computed: nothing follows it. Both are upper
    bounds while steps are in flight that may yield several tokens; with each result they are corrected.
    """

    __slots__ = (
        "acceptance",
        "awaited",
        "blocks",
        "cached_tokens",
        "capacity",
        "decode_on",
        "decode_work",
        "detokenizer",
        "drawn_in",
        "generation",
        "hashes",
        "history",
        "id",
        "indexed",
        "introduced",
        "kv_source",
        "length",
        "limit",
        "list_bytes",
        "min_length",
        "opened",
        "partial",
        "phase",
        "planned",
        "prompt_length",
        "rank",
        "stops",
        "tokens",
    )

    def __init__(self, generate: Generate, rank: Rank, limit: int, stops: frozenset[int]) -> None:
        generation = generate.generation
        self.generation = generation
        self.detokenizer: DetokenizerId = generate.detokenizer
        self.rank = rank
        self.id = SequenceId(rank.ticket)
        """Kept over a preemption: the workers hear of the release before they hear of the sequence again."""
        self.list_bytes = _list_bytes(generation.sampling)
        """What the lists of its sampling parameters take on the wire."""
        self.decode_work = Work(self.id, 1, b"", True)
        """The same for every decode step that needs no new block, so it is made once."""
        self.prompt_length = generation.prompt_length
        self.min_length = generation.prompt_length + generation.stopping.min_tokens
        self.limit = limit
        """Tokens, prompt and output, at which it ends as `length`."""
        self.stops = stops
        self.phase: Phase = "waiting"
        self.history: list[Phase] = ["waiting"]
        handed = generate.handed
        self.decode_on: EngineId | None = generate.decode_on
        """Who takes it over once its first token is drawn."""
        self.kv_source: NodeId | None = generate.kv_source if handed is None else handed.node
        """Whose KV store is likely to hold its blocks."""
        self.partial = BlockHash(handed.partial) if handed is not None and handed.partial else None
        """The name of its last, partial block in the store, where it was handed over."""
        # written when results come
        self.tokens = array("I", unpack(generation.tokens))
        self.hashes: list[BlockHash] = list(split_hashes(generation.block_hashes))
        # written by the planner
        self.length = len(self.tokens)
        self.planned = 0
        self.introduced = False
        """Whether the workers know it."""
        # written by SharedPrompts
        self.awaited = 0
        """Times that it waited for others to compute what it needs, too."""
        # written by Speculation
        self.acceptance = Acceptance()
        # written by MicroBatches
        self.drawn_in = 0
        """The plan that draws its latest token, where the engine has several stages."""
        # written by KvMemory
        self.blocks: list[int] = []
        self.capacity = 0
        """Tokens that `blocks` have room for."""
        self.indexed = 0
        """Leading blocks that were offered to the prefix index."""
        # written by Streams
        self.opened = handed is not None
        self.cached_tokens = 0
        """As the client is told."""

    def move(self, phase: Phase) -> None:
        """Enters `phase`. Raises IllegalStep."""
        if phase not in FOLLOWS[self.phase]:
            raise IllegalStep(f"{self.generation.request}: {' → '.join([*self.history, phase])}")
        self.phase = phase
        self.history = [*self.history[-15:], phase]

    def learn(self, token: int) -> FinishReason | None:
        """The value of the next token came back. How the sequence ends with it, if it does."""
        tokens = self.tokens
        tokens.append(token)
        known = len(tokens)
        if known % BLOCK_SIZE == 0:
            parent = self.hashes[-1] if self.hashes else root_hash(self.generation.cache_salt)
            self.hashes.append(next_hash(parent, pack(tokens[-BLOCK_SIZE:])))
        if token in self.stops and known > self.min_length:
            return "stop"
        return "length" if known >= self.limit else None

    @property
    def reusable(self) -> int:
        """Leading tokens that need not be computed where their blocks are found: all but the last, from which the
        next is drawn. None of a prompt of which log-probabilities are wanted: only computing gives them."""
        return 0 if self.scored else len(self.tokens) - 1

    @property
    def scored(self) -> bool:
        """Whether its prompt is to be computed for its log-probabilities. They are told before the first token."""
        return self.generation.sampling.prompt_logprobs is not None and not self.produced

    @property
    def produced(self) -> int:
        """Output tokens known, those of earlier attempts included."""
        return len(self.tokens) - self.prompt_length

    @property
    def awaits_token(self) -> bool:
        return self.length > len(self.tokens)


def _list_bytes(sampling: SamplingParams) -> int:
    """An upper bound: a token takes up to 5 bytes, a word's frame 3, a bias 15."""
    words = sum(3 + 5 * len(word) for word in sampling.bad_words)
    return 5 * len(sampling.allowed_token_ids or ()) + 15 * len(sampling.logit_bias) + words
