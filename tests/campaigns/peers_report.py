"""What `baton bench peers` found, side by side: for a reader, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from services.bench.statistics import percent_name, summary
from tests.campaigns.transformers_peer.wire import PeerReady

if TYPE_CHECKING:
    from tests.campaigns.peers import LoadFigures, Side
    from tests.campaigns.peers_options import PeersOptions

_RATES = (("output tokens/s", "output_throughput"), ("requests/s", "request_throughput"))
_TIMES = ("ttft", "itl", "tpot", "e2el")


def described(options: PeersOptions, ours: Side, theirs: Side | None) -> dict[str, Any]:
    """The result as a JSON object. A ratio above 1 is in Baton's favour. `theirs`: None: Baton's figures alone."""
    measured = [] if theirs is None else theirs.loads
    others = [*measured, *[None] * (len(ours.loads) - len(measured))]
    return {
        "model": options.model or "demo",
        "load_format": options.load_format or "auto",
        "device": options.device,
        "transformers": None if theirs is None else theirs.ready,
        "loads": [_load(mine, other) for mine, other in zip(ours.loads, others, strict=True)],
        "greedy": None if theirs is None else _agreement(ours.greedy, theirs.greedy),
    }


def _load(ours: LoadFigures, theirs: LoadFigures | None) -> dict[str, Any]:
    options = ours.options
    mine = summary(ours.run, options.percentiles, {})
    its = None if theirs is None else summary(theirs.run, options.percentiles, {})
    ratios = {} if its is None else {key: _ratio(key, mine, its) for _, key in _rows(options.percentiles)}
    return {
        "max_concurrency": options.max_concurrency,
        "request_rate": "inf" if math.isinf(options.request_rate) else options.request_rate,
        "num_prompts": options.num_prompts,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "percentiles": options.percentiles,
        "baton": mine | {"worker": ours.idle},
        "transformers": None if its is None or theirs is None else its | {"without_times": _without_times(theirs)},
        "ratios": ratios,
    }


def _without_times(side: LoadFigures) -> int:
    """Answers that transformers began anew when its memory was full, and forgot the times of what it had."""
    return sum(len(each.token_times) < each.output_tokens for each in side.run.completed)


def _rows(percents: Sequence[float]) -> list[tuple[str, str]]:
    """What is shown, and its key in a summary."""
    times = [
        (f"{metric.upper()} {name} ms", f"{'median' if name == 'p50' else name}_{metric}_ms")
        for metric in _TIMES
        for name in ("p50", *(f"p{percent_name(each)}" for each in percents))
    ]
    return [*_RATES, *times]


def _ratio(key: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float | None:
    """How many times as fast we are: of rates ours over theirs, of times theirs over ours."""
    above, below = (theirs, ours) if key.endswith("_ms") else (ours, theirs)
    return float(above[key] / below[key]) if below[key] else None


def _agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of greedy tokens. In bfloat16 sums round differently, and behind the first other token everything differs."""
    begun = [
        sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(mine, other, strict=False)))
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return {
        "prompts": len(ours),
        "equal": sum(list(mine) == list(other) for mine, other in zip(ours, theirs, strict=True)),
        "tokens": sum(map(len, ours)),
        "tokens_before_the_first_other": sum(begun),
    }


def shown(result: Mapping[str, Any]) -> str:
    """The tables."""
    lines = [_first_line(result["model"], result["transformers"])]
    for load in result["loads"]:
        lines += ["", *_table(load)]
    return "\n".join([*lines, *([] if result["greedy"] is None else ["", _greedy_line(result["greedy"])])])


def _first_line(model: str, ready: PeerReady | None) -> str:
    if ready is None:
        return f"{model}, Baton alone"
    settings = ", ".join(f"{name} {value}" for name, value in ready.settings.items())
    return (
        f"{model} in {ready.dtype} on {ready.device}; transformers {ready.transformers}, {ready.attention}, "
        f"loaded in {ready.load_seconds:.1f} s, warmed up in {ready.warm_up_seconds:.1f} s ({settings})"
    )


def _table(load: Mapping[str, Any]) -> list[str]:
    at_once = (
        f"{load['max_concurrency']} at a time" if load["max_concurrency"] else f"{load['request_rate']} requests/s"
    )
    lines = [f"{load['num_prompts']} prompts, {at_once}, {load['input_len']} in, {load['output_len']} out", ""]
    lines += ["| | Baton | transformers | Baton is better by |", "|---|---:|---:|---:|"]
    sides = load["baton"], load["transformers"]
    for title, key in _rows(load["percentiles"]):
        cells = ["-" if side is None else f"{side[key]:,.2f}" for side in sides]
        ratio = load["ratios"].get(key)
        lines.append(f"| {title} | {' | '.join(cells)} | {'-' if ratio is None else f'{ratio:.2f} ×'} |")
    failed = ["-" if side is None else str(side["failed"]) for side in sides]
    return [*lines, f"| failed | {' | '.join(failed)} | |", *_remarks(*sides)]


def _remarks(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> list[str]:
    found = []
    if ours["worker"].get("idle") is not None:
        idle, prepare = ours["worker"]["idle"], ours["worker"]["prepare"]
        found += ["", f"Baton's worker: {idle:.1%} idle between steps, {prepare:.1%} preparing them"]
    if theirs is not None and theirs["without_times"]:
        found += ["", f"transformers began {theirs['without_times']} answers anew: their times count from there"]
    return found


def _greedy_line(greedy: Mapping[str, Any]) -> str:
    return (
        f"greedy tokens: {greedy['equal']} of {greedy['prompts']} answers equal, "
        f"{greedy['tokens_before_the_first_other']} of {greedy['tokens']} tokens before the first other one"
    )
