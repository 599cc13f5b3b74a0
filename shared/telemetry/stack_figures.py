"""Rates and shares over an interval, from the lifecycle messages at its two ends. No bus, no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from shared.messages.lifecycle import EngineReport, Lifecycle, StepSums, StoreReport, WorkerReport


class TimedLifecycle(NamedTuple):
    """The lifecycle message of an instance and the time of its arrival, in seconds."""

    at: float
    life: Lifecycle


Lifecycles = Mapping[str, TimedLifecycle]
"""Newest lifecycle message of each instance."""


class RankFigures(Struct, frozen=True, kw_only=True):
    """A worker rank in one interval: its steps per second, and the milliseconds of each phase of a step."""

    instance: str
    rank: int
    device: str
    phase: str
    steps_per_second: float | None
    """None, here and below: not known yet, or the divisor is zero."""
    tokens_per_second: float | None
    """Tokens that went through the model, prompt tokens included."""
    step_ms: float | None
    """Duration of a step without its phases `wait` and `answer`."""
    idle_share: float | None
    """Share of the time in which the rank waited for a plan; time without traffic does not count."""
    wait_ms: float | None
    prepare_ms: float | None
    forward_ms: float | None
    sample_ms: float | None
    answer_ms: float | None


class EngineFigures(Struct, frozen=True, kw_only=True):
    """An engine at the end of an interval, its rates over the interval, and its ranks."""

    instance: str
    phase: str
    role: str | None
    node: str | None
    model: str | None
    running: int
    waiting: int
    max_running: int
    max_waiting: int
    prefill_tokens: int
    """Prompt tokens that are still to be computed."""
    kv_blocks: int
    """Number of KV blocks in use."""
    kv_blocks_total: int
    kv_share: float | None
    tokens_per_second: float | None
    """Output tokens per second."""
    hit_rate: float | None
    """Share of prompt tokens that a cache held, over the interval; since the start if the interval had no prompts."""
    acceptance: float | None
    """Share of draft tokens that were accepted, over the interval; since the start if it had no drafts."""
    ttft_ms: float | None
    """Mean time from a request's coming to the engine to its first token, over the interval, of those that got one."""
    itl_ms: float | None
    """Mean time between two tokens of a request, over the interval."""
    messages_per_second: float | None
    suspect: str | None
    """Why the engine is taken to fail; None where it is not."""
    ranks: tuple[RankFigures, ...]


class StoreFigures(Struct, frozen=True, kw_only=True):
    """A node's KV store at the end of an interval."""

    instance: str
    phase: str
    node: str
    blocks: int
    bytes_used: int
    bytes_total: int
    pinned: int
    hit_rate: float | None
    """Share of requested blocks that the store held, over the interval or since the start, as for an engine."""


class OtherFigures(Struct, frozen=True, kw_only=True):
    """An instance of a gateway, tokenizer, coordinator or detokenizer."""

    service: str
    instance: str
    phase: str
    load: int
    """Requests that it holds; for a gateway its open streams."""
    messages_per_second: float | None


class Figures(Struct, frozen=True, kw_only=True):
    """All that `baton top`, and the console, show of a stack's processes at one moment."""

    engines: tuple[EngineFigures, ...]
    stores: tuple[StoreFigures, ...]
    others: tuple[OtherFigures, ...]
    tokens_per_second: float | None
    streams: int
    running: int
    waiting: int


def figures(before: Lifecycles, now: Lifecycles) -> Figures:
    """`before` may lack instances, or hold an earlier life of one: those have no rates yet."""
    lives = [timed.life for _, timed in sorted(now.items())]
    pairs = {instance: _pair(before.get(instance), timed) for instance, timed in now.items()}
    engines = tuple(_engine(life, pairs, lives) for life in lives if life.service == "scheduler")
    rates = [engine.tokens_per_second for engine in engines if engine.tokens_per_second is not None]
    others = tuple(_other(life, pairs[life.instance]) for life in lives if life.service in _OTHERS)
    return Figures(
        engines=engines,
        stores=tuple(_store(life, life.store, pairs[life.instance]) for life in lives if life.store is not None),
        others=others,
        tokens_per_second=sum(rates) if rates else None,
        streams=sum(each.load for each in others if each.service == "gateway"),
        running=sum(engine.running for engine in engines),
        waiting=sum(engine.waiting for engine in engines),
    )


_OTHERS = ("gateway", "tokenizer", "encoder", "coordinator", "detokenizer", "supervisor")


class _Interval(NamedTuple):
    before: Lifecycle
    now: Lifecycle
    seconds: float


def _pair(before: TimedLifecycle | None, now: TimedLifecycle) -> _Interval | None:
    """Messages of one incarnation of an instance, at both ends of the interval; None where there are not two."""
    if before is None or before.life.incarnation != now.life.incarnation or now.at <= before.at:
        return None
    return _Interval(before.life, now.life, now.at - before.at)


def _per_second(pair: _Interval | None, before: int | None, now: int | None) -> float | None:
    if pair is None or before is None or now is None:
        return None
    return max(0, now - before) / pair.seconds


