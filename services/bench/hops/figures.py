"""What hops took, from the messages that passed. No bus, no clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from services.bench.hops.recording import BusRecording, PassedMessage
from services.bench.statistics import percentile
from shared.ids import RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import Deltas
from shared.messages.scheduler import GenerateRequest, StepFinished
from shared.messages.worker import StepPlan

FrameTimes = Sequence[tuple[float, int]]
"""When pieces of a stream arrived at its client, and how many frames had arrived by then."""


class Passage(NamedTuple):
    """Something that happened at a time, as the n-th of its kind."""

    at: float
    number: int


class RequestHop(NamedTuple):
    """What one process does with a request until it passes it on."""

    name: str
    bytes: float
    """Of the message that leaves; mean."""
    seconds: list[float]


class StepHop(NamedTuple):
    """What one process does with a step's tokens until it passes them on."""

    name: str
    actor: str
    bytes: float
    """A step, of all messages of that hop."""
    seconds: list[float]


class StepFigures(NamedTuple):
    """A time of steady streams."""

    steps: int
    seconds: float
    """From the first step's result to the last one's."""
    tokens: int
    hops: list[StepHop]
    plan_and_result: list[float]
    """From the end of each step on the device until the plan that follows from its result passed."""


def paired(first: Sequence[Passage], second: Sequence[Passage]) -> list[float]:
    """Seconds from each of `first` to that of `second` which follows from it. Both are numbered without gaps; most of
    them take less than the time between two, so that the difference of the numbers is that of most neighbours."""
    times = [each.at for each in second]
    votes: Counter[int] = Counter()
    for each in first:
        place = bisect_right(times, each.at)
        if place < len(second):
            votes[second[place].number - each.number] += 1
    if not votes:
        return []
    difference = votes.most_common(1)[0][0]
    by_number = {each.number: each.at for each in second}
    ends = ((by_number.get(each.number + difference), each.at) for each in first)
    return [end - start for end, start in ends if end is not None and end >= start]


def followed(first: Sequence[float], second: Sequence[float]) -> list[tuple[float, float]]:
    """Each time of `first` with the next one of `second`, where no other of `first` lies between them."""
    found = []
    for at, following in zip(first, [*first[1:], float("inf")], strict=True):
        place = bisect_right(second, at)
        if place < len(second) and second[place] <= following:
            found.append((at, second[place]))
    return found


def microseconds(seconds: Sequence[float], percent: float) -> float:
    """That percentile of times in seconds."""
    return percentile(seconds, percent) * 1e6


# ---- steps


def step_figures(recording: BusRecording, probe: RequestId, frames: FrameTimes) -> StepFigures:
    """Of one engine's steps, in each of which every stream gets a token. `probe`: the stream whose client noted when
    its `frames` arrived. Raises ValueError for fewer than two steps."""
    results = [each for each in recording.messages("result") if _draws(each.message)]
    if len(results) < 2:
        raise ValueError("two steps at least have time between them: measure for more --seconds")
    plans = [each for each in recording.messages("plan") if _computes(each.message)]
    batches, deltas = list(recording.messages("tokens")), list(recording.messages("deltas"))
    steps = len(results)
    result_times = [Passage(each.at, number) for number, each in enumerate(results)]
    batch_times = [found for each in batches for found in _tokens_of(each, probe)]
    delta_times = [found for each in deltas for found in _deltas_of(each, probe)]
    planned = followed([each.at for each in results], [each.at for each in plans])
    answers = {each.at: each.message.timing.answer for each in results}
    hops = [
        StepHop("worker: end of the step → result", "worker", _bytes(results, steps), list(answers.values())),
        StepHop("scheduler: result → next plan", "scheduler", _bytes(plans, steps), [b - a for a, b in planned]),
        StepHop("scheduler: result → tokens", "scheduler", _bytes(batches, steps), paired(result_times, batch_times)),
        StepHop("detokenizer: tokens → text", "detokenizer", _bytes(deltas, steps), paired(batch_times, delta_times)),
        StepHop("gateway: text → client", "gateway", 0.0, paired(delta_times, _frame_times(frames))),
    ]
    return StepFigures(
        steps=steps,
        seconds=results[-1].at - results[0].at,
        tokens=sum(len(drawn.tokens) for each in results for drawn in each.message.sampled),
        hops=hops,
        plan_and_result=[end - start + answers[start] for start, end in planned],
    )


