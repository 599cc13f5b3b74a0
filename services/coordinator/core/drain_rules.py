"""Which drains an operator is kept from, unless he insists."""

from __future__ import annotations

from collections.abc import Callable

from shared.messages.lifecycle import Lifecycle
from shared.registry import Registry


def drain_refusal(registry: Registry, life: Lifecycle) -> str | None:
    """Why draining `life` would stop the serving; None where it would not."""
    if life.worker is not None:
        return f"{life.instance} is a rank of {life.worker.engine}; drain that engine instead"
    if life.phase != "ready":
        return None
    alike = _alike(life)
    if any(alike(o) for o in registry.all(life.service, "ready") if o.instance != life.instance):
        return None
    model = f" of model {life.engine.model.name}" if life.engine is not None else ""
    what = "engine" if life.service == "scheduler" else life.service
    return f"{life.instance} is the last ready {what}{model}; start another one first, or use force"


def _alike(life: Lifecycle) -> Callable[[Lifecycle], bool]:
    """Whether another instance of the same service could take over from `life`."""
    if life.engine is None:
        return lambda other: True
    model = life.engine.model.name
    return lambda other: other.engine is not None and other.engine.model.name == model
