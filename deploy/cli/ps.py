"""`baton ps`: what the supervisor started, joined with each process's own lifecycle messages."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import psutil

from deploy.cli.logs import shown_lines
from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, run_dir_of, running_stack
from deploy.errors import CommandError
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.state_file import MemberRecord, StackState, is_held
from shared import topics
from shared.messages.lifecycle import Lifecycle, LifecycleRequest, StoreReport
from shared.messages.supervisor import HostReport
from shared.protocol import incompatibility, other_block_size

WIDE = 200
"""Columns where output is no terminal, so that nothing is cut or wrapped before `grep`."""
HEADINGS = ("SERVICE", "INSTANCE", "PID", "PHASE", "LOAD", "UPTIME", "RESTARTS", "MEMORY", "")
LISTEN_SECONDS = 3.0
"""At the longest. Processes answer within milliseconds, but for one that a busy machine gives no time: it is not silent
yet, as its supervisor sees it."""
HOSTS_SECONDS = 1.2
"""At the least where there are other hosts: nobody knows how many will answer."""
ORPHANED = (
    "The supervisor is gone: nothing is restarted, and all ends {seconds:g} s after its end. `baton up` with the same "
    "options takes over, `baton down` ends."
)

LatestLifecycles = Mapping[str, Lifecycle]


def ps(as_json: AsJson = False, name: Name = DEFAULT, run_dir: RunDir = None) -> None:
    """Show every process of a stack: phase, load, uptime."""
    state = running_stack(name, run_dir)
    supervised = is_held(run_dir_of(name, run_dir))
    heard = asyncio.run(_heard(state))
    rows = [row for member in state.members for row in (_row(member, heard), *_hosted_rows(member, heard))]
    if state.spec.cluster is not None:
        rows = [{**row, "host": state.spec.cluster.node} for row in rows] + list(_rows_elsewhere(state, heard))
    rows.sort(key=lambda row: (row["service"], row["instance"]))
    if as_json:
        print(json.dumps(_described(state, rows, supervised=supervised)))
    else:
        _print_table(state, rows)
        _print_troubles(state, rows, supervised=supervised)


def _described(state: StackState, rows: list[dict[str, Any]], *, supervised: bool) -> dict[str, Any]:
    return {
        "name": state.name,
        "url": state.url,
        "phase": state.phase,
        "supervised": supervised,
        "model": state.model,
        "models": list(state.names),
        "supervisor_pid": state.pid,
        "nats_pid": state.nats_pid,
        "redis_pid": state.redis_pid,
        "problems": list(state.problems),
        "processes": rows,
    }


class StackSnapshot(NamedTuple):
    """What was heard on the bus in a short while."""

    lifecycles: LatestLifecycles
    hosts: Mapping[str, str]
    """The name of the host of each process that another host's supervisor looks after."""

    @property
    def block_size(self) -> int | None:
        """What most processes have, or say; None where none says it."""
        said = Counter(life.block_size for life in self.lifecycles.values() if life.block_size is not None)
        return said.most_common(1)[0][0] if said else None


async def latest_lifecycles(state: StackState) -> LatestLifecycles:
    """The newest lifecycle message of each process; returns once each of this host has sent one, or after
    LISTEN_SECONDS; of a cluster not before HOSTS_SECONDS."""
    return (await _heard(state)).lifecycles


async def _heard(state: StackState) -> StackSnapshot:
    lifecycles: dict[str, Lifecycle] = {}
    hosts: dict[str, str] = {}
    started = [member.member().process for member in state.members if member.pid is not None]
    missing = {each.instance for process in started for each in (process, *process.hosted)}
    complete = asyncio.Event()

    async def record(message: Lifecycle) -> None:
        lifecycles[message.instance] = message
        missing.discard(message.instance)
        if not missing:
            complete.set()

    async def record_host(report: HostReport) -> None:
        hosts.update(dict.fromkeys(report.instances, report.node))

    with contextlib.suppress(TimeoutError, CommandError):
        async with operator_bus(state) as bus, asyncio.timeout(LISTEN_SECONDS):
            await bus.subscribe(topics.lifecycles(), record)
            if state.spec.cluster is not None:
                await bus.subscribe(topics.host_reports(), record_host)
            await bus.publish(topics.lifecycle_requests(), LifecycleRequest())
            if state.spec.cluster is not None:
                await asyncio.sleep(HOSTS_SECONDS)
            await complete.wait()
    return StackSnapshot(lifecycles, hosts)


