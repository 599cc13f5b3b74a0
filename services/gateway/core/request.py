"""One open request, as the supervision sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from shared.ids import Attempt, DetokenizerId, EngineId, RequestId
from shared.messages.tokenizer import Tokenize
from shared.tokens import pack

Stage = Literal["dispatched", "queued", "placed", "paused"]
"""dispatched: at a tokenizer or coordinator. queued: at a coordinator, every engine is full. placed: an engine has
it. paused: between two attempts."""

FOLLOWS: dict[Stage, frozenset[Stage]] = {
    "dispatched": frozenset({"queued", "placed", "paused", "dispatched"}),
    "queued": frozenset({"placed", "paused", "dispatched"}),
    "placed": frozenset({"paused", "dispatched"}),
    "paused": frozenset({"dispatched"}),
}


FIRST = Attempt(1)


class IllegalStage(Exception):
    """A stage that may not follow the present one: a bug of the supervision."""


@dataclass(slots=True)
class OpenRequest:
    """Owns what is known of a request and of its newest attempt."""

    tokenize: Tokenize
    """As first dispatched; later attempts are derived from it."""
    opened_at: float
    unplaced_since: float
    quiet_since: float
    """When something of the attempt was last heard."""
    stage: Stage = "dispatched"
    attempt: Attempt = FIRST
    engine: EngineId | None = None
    """None while unplaced, and where tokens overtook the word of their placement."""
    detokenizer: DetokenizerId | None = None
    handed_by: EngineId | None = None
    """Who had this attempt before `engine`."""
    tokens: list[int] = field(default_factory=list)
    chars: int = 0
    avoid: tuple[EngineId, ...] = ()
    usage_told: bool = False
    prompt_tokens: int | None = None
    """None: not told yet."""
    scored: int = 1
    """Leading tokens of the prompt whose log-probabilities came; the first has none."""
    silent_tries: int = 0
    """Times in this stretch that tokenizer and coordinator left it unplaced and silent."""
    pauses: int = 0
    """Pauses since its last new token."""
    fruitless: int = 0
    """Placed attempts in a row that brought no token."""
    failed: int = 0
    """Placed attempts that failed."""
    resume_at: float = 0.0
    asking: bool = False
    asked_at: float = 0.0
    doubts: int = 0
    """Suspicious answers in a row."""
    unanswered: int = 0
    ask_at: float | None = None
    """When to ask even though it was not silent for long."""

    @property
    def request(self) -> RequestId:
        return self.tokenize.request

    def move(self, stage: Stage) -> None:
        if stage not in FOLLOWS[self.stage]:
            raise IllegalStage(f"{self.request} attempt {self.attempt}: {self.stage} may not become {stage}")
        self.stage = stage

    def place(self, engine: EngineId | None, detokenizer: DetokenizerId, now: float) -> None:
        self.move("placed")
        self.engine, self.detokenizer, self.quiet_since = engine, detokenizer, now
        self.silent_tries = 0

    @property
    def misses_scores(self) -> bool:
        """Whether output came before all that was asked of the prompt: something was lost on the way."""
        asked = self.tokenize.sampling.prompt_logprobs is not None
        return asked and not self.tokens and self.scored != self.prompt_tokens

    def take(self, tokens: tuple[int, ...], text: str, now: float) -> None:
        """New output arrived where it was expected."""
        self.quiet_since = now
        if tokens:
            self.tokens.extend(tokens)
            self.fruitless = self.pauses = 0
        self.chars += len(text)
        if self.doubts or self.unanswered or self.ask_at is not None:
            self.calm()

    def calm(self) -> None:
        self.doubts = self.unanswered = 0
        self.ask_at = None

    def begin_attempt(self, now: float) -> None:
        """Forgets where the last attempt was; everything that carries its number is stale from here on. What follows
        is a pause or a dispatch."""
        if self.stage == "placed":
            self.unplaced_since = now
        self.attempt = Attempt(self.attempt + 1)
        self.engine = self.detokenizer = self.handed_by = None
        self.asking = False
        self.calm()

    def message(self) -> Tokenize:
        """What to dispatch for the present attempt."""
        sampling = self.tokenize.sampling
        if self.tokens and sampling.prompt_logprobs is not None:  # told before the first token
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            self.tokenize,
            sampling=sampling,
            attempt=self.attempt,
            resume=pack(self.tokens),
            sent_chars=self.chars,
            avoid=self.avoid,
        )
