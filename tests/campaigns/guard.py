"""`make bench-guard`: this checkout against the last version, in turn, so that no version is slower unnoticed.

The last version is the commit that CHANGELOG names. A stack of each runs meanwhile, both by this Python and its
libraries, and is sent the same short load by this checkout's client, one after the other, the order changing from round
to round. Ends with status 1 where a figure is worse beyond what chance does (`paired_samples`), twice: with two stacks
and then with two others, as a process keeps what its start was dealt (where its memory lies, its neighbours).
`--short` is what CI runs: little, and only for what is worse by far.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from deploy.errors import CommandError
from shared.config import process_environment
from tests.campaigns.paired_samples import Comparison, Figure, compare, fewest_pairs, regressions, table
from tests.support.paths import DEMO_MODEL, REPOSITORY

VERSION = re.compile(r"^## (?P<name>\d\S*) \(.*commit (?P<commit>[0-9a-f]{7,40})\)", re.MULTILINE)
FIGURES = (
    Figure("output tokens/s", "higher"),
    Figure("TTFT p50 ms", "lower"),
    Figure("TPOT p50 ms", "lower"),
    Figure("server CPU µs/token", "lower"),
)
START_SECONDS, SAMPLE_SECONDS, GIT_SECONDS = 600.0, 300.0, 60.0
"""The first start of a version compiles its kernels."""
SHORT = {"rounds": 14, "output_tokens": 96, "error": 0.001, "allowed": 0.15, "seconds": 45.0}
"""What `--short` has in place of the defaults: some 50 s, and 35 more where the last version is compiled first."""
_SHORT_HELP = "as in CI: other defaults, and a last version that cannot be measured here is no failure"

Pairs = dict[str, list[tuple[float, float]]]
"""(old, new) of each figure at each concurrency, a pair for each round."""


class NotComparedError(CommandError):
    """The last version cannot be measured here, which says nothing of this checkout."""


class LastVersion(NamedTuple):
    """What this checkout is compared with."""

    name: str
    commit: str


class GuardOptions(NamedTuple):
    """How much is measured, and of what."""

    rounds: int
    concurrency: tuple[int, ...]
    waves: int
    """Requests of a sample, for each that runs at a time."""
    output_tokens: int
    model: Path
    up: tuple[str, ...]
    """More arguments of `baton up`."""
    error: float
    """The probability that anything is named without a cause."""
    allowed: float
    """By how much a figure may be worse: 0.15 allows 15% more milliseconds."""
    seconds: float
    """After which no further round begins."""
    short: bool
    """What cannot be compared is no failure."""
    output_json: Path | None


def last_version(changelog: str) -> LastVersion:
    """Raises CommandError where no version names its commit."""
    found = VERSION.search(changelog)
    if found is None:
        raise CommandError("CHANGELOG.md: no version names its commit: ## 0.2.0 (2026-11-22, commit 63a82c1)")
    return LastVersion(found["name"], found["commit"])


@contextmanager
def checkout_of(commit: str, folder: Path) -> Iterator[Path]:
    """The commit's files below `folder`, for as long as the context lasts. Raises NotComparedError, CommandError."""
    tree = folder / "old"
    try:
        _git("worktree", "add", "--force", "--detach", "--quiet", str(tree), commit)
    except CommandError as error:
        raise NotComparedError(f"{error}; a shallow clone lacks old versions") from error
    try:
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=GIT_SECONDS, check=False
    )
    if done.returncode:
        raise CommandError(f"git {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def stack_of(tree: Path, run_dir: Path, options: GuardOptions) -> Iterator[str]:
    """The URL of a stack that runs a tree's code. Raises CommandError where it does not start."""
    url = f"http://127.0.0.1:{_free_port()}"
    port = url.rpartition(":")[2]
    sized = ("--max-num-seqs", str(max(options.concurrency)), *options.up)
    cli = (sys.executable, "-m", "deploy.cli")
    up = (*cli, "up", "--detach", "--model", str(options.model), "--port", port, "--run-dir", str(run_dir), *sized)
    down = (*cli, "down", "--run-dir", str(run_dir))
    try:
        _python(up, tree, START_SECONDS)
    except CommandError:
        with suppress(CommandError):
            _python(down, tree, START_SECONDS)
        raise
    try:
        yield url
    finally:
        _python(down, tree, START_SECONDS)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _python(command: Sequence[str], tree: Path, seconds: float) -> None:
    """Raises CommandError."""
    environment = {**process_environment(), "PYTHONPATH": str(tree)}
    said = f"{' '.join(command[2:])} in {tree}"
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{said}: not done after {seconds:.0f} s") from error
    if done.returncode:
        raise CommandError(f"{said}: {(done.stdout + done.stderr).strip()[-2000:]}")


def sample(url: str, concurrency: int, seed: int, folder: Path, options: GuardOptions) -> dict[str, float]:
    """One short load: each figure by name. Raises CommandError."""
    result = folder / "sample.json"
    load = {
        "base-url": url,
        "dataset": "random",
        "random-input-len": 32,
        "random-output-len": options.output_tokens,
        "max-concurrency": concurrency,
        "num-prompts": concurrency * options.waves,
        "warmup": concurrency,
        "seed": seed,
        "output-json": result,
    }
    flags = [f"--{name}={value}" for name, value in load.items()]
    bench = (sys.executable, "-m", "services.bench", "serve", *flags, "--ignore-eos", "--no-progress", "--cpu")
    _python(bench, REPOSITORY, SAMPLE_SECONDS)
    return figures_of(json.loads(result.read_text(encoding="utf-8")))


def figures_of(result: dict[str, Any]) -> dict[str, float]:
    """What is compared of a benchmark's result. Raises CommandError where requests failed."""
    if result["failed"]:
        raise CommandError(f"{result['failed']} of {result['num_prompts']} requests failed: {result['error_kinds']}")
    values = (
        result["output_throughput"],
        result["median_ttft_ms"],
        result["median_tpot_ms"],
        sum(share["us_per_token"] for share in result["server_cpu"]),
    )
    return dict(zip((figure.name for figure in FIGURES), values, strict=True))


def guard(options: GuardOptions) -> int:
    """0, or 1 where a figure is worse. Raises CommandError."""
    version = last_version((REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"))
    fewest = fewest_pairs(len(FIGURES) * len(options.concurrency), options.error)
    if options.rounds < fewest:
        raise CommandError(f"--rounds: {options.rounds} are too few to find anything; {fewest} at least")
    worse: set[str] | None = None
    runs = []
    while worse is None or (worse and len(runs) < 2):
        pairs = _measured(version, fewest, options)
        compared = comparisons(pairs, options.allowed, worse)
        found = regressions(compared, options.error)
        worse = {each.name for each in found}
        print(f"This checkout against {version.name} ({version.commit}), {min(map(len, pairs.values()))} rounds:\n")
        print("\n".join(table(compared, found)), flush=True)
        runs.append({"pairs": pairs, "compared": [each._asdict() for each in compared]})
    if options.output_json is not None:
        report = {"version": version._asdict(), "worse": sorted(worse), "runs": runs}
        options.output_json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return int(bool(worse))


def comparisons(pairs: Pairs, allowed: float, names: set[str] | None) -> list[Comparison]:
    """Of the figures of these names; of all for None."""
    return [
        compare(figure, pairs[name], allowed=allowed)._replace(name=name)
        for figure in FIGURES
        for name in pairs
        if name.startswith(f"{figure.name}, ") and (names is None or name in names)
    ]


def _measured(version: LastVersion, fewest: int, options: GuardOptions) -> Pairs:
    """By two new stacks. Raises CommandError, NotComparedError."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-guard-")))
        tree = stack.enter_context(checkout_of(version.commit, folder))
        try:
            old = stack.enter_context(stack_of(tree, folder / "run-old", options))
        except CommandError as error:
            raise NotComparedError(f"{version.name} does not start here: {error}") from error
        new = stack.enter_context(stack_of(REPOSITORY, folder / "run-new", options))
        pairs = _sampled((old, new), folder, options)
    rounds = min(map(len, pairs.values()), default=0)
    if rounds < fewest:
        raise NotComparedError(f"{rounds} rounds in {options.seconds:.0f} s, {fewest} at least are needed: --seconds")
    return pairs


def _sampled(urls: Sequence[str], folder: Path, options: GuardOptions) -> Pairs:
    """A first round warms both up."""
    pairs: Pairs = {}
    end = monotonic() + options.seconds
    for number in range(options.rounds + 1):
        if monotonic() > end:
            break
        for concurrency in options.concurrency:
            order = (0, 1) if number % 2 else (1, 0)
            taken = {which: sample(urls[which], concurrency, number, folder, options) for which in order}
            for name in taken[0] if number else ():
                pairs.setdefault(f"{name}, {concurrency} at a time", []).append((taken[0][name], taken[1][name]))
        if sys.stderr.isatty():
            print(f"round {number} of {options.rounds}", file=sys.stderr)
    return pairs


def options_of(argv: Sequence[str]) -> GuardOptions:
    """What was typed."""
    parser = argparse.ArgumentParser(
        prog="make bench-guard", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=12, help="pairs of samples (default: 12)")
    parser.add_argument("--concurrency", default="8", help="requests at a time, separated by commas (default: 8)")
    parser.add_argument("--waves", type=int, default=3, help="requests of a sample for each at a time (default: 3)")
    parser.add_argument("--output-tokens", type=int, default=48, help="of each request (default: 48)")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="a model directory (default: the demo model)")
    parser.add_argument("--up", default="", help="more arguments of `baton up` for both")
    parser.add_argument("--error", type=float, default=0.01, help="probability of a false alarm (default: 0.01)")
    parser.add_argument("--allowed", type=float, default=0.0, help="0.15: what is 15%% worse is not named (default: 0)")
    parser.add_argument("--seconds", type=float, default=1800.0, help="no round begins after these (default: 1800)")
    parser.add_argument("--short", action="store_true", help=_SHORT_HELP)
    parser.add_argument("--output-json", type=Path, help="where all samples are written")
    if "--short" in argv:
        parser.set_defaults(**SHORT)
    typed = parser.parse_args(argv)
    concurrency = tuple(int(each) for each in typed.concurrency.split(","))
    return GuardOptions(**{**vars(typed), "concurrency": concurrency, "up": tuple(typed.up.split())})


def run_guard(argv: Sequence[str]) -> int:
    """The exit status. Raises CommandError."""
    options = options_of(argv)
    try:
        return guard(options)
    except NotComparedError as error:
        if not options.short:
            raise
        print(f"bench-guard: not compared, so nothing is found: {error}")
        return 0
