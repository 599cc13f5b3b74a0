"""Every metric of every service, read from the collectors that the services register."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector, CollectorRegistry

from services.gateway.metrics import Meters, gateway_collectors
from shared.telemetry.metrics import ForeignNames
from tests.support.paths import REPOSITORY

PACKAGES: Mapping[str, str] = {
    "Every service": "shared",
    "Gateway": "services/gateway",
    "Tokenizer": "services/tokenizer",
    "Encoder": "services/encoder",
    "Coordinator": "services/coordinator",
    "Scheduler": "services/scheduler",
    "Worker": "services/worker",
    "Detokenizer": "services/detokenizer",
    "KV store": "kvstore",
    "Planner": "services/planner",
}
_HEADING = """\
# Metrics

Each service has its own at `/metrics` of its metrics port (`baton ps --json` names them); any gateway's HTTP port
answers for all gateways. Counters end in `_total`; histograms have `_bucket`, `_sum` and `_count`. This page is made
from the code.
"""


class Described(NamedTuple):
    """A metric as Prometheus shows it."""

    name: str
    type: str
    labels: tuple[str, ...]
    help: str


def page() -> str:
    """The page's text."""
    parts, shown = [_HEADING], set[Collector]()  # kept: the next ones could get the place of one that is gone
    for title, folder in PACKAGES.items():
        found = [*collectors_in(folder), *(gateway_collectors(Meters()) if title == "Gateway" else ())]
        collectors = [each for each in found if each not in shown]
        shown.update(collectors)
        own = [each for collector in collectors if not isinstance(collector, ForeignNames) for each in read(collector)]
        parts += [f"## {title}\n", _table(own)]
        foreign = [line for each in collectors if isinstance(each, ForeignNames) for line in _foreign(each)]
        if foreign:
            parts += ["The same under vLLM's names:\n", "\n".join(["| vLLM | Baton |", "|---|---|", *foreign]) + "\n"]
    return "\n".join(parts)


def collectors_in(folder: str) -> list[Collector]:
    """Those that modules below a folder make or import, in the order of the modules' names."""
    found: dict[int, Collector] = {}
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        if "prometheus_client" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            found |= {id(each): each for each in vars(import_module(name)).values() if _collects(each)}
    return list(found.values())


def _collects(value: Any) -> bool:
    """Whether it is a collector, and none of the children that another has for some values of its labels."""
    has_values = bool(getattr(value, "_labelvalues", ()))
    return not has_values and not isinstance(value, type | CollectorRegistry) and hasattr(type(value), "collect")


def read(collector: Collector) -> Iterator[Described]:
    """A metric for each of a collector's."""
    if isinstance(collector, MetricWrapperBase):
        (family,) = collector.describe()
        yield _described(family, tuple(collector._labelnames))
        return
    for family in collector.collect():
        yield _described(family, tuple(getattr(family, "_labelnames", ())))


def _described(family: Metric, labels: tuple[str, ...]) -> Described:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return Described(name, family.type, labels, family.documentation)


def _table(metrics: Iterable[Described]) -> str:
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for each in metrics:
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append(f"| `{each.name}` | {each.type} | {labels} | {each.help} |")
    return "\n".join(rows) + "\n"


def _foreign(names: ForeignNames) -> Iterator[str]:
    for each in names.names:
        where = ", ".join(f'{label}="{value}"' for label, value in each.where.items())
        yield f"| `{each.name}` | `{each.metric}{f'{{{where}}}' if where else ''}` |"
