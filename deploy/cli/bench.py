"""`baton bench`: runs `services.bench`, told where the running stack is; or starts a stack just for the run."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.cli.detach import start_in_background
from deploy.cli.down import stop_stack
from deploy.cli.errors import CommandError
from deploy.cli.stack_lookup import run_dir_of, running_stack
from deploy.supervisor.log_files import LogFolder, log_files
from deploy.supervisor.state_file import StackState, read_state

_NO_SERVER_NEEDED = ("--help", "-h", "--base-url")
_MEASURES_NO_SERVER = ("prefixes", "kv")
_THEIR_USAGE = """
Of the `baton` command alone:

  idle          the share of its time in which a worker has nothing to do between steps
  speculation   output tokens per second with each method of drafting, and without
  roofline      a model's steps beside the device's limits, measured in the same run
  kernels       single kernels beside torch's own operations and those limits
  peers         the whole ring and transformers' own continuous batching, under the same load
  gpu           all that is to be measured on a GPU, stage by stage, into one folder
"""


def run_bench(argv: Sequence[str], up: str | None, name: str, run_dir: Path | None) -> None:
    """Ends with the bench's own status. Raises CommandError."""
    if argv and argv[0] == "peers":
        from deploy.bench.peers import run_peers

        run_peers(argv[1:], up)
        return
    own = _own_command(argv[0]) if argv else None
    if own is not None:
        own(argv[1:])
        return
    if not argv or argv[0] in ("-h", "--help"):
        status = _bench(argv)
        print(_THEIR_USAGE, end="", file=sys.stdout if argv else sys.stderr)
        raise SystemExit(status)
    if argv[0] in _MEASURES_NO_SERVER or any(each.split("=")[0] in _NO_SERVER_NEEDED for each in argv):
        raise SystemExit(_bench(argv))
    if up is None:
        raise SystemExit(_bench(told(argv, _found(name, run_dir))))
    with stack_for_the_run(shlex.split(up)) as state:
        status = _bench(told(argv, state))
    raise SystemExit(status)


def _own_command(name: str) -> Callable[[Sequence[str]], None] | None:
    """What starts engines or workers of its own; imported only when asked for."""
    match name:
        case "idle":
            from deploy.bench.idle import run_idle

            return run_idle
        case "speculation":
            from deploy.bench.speculation import run_speculation

            return run_speculation
        case "roofline":
            from deploy.bench.roofline import run_roofline

            return run_roofline
        case "kernels":
            from deploy.bench.kernels import run_kernels

            return run_kernels
        case "gpu":
            from deploy.bench.campaign.command import run_gpu

            return run_gpu
        case _:
            return None


def told(argv: Sequence[str], state: StackState) -> list[str]:
    """`argv` with what is known of the stack put in where the user did not say it."""
    pids = {member.instance: member.pid for member in state.members} | {"nats-server": state.nats_pid}
    known = {
        "--base-url": state.url,
        "--model": state.model,
        "--api-key": state.api_key,
        "--pids": ",".join(f"{name}={pid}" for name, pid in pids.items() if pid is not None),
    }
    given = {each.split("=")[0] for each in argv}
    return [*argv, *(f"{flag}={value}" for flag, value in known.items() if value and flag not in given)]


def _found(name: str, run_dir: Path | None) -> StackState:
    try:
        return running_stack(name, run_dir)
    except CommandError:
        raise CommandError(
            f"no stack runs in {run_dir_of(name, run_dir)}; baton up starts one, --base-url names any other server, "
            'and --up "--model DIR" starts one for this run'
        ) from None


@contextlib.contextmanager
def stack_for_the_run(argv: list[str], keep_logs: Path | None = None) -> Iterator[StackState]:
    """Ended with the context. What its processes said is written to `keep_logs`. Raises CommandError where it does not
    start."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        run_dir = Path(folder)
        try:
            start_in_background(run_dir, ["up", "--port=0", *argv, "--run-dir", folder])
            state = read_state(run_dir)
            if state is None:
                raise CommandError("the stack ended as soon as it was ready")
            try:
                yield state
            finally:
                stop_stack(state, run_dir, now=True)
        finally:
            if keep_logs is not None:
                said = (path.read_bytes() for path in log_files(LogFolder(run_dir).folder))
                keep_logs.write_bytes(b"".join(said))


def _bench(argv: Sequence[str]) -> int:
    try:
        return subprocess.run([sys.executable, "-m", "services.bench", *argv], check=False).returncode
    except KeyboardInterrupt:
        return 130
