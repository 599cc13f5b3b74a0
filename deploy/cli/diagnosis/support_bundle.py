"""`baton support-bundle`: what a bug report needs, in one archive, without secrets and without anybody's texts."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tarfile
import time
import urllib.request
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from deploy.cli.diagnosis.recent_traces import newest_requests, recent_traces
from deploy.cli.diagnosis.redaction import (
    redacted_line,
    redacted_settings,
    redacted_trace,
    secrets_in,
    without,
)
from deploy.cli.doctor import checks, versions
from deploy.cli.ps import LatestLifecycles, latest_lifecycles
from deploy.cli.running_stack import DEFAULT, Name, RunDir, run_dir_of
from deploy.errors import CommandError
from deploy.supervisor.log_files import log_files
from deploy.supervisor.servers.federation import NAME as FEDERATION
from deploy.supervisor.servers.nats import NAME as NATS
from deploy.supervisor.servers.prometheus_targets import TARGETS
from deploy.supervisor.servers.redis import NAME as REDIS
from deploy.supervisor.state_file import StackState, last_state, read_state
from shared.config import process_environment
from shared.private_files import private_opener

MAX_LOG_LINES = 20_000
"""Of each process, the newest."""
FOREIGN = (NATS, REDIS, FEDERATION)
"""Servers of others, whose logs have nothing of what passes through them."""
METRICS_TIMEOUT = 5.0
READ_ME = """\
A bundle of `baton support-bundle`, to be sent to whoever helps.

versions.json   Baton, Python, libraries
doctor.json     what `baton doctor` found
state.json      how the stack was started and which processes it has; secrets removed
processes.json  what each process said of itself last
metrics/        /metrics of each process
traces.json     the ways of the newest requests, hop by hop with times
logs/           the newest lines of each process: events, names and numbers

Removed: API keys, passwords, tokens, users and passwords in URLs; of log lines every text that is not known to be a
name of Baton's own, so no prompt and no output is in it; of exceptions what they said. Left: names of models, folders,
hosts, processes and requests, numbers and times. Look through it before you send it.
"""

Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The archive. Default: baton-support-NAME-TIME.tar.gz here.")
]


class BundledFile(NamedTuple):
    """One file of the archive."""

    name: str
    text: str


def support_bundle(output: Output = None, name: Name = DEFAULT, run_dir: RunDir = None) -> None:
    """Collect what a bug report needs in one archive: versions, findings, metrics, logs, without secrets and texts."""
    where = run_dir_of(name, run_dir)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = output or Path(f"baton-support-{where.name}-{stamp}.tar.gz")
    try:
        with open(path, "wb", opener=private_opener) as file:
            size = _write(file, f"baton-support-{stamp}", list(collected(where)))
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    print(f"{path}: {size / 1024:.0f} KiB, without keys, prompts and outputs. Look through it before you send it.")


def _write(file: Any, folder: str, files: Collection[BundledFile]) -> int:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for each in files:
            content = each.text.encode()
            member = tarfile.TarInfo(f"{folder}/{each.name}")
            member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
            archive.addfile(member, io.BytesIO(content))
    return int(os.fstat(file.fileno()).st_size) or int(file.tell())


def collected(run_dir: Path) -> Iterator[BundledFile]:
    """The files of a bundle; without a stack those of this machine, and what the last one left."""
    running = read_state(run_dir)
    state = running or last_state(run_dir)
    described = {} if state is None else _plain(state)
    secrets = set(secrets_in(described)) | _keys_of_environment()
    lives: LatestLifecycles = {} if running is None else asyncio.run(latest_lifecycles(running))
    findings = [check()._asdict() for check in checks(run_dir)]
    for finding in findings:
        finding["detail"] = _redacted_detail(finding["detail"])
    for each in (
        BundledFile("README.txt", READ_ME),
        BundledFile("versions.json", _json(versions())),
        BundledFile("doctor.json", _json(findings)),
        BundledFile("state.json", _json(_redacted_state(described))),
        BundledFile("processes.json", _json({instance: _plain(life) for instance, life in lives.items()})),
        BundledFile("traces.json", _json(_traces(run_dir, running, lives))),
        *_metrics(run_dir, running),
        *_logs(run_dir),
    ):
        yield each._replace(text=without(each.text, secrets))


def _traces(run_dir: Path, running: StackState | None, lives: LatestLifecycles) -> list[dict[str, Any]]:
    if running is None:
        return []
    return asyncio.run(recent_traces(running, lives, newest_requests(run_dir / "logs")))


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=str)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _redacted_state(state: Mapping[str, Any]) -> Any:
    """Last lines of processes that died are log lines."""
    shown: Any = redacted_settings(state)
    for member in shown.get("members", ()):
        member["last_lines"] = [redacted_line(line) for line in member["last_lines"]]
    return shown


def _redacted_detail(detail: str) -> str:
    """A finding may quote the last lines of a process that died, indented."""
    lines = detail.splitlines()
    return "\n".join(redacted_trace(line) if line.startswith("  ") else line for line in lines)


def _keys_of_environment() -> set[str]:
    """What this command's environment has that a stack may have been given."""
    environment = process_environment().items()
    return {value for name, value in environment if name.startswith("BATON_") and value and _may_be_secret(name)}


def _may_be_secret(variable: str) -> bool:
    return any(word in variable for word in ("KEY", "PASSWORD", "TOKEN", "SECRET")) and not variable.endswith("_FILE")


def _metrics(run_dir: Path, running: StackState | None) -> Iterator[BundledFile]:
    if running is None:
        return
    try:
        groups = json.loads((run_dir / TARGETS).read_text())
    except (OSError, ValueError):
        return
    for group in groups:
        instance, address = group["labels"]["instance"], group["targets"][0]
        try:
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=METRICS_TIMEOUT) as answer:
                text = answer.read().decode(errors="replace")
        except OSError as error:
            text = f"# {address} does not answer: {error}\n"
        yield BundledFile(f"metrics/{instance}.txt", text)


def _logs(run_dir: Path) -> Iterator[BundledFile]:
    for folder in ("logs", "logs.previous"):
        for path in log_files(run_dir / folder):
            foreign = path.name.partition(".log")[0] in FOREIGN
            with path.open(errors="replace") as file:
                newest = deque((line.rstrip("\n") for line in file), maxlen=MAX_LOG_LINES)
            kept = newest if foreign else map(redacted_line, newest)
            yield BundledFile(f"{folder}/{path.name}", "".join(f"{line}\n" for line in kept))
