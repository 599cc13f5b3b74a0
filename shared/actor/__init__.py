"""An actor: an inbox, a `handle` that runs one message at a time, and a lifecycle kept by a table."""

from shared.actor.actor import Actor, Asked, Hears, Tick
from shared.actor.lifecycle import IllegalPhase, LifecycleTable
from shared.actor.runtime import ActorRuntime, keep_from_collecting, run_loop, run_service

__all__ = [
    "Actor",
    "ActorRuntime",
    "Asked",
    "Hears",
    "IllegalPhase",
    "LifecycleTable",
    "Tick",
    "keep_from_collecting",
    "run_loop",
    "run_service",
]
