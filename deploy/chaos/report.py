"""The matrix: for each fault and target how many streams there were, how they ended, and how long they stood still."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.chaos.run import RoundResult
from deploy.chaos.schedule import Case
from deploy.chaos.usage import ProcessUsage
from services.bench.report import Table, line, rule
from services.bench.statistics import percentile

HEADS = (
    "fault",
    "rounds",
    "streams",
    "equal",
    "errors",
    "lost",
    "altered",
    "p50 s",
    "p99 s",
    "ITL max s",
    "late",
    "leaks",
)
SHOWN_MESSAGES = 5


def row_figures(case: Case, results: Sequence[RoundResult]) -> dict[str, Any]:
    """One row of the matrix: all rounds of one case."""
    waits = [wait for result in results for wait in result.waits]
    return {
        "fault": case.fault,
        "target": case.target,
        "rounds": len(results),
        "streams": sum(len(result.streams) for result in results),
        "equal": sum(result.equal for result in results),
        "errors": sum(result.errors for result in results),
        "lost": sum(len(result.lost) for result in results),
        "altered": sum(len(result.altered) for result in results),
        "median_recovery_s": round(percentile(waits, 50), 3),
        "p99_recovery_s": round(percentile(waits, 99), 3),
        "max_recovery_s": round(max(waits, default=0.0), 3),
        "max_itl_s": round(max((result.longest_pause for result in results), default=0.0), 3),
        "deadline_s": max((result.deadline for result in results), default=0.0),
        "late": sum(result.late for result in results),
        "leaks": sum(bool(result.leaks or result.unready or result.bugs) for result in results),
    }


def matrix(results: Sequence[RoundResult]) -> list[dict[str, Any]]:
    """A row for each case that had a round, by its name."""
    by_case: dict[Case, list[RoundResult]] = {}
    for result in results:
        by_case.setdefault(result.case, []).append(result)
    return [row_figures(case, by_case[case]) for case in sorted(by_case)]


def figures(
    results: Sequence[RoundResult],
    cases: Sequence[Case],
    skipped: Mapping[str, str],
    usage: Sequence[Mapping[str, ProcessUsage]],
    broken: str | None = None,
    grown: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """All that a run found, for JSON. `usage`: of each process, before the first round and after each.
    `broken`: why it could not go on. `grown`: bytes by which processes are too large in the end."""
    larger = [f"{name} has grown by {size >> 20} MiB" for name, size in (grown or {}).items()]
    struck = {result.case for result in results}
    return {
        "rounds": len(results),
        "streams": sum(len(result.streams) for result in results),
        "lost": sum(len(result.lost) for result in results),
        "altered": sum(len(result.altered) for result in results),
        "late": sum(result.late for result in results),
        "leaks": sum(bool(result.leaks) for result in results),
        "unready": sorted({name for result in results for name in result.unready}),
        "bugs": sum(result.bugs for result in results),
        "complaints": sum(len(result.complaints) for result in results),
        "matrix": matrix(results),
        "no_round": [str(case) for case in cases if case not in struck],
        "skipped": dict(skipped),
        "memory_bytes": {when: sum(each.memory for each in found.values()) for when, found in _ends(usage).items()},
        "memory_by_process": {
            when: {name: each.memory for name, each in found.items()} for when, found in _ends(usage).items()
        },
        "descriptors_by_process": {
            when: {name: each.descriptors for name, each in found.items()} for when, found in _ends(usage).items()
        },
        "notes": [f"{result.case}: {note}" for result in results for note in result.notes],
        "problems": [*problems(results), *larger, *([broken] if broken is not None else [])],
    }


def _ends(usage: Sequence[Mapping[str, ProcessUsage]]) -> dict[str, Mapping[str, ProcessUsage]]:
    return {"before": usage[0], "after": usage[-1]} if usage else {}


def problems(results: Sequence[RoundResult]) -> list[str]:
    """Every round that was not good, in words."""
    found = []
    for result in results:
        title = f"{result.case.fault} {result.victim}"
        found += [f"{title}: lost: request {each.prompt}: {each.message}" for each in result.lost]
        found += [f"{title}: altered: request {each.prompt}: {each.text!r}" for each in result.altered]
        found += [f"{title}: held: {what} {count}" for what, count in result.leaks.items()]
        found += [f"{title}: {complaint}" for complaint in result.complaints]
        found += [f"{title}: not back: {name}" for name in result.unready]
        found += [f"{title}: {result.bugs} unexpected exceptions in the logs"] if result.bugs else []
    return found


def round_line(number: int, result: RoundResult) -> str:
    """A round in one line, as it is shown while the run goes on."""
    worst = max(result.waits, default=0.0)
    parts = [f"{len(result.streams)} streams, {result.equal} equal", f"longest wait {worst:.1f} s"]
    parts += [f"longest pause {result.longest_pause:.2f} s", *result.notes]
    parts += [f"{count} {what}" for what, count in _trouble(result).items() if count]
    return f"{number + 1:4} {result.case.fault} {result.victim}: {', '.join(parts)}"


def _trouble(result: RoundResult) -> dict[str, int]:
    return {
        "allowed errors": result.errors,
        "LOST": len(result.lost),
        "ALTERED": len(result.altered),
        "late": result.late,
        "LEAKS": len(result.leaks),
        "NOT BACK": len(result.unready),
        "BUGS": result.bugs,
        "COMPLAINTS": len(result.complaints),
    }


def text(found: Mapping[str, Any]) -> str:
    """The matrix and what is to be said about it, as `figures` has them."""
    rows = [_cells(row) for row in found["matrix"]]
    lines = [rule(" Chaos ", "="), *Table(HEADS, rows).lines(), ""]
    lines += [line("Rounds:", found["rounds"]), line("Streams:", found["streams"])]
    lines += [line("Lost, altered:", f"{found['lost']}, {found['altered']}")]
    lines += [line("Late (deadline + 5 s):", found["late"]), line("Rounds with leaks:", found["leaks"])]
    if used := found["memory_bytes"]:
        lines.append(line("Memory before, after (MiB):", f"{used['before'] >> 20}, {used['after'] >> 20}"))
    lines += _usage_lines(found)
    lines += [f"skipped: {name}: {why}" for name, why in found["skipped"].items()]
    if found["no_round"]:
        lines.append(f"no time for: {', '.join(found['no_round'])}")
    lines += found["problems"][:SHOWN_MESSAGES]
    if len(found["problems"]) > SHOWN_MESSAGES:
        lines.append(f"and {len(found['problems']) - SHOWN_MESSAGES} more problems (--json)")
    return "\n".join(lines)


def _usage_lines(found: Mapping[str, Any]) -> list[str]:
    """A line for each process: its memory and file descriptors before and after."""
    memory, descriptors = found["memory_by_process"], found["descriptors_by_process"]
    lines = []
    for name, before in memory.get("before", {}).items():
        if name in memory["after"]:
            sizes = f"{before >> 20} -> {memory['after'][name] >> 20} MiB"
            counts = f"{descriptors['before'][name]} -> {descriptors['after'][name]} file descriptors"
            lines.append(f"{name}: {sizes}, {counts}")
    return lines


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    counts = (row[key] for key in ("rounds", "streams", "equal", "errors", "lost", "altered"))
    times = f"{row['median_recovery_s']:.2f}", f"{row['p99_recovery_s']:.2f}", f"{row['max_itl_s']:.2f}"
    name = f"{row['fault']} {row['target']}".rstrip()
    return (name, *map(str, counts), *times, str(row["late"]), str(row["leaks"]))
