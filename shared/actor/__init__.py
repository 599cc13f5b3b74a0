"""An actor has an inbox, a `handle` method that runs one message at a time, and a lifecycle given by a table."""

from shared.actor.actor import Actor, LifecycleTable, PendingRequest, Tick, TopicSubscription
from shared.actor.runtime import ActorRuntime, NameTaken
from shared.actor.service_process import keep_from_collecting, run_loop, run_service

__all__ = [
    "Actor",
    "ActorRuntime",
    "LifecycleTable",
    "NameTaken",
    "PendingRequest",
    "Tick",
    "TopicSubscription",
    "keep_from_collecting",
    "run_loop",
    "run_service",
]
