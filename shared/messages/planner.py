"""What the planner says: each of its decisions, with every number that it follows from."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.lifecycle import Role

ScalingReason = Literal["as wanted", "nothing to change", "stabilizing", "cool-down"]

ProfileSource = Literal["measured", "live", "none"]
"""measured: tables of a measurement; live: what workers report of their steps; none: neither says anything of the
load."""


class PoolDecision(Struct, frozen=True, array_like=True, kw_only=True):
    """What is to become of one pool."""

    role: Role
    present: int
    """Engines that take requests or start."""
    wanted: int
    """By the forecast, within the bounds and the budget."""
    target: int
    """What is to be done now."""
    reason: ScalingReason


class PlannerDecision(Struct, frozen=True, array_like=True, kw_only=True):
    """A decision. Rates per second, times in seconds, lengths in tokens."""

    at: float
    """On the planner's clock."""
    observed_rate: float | None
    """None, here and below: there was nothing to observe."""
    predicted_rate: float | None
    """The highest until an engine that starts now could help, with what is needed to work off the backlog."""
    backlog: int
    prompt_tokens: float | None
    """Computed, on average per request."""
    cached_tokens: float | None
    output_tokens: float | None
    observed_ttft: float | None
    observed_itl: float | None
    ttft_correction: float
    itl_correction: float
    forecast_ttft: float | None
    """Of the fleet that is wanted, at the percentile of the target; None: it is overloaded."""
    forecast_itl: float | None
    suffices: bool
    """Whether the wanted fleet meets the targets; False: the bounds or the budget are too tight."""
    pools: tuple[PoolDecision, ...]
    acts: bool = False
    """Whether the planner does what it decides; False: it only says it."""
    profile: ProfileSource = "live"
    """What it was computed with."""
    profile_note: str = ""
    """Why that is not the measured one, where there is one; for people."""

    @property
    def changes(self) -> tuple[PoolDecision, ...]:
        """The pools in which engines are started or drained."""
        return tuple(pool for pool in self.pools if pool.target != pool.present)
