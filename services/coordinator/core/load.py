"""How much room an engine has and what one more request costs there, from its last report. Arithmetic only."""

from __future__ import annotations

from shared.messages.lifecycle import EngineReport

WAITING_WEIGHT = 4
"""A waiting request is work that has yet to begin; a running one shares each step with the others."""


def room(report: EngineReport, fill: float | None) -> int:
    """Requests that the engine can take beyond those it reported; never negative.

    Where something waits already, a free running slot is no room: blocks may be what is short.
    """
    slots = 0 if report.waiting else report.max_running - report.running
    by_bounds = report.max_waiting - report.waiting + slots
    if fill is None:
        return max(0, by_bounds)
    by_fill = int(fill * report.max_running) - report.waiting - report.running
    return max(0, min(by_bounds, by_fill))


def share(whole: int, parts: int, turn: int) -> int:
    """One of `parts` shares of `whole`, which add up to it over `turn` = t, t + 1, …, t + parts - 1."""
    return whole // parts + (1 if turn % parts < whole % parts else 0)


def cost(report: EngineReport, placed: int) -> int:
    """Requests on the engine once `placed` more have reached it: they take free running slots first."""
    slots = 0 if report.waiting else max(0, report.max_running - report.running)
    running = min(placed, slots)
    return WAITING_WEIGHT * (report.waiting + placed - running) + report.running + running
