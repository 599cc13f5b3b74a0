"""The fork server of `multiprocessing` is forked of a process of tests before that has threads: most of what it would
import, PyTorch and `transformers` among it, is there. It imports the rest once it is asked for a process."""

from __future__ import annotations

import gc
import os
import select
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver, util
from typing import Any, NoReturn

from tests.support.lanes.forked_logs import log_to_own_errors

PRELOADED = (
    "tests.support.worker.rank_process",
    "transformers.modeling_utils",
    "services.worker.guided.fork_server",
    "xgrammar",
    "deploy.cli.up.command",
    "deploy.cli.up.run",
    "tests.support.cluster.stack",
)
"""What is forked are ranks, servers of grammars and supervisors: importing takes most of the processor time of each."""
_forked_by: list[int] = []
"""This process, where it has forked one."""


def fork_server() -> None:
    """Forks it, to be found by who needs one; to be called where this process has one thread."""
    forkserver.set_forkserver_preload([])  # it imports by itself
    start = util.spawnv_passfds  # type: ignore[attr-defined]

    def forked(path: bytes, arguments: Sequence[Any], descriptors: Sequence[int]) -> int:
        code = os.fsdecode(arguments[-1])
        if forkserver.__name__ not in code:
            return int(start(path, arguments, descriptors))
        return os.fork() or _serve(code, descriptors)

    util.spawnv_passfds = forked  # type: ignore[attr-defined]
    try:
        forkserver.ensure_running()
        _forked_by.append(os.getpid())
    finally:
        util.spawnv_passfds = start  # type: ignore[attr-defined]


def is_there() -> bool:
    """Whether this process has forked one."""
    return os.getpid() in _forked_by


def _serve(code: str, descriptors: Sequence[int]) -> NoReturn:
    """What `python -c` does with `code`, once somebody connects to the first of `descriptors`; nothing where all who
    might have ended."""
    try:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in descriptors:
                with suppress(OSError):  # that of the list itself
                    os.close(descriptor)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(2, 1)
        os.close(nothing)
        log_to_own_errors()
        if descriptors[0] in select.select(descriptors, [], [])[0]:
            _import_all()
            with suppress(SystemExit):  # as it ends where nobody needs it any more
                exec(code, {})
        os._exit(0)
    except BaseException:  # nothing of the tests' process may run on in here
        traceback.print_exc()
    finally:
        os._exit(1)


def _import_all() -> None:
    """All of it, 0.8 million objects, stays: a supervisor, which collects garbage before it forks, would look through
    it and have a page of its own for each that it shares."""
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)
    gc.freeze()
    gc.enable()
