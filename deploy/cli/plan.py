"""`baton plan`: the planner of a running stack, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from importlib.util import find_spec
from typing import Any

import msgspec

from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, running_stack
from deploy.cli.up.options import given, offers_of, with_options
from deploy.errors import CommandError
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from services.planner.actor import FleetActor
from services.planner.config import PlannerSettings
from shared.messages.planner import PlannerDecision
from shared.settings import settings_of
from shared.telemetry.metrics import metrics_server

PLANNER = "planner"
PLAN_OFFERS = offers_of((PLANNER, setting) for setting in settings_of(PlannerSettings).values())
METRICS_HOST = "127.0.0.1"


def plan(as_json: AsJson = False, name: Name = DEFAULT, run_dir: RunDir = None, **typed: Any) -> None:
    """Say how many engines meet the latency targets of a stack's load, or with --act start and drain them."""
    settings = _settings(given(typed, PLAN_OFFERS))
    state = running_stack(name, run_dir)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(_run(state, settings, as_json))
        except ValueError as error:
            raise CommandError(str(error), status=2) from None


def _settings(values: dict[str, Any]) -> PlannerSettings:
    """Raises CommandError."""
    fields = {}
    for option, value in values.items():
        ((_, setting),) = PLAN_OFFERS[option].targets
        fields[setting.name] = setting.parse(value)
    if fields.get("load_predictor") == "arima" and find_spec("statsmodels") is None:
        raise CommandError("--load-predictor arima: statsmodels is missing: pip install 'baton-serve[planner]'")
    try:
        return PlannerSettings(**fields)
    except ValueError as error:
        raise CommandError(str(error), status=2) from None


async def _run(state: StackState, settings: PlannerSettings, as_json: bool) -> None:
    def say(decision: PlannerDecision) -> None:
        text = msgspec.json.encode(_described(decision)).decode() if as_json else sentence(decision)
        print(text, flush=True)

    def note(text: str) -> None:
        print(f"baton plan: {text}", file=sys.stderr, flush=True)

    with metrics_server(METRICS_HOST, settings.metrics_port) as port:
        if port is not None:
            note(f"metrics at http://{METRICS_HOST}:{port}/metrics")
        async with operator_bus(state) as bus:
            await FleetActor(bus, settings, say, note).run()


def _described(decision: PlannerDecision) -> dict[str, Any]:
    fields = msgspec.structs.asdict(decision)
    pools = [msgspec.structs.asdict(pool) for pool in decision.pools]
    return {"time": round(time.time(), 3), **fields, "pools": pools}


def sentence(decision: PlannerDecision) -> str:
    """A decision on one line, for people."""
    load = f"{_rate(decision.observed_rate)} req/s, {_rate(decision.predicted_rate)} expected"
    if decision.prompt_tokens is not None and decision.output_tokens is not None:
        load += f" ({decision.prompt_tokens:.0f} tokens in, {decision.output_tokens:.0f} out)"
    waits = f"TTFT {_ms(decision.observed_ttft)}, ITL {_ms(decision.observed_itl)}"
    waits += f" (profile × {decision.ttft_correction:.2f}, {decision.itl_correction:.2f})"
    pools = ", ".join(
        f"{pool.role} {pool.present} → {pool.target} ({pool.wanted} wanted: {pool.reason})" for pool in decision.pools
    )
    short = "" if decision.suffices else "; the bounds or the budget do not allow what the targets need"
    dry = "" if decision.acts or not decision.changes else "; dry run, see --act"
    backlog = f", {decision.backlog} wait" if decision.backlog else ""
    return f"{time.strftime('%H:%M:%S')} {load}{backlog}; {waits}; {pools}{short}{dry}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


with_options(plan, PLAN_OFFERS.values())
