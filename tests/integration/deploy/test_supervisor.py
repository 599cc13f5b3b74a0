"""The supervisor over a real nats-server and processes that do nothing but live."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil
import pytest
import redis

from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.state_file import StackState, directory_of, is_held
from shared import topics
from shared.bus import Bus, BusError
from shared.bus.nats_connection import NatsOptions, connect
from shared.ids import InstanceId
from shared.messages.lifecycle import Lifecycle
from shared.messages.supervisor import (
    ProcessStruck,
    Scale,
    ScaleReply,
    ScaleResult,
    StrikeProcess,
    StrikeRefusal,
    StrikeReply,
)
from shared.permissions import USERS
from tests.support.cluster.ports import free_port
from tests.support.paths import REPOSITORY
from tests.support.small_disk import fill, small_disk
from tests.support.tiny_stack.running import DEADLINE, TinyStack

Start = Callable[..., TinyStack]
WITH_REDIS = {"redis": {"type": "EmbeddedRedis", "memory": 2**24}}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    stacks: list[TinyStack] = []

    def begin(**spec: object) -> TinyStack:
        stacks.append(TinyStack(tmp_path / f"run{len(stacks)}", **spec))
        return stacks[-1]

    yield begin
    for stack in stacks:
        stack.destroy()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyStack]:
    """One for the tests after which it runs as before."""
    stack = TinyStack(
        tmp_path_factory.mktemp("lasting") / "run", counts={"ranks": 2, "engines": 2, "kvstore": 1}, store=WITH_REDIS
    )
    stack.ready()
    yield stack
    stack.destroy()


@contextlib.asynccontextmanager
async def bus_of(state: StackState, run_dir: Path) -> AsyncIterator[Bus]:
    """As the coordinator, whose password lies in the server's configuration."""
    text = (run_dir / "nats.conf").read_text()
    password = text.split("user: coordinator, password: ")[1].split('"')[1]
    bus = await connect(NatsOptions(servers=state.nats_url, user="coordinator", password=password))
    try:
        yield bus
    finally:
        await bus.close()


async def test_a_killed_service_is_announced_as_failed_and_replaced(lasting: TinyStack) -> None:
    state = lasting.ready()
    heard: asyncio.Queue[Lifecycle] = asyncio.Queue()
    async with bus_of(state, lasting.run_dir) as bus:
        await bus.subscribe(topics.lifecycles(), heard.put)
        await bus.flush()
        victim = lasting.pid("tokenizer-1")
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE):
            while (message := await heard.get()).phase != "failed":
                pass
            assert (message.instance, message.pid) == ("tokenizer-1", victim)
            while (message := await heard.get()).instance != "tokenizer-1" or message.phase != "ready":
                pass
    assert message.pid != victim
    assert lasting.pid("tokenizer-1") == message.pid


def test_a_killed_rank_takes_the_others_of_its_engine_along_and_no_scheduler(lasting: TinyStack) -> None:
    lasting.ready()
    before = {name: lasting.pid(name) for name in lasting.instances()}
    os.kill(before["engine-2-rank1"] or 0, signal.SIGKILL)
    replaced = {"engine-2-rank0", "engine-2-rank1"}
    lasting.until(
        lambda state: all(m.pid not in (None, before[m.instance]) for m in state.members if m.instance in replaced)
    )
    assert {name for name, pid in before.items() if lasting.pid(name) != pid} == replaced


def test_nats_server_comes_back_where_it_was_and_everybody_is_still_there(lasting: TinyStack) -> None:
    before = lasting.ready()
    assert before.nats_pid is not None
    os.kill(before.nats_pid, signal.SIGKILL)
    after = lasting.until(lambda state: state.nats_pid not in (None, before.nats_pid))
    assert after.nats_url == before.nats_url

    async def someone_speaks() -> Lifecycle:
        heard: asyncio.Queue[Lifecycle] = asyncio.Queue()
        async with asyncio.timeout(DEADLINE), bus_of(after, lasting.run_dir) as bus:
            await bus.subscribe(topics.lifecycles(), heard.put)
            while (message := await heard.get()).instance != "gateway-1":
                pass
            return message

    assert asyncio.run(someone_speaks()).pid == lasting.pid("gateway-1")


