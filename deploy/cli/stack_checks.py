"""Checks of a running stack, or of whether one could start: port, bus, gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deploy.cli.errors import CommandError
from deploy.cli.finding import Finding, fail, ok, warn
from deploy.cli.gateway_http import wait_until_ready
from deploy.cli.operator_bus import operator_bus
from deploy.supervisor.gateway_port import PortTaken, reserved_port
from deploy.supervisor.nats_config import MAX_PAYLOAD
from deploy.supervisor.state_file import StackState, is_held, read_state

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000
READY_WITHIN = 2.0


def port(run_dir: Path) -> Finding:
    if (state := read_state(run_dir)) is not None:
        return ok("port", f"{state.url} belongs to the running stack")
    try:
        with reserved_port(DEFAULT_HOST, DEFAULT_PORT):
            return ok("port", f"{DEFAULT_PORT} is free")
    except PortTaken:
        return warn("port", f"{DEFAULT_PORT} is in use", "baton up --port N, or end whoever listens there")


def bus(run_dir: Path) -> Finding:
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
    state = read_state(run_dir)
    if state is None:
        if is_held(run_dir):
            return warn("gateway", "a stack is starting", "wait; baton logs --follow shows what it does")
        return ok("gateway", "no stack runs")
    if asyncio.run(wait_until_ready(state.url, READY_WITHIN)):
        return ok("gateway", f"{state.url} is ready, model {state.model}")
    return fail("gateway", f"{state.url}/ready does not say 200", "baton ps shows who is missing, baton logs why")
