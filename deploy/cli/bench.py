"""`baton bench`: runs `services.bench` against the running stack, or starts a stack just for the run."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NoReturn

import typer

from deploy.cli.running_stack import DEFAULT, Name, RunDir, run_dir_of, running_stack
from deploy.errors import CommandError
from deploy.model_choice import DEMO_MODEL, model_directory, model_folder
from deploy.supervisor.background import stack_for_the_run
from deploy.supervisor.servers.nats import NatsServerUnavailable, find_binary
from deploy.supervisor.state_file import StackState
from services.bench.__main__ import BENCHMARKS
from services.bench.stack_bus import PASSWORD_VARIABLE
from shared.config import process_environment

_NO_SERVER_NEEDED = ("--help", "-h", "--base-url")
_MEASURES_NO_SERVER = ("prefixes", "kv")
_ON_THE_BUS = ("startup", "hops", "profile")
"""They listen to the stack's bus, as its operator."""
_CAMPAIGNS = ("gpu", "peers")
"""They measure with the repository's tests and beside other engines: `tests/campaigns`, which is not installed."""
DEMO = "demo"
"""How the demo model is called, and as a shape."""
_CORES = "routing"
"""It measures the coordinator's core in this process."""
_ENGINES, _DEVICE = ("idle", "speculation", "perplexity"), ("roofline", "kernels")
"""What starts single engines, and what measures the device: they need a model, and no stack."""
_TEXTS = {
    "speculation": (("--prompts", DEMO_MODEL.with_name("prompts.jsonl")),),
    "perplexity": (("--text", DEMO_MODEL.with_name("held_out.jsonl")),),
}
"""Flags that these are given where they were not typed."""
_THEIR_USAGE = """
Through this command alone (the first two in a checkout of the repository only):

  peers         the whole ring and transformers' own continuous batching, under the same load
  gpu           all that is to be measured on a GPU, stage by stage, into one folder
  routing       processor time and memory of the coordinator's placements among many engines; starts nothing
"""


def bench(
    context: typer.Context,
    up: Annotated[
        str | None, typer.Option(help="Start a stack with these arguments of `baton up` for this run.")
    ] = None,
    name: Name = DEFAULT,
    run_dir: RunDir = None,
) -> None:
    """Measure: baton bench serve|latency|throughput|interference|hops|ring|startup|profile|prefixes|kv|idle|
    speculation|perplexity|roofline|kernels|routing|peers|gpu.

    All other arguments are passed on (baton bench serve --help).
    """
    run_bench(context.args, up, name, run_dir)


def run_bench(argv: Sequence[str], up: str | None, name: str, run_dir: Path | None) -> None:
    """Ends with the bench's own status. Raises CommandError."""
    if argv and argv[0] in _CAMPAIGNS:
        _campaign(argv, up)
    if argv and argv[0] == _CORES:
        from deploy.simulation.routing_cost import main

        raise SystemExit(main(argv[1:]))
    if argv and argv[0] in (*_ENGINES, *_DEVICE):
        raise SystemExit(_bench_of_a_part(argv))
    if not argv or argv[0] in ("-h", "--help"):
        status = _bench(argv)
        print(_THEIR_USAGE, end="", file=sys.stdout if argv else sys.stderr)
        raise SystemExit(status)
    if argv[0] not in BENCHMARKS:
        raise CommandError(f"bench {argv[0]}: no such benchmark; baton bench --help lists them", status=2)
    if argv[0] in _MEASURES_NO_SERVER or any(each.split("=")[0] in _NO_SERVER_NEEDED for each in argv):
        raise SystemExit(_bench(argv))
    if up is None:
        raise SystemExit(_bench_of_a_stack(argv, _running_stack(name, run_dir)))
    with stack_for_the_run(shlex.split(up)) as state:
        status = _bench_of_a_stack(argv, state)
    raise SystemExit(status)


def _bench_of_a_stack(argv: Sequence[str], state: StackState) -> int:
    """The operator's password goes by environment."""
    password = {PASSWORD_VARIABLE: state.nats_password} if argv[0] in _ON_THE_BUS and state.nats_password else {}
    return _bench(with_stack_flags(argv, state), password)