@pytest.mark.faults
@pytest.mark.parametrize("import_seconds", ["0", "60"], ids=["ready", "importing"])
def test_everything_ends_a_while_after_a_killed_supervisor(start: Start, import_seconds: str) -> None:
    port = free_port()
    worker = {"import_seconds": import_seconds}
    stack = start(settings={"worker": worker}, counts={"ranks": 2}, orphan_timeout=1.0, port=port)
    slow = import_seconds != "0"
    if slow:
        stack.until(lambda state: len(state.members) == 7 and all(m.pid for m in state.members))
    else:
        stack.ready()
    stack.kill_supervisor()
    stack.until_nobody_is_left()
    assert not is_held(stack.run_dir)
    assert not (stack.run_dir / "state.json").exists()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


@pytest.mark.faults
def test_what_ends_a_stack_without_supervisor_starts_nothing_of_it(start: Start) -> None:
    """It started all that had ended, PyTorch included, to end it at once."""
    stack = start(counts={"ranks": 2})
    state = stack.ready()
    stack.kill_supervisor()
    for member in state.members:
        os.kill(state.processes[member.instance].pid, signal.SIGKILL)
    done = baton(stack, "down")
    assert done.returncode == 0, done.stderr
    stack.until_nobody_is_left()
    log = (stack.run_dir / "logs" / "supervisor.log").read_bytes().splitlines()
    events = [(line["event"], line.get("child")) for line in map(msgspec.json.decode, log)]
    after = events[events.index(("adopted", None)) :]
    assert [child for event, child in after if "started" in event] == []


@pytest.mark.faults
def test_services_end_by_themselves_where_nobody_ends_them(start: Start) -> None:
    stack = start(orphan_timeout=1.0)
    state = stack.ready()
    stack.kill_supervisor()
    os.kill(state.processes["keeper"].pid, signal.SIGKILL)
    services = [state.processes[member.instance] for member in state.members]
    deadline = time.monotonic() + DEADLINE
    while any(each.lives for each in services) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(each.lives for each in services)
    assert "no supervisor" in (stack.run_dir / "logs" / "gateway-1.log").read_text()


