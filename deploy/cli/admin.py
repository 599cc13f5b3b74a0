"""`baton drain`, `undrain`, `scale`: clients of the coordinator's admin endpoints, as `nats req` is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from deploy.cli.errors import CommandError
from deploy.cli.operator_bus import ask_admin
from deploy.supervisor.core.plan import SCALABLE
from deploy.supervisor.state_file import StackState


def drain_instance(state: StackState, instance: str, *, force: bool, as_json: bool) -> None:
    answer = asyncio.run(ask_admin(state, "drain", {"instance": instance, "force": force}))
    instances, load = answer.get("instances", [instance]), answer.get("load", 0)
    several = len(instances) > 1
    verb, rest = (
        ("drain: they finish what they have", "take") if several else ("drains: it finishes what it has", "takes")
    )
    _say(answer, as_json, f"{', '.join(instances)} {verb} ({load} in hand), {rest} no more.")


def undrain_instance(state: StackState, instance: str, *, as_json: bool) -> None:
    answer = asyncio.run(ask_admin(state, "undrain", {"instance": instance}))
    instances = answer.get("instances", [instance])
    _say(answer, as_json, f"{', '.join(instances)} {'takes' if len(instances) == 1 else 'take'} requests again.")


def scale_service(state: StackState, assignment: str, *, as_json: bool) -> None:
    service, equals, count = assignment.partition("=")
    if not equals or not count.isdecimal():
        raise CommandError(f"{assignment}: SERVICE=N is expected, for example tokenizer=3", status=2)
    answer = asyncio.run(ask_admin(state, "scale", {"service": _endpoint_name(service), "count": int(count)}))
    started, stopping = answer.get("started", []), answer.get("stopping", [])
    changes = [f"starting {', '.join(started)}"] if started else []
    changes += [f"draining and stopping {', '.join(stopping)}"] if stopping else []
    _say(answer, as_json, f"{assignment}: {'; '.join(changes) or 'nothing to change'}.")


def _endpoint_name(service: str) -> str:
    """People also type `engine`, `tokenizers`."""
    for known in SCALABLE:
        if service.removesuffix("s") == known.removesuffix("s"):
            return known
    raise CommandError(f"{service}: cannot be scaled; {', '.join(SCALABLE)} can", status=2)


def _say(answer: dict[str, Any], as_json: bool, sentence: str) -> None:
    print(json.dumps(answer) if as_json else sentence)
