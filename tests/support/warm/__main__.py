"""`python -m tests.support.warm SOCKET services|worker OWNER PADDING`: imports what such a template does, and forks one
for whoever asks. Ends with the process OWNER, a pid, and removes the folder of the socket."""

from __future__ import annotations

import gc
import os
import select
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from runpy import run_module

from deploy.supervisor.template.identity import ShownMemory, write_to
from shared.config import replace_environment
from tests.support.process_end import end_process
from tests.support.warm.protocol import MAX_MESSAGE_BYTES, ForkTemplate, decode

SERVICES = ("gateway", "tokenizer", "coordinator", "scheduler", "detokenizer")


def import_all(kind: str) -> None:
    with suppress(ImportError):
        import_module("uvloop")
    import_module("deploy.supervisor.template.__main__")
    del sys.modules["deploy.supervisor.template.__main__"]  # it is run under that name
    if kind == "worker":
        for module in (
            "services.worker.preload",
            "services.worker.sim.backend",
            "services.worker.executor.torch_backend",
        ):
            import_module(module)
        return
    for program in (*(f"services.{service}.__main__" for service in SERVICES), "kvstore.__main__"):
        import_module(program)
        del sys.modules[program]


def become_template(request: ForkTemplate, descriptors: list[int], shown: ShownMemory) -> None:
    """What `exec` would do, for a process that is there already."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    control, output = descriptors
    write_to(output)
    os.chdir(request.folder)
    replace_environment(request.environment)
    more = request.environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in more if folder and folder not in sys.path]
    _customize(more)
    shown.replace(request.environment)
    shown.show([sys.executable, "-m", "deploy.supervisor.template"])
    sys.argv[1:] = [str(control), *request.argv]
    try:
        run_module("deploy.supervisor.template", run_name="__main__", alter_sys=True)
    except SystemExit as end:  # of the template, or of a process that it has forked
        if not isinstance(end.code, int | None):
            raise
        end_process(end.code or 0)
    end_process(0)


def _customize(folders: Sequence[str]) -> None:
    """What Python does at its start: runs the first `sitecustomize` of these folders."""
    files = (Path(folder, "sitecustomize.py") for folder in folders if folder)
    if (file := next((each for each in files if each.exists()), None)) is not None:
        spec = spec_from_file_location("sitecustomize", file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


def main() -> None:
    path, kind, owner = sys.argv[1:4]
    lives = os.pidfd_open(int(owner))
    shown = ShownMemory.own()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(16)
    import_all(kind)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: forking is not safe"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    Path(path).with_suffix(".ready").touch()
    while True:
        readable, _, _ = select.select([listener.fileno(), lives], [], [])
        if lives in readable:
            shutil.rmtree(Path(path).parent, ignore_errors=True)
            return
        with listener.accept()[0] as connection:
            data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 2)
            if not data:
                continue
            if not (pid := os.fork()):
                connection.close()
                break
            connection.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)
    listener.close()
    os.close(lives)
    become_template(decode(data), descriptors, shown)


if __name__ == "__main__":
    main()
