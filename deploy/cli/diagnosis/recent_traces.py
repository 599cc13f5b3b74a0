"""The ways of the newest requests of a stack, hop by hop, for a bug report: names and times, none of their texts."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deploy.cli.diagnosis.redaction import redacted_attributes
from deploy.cli.ps import LatestLifecycles
from deploy.supervisor.log_files import log_files
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import StackState
from shared.ids import InstanceId
from shared.traces.request_trace import RECORDERS, GatewaysSilent, request_trace

MAX_TRACES = 20
"""Each asks every process once."""
ANSWERED = '"event":"answered"'
"""What a gateway logs at the end of each response, with its id."""


def newest_requests(logs: Path) -> list[str]:
    """The ids of the responses that gateways ended last, the newest first."""
    ended: list[tuple[str, str]] = []
    for path in log_files(logs):
        with path.open(errors="replace") as file:
            newest = deque((line for line in file if ANSWERED in line), maxlen=MAX_TRACES)
        for line in newest:
            try:
                fields = json.loads(line)
                ended.append((str(fields["time"]), str(fields["request"])))
            except (ValueError, KeyError, TypeError):
                continue
    return [request for _, request in sorted(ended, reverse=True)[:MAX_TRACES]]


async def recent_traces(state: StackState, lives: LatestLifecycles, requests: Iterable[str]) -> list[dict[str, Any]]:
    """What processes remember of these requests; those that nobody remembers are left out."""
    ask = {InstanceId(instance): life.service for instance, life in lives.items() if life.service in RECORDERS}
    gateways = [instance for instance, service in ask.items() if service == "gateway"]
    others = [instance for instance, service in ask.items() if service != "gateway"]
    traces: list[dict[str, Any]] = []
    async with operator_bus(state) as bus:
        for request in requests:
            try:
                found = await request_trace(bus, request, gateways, others)
            except GatewaysSilent:
                continue
            if found is None:
                continue
            hops = [{**hop._asdict(), "attributes": redacted_attributes(hop.attributes)} for hop in found.hops]
            traces.append({"request": request, "trace": found.trace_id, "hops": hops})
    return traces