def _rows_elsewhere(state: StackState, heard: StackSnapshot) -> Iterator[dict[str, Any]]:
    """Processes of other hosts, as far as they say themselves."""
    own = {member.instance for member in state.members}
    for instance, host in heard.hosts.items():
        if instance in own:
            continue
        life = heard.lifecycles.get(instance)
        yield {
            "service": life.service if life else "-",
            "instance": instance,
            "pid": life.pid if life else None,
            "phase": life.shown_phase if life else "silent",
            **_said(life, heard.block_size),
            "restarts": None,
            "memory": None,
            "failure": None,
            "host": host,
        }


def _said(life: Lifecycle | None, block_size: int | None) -> dict[str, Any]:
    return {
        "load": life.load if life else None,
        "uptime": round(max(0.0, time.time() - life.started), 1) if life else None,
        "metrics_port": life.metrics_port if life else None,
        "detail": detail(life, block_size),
    }


def _row(member: MemberRecord, heard: StackSnapshot) -> dict[str, Any]:
    life = heard.lifecycles.get(member.instance)
    if life is not None and life.pid != member.pid:
        life = None
    return {
        "service": member.service,
        "instance": member.instance,
        "pid": member.pid,
        "phase": _phase(member, life),
        **_said(life, heard.block_size),
        "restarts": member.restarts,
        "memory": _resident(member.pid),
        "failure": _failure(member) if is_failed(member, life) else None,
    }


def _hosted_rows(member: MemberRecord, heard: StackSnapshot) -> Iterator[dict[str, Any]]:
    """The other actors of its process."""
    for hosted in member.member().process.hosted:
        row = _row(msgspec.structs.replace(member, service=hosted.service, instance=hosted.instance), heard)
        yield {**row, "memory": None, "failure": None}


def _failure(member: MemberRecord) -> dict[str, Any]:
    return {"deaths": member.failures, "status": member.status, "last_lines": list(member.last_lines)}


def is_failed(member: MemberRecord, life: Lifecycle | None) -> bool:
    """Whether it keeps dying, and is not ready just now."""
    return member.failed and (life is None or not (life.phase == "ready" or life.is_standby))


def failure_sentence(instance: str, failure: Mapping[str, Any]) -> str:
    """What happened to a process that keeps dying."""
    return (
        f"{instance} died {failure['deaths']} times in a row (last exit status {failure['status']}) and is tried again "
        "once a minute"
    )


def _phase(member: MemberRecord, life: Lifecycle | None) -> str:
    if is_failed(member, life):
        return "failed"
    if member.state == "waiting":
        return "restarting" if member.restarts else "waiting"  # at first for the process that it is forked of
    if member.state == "ending":
        return "ending"
    return life.shown_phase if life else "silent"


def _resident(pid: int | None) -> int | None:
    """Resident memory of a process in bytes; None if it does not exist."""
    with contextlib.suppress(psutil.Error):
        return None if pid is None else int(psutil.Process(pid).memory_info().rss)
    return None


