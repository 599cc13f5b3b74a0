"""The processes of pytest-xdist are forked from its controller, which imports before what tests import: PyTorch,
transformers, clients and all of Baton are two thirds of what collecting the tests costs each of them.

Modules of tests are left to each process: some train tokenizers or load kernels as they are imported, whose threads a
forked process would lack.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple, NoReturn

import execnet
import pytest
from _pytest.assertion.rewrite import AssertionRewritingHook
from _pytest.warnings import catch_warnings_for_item
from execnet import gateway_io
from execnet.gateway_base import Popen2IO
from hypothesis.internal.conjecture import providers

from shared.machine.roomy_stack import call_with_room
from tests.support.lanes.forked_server import fork_server
from tests.support.paths import REPOSITORY
from tests.support.process_end import end_process

_IMPORTED = re.compile(r"^(?:from|import) ([\w.]+)", re.MULTILINE)
_OF_TESTS = re.compile(r"^from (tests[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
_OF_LAZY = re.compile(r"^from (transformers) import (\([^)]*\)|.*)", re.MULTILINE)
"""A package that imports the module of a name only once that is asked for."""


def fork_workers(config: pytest.Config, specs: Sequence[execnet.XSpec]) -> int:
    """Forks a process for each of `specs` that is one on this machine, to be taken when xdist starts it. Returns how
    many: none where this process has threads, which would be missing in those."""
    usual = [spec for spec in specs if _is_usual(spec)]
    gc.disable()  # of what is imported nothing is freed, and what is looked through is copied in each process
    try:
        with catch_warnings_for_item(config, config.hook, "collect", None):
            texts = texts_of_tests(_test_files(config.args))
            _import_all(modules_imported_by(texts))
            _look_up(lazy_names_imported_by(texts))
            _read_constants()
        if not sys.platform.startswith("linux") or len(os.listdir("/proc/self/task")) > 1:
            return 0
        gc.freeze()
        workers: list[ForkedWorker] = []
        for _ in usual:
            workers.append(_forked(workers))
        config.add_cleanup(gc.unfreeze)  # else libraries complain of what is left as this process ends
    finally:
        gc.enable()
    _hand_out(workers)
    return len(workers)


def _is_usual(spec: execnet.XSpec) -> bool:
    return bool(spec.popen and not spec.python and not spec.chdir)


def texts_of_tests(files: Iterable[Path], root: Path = REPOSITORY) -> list[str]:
    """Of these files, and of others of tests that they import as they are imported themselves."""
    texts: list[str] = []
    waiting = list(files)
    seen = set(waiting)
    while waiting:
        texts.append(waiting.pop().read_text())
        for package, names in _OF_TESTS.findall(texts[-1]):
            folder = root.joinpath(*package.split("."))
            beside = {folder.with_suffix(".py"), *(folder / f"{name}.py" for name in re.findall(r"\w+", names))}
            new = {path for path in beside - seen if path.exists()}
            seen |= new
            waiting += sorted(new)
    return texts


def modules_imported_by(texts: Iterable[str]) -> list[str]:
    """Modules that they import; without those of tests."""
    found = dict.fromkeys(name for text in texts for name in _IMPORTED.findall(text))
    return [name for name in found if name.partition(".")[0] != "tests"]


def lazy_names_imported_by(texts: Iterable[str]) -> list[tuple[str, str]]:
    """(package, name) whose module is imported only when the name is looked up."""
    asked = (each for text in texts for each in _OF_LAZY.findall(text))
    return list(dict.fromkeys((package, name) for package, names in asked for name in re.findall(r"\w+", names)))


def _test_files(arguments: Iterable[str]) -> Iterator[Path]:
    """Those that pytest will import for these arguments."""
    for argument in arguments:
        path = Path(argument.partition("::")[0])
        yield from path.rglob("test_*.py") if path.is_dir() else [path] if path.is_file() else []


def _import_all(names: Iterable[str]) -> None:
    """What cannot be imported, or only with a warning, is left to those who say so."""
    for name in names:
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def _look_up(names: Iterable[tuple[str, str]]) -> None:
    for package, name in names:
        with suppress(Exception):
            getattr(sys.modules.get(package), name)


def _read_constants() -> None:
    """Of what is imported by now, as Hypothesis does at the end of collection: by a function of its own, which another
    release may not have."""
    with suppress(AttributeError):
        providers._get_local_constants()


class ForkedWorker(NamedTuple):
    """What execnet does with a `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


class ForkedIO(gateway_io.Popen2IOMaster):  # type: ignore[misc]
    """execnet's connection with a process that is there already."""

    def __init__(self, worker: ForkedWorker, execmodel: Any) -> None:
        self.popen = worker
        Popen2IO.__init__(self, worker.stdin, worker.stdout, execmodel=execmodel)


def _hand_out(workers: list[ForkedWorker]) -> None:
    """execnet takes these; one that comes later, in the place of one that crashed, is started as always."""
    start = gateway_io.create_io

    def created(spec: execnet.XSpec, execmodel: Any) -> gateway_io.Popen2IOMaster:
        return ForkedIO(workers.pop(0), execmodel) if workers and _is_usual(spec) else start(spec, execmodel)

    gateway_io.create_io = created


def _forked(others: Sequence[ForkedWorker]) -> ForkedWorker:
    taken, told = os.pipe()
    read, said = os.pipe()
    if pid := os.fork():
        os.close(taken)
        os.close(said)
        return ForkedWorker(pid, os.fdopen(told, "wb"), os.fdopen(read, "rb"))
    for other in others:  # they shall see when the controller ends
        os.close(other.stdin.fileno())
        os.close(other.stdout.fileno())
    os.close(told)
    os.close(read)
    for end, standard in ((taken, 0), (said, 1)):
        os.dup2(end, standard)
        os.close(end)
    _serve()


def _serve() -> NoReturn:
    """What execnet's `python -c` does: runs the line that it is told. Nothing of the controller's pytest is in use."""
    status = 1
    try:
        sys.stdin = os.fdopen(0, "r", 1, closefd=False)
        sys.stdout = os.fdopen(1, "w", 1, closefd=False)
        sys.argv[:] = ["-c"]
        sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, AssertionRewritingHook)]
        log = logging.getLogger()
        log.handlers[:] = [each for each in log.handlers if not type(each).__module__.startswith("_pytest.")]
        main = sys.modules["__main__"] = ModuleType("__main__")
        fork_server()
        call_with_room(lambda: exec(eval(sys.stdin.readline()), main.__dict__))
        status = 0
    finally:
        end_process(status)