@pytest.mark.faults
def test_a_new_supervisor_takes_over_what_was_scaled_and_ends_what_nobody_wrote_down(start: Start) -> None:
    stack = start(counts={"ranks": 2})
    state = stack.ready()

    async def scale() -> None:
        async with bus_of(state, stack.run_dir) as bus:
            await bus.request(topics.scaling(), Scale("tokenizer", 2), ScaleReply, DEADLINE)

    asyncio.run(scale())
    stack.until(lambda state: "tokenizer-2" in {member.instance for member in state.members})
    stack.ready()
    before = {name: stack.pid(name) for name in stack.instances()}
    stack.kill_supervisor()
    unwritten = ChildProcesses(dict(os.environ), stack.run_dir)
    for name in ("tokenizer-2", "tokenizer-3"):
        unwritten.start(name, [sys.executable, "-c", "import time; time.sleep(600)"], stack.run_dir / "log", {})
    strangers = list(unwritten.identities().values())
    config = stack.run_dir / "nats.conf"
    former = re.sub(r'"_INBOX\.\w+\.>"', '"_INBOX.>"', config.read_text())  # as a release before this one wrote it
    config.write_text(former)
    stack.start_supervisor()
    stack.until(lambda state: state.pid == stack.process.pid)
    stack.ready()
    assert {name: stack.pid(name) for name in stack.instances()} == before
    assert re.search(r'subscribe: \[.*"_INBOX\.gateway\.>",.*"_INBOX\.>"', config.read_text())
    log = stack.run_dir / "logs" / "nats-server.log"
    deadline = time.monotonic() + DEADLINE
    while "Reloaded server configuration" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "Reloaded server configuration" in log.read_text()
    deadline = time.monotonic() + DEADLINE
    while any(each.lives for each in strangers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(each.lives for each in strangers)
    unwritten.exited()


def test_one_ctrl_c_ends_everything_in_order(start: Start) -> None:
    stack = start(counts={"gateway": 2})
    stack.ready()
    os.killpg(stack.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert stack.ended() == 0
    stack.until_nobody_is_left()
    lines = [
        msgspec.json.decode(line) for line in (stack.run_dir / "logs" / "supervisor.log").read_bytes().splitlines()
    ]
    ended = [line["child"] for line in lines if line["event"] == "ended"]
    assert set(ended[:2]) == {"gateway-1", "gateway-2"}
    assert ended[-1] == "engine-1-rank0"
    assert {line["status"] for line in lines if line["event"] == "ended"} == {0}
    assert not (stack.run_dir / "state.json").exists()


def test_the_store_ends_last_and_its_directory_with_the_stack(start: Start) -> None:
    stack = start(counts={"kvstore": 1})
    state = stack.ready()
    arenas = directory_of(stack.run_dir)
    assert state.arenas == str(arenas)
    assert stat.S_IMODE(arenas.stat().st_mode) == 0o700
    (arenas / "blocks").write_bytes(b"x")
    killed = stack.pid("kvstore-1")
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    stack.until(lambda state: any(m.instance == "kvstore-1" and m.pid not in (None, killed) for m in state.members))
    assert (arenas / "blocks").read_bytes() == b"x", "a restarted store finds what it had"
    stack.ready()
    stack.process.send_signal(signal.SIGINT)
    assert stack.ended() == 0
    assert not arenas.exists()
    lines = map(msgspec.json.decode, (stack.run_dir / "logs" / "supervisor.log").read_bytes().splitlines())
    assert [line["child"] for line in lines if line["event"] == "ended"][-1] == "kvstore-1"


@pytest.mark.faults
def test_what_is_left_in_shared_memory_where_all_were_killed_is_removed(start: Start) -> None:
    first = start(counts={"kvstore": 1})
    first.ready()
    arenas = directory_of(first.run_dir)
    (arenas / "blocks").write_bytes(b"x")
    first.kill_everything()
    first.until_nobody_is_left()
    assert (arenas / "blocks").exists()
    first.start_supervisor()
    first.ready()
    assert not (arenas / "blocks").exists()
    first.kill_everything()
    first.until_nobody_is_left()
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", "down", "--run-dir", str(first.run_dir)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.returncode, arenas.exists()) == (0, False), done.stderr
    assert "left" in done.stdout


def test_the_embedded_redis_is_closed_to_others_and_comes_back_where_it_was(lasting: TinyStack) -> None:
    before = lasting.ready()
    url = redis_url(lasting)
    with redis.Redis.from_url(url) as client:
        assert client.ping()
        told = {key: client.config_get(key)[key] for key in ("save", "maxmemory", "bind")}
        assert told == {"save": "", "maxmemory": str(2**24), "bind": "127.0.0.1"}
    with redis.Redis.from_url(url.replace("redis://:", "redis://:not-")) as client, pytest.raises(redis.RedisError):
        client.ping()
    assert before.redis_pid is not None
    os.kill(before.redis_pid, signal.SIGKILL)
    lasting.until(lambda state: state.redis_pid not in (None, before.redis_pid))
    assert redis_url(lasting) == url
    deadline = time.monotonic() + DEADLINE
    with redis.Redis.from_url(url) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.ConnectionError):
                assert client.ping()
                return
            time.sleep(0.02)
    raise AssertionError(f"no Redis within {DEADLINE} s")


def redis_url(stack: TinyStack) -> str:
    """As the store is told, by its environment and not by its flags."""
    store = psutil.Process(stack.pid("kvstore-1"))
    url = store.environ()["BATON_KVSTORE_REDIS_URL"]
    assert url not in " ".join(store.cmdline())
    return url


def test_a_second_ctrl_c_does_not_wait_for_requests(start: Start) -> None:
    stack = start(settings={"gateway": {"busy": "true"}}, drain_timeout=60.0)
    stack.ready()
    stack.process.send_signal(signal.SIGINT)
    stack.until(lambda state: any(m.state == "ending" for m in state.members))
    stack.process.send_signal(signal.SIGINT)
    assert stack.ended() == 0
    stack.until_nobody_is_left()


@pytest.mark.faults
def test_a_process_that_stands_still_is_replaced(start: Start) -> None:
    stack = start(silence_limit=2.0)
    stack.ready()
    stopped = stack.pid("detokenizer-1")
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    stack.until(
        lambda state: any(m.instance == "detokenizer-1" and m.pid not in (None, stopped) for m in state.members)
    )
    assert "silent" in (stack.run_dir / "logs" / "supervisor.log").read_text()


async def test_scaling_starts_and_drains_processes(lasting: TinyStack) -> None:
    state = lasting.ready()
    async with bus_of(state, lasting.run_dir) as bus:
        up = await bus.request(topics.scaling(), Scale("tokenizer", 3), ScaleReply, DEADLINE)
        assert up == ScaleResult(started=("tokenizer-2", "tokenizer-3"), stopping=())
        await asyncio.to_thread(lasting.until, lambda state: sum(m.service == "tokenizer" for m in state.members) == 3)
        down = await bus.request(topics.scaling(), Scale("tokenizer", 1), ScaleReply, DEADLINE)
    assert down == ScaleResult(started=(), stopping=("tokenizer-2", "tokenizer-3"))
    await asyncio.to_thread(lasting.until, lambda state: sum(m.service == "tokenizer" for m in state.members) == 1)


async def test_an_operator_has_a_process_killed_or_stand_still(lasting: TinyStack) -> None:
    state = lasting.ready()
    before = {member.instance: member.pid for member in state.members}
    async with bus_of(state, lasting.run_dir) as bus:

        async def strike(instance: str, fault: Literal["kill", "pause"], seconds: float = 5.0) -> Any:
            order = StrikeProcess(InstanceId(instance), fault, seconds)
            return await bus.request(topics.scaling(), order, StrikeReply, DEADLINE)

        pid = before["tokenizer-1"]
        assert pid is not None
        assert await strike("tokenizer-1", "kill") == ProcessStruck(pid)
        await asyncio.to_thread(
            lasting.until,
            lambda state: any(m.instance == "tokenizer-1" and m.pid not in (None, pid) for m in state.members),
        )
        still = before["detokenizer-1"]
        assert still is not None
        assert await strike("detokenizer-1", "pause", 0.5) == ProcessStruck(still)
        await asyncio.to_thread(until_status, still, psutil.STATUS_STOPPED)
        await asyncio.to_thread(until_status, still, psutil.STATUS_SLEEPING)
        refused = await strike("tokenizer-9", "kill")
        assert isinstance(refused, StrikeRefusal)
        assert "tokenizer-9" in refused.message


def until_status(pid: int, status: str) -> None:
    deadline = time.monotonic() + DEADLINE
    while psutil.Process(pid).status() != status:
        assert time.monotonic() < deadline, psutil.Process(pid).status()
        time.sleep(0.01)


def test_a_service_that_cannot_start_ends_the_start_with_its_last_words(start: Start) -> None:
    stack = start(settings={"detokenizer": {"fail": "the vocabulary is missing"}})
    assert stack.ended() != 0
    said = stack.said()
    assert "detokenizer-1 ended with status 1" in said
    assert "the vocabulary is missing" in said
    stack.until_nobody_is_left()


def test_a_start_that_takes_too_long_is_given_up(start: Start) -> None:
    stack = start(settings={"worker": {"import_seconds": "60"}}, start_timeout=1.0)
    assert stack.ended() != 0
    assert "engine-1-rank0 was not ready after 1 s" in stack.said()


def test_what_holds_secrets_is_for_its_owner_only(lasting: TinyStack) -> None:
    lasting.ready()
    assert stat.S_IMODE(lasting.run_dir.stat().st_mode) == 0o700
    written = [path for path in lasting.run_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {path.name for path in written} >= {
        "state.json",
        "nats.conf",
        "redis.conf",
        "supervisor.log",
        "gateway-1.log",
    }
    assert {path.name: mode for path in written if (mode := stat.S_IMODE(path.stat().st_mode)) != 0o600} == {}
    shown = " ".join(psutil.Process(lasting.pid("gateway-1")).cmdline())
    password = (lasting.run_dir / "nats.conf").read_text().split("user: gateway, password: ")[1].split('"')[1]
    assert password not in shown


def test_a_process_has_the_secrets_of_its_own_service_only(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    others = {"BATON_CLUSTER_TOKEN": "cluster-wide-secret", "BATON_API_KEY": "key", "BATON_REDIS_URL": "redis://:p@h"}
    own = {"BATON_TOKENIZER_BUSY": "false", "BATON_GATEWAY_BUSY": "false", "BATON_LOG_LEVEL": "warning"}
    for name, value in {**others, **own}.items():
        monkeypatch.setenv(name, value)
    stack = start()
    stack.ready()
    text = (stack.run_dir / "nats.conf").read_text()
    passwords = {user: text.split(f"user: {user}, password: ")[1].split('"')[1] for user in USERS}
    for service in ("gateway", "tokenizer", "coordinator", "detokenizer"):
        environment = psutil.Process(stack.pid(f"{service}-1")).environ()
        assert others.keys() & environment.keys() == set()
        assert {value for value in passwords.values() if value in environment.values()} == {passwords[service]}
        assert own.keys() & environment.keys() == {"BATON_LOG_LEVEL", f"BATON_{service.upper()}_BUSY"} & own.keys()
    server = psutil.Process(stack.ready().nats_pid).environ()
    assert [name for name in server if name.startswith("BATON_") and "PROCESS" not in name] == []


async def test_without_a_password_the_bus_is_closed(lasting: TinyStack) -> None:
    state = lasting.ready()
    with pytest.raises(BusError):
        await connect(NatsOptions(servers=state.nats_url, connect_timeout=1.0))


def test_a_run_directory_and_a_port_belong_to_one_stack(start: Start) -> None:
    port = free_port()
    first = start(port=port)
    first.ready()
    same_place = subprocess.run(first.process.args, cwd=REPOSITORY, capture_output=True, timeout=DEADLINE, check=False)
    assert same_place.returncode != 0
    assert b"StackRunning" in same_place.stderr
    second = start(port=port)
    assert second.ended() != 0
    assert f"port {port}" in second.said()


def baton(stack: TinyStack, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deploy.cli", *argv, "--run-dir", str(stack.run_dir)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.slow
def test_a_service_that_keeps_dying_is_shown_as_failed_with_its_last_words_until_it_lives(
    start: Start, tmp_path: Path
) -> None:
    obstacle = tmp_path / "obstacle"
    stack = start(settings={"tokenizer": {"fail_beside": str(obstacle), "status": "5"}})
    stack.ready()
    obstacle.touch()
    os.kill(stack.pid("tokenizer-1") or 0, signal.SIGKILL)
    stack.until(lambda state: any(m.failed for m in state.members))
    (row,) = [row for row in json.loads(baton(stack, "ps", "--json").stdout)["processes"] if row["failure"]]
    assert (row["instance"], row["phase"], row["failure"]["status"]) == ("tokenizer-1", "failed", 5)
    assert "the file is there" in row["failure"]["last_lines"]
    assert "the file is there" in baton(stack, "ps").stdout
    done = baton(stack, "doctor")
    assert done.returncode == 1
    assert "tokenizer-1 died" in done.stdout
    assert "the file is there" in done.stdout
    obstacle.unlink()
    stack.until(lambda state: not any(m.failed for m in state.members))
    assert all(row["phase"] == "ready" for row in json.loads(baton(stack, "ps", "--json").stdout)["processes"])


@pytest.mark.faults
def test_a_full_disk_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        check_full_disk(disk)


def check_full_disk(disk: Path) -> None:
    stack = TinyStack(disk / "run")
    try:
        before = stack.ready()
        filling = fill(disk)
        os.kill(stack.pid("tokenizer-1") or 0, signal.SIGKILL)
        stack.until(lambda state: state.phase == "ready" and state.problems != ())
        after = stack.until(lambda state: all(m.pid for m in state.members))
        assert after.pid == before.pid
        assert stack.pid("tokenizer-1") not in (None, next(m.pid for m in before.members if m.service == "tokenizer"))
        told = json.loads(baton(stack, "ps", "--json").stdout)
        assert "No space left on device" in " ".join(told["problems"])
        assert {row["phase"] for row in told["processes"]} == {"ready"}
        assert "No space left" in baton(stack, "doctor").stdout

        pids = {name: stack.pid(name) for name in stack.instances()}
        stack.kill_supervisor()
        stack.start_supervisor()
        stack.until(lambda state: state.pid == stack.process.pid)
        assert {name: stack.pid(name) for name in stack.instances()} == pids

        filling.unlink()
        stack.until(lambda state: state.problems == ())
        assert json.loads((stack.run_dir / "state.json").read_bytes())["pid"] == stack.process.pid
    finally:
        stack.destroy()