def _print_table(state: StackState, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    several = state.spec.cluster is not None
    for heading in (*(["HOST"] if several else []), *HEADINGS):
        table.add_column(
            heading,
            no_wrap=True,
            justify="right" if heading in ("PID", "LOAD", "UPTIME", "RESTARTS", "MEMORY") else "left",
        )
    styles = {"ready": "green", "draining": "cyan", "silent": "red", "failed": "red"}
    for row in rows:
        style = styles.get(row["phase"], "yellow")
        table.add_row(
            *([row["host"]] if several else []),
            row["service"],
            row["instance"],
            _shown(row["pid"]),
            f"[{style}]{row['phase']}[/{style}]",
            _shown(row["load"]),
            duration(row["uptime"]),
            _shown(row["restarts"]),
            "-" if row["memory"] is None else f"{row['memory'] / 2**20:.0f} MiB",
            sentence(row["detail"]),
        )
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(
        f"[bold]{state.name}[/bold] {state.phase}  {state.url}  model {', '.join(state.names)}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)


def _print_troubles(state: StackState, rows: list[dict[str, Any]], *, supervised: bool) -> None:
    for row in rows:
        if row["failure"] is not None:
            lines = shown_lines(row["instance"], row["failure"]["last_lines"])
            print("\n".join(["", f"{failure_sentence(row['instance'], row['failure'])}. Its last lines:", *lines]))
    for problem in state.problems:
        print(f"\n{problem}")
    if not supervised:
        print("\n" + ORPHANED.format(seconds=state.spec.orphan_timeout))


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def duration(seconds: float | None) -> str:
    """`42s`, `3m07s`, `5h12m`, `2d04h`."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


# The last column: what engines, ranks and KV stores have beyond other processes.


def detail(life: Lifecycle | None, block_size: int | None = None) -> dict[str, Any] | None:
    """For scripts; None where there is nothing special. `block_size`: that of the stack, where it is known."""
    if life is not None:
        other = None if block_size is None else other_block_size(life.block_size, block_size)
        if (why := incompatibility(life.protocols) or other) is not None:
            return {"incompatible": why}
    if life is not None and life.engine is not None:
        engine = life.engine
        return {
            "role": engine.role,
            "node": engine.node,
            "waiting": engine.waiting,
            "running": engine.running,
            "blocks_free": engine.blocks_free,
            "blocks_total": engine.blocks_total,
            "steps": engine.steps,
            "tokens": engine.tokens,
            "suspect": engine.suspect,
        }
    if life is not None and life.worker is not None:
        worker = life.worker
        return {"rank": worker.rank, "world_size": worker.world_size, "device": worker.device}
    return None if life is None or life.store is None else _store_detail(life.store)


def _store_detail(store: StoreReport) -> dict[str, Any]:
    lookups = store.hits + store.misses
    return {
        "node": store.node,
        "blocks": store.committed,
        "slots": store.slots,
        "reserved": store.reserved,
        "pinned": store.pinned,
        "bytes_used": store.bytes_used,
        "bytes_total": store.bytes_total,
        "hits": store.hits,
        "misses": store.misses,
        "hit_rate": round(store.hits / lookups, 4) if lookups else None,
        "lower_hits": store.lower_hits,
        "prefetched": store.prefetched,
        "tiers": [msgspec.structs.asdict(tier) for tier in store.tiers],
    }


def sentence(detail: dict[str, Any] | None) -> str:
    """An instance's details in words, for the table."""
    if detail is None:
        return ""
    if "incompatible" in detail:
        return f"ignored by the others: {detail['incompatible']}"
    if "running" in detail:
        return _engine_sentence(detail)
    if "slots" in detail:
        return _store_sentence(detail)
    return f"rank {detail['rank']} of {detail['world_size']} on {detail['device']}"


def _engine_sentence(detail: dict[str, Any]) -> str:
    where = f" at {detail['node']}" if detail["node"] else ""
    suspect = f"; suspect: {detail['suspect']}" if detail["suspect"] else ""
    return (
        f"{detail['role']}{where}: {detail['running']} running, {detail['waiting']} waiting, "
        f"{detail['blocks_free']}/{detail['blocks_total']} blocks free{suspect}"
    )


def _store_sentence(detail: dict[str, Any]) -> str:
    rate = "no lookups yet" if detail["hit_rate"] is None else f"{detail['hit_rate']:.0%} hits"
    lower = f", {detail['lower_hits']} from below" if detail["lower_hits"] else ""
    pinned = f", {detail['pinned']} pinned" if detail["pinned"] else ""
    away = "".join(f", {tier['name']}: {tier['problem']}" for tier in detail["tiers"] if tier["problem"])
    used, total = detail["bytes_used"] / 2**20, detail["bytes_total"] / 2**20
    return f"{detail['node']}: {used:.0f}/{total:.0f} MiB, {detail['blocks']} blocks{pinned}, {rate}{lower}{away}"