def _engine(life: Lifecycle, pairs: Mapping[str, _Interval | None], lives: Iterable[Lifecycle]) -> EngineFigures:
    report, pair = life.engine, pairs[life.instance]
    was = pair.before.engine if pair is not None else None
    used = 0 if report is None else report.blocks_total - report.blocks_free
    total = 0 if report is None else report.blocks_total
    return EngineFigures(
        instance=life.instance,
        phase=life.shown_phase,
        role=report.role if report else None,
        node=report.node if report else None,
        model=report.model.name if report else None,
        running=report.running if report else 0,
        waiting=report.waiting if report else 0,
        max_running=report.max_running if report else 0,
        max_waiting=report.max_waiting if report else 0,
        prefill_tokens=report.prefill_tokens if report else 0,
        kv_blocks=used,
        kv_blocks_total=total,
        kv_share=used / total if total else None,
        tokens_per_second=_per_second(pair, was.tokens if was else None, report.tokens if report else None),
        hit_rate=_prompt_hits(was, report),
        acceptance=_acceptance(was, report),
        ttft_ms=_mean_ms(was, report, "first_token"),
        itl_ms=_mean_ms(was, report, "later_token"),
        messages_per_second=_per_second(pair, pair.before.progress if pair else None, life.progress),
        suspect=report.suspect if report else None,
        ranks=tuple(
            _rank(each, each.worker, pairs[each.instance])
            for each in lives
            if each.worker is not None and str(each.worker.engine) == life.instance
        ),
    )


def _prompt_hits(was: EngineReport | None, report: EngineReport | None) -> float | None:
    if report is None:
        return None
    before = (was.cached_tokens, was.prompt_tokens) if was else (0, 0)
    return _share_since(before, (report.cached_tokens, report.prompt_tokens))


def _acceptance(was: EngineReport | None, report: EngineReport | None) -> float | None:
    if report is None:
        return None
    before = (was.accepted_tokens, was.drafted_tokens) if was else (0, 0)
    return _share_since(before, (report.accepted_tokens, report.drafted_tokens))


def _mean_ms(was: EngineReport | None, report: EngineReport | None, tokens: str) -> float | None:
    """`tokens`: which of the `LatencySums`."""
    if was is None or was.latency is None or report is None or report.latency is None:
        return None
    number = getattr(report.latency, f"{tokens}s") - getattr(was.latency, f"{tokens}s")
    seconds = getattr(report.latency, f"{tokens}_seconds") - getattr(was.latency, f"{tokens}_seconds")
    return float(1000 * seconds / number) if number > 0 else None


def _share_since(before: tuple[int, int], now: tuple[int, int]) -> float | None:
    """(part, whole), growing: the share in the interval, or since the start where nothing came in it."""
    part, whole = now[0] - before[0], now[1] - before[1]
    if whole <= 0:
        part, whole = now
    return part / whole if whole else None


def _rank(life: Lifecycle, report: WorkerReport, pair: _Interval | None) -> RankFigures:
    was = pair.before.worker if pair is not None else None
    sums = None if was is None or pair is None else _difference(was.sums, report.sums)
    steps = sums.steps if sums else 0

    def ms(seconds: float) -> float | None:
        return 1000 * seconds / steps if steps else None

    work = sums.prepare + sums.forward + sums.sample if sums else 0.0
    waited = sums.wait if sums else 0.0
    return RankFigures(
        instance=life.instance,
        rank=report.rank,
        device=report.device,
        phase=life.shown_phase,
        steps_per_second=steps / pair.seconds if sums and pair else None,
        tokens_per_second=sums.computed / pair.seconds if sums and pair else None,
        step_ms=ms(work),
        idle_share=waited / (waited + work) if waited + work > 0 else None,
        wait_ms=ms(waited),
        prepare_ms=ms(sums.prepare if sums else 0.0),
        forward_ms=ms(sums.forward if sums else 0.0),
        sample_ms=ms(sums.sample if sums else 0.0),
        answer_ms=ms(sums.answer if sums else 0.0),
    )


def _difference(before: StepSums, now: StepSums) -> StepSums:
    return StepSums(**{name: getattr(now, name) - getattr(before, name) for name in StepSums.__struct_fields__})


def _store(life: Lifecycle, report: StoreReport, pair: _Interval | None) -> StoreFigures:
    was = pair.before.store if pair is not None else None
    before = (was.hits, was.hits + was.misses) if was else (0, 0)
    return StoreFigures(
        instance=life.instance,
        phase=life.shown_phase,
        node=report.node,
        blocks=report.committed,
        bytes_used=report.bytes_used,
        bytes_total=report.bytes_total,
        pinned=report.pinned,
        hit_rate=_share_since(before, (report.hits, report.hits + report.misses)),
    )


def _other(life: Lifecycle, pair: _Interval | None) -> OtherFigures:
    return OtherFigures(
        service=life.service,
        instance=life.instance,
        phase=life.shown_phase,
        load=life.load,
        messages_per_second=_per_second(pair, pair.before.progress if pair else None, life.progress),
    )


def as_json(found: Figures, **more: Any) -> dict[str, Any]:
    """The figures as plain objects for JSON, rounded."""
    return _rounded({**more, **msgspec.to_builtins(found)})  # type: ignore[no-any-return]


def _rounded(value: Any) -> Any:
    match value:
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
        case float():
            return round(value, 4)
        case _:
            return value