def _draws(message: object) -> bool:
    return isinstance(message, StepFinished) and bool(message.sampled)


def _computes(plan: StepPlan) -> bool:
    return bool(plan.work)


def _bytes(messages: Iterable[PassedMessage], steps: int) -> float:
    return sum(each.size for each in messages) / steps


def _tokens_of(passed: PassedMessage, request: RequestId) -> list[Passage]:
    batch: TokenBatch = passed.message
    return [Passage(passed.at, entry.position) for entry in batch.entries if entry.request == request]


def _deltas_of(passed: PassedMessage, request: RequestId) -> list[Passage]:
    message = passed.message
    if not isinstance(message, Deltas):
        return []
    return [Passage(passed.at, delta.position) for delta in message.deltas if delta.request == request]


def _frame_times(frames: FrameTimes) -> list[Passage]:
    """Frames that arrived together have one time."""
    found: list[Passage] = []
    before = 0
    for at, count in frames:
        found += [Passage(at, number) for number in range(before, count)]
        before = count
    return found


# ---- requests


class ClientTimes(NamedTuple):
    """What the client of one request noted."""

    sent: float
    first: float
    """When its first token arrived."""


def request_hops(recording: BusRecording, clients: dict[int, ClientTimes]) -> list[RequestHop]:
    """Of the requests with these seeds, each of which wants one token."""
    tokenize = {each.message.request: each for each in _of_seeds(recording, clients)}
    route = _first((each.message.generation.request, each) for each in recording.messages("route"))
    generate = _first(
        (each.message.generation.request, each)
        for each in recording.messages("generate")
        if isinstance(each.message, GenerateRequest)
    )
    tokens = _first((entry.request, each) for each in recording.messages("tokens") for entry in each.message.entries)
    deltas = _first(
        (delta.request, each)
        for each in recording.messages("deltas")
        if isinstance(each.message, Deltas)
        for delta in each.message.deltas
    )
    sent = {request: clients[each.message.sampling.seed] for request, each in tokenize.items()}
    return [
        RequestHop(
            "gateway: request → tokenizer",
            _mean_size(tokenize.values()),
            [each.at - sent[request].sent for request, each in tokenize.items()],
        ),
        RequestHop("tokenizer → coordinator", *_between(tokenize, route)),
        RequestHop("coordinator → scheduler", *_between(route, generate)),
        RequestHop("engine: until its first token", *_between(generate, tokens)),
        RequestHop("detokenizer → gateway", *_between(tokens, deltas)),
        RequestHop(
            "gateway: text → client",
            0.0,
            [times.first - deltas[request].at for request, times in sent.items() if request in deltas],
        ),
    ]


def _first(messages: Iterable[tuple[RequestId, PassedMessage]]) -> dict[RequestId, PassedMessage]:
    """The first one of each request."""
    found: dict[RequestId, PassedMessage] = {}
    for request, each in messages:
        found.setdefault(request, each)
    return found


def _of_seeds(recording: BusRecording, clients: dict[int, ClientTimes]) -> Iterable[PassedMessage]:
    return (each for each in recording.messages("tokenize") if each.message.sampling.seed in clients)


def _between(
    first: dict[RequestId, PassedMessage], second: dict[RequestId, PassedMessage]
) -> tuple[float, list[float]]:
    both = [(each, second[request]) for request, each in first.items() if request in second]
    seconds = [end.at - start.at for start, end in both if end.at >= start.at]
    return _mean_size(end for _, end in both), seconds


def _mean_size(messages: Iterable[PassedMessage]) -> float:
    sizes = [each.size for each in messages]
    return sum(sizes) / len(sizes) if sizes else 0.0
