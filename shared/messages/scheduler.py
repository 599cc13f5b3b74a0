"""Messages to an engine's scheduler: requests, control, probes, and its workers' results."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import (
    Attempt,
    Count,
    DetokenizerId,
    EngineId,
    GrammarKey,
    Incarnation,
    InstanceId,
    NodeId,
    RequestId,
    SequenceId,
    TokenId,
)
from shared.messages.generation import Generation, TokenLogprobs
from shared.messages.kv_events import PrefixCacheReset, ResetPrefixCache
from shared.messages.worker import SleepLevel


class HandOver(Struct, frozen=True, array_like=True, kw_only=True):
    """What a prefill engine adds when it passes a request on. `Generation.tokens` ends with the token it has drawn."""

    prefilled_by: EngineId
    node: NodeId | None
    """The node whose KV store holds the blocks; None if the prefill engine has no store."""
    partial: bytes = b""
    """The hash under which the prompt's last, partial block lies in that store; empty if there is no partial block."""
    cached_tokens: Count = 0
    """Prompt tokens that the prefill engine found in a cache. The client has already been sent this number."""


class GenerateRequest(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → the engine it chose: generate this; tokens go to `detokenizer`.

    Also prefill engine → decode engine, with `handed`; and decode engine → prefill engine, with `passed_by`.
    """

    generation: Generation
    detokenizer: DetokenizerId
    decode_on: EngineId | None = None
    """Draw one token only, then hand the request over to this engine; None: generate to the end."""
    handed: HandOver | None = None
    kv_source: NodeId | None = None
    """A node whose KV store holds more of the prompt than the engine's own store, according to the coordinator; None if
    there is none."""
    predicted_cached: Count = 0
    """Prompt tokens that the coordinator expects to be cached. Metrics compare it with what was cached."""
    decode_node: NodeId | None = None
    """The node of `decode_on`, whose KV store copies the prompt's blocks while they are computed; None where it is that
    of this engine, or not known."""
    prefill_on: EngineId | None = None
    """Decode-first: the engine that may compute the prompt, and hand the request over to this one; None: this one
    computes it."""
    remote_from: Count = 0
    """Decode-first: it may if so many tokens or more are left to compute when the request's turn has come here."""
    passed_by: EngineId | None = None
    """Decode-first: the engine that took the request first, which is `decode_on`, and that keeps room for it; None: a
    coordinator has sent it."""


class Cancel(Struct, frozen=True, array_like=True, tag=True):
    """gateway → scheduler: stop attempts up to this one and free what they hold. Unknown requests are no error."""

    request: RequestId
    attempt: Attempt
    detokenizer: DetokenizerId | None = None
    """The detokenizer that has the stream of a request that was handed over to this engine. If the request itself was
    lost on its way, only this engine can still end the stream."""


class StopMatched(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → scheduler: a stop string was found and the client's stream has ended; free what the request
    holds."""

    request: RequestId
    attempt: Attempt


class TokenBatchLost(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → scheduler: a numbered message of yours is missing; fail every request whose tokens you send me."""

    detokenizer: DetokenizerId


class ReleaseKept(Struct, frozen=True, array_like=True, tag=True):
    """scheduler → scheduler: a later request has loaded the blocks that you keep of this one's prompt, or needs them no
    more. An unknown request is no error."""

    request: RequestId


class OutlierReport(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler: requests that I place on you fail, for this reason. You are a suspect; say so in your
    lifecycle. Sent only to engines that report their health."""

    reason: str


SchedulerControl = Cancel | StopMatched | TokenBatchLost | OutlierReport | ReleaseKept


class Probe(Struct, frozen=True, array_like=True, tag=True):
    """gateway, detokenizer → scheduler: no output of this request has arrived for a while; do you hold it?"""

    request: RequestId
    attempt: Attempt


class ProbeReply(Struct, frozen=True, array_like=True, tag=True):
    """Whether the scheduler holds the probed request. `produced` counts the output tokens sent to the detokenizer so
    far, those of earlier attempts included."""

    state: Literal["waiting", "running", "unknown"]
    produced: int


PauseMode = Literal["new", "all"]
"""new: the engine begins no waiting request, and goes on with those that run. all: it computes nothing."""


class PauseGeneration(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler: pause so, until `ResumeGeneration`. Requests are taken all the same, and wait. Answered
    by a `PauseState`."""

    mode: PauseMode


class ResumeGeneration(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler: be paused no longer. Answered by a `PauseState`."""


class ReadPauseState(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler: are you paused? Answered by a `PauseState`."""


class PauseState(Struct, frozen=True, array_like=True, tag=True):
    """Whether an engine is paused, and whether it rests."""

    mode: PauseMode | None
    """None: it is not paused."""
    busy: int
    """Steps in flight, and requests that go on: 0 once it rests."""


class SleepEngine(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler: have your ranks give up their memory, and serve nothing until `WakeEngine`. Answered by
    a `SleepState`."""

    level: SleepLevel


class WakeEngine(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler: have your ranks load the model, and serve again, not paused either. Answered by a
    `SleepState`."""


class ReadSleepState(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → scheduler: are you asleep? Answered by a `SleepState`."""


class SleepState(Struct, frozen=True, array_like=True, tag=True):
    """Whether an engine is to be asleep, and whether it has come to that."""

    level: SleepLevel | None
    """None: it is to be awake."""
    busy: int
    """Ranks that are not asleep yet; of an engine that is to be awake 1 until it serves. 0: it has come to that."""
    refused: str = ""
    """Why it does not fall asleep; empty: it was not asked to, or does."""


class ReadPicture(Struct, frozen=True, array_like=True, tag=True):
    """gateway → scheduler, each second while somebody looks at the engine: what does it hold, and what has it done
    last? Answered by an `EnginePicture`."""


SchedulerQuestion = (
    Probe
    | ResetPrefixCache
    | PauseGeneration
    | ResumeGeneration
    | ReadPauseState
    | SleepEngine
    | WakeEngine
    | ReadSleepState
    | ReadPicture
)
"""What a scheduler is asked, and answers."""


class StepTiming(Struct, frozen=True, array_like=True, kw_only=True):
    """Where a step's time went on the worker, in seconds."""

    wait: float
    """Idle time from the end of the step before to the arrival of this plan; 0 if the plan had already arrived."""
    prepare: float
    """Time before the device could begin; preparation while the device computed the step before does not count."""
    forward: float
    sample: float
    answer: float = 0.0
    """From the end of the step until its result is handed to the bus; the next step runs meanwhile."""


class BlockMap(Struct, frozen=True, array_like=True, kw_only=True):
    """What the blocks of an engine's KV memory are used for."""

    total: Count
    free: Count
    """Blocks that hold nothing of use."""
    cached: Count
    """Blocks that nobody uses, and that are found by what they hold."""
    loading: Count
    """Blocks in use that are being filled from a KV store or connector."""
    every: Count
    """`cells` has one of so many blocks, in the order of their numbers."""
    cells: bytes
    """A byte for each block that is shown: 0 free, 1 cached, 2 in use, 3 in use by several, 4 loading."""


class StepPicture(Struct, frozen=True, array_like=True, kw_only=True):
    """One step that an engine has finished."""

    step: int
    seconds: float
    """Between its result and that before it, or its plan where that came later."""
    prefill_tokens: Count
    decode_tokens: Count
    """Those of drafts included."""
    prefills: Count
    """Sequences whose prompts it computed."""
    decodes: Count
    drafted: Count
    accepted: Count
    timing: StepTiming
    """On the rank that samples."""


class SequencePicture(Struct, frozen=True, array_like=True, kw_only=True):
    """One request inside an engine; nothing of its texts."""

    request: RequestId
    phase: str
    arrival: float
    """When a gateway took it, in Unix seconds."""
    priority: int
    prompt_tokens: Count
    computed_tokens: Count
    """How many of its tokens have been planned."""
    output_tokens: Count
    cached_tokens: Count
    """Prompt tokens that a cache held."""
    blocks: Count


class EnginePicture(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """Reply to `ReadPicture`: what an engine holds, bounded, however much that is."""

    blocks: BlockMap | None
    """None while the engine has no workers; then all below is empty."""
    block_size: Count = 0
    max_batch_tokens: Count = 0
    """The budget of a step."""
    steps: tuple[StepPicture, ...] = ()
    """The last ones, oldest first."""
    waiting: tuple[SequencePicture, ...] = ()
    """The first in the order in which they are served, then those that wait beside the queue."""
    running: tuple[SequencePicture, ...] = ()
    queued: Count = 0
    """All that wait."""
    computing: Count = 0
    """All that run."""


class SampledTokens(Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence from one step: one, or more with speculation."""

    sequence: SequenceId
    tokens: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One entry for each token; None if the request wants none."""
    drafted: int = 0
    """How many of `SequenceWork.speculate` tokens were verified, drafted or forced by the grammar; of a tree those of
    its longest path. `len(tokens) - 1` of them were accepted."""


class SequencePromptLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens whose preceding tokens this step has computed."""

    sequence: SequenceId
    position: int
    """Index in the prompt of the token that the first entry belongs to; at least 1, as the first prompt token has no
    probability."""
    logprobs: tuple[TokenLogprobs, ...]


class SequencePooled(Struct, frozen=True, array_like=True):
    """The vector of a sequence with `NewSequence.pooling`, whose last token this step has computed."""

    sequence: SequenceId
    vector: bytes
    """Packed float32, little-endian."""


GrammarFault = Literal["refused", "busy", "lost", "died"]
"""What a grammar's error means. refused: it is beyond a limit, or no grammar; it would be again. busy: too much else is
being compiled; later it may be. lost: nothing holds it any more, by no fault of its own. died: its own process was
killed, or did not answer; nobody knows why, so it may be the grammar's doing."""


SequenceFault = Literal["refused", "busy", "lost", "died", "nan", "invalid_args", "processor"]
"""A `GrammarFault` of the sequence's grammar. nan: the model computed no number for its next token. invalid_args: a
logits processor does not take its `extra_args`. processor: a logits processor failed for it."""


class SequenceFailed(Struct, frozen=True, array_like=True):
    """A sequence that the ranks cannot go on with: what the step drew for it is nobody's."""

    sequence: SequenceId
    error: str
    """The client reads it."""
    fault: SequenceFault


class StepFinished(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """worker → scheduler: this step is computed; only sequences whose work had `sample` set are in `sampled`."""

    epoch: Incarnation
    step: int
    sampled: tuple[SampledTokens, ...]
    timing: StepTiming
    drafted: int = 0
    """Draft tokens that were verified; of a tree those of its longest path."""
    accepted: tuple[int, ...] = ()
    """By draft position: how many sequences accepted their first draft token, their second, and so on."""
    scored: tuple[SequencePromptLogprobs, ...] = ()
    """Prompt log-probabilities, for sequences with `SamplingOptions.prompt_logprobs`."""
    failed: tuple[SequenceFailed, ...] = ()
    pooled: tuple[SequencePooled, ...] = ()
    """Vectors of prompts; each of these sequences has an entry without tokens in `sampled`, too."""


class StepMissed(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """worker → scheduler: a plan is missing (a later one arrived in place of `expected`); the engine must start a new
    epoch."""

    worker: InstanceId
    epoch: Incarnation
    expected: int


class TransferProgress(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """any rank → scheduler: how far its transfers are. It is cumulative and also part of the rank's lifecycle, so a
    lost message does no harm."""

    rank: int
    epoch: Incarnation
    done: int
    """All transfers of `epoch` with a number below this are over."""
    failed: tuple[int, ...] = ()
    """Numbers of the transfers that are over and failed; at most the newest 256."""
    early: tuple[int, ...] = ()
    """Numbers from `done` on of transfers that are over, too: those of a KV connector end in any order."""


class GrammarCompiled(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """worker → scheduler: a grammar of `StepPlan.compile` is ready, or cannot be compiled."""

    epoch: Incarnation
    grammar: GrammarKey
    error: str | None = None
    """Why it cannot be compiled, and where, in words for the client; None if it is ready."""
    fault: GrammarFault = "refused"


SchedulerAnswer = ProbeReply | PrefixCacheReset | PauseState | SleepState | EnginePicture
"""And what it answers."""

WorkerResult = StepFinished | StepMissed | TransferProgress | GrammarCompiled
