"""`baton plan`: the planner of a running stack, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from deploy.cli.running_stack import (
    DEFAULT,
    AsJson,
    KubernetesNamespace,
    KubernetesUrl,
    Name,
    RunDir,
    running_stack,
)
from deploy.cli.up.options import given, offers_of, with_options
from deploy.errors import CommandError
from deploy.launchers import Launcher
from deploy.supervisor.operator_bus import client_bus, operator_bus
from deploy.supervisor.state_file import StackState
from services.planner.actor import FleetActor
from services.planner.config import PlannerSettings
from services.planner.core.host_spread import Host
from services.planner.fleet_scaler import AdminScaler, FleetScaler, ScalingRefused
from shared.bus import Bus
from shared.bus.nats_connection import NatsOptions
from shared.messages.supervisor import PlannerDecision
from shared.models.profile_file import ProfileError, ProfileFile, read_profile
from shared.settings import settings_of
from shared.telemetry.metrics import ProcessMetrics, metrics_server

PLANNER = "planner"
PLAN_OFFERS = offers_of((PLANNER, setting) for setting in settings_of(PlannerSettings).values())
BUS_NAMESPACE = "baton"
"""That of the services of deploy/kubernetes."""
METRICS_HOST = "127.0.0.1"


def plan(
    *,
    kubernetes: KubernetesUrl = None,
    kubernetes_namespace: KubernetesNamespace = "baton",
    nats_url: Annotated[
        str, typer.Option("--nats-url", help="With --kubernetes: the bus, e.g. by `kubectl port-forward service/nats`.")
    ] = "nats://127.0.0.1:4222",
    nats_password: Annotated[
        str | None,
        typer.Option(
            "--nats-password",
            envvar="BATON_NATS_PASSWORD",
            help="With --kubernetes: that of the user operator; better set by environment.",
        ),
    ] = None,
    as_json: AsJson = False,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
    **typed: Any,
) -> None:
    """Say how many engines meet the latency targets of a stack's load, or with --act start and drain them.

    Engines come and go where the stack runs them: on this host and those that have joined, on a Ray cluster, or with
    --kubernetes as pods.
    """
    settings = _settings(given(typed, PLAN_OFFERS))
    try:
        measured = None if settings.profile is None else read_profile(settings.profile)
    except ProfileError as error:
        raise CommandError(f"--profile {error}", status=2) from None
    if kubernetes is None:
        state = running_stack(name, run_dir)
        if state.spec.models:
            raise CommandError(f"baton plan sizes the engines of one model; the stack serves {', '.join(state.names)}")
        fleet = _stack_fleet(state)
    else:
        user = None if nats_password is None else "operator"
        options = NatsOptions(
            servers=(nats_url,), namespace=BUS_NAMESPACE, name="baton-plan", user=user, password=nats_password
        )
        fleet = _kubernetes_fleet(kubernetes, kubernetes_namespace, options)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            asyncio.run(_run(fleet, settings, measured, as_json))
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


class FleetAccess(NamedTuple):
    """How a fleet is heard, and its engines are started and drained."""

    bus: Bus
    scaler: FleetScaler


@contextlib.asynccontextmanager
async def _stack_fleet(state: StackState) -> AsyncIterator[FleetAccess]:
    async with operator_bus(state) as bus:
        yield FleetAccess(bus, AdminScaler(bus))


@contextlib.asynccontextmanager
async def _kubernetes_fleet(url: str, namespace: str, options: NatsOptions) -> AsyncIterator[FleetAccess]:
    from deploy.launchers.kubernetes_api import kubernetes_api
    from deploy.launchers.kubernetes_launcher import KubernetesLauncher

    async with kubernetes_api(url, namespace) as api, client_bus(options) as bus:
        yield FleetAccess(bus, LauncherScaler(KubernetesLauncher(api)))


class LauncherScaler:
    """A `FleetScaler` by a launcher that chooses hosts itself."""

    places_engines = True

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    async def scale(self, pool: str, count: int, host: Host) -> None:
        """As `FleetScaler.scale`."""
        try:
            await self._launcher.scale(pool, count)
        except CommandError as error:
            raise ScalingRefused(str(error)) from None


async def _run(
    access: contextlib.AbstractAsyncContextManager[FleetAccess],
    settings: PlannerSettings,
    measured: ProfileFile | None,
    as_json: bool,
) -> None:
    def say(decision: PlannerDecision) -> None:
        text = msgspec.json.encode(_described(decision)).decode() if as_json else sentence(decision)
        print(text, flush=True)

    def note(text: str) -> None:
        print(f"baton plan: {text}", file=sys.stderr, flush=True)

    with metrics_server(METRICS_HOST, settings.metrics_port, ProcessMetrics("planner")) as port:
        if port is not None:
            note(f"metrics at http://{METRICS_HOST}:{port}/metrics")
        async with access as fleet:
            await FleetActor(fleet.bus, settings, say, note, scaler=fleet.scaler, measured=measured).run()


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
    named = "no profile" if decision.profile == "none" else f"{decision.profile} profile"
    waits += f" ({named} × {decision.ttft_correction:.2f}, {decision.itl_correction:.2f})"
    pools = ", ".join(
        f"{pool.role} {pool.present} → {pool.target} ({pool.wanted} wanted: {pool.reason})" for pool in decision.pools
    )
    short = "" if decision.suffices else "; the bounds or the budget do not allow what the targets need"
    dry = "" if decision.acts or not decision.changes else "; dry run, see --act"
    backlog = f", {decision.backlog} wait" if decision.backlog else ""
    note = f"; {decision.profile_note}" if decision.profile_note else ""
    return f"{time.strftime('%H:%M:%S')} {load}{backlog}; {waits}; {pools}{short}{dry}{note}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


with_options(plan, PLAN_OFFERS.values())
