"""`python -m deploy.set_up --extras worker,cli`: installs Baton with these extras here, and says how much is fetched.

PyPI's PyTorch for Linux brings gigabytes of CUDA. Where there is no NVIDIA driver, its build without is taken instead,
from wherever pip finds one, or else from PyTorch's own index. The standard library and pip only: this is what runs
before anything of ours can.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from deploy.without_network.needs import REPOSITORY, canonical, comes_with_the_machine, project

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1")
"""Each is there with an NVIDIA driver only."""
LARGEST_SHOWN = 4
_MEGABYTE = 10**6
_ASK_SECONDS = 10
_PLAN_SECONDS = 900
_ASKED_AT_ONCE = 16


class WantedPackage(NamedTuple):
    """What pip is going to install."""

    name: str
    version: str
    url: str
    requires: tuple[str, ...]


class InstallPlan(NamedTuple):
    """The arguments of `pip install`, and what it is going to fetch with them."""

    arguments: tuple[str, ...]
    packages: tuple[WantedPackage, ...]


class PlanFailed(Exception):
    """pip cannot say what it would install; the text is its last line."""


def plan(arguments: Sequence[str]) -> InstallPlan:
    """What `pip install` with these arguments would fetch. Raises PlanFailed."""
    command = [*_pip(), "install", "--quiet", "--dry-run", "--report", "-", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=_PLAN_SECONDS, check=False)
    if done.returncode != 0:
        raise PlanFailed((done.stderr.strip().splitlines() or ["pip said nothing"])[-1])
    packages = [
        WantedPackage(
            canonical(each["metadata"]["name"]),
            each["metadata"]["version"],
            each["download_info"]["url"],
            tuple(each["metadata"].get("requires_dist", ())),
        )
        for each in json.loads(done.stdout)["install"]
        if "dir_info" not in each["download_info"]
    ]
    return InstallPlan(tuple(arguments), tuple(packages))


def build_for_cpus(found: InstallPlan, requirement: str, index: str) -> tuple[str, ...]:
    """Arguments of `pip install` that take PyTorch's build for CPUs; none where `found` has no PyTorch that needs CUDA.

    `requirement` is Baton's of PyTorch, `index` where builds for CPUs are. Raises PlanFailed where none is to be had.
    """
    torch = next((each for each in found.packages if each.name == "torch"), None)
    if torch is None or not any(_is_cuda(each) for each in torch.requires):
        return ()
    (build,) = plan(["--ignore-installed", "--no-deps", "--index-url", index, requirement]).packages
    return "--extra-index-url", index, f"torch=={build.version}"


def _is_cuda(requirement: str) -> bool:
    name = canonical(requirement)
    return name not in ("torch", "triton") and comes_with_the_machine(name, ())


def sizes(packages: Iterable[WantedPackage]) -> dict[str, int | None]:
    """Bytes of each package's file by its name and version; None where nobody says."""
    fetched = list(packages)
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        found = pool.map(_size, (each.url for each in fetched))
        return {f"{each.name} {each.version}": size for each, size in zip(fetched, found, strict=True)}


def _size(url: str) -> int | None:
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            return Path(unquote(parts.path)).stat().st_size
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_ASK_SECONDS) as answer:
            length = answer.headers["Content-Length"]
            return int(length) if length is not None else None
    except (OSError, ValueError, urllib.error.URLError):
        return None


def told(found: dict[str, int | None]) -> str:
    """`87 packages, 512 MB: torch 2.13.0+cpu 192 MB, triton 3.9.0 190 MB, … and 85 more`."""
    known = {name: size for name, size in found.items() if size is not None}
    largest = sorted(known.items(), key=lambda each: -each[1])[:LARGEST_SHOWN]
    words = [f"{name} {size / _MEGABYTE:,.0f} MB" for name, size in largest]
    if more := len(found) - len(largest):
        words.append(f"{more} more")
    unknown = f" and {len(found) - len(known)} of unknown size" if len(known) < len(found) else ""
    return f"{len(found)} packages, {sum(known.values()) / _MEGABYTE:,.0f} MB{unknown}: {', '.join(words)}"


def main(argv: Sequence[str] | None = None) -> int:
    """pip's exit status."""
    options, more = _parser().parse_known_args(argv)
    wanted = [*more, "--editable", f".[{options.extras}]"] if options.extras else more
    began = time.monotonic()
    choose = unannounced if options.unannounced else chosen
    arguments = choose(wanted, options.torch, options.cpu_index)
    # Byte code is made of what is imported, when it is: making it of all of PyTorch takes longer than the rest.
    done = subprocess.run([*_pip(), "install", "-qq", "--no-compile", *arguments], cwd=REPOSITORY, check=False)
    if done.returncode == 0:
        say(f"installed in {time.monotonic() - began:.0f} s")
    return done.returncode


def chosen(wanted: Sequence[str], build: str, index: str) -> Sequence[str]:
    """The arguments of `pip install`, after saying what will be fetched."""
    say("looking for what is needed …")
    try:
        found = plan(wanted)
    except PlanFailed as error:
        say(f"how much will be fetched is not known: {error}")
        return wanted
    if _needs_no_cuda(build):
        try:
            if build_arguments := build_for_cpus(found, _torch(), index):
                found = plan([*found.arguments, *build_arguments])
        except PlanFailed as error:
            say(f"no NVIDIA driver here, but PyTorch comes with CUDA: no build without was found at {index} ({error})")
    if found.packages:
        say(f"fetching {told(sizes(found.packages))}")
    return found.arguments


def unannounced(wanted: Sequence[str], build: str, index: str) -> Sequence[str]:
    """The same, without looking for other packages than PyTorch: pip may fetch what it looks at, and then once more."""
    if not _needs_no_cuda(build):
        return wanted
    try:
        return [*wanted, *build_for_cpus(plan(["--ignore-installed", "--no-deps", _torch()]), _torch(), index)]
    except PlanFailed as error:
        say(f"no NVIDIA driver here, and which PyTorch there is is not known: {error}")
        return wanted


def _needs_no_cuda(build: str) -> bool:
    return build == "cpu" or (build == "auto" and sys.platform == "linux" and not has_driver())


def _torch() -> str:
    """What Baton requires of PyTorch."""
    return next(each for each in project().requirements if canonical(each) == "torch")


def has_driver() -> bool:
    """Whether this machine has a driver for NVIDIA's GPUs."""
    return any(os.path.exists(path) for path in DRIVER)


def say(text: str) -> None:
    """One line for whoever waits."""
    print(f"set-up: {text}", flush=True)


def _pip() -> list[str]:
    return [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m deploy.set_up", description=__doc__)
    parser.add_argument("--extras", default="", help="Of Baton, separated by commas. Other arguments are pip's.")
    parser.add_argument(
        "--torch",
        choices=("auto", "cpu", "any"),
        default="auto",
        help="auto: without CUDA where there is no NVIDIA driver; cpu: without CUDA; any: as pip finds it.",
    )
    parser.add_argument("--unannounced", action="store_true", help="Do not look first how much will be fetched.")
    parser.add_argument("--cpu-index", default=CPU_INDEX, metavar="URL", help="Where PyTorch's builds for CPUs are.")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
