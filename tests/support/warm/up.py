"""`python -m tests.support.warm.up FOLDER ARGUMENTS…`: `baton ARGUMENTS` with templates forked from warm processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.cli import main
from deploy.supervisor.template import link
from tests.support.warm.processes import read_by_libraries
from tests.support.warm.protocol import ForkTemplate, encode


class ForkedTemplate:
    """What a supervisor does with a template's process; its parent is the warm one, which lets it go when it ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def send_signal(self, number: signal.Signals) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return

    def wait(self) -> None:
        while Path(f"/proc/{self.pid}").exists():
            time.sleep(0.002)


def patch(folder: Path) -> None:
    start = link.launched

    def launched(argv: Sequence[str], environment: Mapping[str, str], output: int, control: int) -> object:
        kind = "worker" if "services.worker" in argv[4].split(",") and "--device=sim" not in argv else "services"
        if read_by_libraries(environment) != read_by_libraries({**os.environ, "OPENBLAS_NUM_THREADS": "1"}):
            return start(argv, environment, output, control)
        request = encode(ForkTemplate(list(argv[4:]), dict(environment), os.getcwd()))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as warm:
            warm.settimeout(10.0)
            warm.connect(str(folder / kind))
            socket.send_fds(warm, [request], [control, output])
            return ForkedTemplate(int(warm.recv(64)))

    link.launched = launched  # type: ignore[assignment]


if __name__ == "__main__":
    patch(Path(sys.argv.pop(1)))
    main()