def _bench_of_a_part(argv: Sequence[str]) -> int:
    """Runs it in this process, so that it ends what it started when this one is interrupted."""
    from services.bench.__main__ import main

    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        return main(argv if {"-h", "--help"} & set(argv) else with_model(argv, Path(folder)))


def with_model(argv: Sequence[str], folder: Path) -> list[str]:
    """`argv` with a model's directory in place of what was typed: a repository's name, a shape's, or nothing. A
    directory that has to be made is made in `folder`. Raises CommandError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--model", "--shape", "--load-format"):
        parser.add_argument(flag)
    known, rest = parser.parse_known_args(argv[1:])
    flags = [argv[0], *rest]
    if known.load_format is not None:
        flags.append(f"--load-format={known.load_format}")
    if argv[0] in _ENGINES:
        directory = model_folder(known.model, known.load_format, folder)
        flags.append(f"--nats-server={_nats_server()}")
        typed = {each.split("=")[0] for each in rest}
        flags += [f"{flag}={file}" for flag, file in _TEXTS.get(argv[0], ()) if flag not in typed]
    elif known.model is not None:
        directory = model_directory(known.model, weights=False)
    elif known.shape == DEMO or (known.shape is None and argv[0] == "roofline"):
        return [*flags, f"--model={DEMO_MODEL}", f"--model-name={DEMO}"]
    else:
        return [*flags, *([] if known.shape is None else [f"--shape={known.shape}"])]
    shape = [] if known.shape is None else [f"--shape={known.shape}"]
    return [*flags, *shape, f"--model={directory}", f"--model-name={known.model or DEMO}"]


def _nats_server() -> Path:
    try:
        return find_binary()
    except NatsServerUnavailable as error:
        raise CommandError(str(error)) from None


def _campaign(argv: Sequence[str], up: str | None) -> NoReturn:
    """Becomes the campaign's process, so that signals reach it. Raises CommandError without a repository."""
    repository = Path(__file__).parents[2]
    if not (repository / "tests" / "campaigns" / "__main__.py").is_file():
        raise CommandError(f"baton bench {argv[0]} needs Baton's repository: run it in a checkout, after make setup")
    ups = [] if up is None or argv[0] != "peers" else [f"--up={up}"]
    environment = process_environment()
    paths = [str(repository), *filter(None, [environment.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "tests.campaigns", argv[0], *ups, *argv[1:]]
    os.execve(sys.executable, command, {**environment, "PYTHONPATH": os.pathsep.join(paths)})


def with_stack_flags(argv: Sequence[str], state: StackState) -> list[str]:
    """`argv` with what is known of the stack put in where the user did not say it."""
    pids = {member.instance: member.pid for member in state.members} | {"nats-server": state.nats_pid}
    known = {"--base-url": state.url, "--model": state.model, "--api-key": state.api_key}
    if argv[0] in _ON_THE_BUS:
        known |= {
            "--nats-url": ",".join(state.nats_url),
            "--nats-user": state.nats_user,
            "--nats-ca": state.nats_ca,
            "--namespace": state.namespace,
        }
    if argv[0] == "startup":
        known["--model-dir"] = state.model_dir
    elif argv[0] != "profile":
        known["--pids"] = ",".join(f"{name}={pid}" for name, pid in pids.items() if pid is not None)
    given = {each.split("=")[0] for each in argv}
    return [*argv, *(f"{flag}={value}" for flag, value in known.items() if value and flag not in given)]


def _running_stack(name: str, run_dir: Path | None) -> StackState:
    try:
        return running_stack(name, run_dir)
    except CommandError:
        raise CommandError(
            f"no stack runs in {run_dir_of(name, run_dir)}; baton up starts one, --base-url names any other server, "
            'and --up "--model DIR" starts one for this run'
        ) from None


def _bench(argv: Sequence[str], more: Mapping[str, str] = MappingProxyType({})) -> int:
    """`more`: variables of its environment."""
    command, environment = [sys.executable, "-m", "services.bench", *argv], {**process_environment(), **more}
    try:
        return subprocess.run(command, check=False, env=environment).returncode
    except KeyboardInterrupt:
        return 130
