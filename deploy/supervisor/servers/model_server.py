"""The process that sends this host's model to other hosts of its stack."""

from __future__ import annotations

import sys
from pathlib import Path

from deploy.supervisor.checkpoints.fetch import FetchedModel
from deploy.supervisor.cluster.folder import ClusterFolder
from deploy.supervisor.log_files import LogFolder
from deploy.supervisor.processes import ChildProcesses
from deploy.supervisor.servers.server_process import ServerProcess
from deploy.supervisor.spec import StackSpec

NAME = "model-server"


def model_server(spec: StackSpec, children: ChildProcesses, logs: LogFolder) -> ServerProcess | None:
    """None where no other host can join, or none is to get the model from here. Nothing waits until it listens: who
    asks it tries again."""
    if spec.cluster is None or not spec.cluster.model_port:
        return None
    tls = ClusterFolder(spec.run_dir).tls
    assert tls.certificate is not None, "a host of several has one"
    assert tls.key is not None
    argv = server_command(
        spec.model,
        FetchedModel(spec.run_dir).stamps,
        spec.cluster.address,
        spec.cluster.model_port,
        (tls.certificate, tls.key, tls.authority),
        weights=spec.settings.get("worker", {}).get("load_format") != "dummy",
    )
    return ServerProcess(NAME, argv, None, children, logs)


def server_command(
    model: Path, keep: Path, host: str, port: int, tls: tuple[str, str, str], *, weights: bool
) -> list[str]:
    """The command line. `tls`: files of the certificate, its key, and the authority that signs all hosts'."""
    files = ["--cert", tls[0], "--key", tls[1], "--authority", tls[2]]
    where = ["--model", str(model), "--keep", str(keep), "--host", host, "--port", str(port)]
    return [
        sys.executable,
        "-m",
        "deploy.supervisor.checkpoints",
        *where,
        *files,
        *([] if weights else ["--no-weights"]),
    ]
