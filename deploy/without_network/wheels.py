"""`python -m deploy.without_network.wheels`: fetches the wheels of all that Baton needs, for another machine's Python.

What comes with that machine is left out, and what only that needs. Which versions fit each other is found where they
are installed; of each package the newest is fetched that our own ranges allow.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

from deploy.without_network.needs import canonical, comes_with_the_machine, names_in, project

_MIN_GLIBC, _MAX_GLIBC = 5, 39
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(_MAX_GLIBC, _MIN_GLIBC - 1, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
_FETCH_SECONDS = 900
_ROUNDS = 8
"""Depth to which requirements of requirements are followed."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 once every wheel is in the folder, 1 where one cannot be fetched."""
    options = _parsed(argv)
    there = names_in(options.there) | {canonical(each) for each in options.there_too}
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [each for each in project().requirements if _fetched(each, options.python, there)]
    seen: set[str] = set()
    for _ in range(_ROUNDS):
        wanted = [each for each in dict.fromkeys(wanted) if canonical(each) not in seen]
        if not wanted:
            _tell(options.out)
            return 0
        seen |= {canonical(each) for each in wanted}
        before = set(options.out.glob("*.whl"))
        if _fetch(wanted, options.python, options.out) != 0:
            return 1
        found = set(options.out.glob("*.whl")) - before
        wanted = [need for wheel in found for need in needs_of(wheel) if _fetched(need, options.python, there)]
    print(f"wheels: needs are nested more than {_ROUNDS} deep", file=sys.stderr)
    return 1


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m deploy.without_network.wheels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--python", default="3.12", metavar="X.Y", help="Python version of that machine; default: %(default)s."
    )
    parser.add_argument(
        "--there", type=Path, metavar="FILE", help="Packages that it already has, in the format of pip list."
    )
    parser.add_argument("there_too", nargs="*", metavar="NAME", help="More packages that it already has.")
    return parser.parse_args(argv)


def _fetch(requirements: Sequence[str], python: str, out: Path) -> int:
    platforms = [flag for platform in _PLATFORMS for flag in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms, "--dest", str(out), *requirements]
    return subprocess.run(command, timeout=_FETCH_SECONDS, check=False).returncode


def needs_of(wheel: Path) -> list[str]:
    """Its requirements, markers and all; none of those that only its extras have."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode(), headersonly=True)
    return list(metadata.get_all("Requires-Dist") or ())


def _fetched(requirement: str, python: str, there: frozenset[str]) -> bool:
    return not comes_with_the_machine(canonical(requirement), there) and _holds(requirement, python)


def _holds(requirement: str, python: str) -> bool:
    """Whether its marker is true on that machine."""
    from pip._vendor.packaging.requirements import Requirement

    marker = Requirement(requirement).marker
    its = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "extra": ""}
    its |= {"platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    its |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return marker is None or bool(marker.evaluate(its))


def _tell(out: Path) -> None:
    sizes = {wheel.name.split("-")[0]: wheel.stat().st_size for wheel in out.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda each: -each[1]):
        print(f"{size / 2**20:8.2f} MiB  {name}")
    print(f"{sum(sizes.values()) / 2**20:8.2f} MiB  in {len(sizes)} wheels in {out}")


if __name__ == "__main__":
    raise SystemExit(main())
