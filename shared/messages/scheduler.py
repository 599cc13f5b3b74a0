"""Messages to an engine's scheduler: requests, control, probes, and its workers' results."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.ids import Attempt, DetokenizerId, EngineId, Incarnation, InstanceId, NodeId, RequestId, SequenceId
from shared.messages.generation import Generation, Grammar, TokenLogprobs


class HandOver(Struct, frozen=True, array_like=True, kw_only=True):
    """What a prefill engine adds when it passes a request on. `Generation.tokens` ends with the token it has drawn."""

    prefilled_by: EngineId
    node: NodeId | None
    """Whose KV store holds the blocks."""
    partial: bytes = b""
    """The hash under which the prompt's last, partial block lies in that store; empty where there is none."""
    cached_tokens: int = 0
    """Prompt tokens that the prefill engine found in a cache; the client has been sent this number."""


class GenerateRequest(Struct, frozen=True, array_like=True, tag=True):
    """coordinator → the engine it chose: generate this; tokens go to `detokenizer`.

    Also prefill engine → decode engine, with `handed`.
    """

    generation: Generation
    detokenizer: DetokenizerId
    decode_on: EngineId | None = None
    """Draw one token only, and hand the request over to this engine."""
    handed: HandOver | None = None
    kv_source: NodeId | None = None
    """A node whose KV store holds more of the prompt than the engine's own, as the coordinator sees it."""
    predicted_cached: int = 0
    """Tokens that the coordinator expects the engine not to have to compute: what its index is judged by."""


class Cancel(Struct, frozen=True, array_like=True, tag=True):
    """gateway → scheduler: stop attempts up to this one and free what they hold. Unknown requests are no error."""

    request: RequestId
    attempt: Attempt
    detokenizer: DetokenizerId | None = None
    """The detokenizer that has the stream of a request that was handed over to this engine. If the request itself was
    lost on its way, only this engine can still end the stream."""


class StopMatched(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → scheduler: a stop string was hit and the client has its end; free what the request holds."""

    request: RequestId
    attempt: Attempt


class TokenBatchLost(Struct, frozen=True, array_like=True, tag=True):
    """detokenizer → scheduler: messages of yours were missed; every request you sent me must be failed."""

    detokenizer: DetokenizerId


SchedulerControl = Cancel | StopMatched | TokenBatchLost


class Probe(Struct, frozen=True, array_like=True, tag=True):
    """gateway, detokenizer → scheduler: no output of this request has arrived for a while; do you hold it?"""

    request: RequestId
    attempt: Attempt


class ProbeReply(Struct, frozen=True, array_like=True, tag=True):
    """`produced` counts output tokens sent to the detokenizer so far, resumed ones included."""

    state: Literal["waiting", "running", "unknown"]
    produced: int


class StepTiming(Struct, frozen=True, array_like=True, kw_only=True):
    """Where a step's time went on the worker, in seconds."""

    wait: float
    """Idle: from the end of the step before to the arrival of this plan; 0 where the plan lay ready."""
    prepare: float
    """Before the device could begin; what was prepared while it computed the step before does not count."""
    forward: float
    sample: float
    answer: float = 0.0
    """From the end of the step until its result is on its way to the bus; the next step runs meanwhile."""


class SampledTokens(Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one sequence: one a step, more with speculation."""

    sequence: SequenceId
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    drafted: int = 0
    """Of `SequenceWork.speculate`, how many were tried: drafted, or forced by the grammar; `len(tokens) - 1` of them
    were accepted."""


class SequencePromptLogprobs(Struct, frozen=True, array_like=True):
    """Log-probabilities of prompt tokens, of which a step has computed the ones before."""

    sequence: SequenceId
    position: int
    """Index in the prompt of the first of them; never 0, of which there is no probability."""
    logprobs: tuple[TokenLogprobs, ...]


class StepFinished(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """worker → scheduler: this step is computed; only sequences whose work had `sample` set are in `sampled`."""

    epoch: Incarnation
    step: int
    sampled: tuple[SampledTokens, ...]
    timing: StepTiming
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: tuple[int, ...] = ()
    """How many sequences accepted their first draft token, their second, and so on."""
    scored: tuple[SequencePromptLogprobs, ...] = ()
    """Of sequences whose `SamplingOptions.prompt_logprobs` is set."""


class StepMissed(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """worker → scheduler: a plan never arrived (`expected` did not follow); the engine must start a new epoch."""

    worker: InstanceId
    epoch: Incarnation
    expected: int


class TransferProgress(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """any rank → scheduler: how far its transfers are. Cumulative, and part of its lifecycle too: a lost one heals."""

    rank: int
    epoch: Incarnation
    done: int
    """Transfers of `epoch` that are over: all numbers below this."""
    failed: tuple[int, ...] = ()
    """Those of them that failed, the newest 256."""


class GrammarCompiled(Struct, frozen=True, array_like=True, tag=True, kw_only=True):
    """worker → scheduler: a grammar of `StepPlan.compile` is ready, or cannot be compiled."""

    epoch: Incarnation
    grammar: Grammar
    error: str | None = None
    """Why it cannot be compiled, and where: the client reads it."""


WorkerResult = StepFinished | StepMissed | TransferProgress | GrammarCompiled
