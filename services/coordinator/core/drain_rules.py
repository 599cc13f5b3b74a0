"""Which drains an operator is kept from, unless he insists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.messages.lifecycle import EngineReport, Lifecycle
from shared.registry import Registry


def drain_refusal(registry: Registry, leaving: Sequence[Lifecycle]) -> str | None:
    """Why draining all of `leaving` would stop the serving; None where it would not."""
    return next(filter(None, (_refusal(registry, life, leaving) for life in leaving)), None)


def _refusal(registry: Registry, life: Lifecycle, leaving: Sequence[Lifecycle]) -> str | None:
    if life.worker is not None:
        return f"{life.instance} is a rank of {life.worker.engine}; drain that engine instead"
    if life.phase != "ready" or (life.engine is not None and not _decodes(life.engine)):
        return None
    alike, gone = _alike(life), {each.instance for each in leaving}
    if any(alike(other) for other in registry.all(life.service, "ready") if other.instance not in gone):
        return None
    last = f"{life.instance} is" if len(gone) == 1 else f"{', '.join(sorted(gone))} are"
    return f"{last} the last ready {_what(life)}; start another one first, or use force"


def _what(life: Lifecycle) -> str:
    if life.engine is None:
        return "engine" if life.service == "scheduler" else life.service
    return f"engine of model {life.engine.model.name} that decodes"


def _decodes(engine: EngineReport) -> bool:
    """Prefill engines are never the last: the others compute prompts, too."""
    return engine.role != "prefill"


def _alike(life: Lifecycle) -> Callable[[Lifecycle], bool]:
    """Whether another instance of the same service could take over from `life`."""
    if life.engine is None:
        return lambda other: True
    model = life.engine.model.name
    return lambda other: other.engine is not None and other.engine.model.name == model and _decodes(other.engine)
