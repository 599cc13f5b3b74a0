"""Compiles the kernels on first use and keeps the library. Knows compilers and files; no torch, no kernels.

One library for each level of instructions, so that a prebuilt one serves on any machine that has them: an image can be
built with `--all` on one machine and run on another, without a compiler.

    python -m services.worker.ops.native.build          # what this machine will use
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from shared.config import cache_folder, process_environment

Level = Literal["amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2", "neon", "portable"]
"""Instructions that kernels may use; on x86 each level needs all that come after it there."""

COMPILE_CPU_SECONDS = 300
"""Processor time of one source: a compiler that takes more is stopped. The longest source takes 20."""
COMPILE_SECONDS = 1800.0
"""A compiler that hangs is stopped after this. Two free cores take 25 in all; what others compile meanwhile, or run, is
not counted against it: PyTorch's operations, which there are otherwise, take several times as long for ever."""
LOCK_PAUSE = 0.1
"""Seconds between two looks whether another process has compiled."""

_SOURCES = Path(__file__).parent
_FLAGS = (
    "-std=gnu++17",
    "-O3",
    "-fPIC",
    "-pthread",
    # Results must not depend on how a template was inlined: fused multiply-adds are written out where they are meant.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    # Vectors wider than the instructions' are passed in memory: only a matter between libraries.
    "-Wno-psabi",
)
_HEADERS = ("algorithm", "cmath", "cstdint", "cstring", "limits", "vector")
"""What most sources include, beside lanes.h. It is read once for all: that takes as long as compiling a small one."""
_INCLUDED = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
_TILE_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
"""No compiler makes such instructions of its own accord: a library that has them runs on any machine of its level."""
_LEVEL_FLAGS: dict[Level, tuple[str, ...]] = {
    "avx512-bf16": ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", *_TILE_FLAGS),
    "avx512-vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "neon": (),
    "portable": (),
}
_ZIG_LEVEL_FLAGS: dict[Level, tuple[str, ...]] = {
    "avx512-bf16": ("-mcpu=x86_64_v4+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",),
    "avx512-vnni": ("-mcpu=x86_64_v4+avx512vnni",),
    "avx512": ("-mcpu=x86_64_v4",),
    "avx2": ("-mcpu=x86_64_v3",),
    "neon": ("-mcpu=baseline",),
    "portable": ("-mcpu=baseline",),
}
_X86_LEVELS: tuple[Level, ...] = ("amx", "avx512-bf16", "avx512-vnni", "avx512", "avx2", "portable")
_LIBRARIES: dict[Level, Level] = {"amx": "avx512-bf16"}
"""Levels whose kernels are in another one's library: what is multiplied in tiles is marked so, matrix by matrix."""
_FEWER: dict[Level, tuple[Level, str]] = {"avx512-vnni": ("avx512", "defined(BATON_VNNI)")}
"""A level, one that it adds instructions to, and what asks for these: sources that do not compile to the same bits."""
Objects = MutableMapping[tuple[str, Level, str], bytes]
"""What was compiled before, by compiler, level and name of the source."""
_AVX512 = frozenset(("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
_AVX512_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_NEEDED: tuple[tuple[Level, frozenset[str]], ...] = (
    ("amx", _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"}),
    ("avx512-bf16", _AVX512_BF16),
    ("avx512-vnni", _AVX512 | {"avx512_vnni"}),
    ("avx512", _AVX512),
    ("avx2", frozenset(("avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"))),
)


class BuildError(Exception):
    """No library could be had; the text says what was tried."""


def best_level() -> Level:
    """The highest level that this machine has."""
    machine = platform.machine().lower()
    if machine in ("aarch64", "arm64"):
        return "neon"
    flags = _cpu_flags() if machine in ("x86_64", "amd64") else frozenset()
    return next((level for level, needed in _NEEDED if needed <= flags), "portable")


def runnable_levels() -> tuple[Level, ...]:
    """Every level that this machine can run, best first."""
    best = best_level()
    if best == "neon":
        return ("neon",)
    return _X86_LEVELS[_X86_LEVELS.index(best) :]


def library_path(level: Level, kept: Objects | None = None) -> Path:
    """Where the library for `level` lies: compiles it if it is not there, or waits for another process that does.

    What is in `kept` is not compiled again, and what is compiled is put there. Raises BuildError.
    """
    level = _LIBRARIES.get(level, level)
    target = _cache_folder() / f"kernels-{level}-{_key(level)}.so"
    if not target.exists():
        with _alone(target.parent):
            if not target.exists():
                _compile(level, target, {} if kept is None else kept)
    return target


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process compiles into `folder` meanwhile: the ranks of an engine start together, and would each use all
    cores for the same. One that hangs is not waited for: each renames its own result into place."""
    until = time.monotonic() + COMPILE_SECONDS
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while time.monotonic() < until:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(LOCK_PAUSE)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(lock)


def _cpu_flags() -> frozenset[str]:
    """Names as Linux has them; none elsewhere, which means the portable level."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split(":", 1)[1].split()) for line in lines if line.startswith("flags")), frozenset())


def _longest_first() -> list[Path]:
    return sorted(_SOURCES.glob("*.cpp"), key=lambda source: (-source.stat().st_size, source.name))


def _key(level: Level) -> str:
    """Changes with the sources and the flags."""
    digest = hashlib.sha256(repr((_FLAGS, _LEVEL_FLAGS[level], platform.machine(), sys.platform)).encode())
    for path in sorted(_SOURCES.glob("*.cpp")) + sorted(_SOURCES.glob("*.h")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    """The user's own, readable by nobody else's code: what lies there gets loaded."""
    try:
        folder = cache_folder("native")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder
    except OSError as refused:
        return _temporary_folder(refused)


def _temporary_folder(refused: OSError) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = Path(tempfile.gettempdir()) / f"baton-native-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise BuildError(f"no folder to keep the library in: {refused}; {error}") from None
    if hasattr(os, "getuid") and (status.st_uid != user or status.st_mode & 0o022):
        raise BuildError(f"{folder} belongs to somebody else or is open to others")
    return folder


def _compilers(level: Level) -> list[list[str]]:
    """Command lines to try, without output and sources."""
    chosen = process_environment().get("CXX")
    names = [chosen] if chosen else ["c++", "g++", "clang++"]
    found = {os.path.realpath(path): path for path in map(shutil.which, names) if path}
    commands = [[path, *_FLAGS, *_LEVEL_FLAGS[level]] for path in found.values()]
    if importlib.util.find_spec("ziglang") is not None:
        commands.append([sys.executable, "-m", "ziglang", "c++", *_FLAGS, *_ZIG_LEVEL_FLAGS[level]])
    return commands


def _compile(level: Level, target: Path, kept: Objects) -> None:
    commands = _compilers(level)
    if not commands:
        raise BuildError(
            "no C++ compiler: none of c++, g++ and clang++ is installed, nor the Python package ziglang "
            "(apt-get install g++, or pip install ziglang)"
        )
    failures = []
    for command in commands:
        failure = _compile_with(command, target, level, kept)
        if failure is None:
            return
        failures.append(failure)
    raise BuildError("; ".join(failures))


def _compile_with(command: Sequence[str], target: Path, level: Level, kept: Objects) -> str | None:
    """Why it failed, or None. Each source by itself, as many at a time as there are cores, the longest first, so that
    none is left alone at the end; then they are linked."""
    until = time.monotonic() + COMPILE_SECONDS
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        objects = {source: Path(folder) / f"{source.stem}.o" for source in _longest_first()}
        output = Path(folder) / target.name
        missing = {
            source: made for source, made in objects.items() if not _written(made, source, command[0], level, kept)
        }
        begun = [*command, *_precompiled(command, Path(folder), until)]
        with ThreadPoolExecutor(os.cpu_count()) as cores:
            calls = [[*begun, "-c", "-o", str(made), str(source)] for source, made in missing.items()]
            failures = list(cores.map(lambda call: _failure(call, until), calls))
        failure = next(filter(None, failures), None)
        if failure is None:
            failure = _failure([*command, "-shared", "-o", str(output), *map(str, objects.values())], until)
        if failure is None:
            kept.update({(command[0], level, source.name): made.read_bytes() for source, made in objects.items()})
            output.replace(target)
    return failure


def _written(made: Path, source: Path, compiler: str, level: Level, kept: Objects) -> bool:
    """Whether `made` is there now, as it was compiled for a level with fewer instructions, none of which it misses."""
    if level not in _FEWER:
        return False
    fewer, asked = _FEWER[level]
    found = kept.get((compiler, fewer, source.name))
    if found is None or any(asked in path.read_text() for path in _included(source)):
        return False
    made.write_bytes(found)
    return True


def _included(source: Path) -> set[Path]:
    """It and what it includes of ours, and so on."""
    found = {source}
    waiting = [source]
    while waiting:
        new = {_SOURCES / name for name in _INCLUDED.findall(waiting.pop().read_text())} - found
        found |= new
        waiting += new
    return found


def _precompiled(command: Sequence[str], folder: Path, until: float) -> tuple[str, ...]:
    """Arguments that hand a compiler what it made of the headers, in `folder`; none where it made nothing. Only GCC is
    asked: where that does not fit, it reads the headers themselves, and others stop."""
    name = Path(os.path.realpath(command[0])).name
    if "g++" not in name or "clang" in name:
        return ()
    header = folder / "headers.h"
    header.write_text("".join(f"#include <{each}>\n" for each in _HEADERS) + f'#include "{_SOURCES / "lanes.h"}"\n')
    failure = _failure([*command, "-x", "c++-header", "-o", f"{header}.gch", str(header)], until)
    return () if failure else ("-include", str(header))


def _failure(command: Sequence[str], until: float) -> str | None:
    """What a compiler complains of, or None. It is stopped at `until`, of the clock that only goes forward, or once one
    of its processes has had COMPILE_CPU_SECONDS."""
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as compiler:
            _limit(compiler.pid)
            try:
                _, complaints = compiler.communicate(timeout=max(0.0, until - time.monotonic()))
            except BaseException:
                compiler.kill()
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    if compiler.returncode != 0:
        return f"{command[0]} exited with {compiler.returncode}: {complaints.strip()[:500]}"
    return None


def _limit(pid: int) -> None:
    """The processes that it starts from now on have the same limit. Where there is no such call, there is none."""
    with contextlib.suppress(ImportError, AttributeError, OSError):
        import resource

        resource.prlimit(pid, resource.RLIMIT_CPU, (COMPILE_CPU_SECONDS, COMPILE_CPU_SECONDS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prebuilds; 0 when every library asked for is there."""
    parser = argparse.ArgumentParser(prog="python -m services.worker.ops.native.build", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every level of this machine's architecture")
    parser.add_argument("--level", choices=get_args(Level), help="one level, whatever this machine has")
    options = parser.parse_args(arguments)
    arm = best_level() == "neon"
    every: list[Level] = ["neon"] if arm else [level for level in _X86_LEVELS if level not in _LIBRARIES]
    every.sort(key=lambda level: level in _FEWER)  # behind what they take over
    levels = every if options.all else [options.level or best_level()]
    kept: Objects = {}
    try:
        for level in levels:
            print(f"{level}: {library_path(level, kept)}")
    except BuildError as error:
        print(f"the native kernels could not be built, the worker will use PyTorch's: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
